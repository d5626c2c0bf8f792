"""Arming under load, under virtual time: nobody loses a sandbox because its engine is slow, and an engine that is away is left
alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.result import CallResult
from executor.sandbox.arming import AT_ONCE, SLOT_TIME, ArmingLimit
from executor.sandbox.runner_supervision import START_TIMEOUT
from pool.pool import SandboxPool
from pool.session import Session
from tests.support.pools import (
    LATENCY,
    count,
    outcome,
    running,
    settings_of,
    until,
    virtual_backend,
    wall_clock_follows,
)
from tests.support.scripted import ScriptedEngine
from tests.support.scripted_runner import falls_silent, takes

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return virtual_backend()


@pytest.fixture(autouse=True)
def _virtual_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_clock_follows(monkeypatch)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(latency=LATENCY) as engine:
        yield engine


async def sessions(pool: SandboxPool, number: int) -> list[Session]:
    return [await pool.acquire("agent", str(n)) for n in range(number)]


async def call_all(held: list[Session]) -> None:
    """One call in each, all at once, after which each needs another exec."""
    async with anyio.create_task_group() as tasks:
        for session in held:
            tasks.start_soon(lambda session=session: session.call(code="echo x"))  # type: ignore[misc]


# --- a slow engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [16.0, START_TIMEOUT - 1])
@pytest.mark.parametrize("at", ["attach", "hello", "armed"])
async def test_idle_session_keeps_its_state_while_each_exec_takes_long(
    engine: ScriptedEngine, state_dir: Path, at: str, seconds: float
) -> None:
    async with running(engine, settings_of(state_dir, acquire_timeout=200, max_lifetime=3600)) as pool:
        session = await pool.acquire("agent", "session")
        kept = session.generation
        engine.latency[at] = seconds
        for _ in range(3):
            await session.call(code="echo x")
            await anyio.sleep(seconds + 5)
        assert (await session.call(code="echo x", generation=kept)).ok
        # One that is started meanwhile is waited for as long.
        assert isinstance(await outcome(lambda: pool.acquire("agent", "new")), Session)


async def test_execs_of_a_pool_are_armed_a_few_at_a_time_and_all_in_the_end(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    number, most, others = 5 * AT_ONCE, 0, 0

    def look(operation: str) -> None:
        nonlocal most
        if operation == "attach":
            most = max(most, engine.asked["attach"] - others - sum(1 for runner in engine.runners if runner.seq))

    async with running(engine, settings_of(state_dir, max_sandboxes=number, max_starting=number)) as pool:
        held = await sessions(pool, number)
        engine.latency["attach"] = 1.0
        others = engine.asked["attach"] - len(engine.runners)  # of the probe
        engine.before = look
        kept = [session.generation for session in held]
        await call_all(held)
        await until(lambda: all(runner.seq for runner in engine.runners) and len(engine.runners) == 2 * number)
        assert most == AT_ONCE
        assert [session.generation for session in held] == kept


async def test_sandboxes_that_start_together_wait_for_their_turn_and_fail_not_for_it(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    """What waits for its turn has all of its time yet, however long the queue."""
    number = 15 * AT_ONCE
    engine.latency["attach"] = SLOT_TIME - 0.5
    settings = settings_of(
        state_dir, max_sandboxes=number, max_starting=number, min_standby=number, standby_max_age="1d"
    )
    async with running(engine, settings) as pool:
        await until(lambda: count(pool, "standby") == number)
        assert engine.asked["start"] == number
        assert anyio.current_time() > START_TIMEOUT


async def test_exec_that_hangs_keeps_nobody_else_waiting_for_long(engine: ScriptedEngine, state_dir: Path) -> None:
    number = AT_ONCE + 1
    async with running(engine, settings_of(state_dir, max_sandboxes=number, max_starting=number)) as pool:
        held = await sessions(pool, number)
        engine.misdeeds["hello"] = [falls_silent] * AT_ONCE
        await call_all(held)
        await anyio.sleep(SLOT_TIME + 1)
        answers = [await outcome(lambda session=session: session.call(code="echo x", timeout=1)) for session in held]  # type: ignore[misc]
        assert sum(isinstance(answer, CallResult) for answer in answers) == 1


def test_patience_grows_with_what_is_under_way() -> None:
    limit = ArmingLimit(4)
    assert limit.patience(10.0) == 10.0
    limit.under_way = 4
    assert limit.patience(10.0) == 10.0
    limit.under_way = 12
    assert limit.patience(10.0) == 30.0


async def test_slot_is_given_back_once_however_often_it_is_ended() -> None:
    limit = ArmingLimit(2)
    first, second = await limit.slot(), await limit.slot()
    for slot in (first, first, second):
        slot.release()
        slot.end()
    assert (limit.under_way, limit.free.value) == (0, 2)


# --- an engine that is away ---------------------------------------------------------------------------------------------


async def test_engine_that_is_away_is_asked_for_no_exec(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, min_standby=3)) as pool:
        await until(lambda: count(pool, "standby") == 3)
        await pool.acquire("agent", "session")
        await anyio.sleep(30)
        execs, kills = engine.asked["attach"], engine.asked["kill"]
        engine.down()
        await anyio.sleep(600)
        assert engine.asked["attach"] == execs
        assert engine.asked["kill"] - kills <= 8, "each sandbox is asked for once, if at all"
        engine.up()
        await until(lambda: pool.snapshot().engine == "up" and count(pool, "standby") == 3)


async def test_exec_that_is_under_way_when_the_engine_goes_is_waited_for(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    """A daemon that hangs and goes on has not made anybody's runner worse."""
    async with running(engine, settings_of(state_dir, resync_interval=5, idle_timeout=7200)) as pool:
        session = await pool.acquire("agent", "session")
        kept = session.generation
        engine.misdeeds["hello"] = [takes(10 * START_TIMEOUT)]
        await session.call(code="echo x")
        await anyio.sleep(1)
        engine.up_now = False  # it answers nobody; nothing that runs has ended
        await anyio.sleep(5)
        engine.cut_events()
        await anyio.sleep(10 * START_TIMEOUT - 30)
        engine.up_now = True
        await anyio.sleep(40)
        assert (await session.call(code="echo x", generation=kept)).ok


async def test_sandbox_that_is_let_go_while_its_engine_is_away_waits_for_nothing(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with SandboxPool(settings_of(state_dir, drain_timeout=1), find=engine.find) as pool:
        session = await pool.acquire("agent", "session")
        box = pool._shell.containers.sandboxes[1]
        engine.down()
        await anyio.sleep(10)
        await session.close()
        await until(lambda: box._runners is not None and box._runners.closed)
        await anyio.sleep(1)
        assert box._runners is not None
        assert not box._runners._pauses
        engine.up()
