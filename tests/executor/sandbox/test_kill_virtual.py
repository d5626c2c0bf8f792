"""An answer to a call that was cut off comes with the proof that nothing of it runs, or says that there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.errors import EngineFailed, SandboxDied
from executor.result import CallResult
from executor.sandbox import wire
from executor.sandbox.kill import KILL_PATIENCE
from executor.sandbox.runner_call import ANSWER_PATIENCE
from executor.sandbox.wire import encode
from pool.pool import SandboxPool
from tests.support.pools import LATENCY, outcome, running, settings_of, until, virtual_backend, wall_clock_follows
from tests.support.scripted import Fault, ScriptedEngine
from tests.support.scripted_runner import falls_silent, says

pytestmark = pytest.mark.anyio

BUSY = Fault(error=EngineFailed("it is busy"))
CUT_OFF = 5.0 + 2.0 + ANSWER_PATIENCE + 1.0
"""Seconds within which a call of five is cut off, however it runs."""


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


Call = Callable[[], Awaitable[object]]


async def call_of(kind: str, pool: SandboxPool, engine: ScriptedEngine) -> Call:
    """A call that outlasts its deadline and can only be killed with its container: by a runner that has gone silent, by plain
    exec, or cold."""
    engine.python = kind != "plain"
    if kind == "cold":
        return lambda: pool.call_cold(code="hang", timeout=5)
    session = await pool.acquire("agent", "session")
    engine.misdeeds["done"] = [falls_silent]
    return lambda: session.call(["hang"], timeout=5)


def running_on(engine: ScriptedEngine) -> int:
    return sum(box.busy for box in engine.boxes.values())


KINDS = pytest.mark.parametrize("kind", ["runner", "plain", "cold"])


@KINDS
@pytest.mark.parametrize(
    "faults", [[Fault(slow=12.0)], [BUSY, BUSY], [Fault(hang=True)], [BUSY, Fault(slow=9.0)]], ids=str
)
async def test_answer_to_a_timed_out_call_waits_for_the_proof_of_its_end(
    engine: ScriptedEngine, state_dir: Path, kind: str, faults: list[Fault]
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        call = await call_of(kind, pool, engine)
        engine.faults["kill"] = list(faults)
        result = await outcome(call)
        assert isinstance(result, CallResult), result
        assert result.timed_out
        assert running_on(engine) == 0
        assert not any(box.running for box in engine.boxes.values())
        assert engine.faults["kill"] == []


@KINDS
async def test_event_of_the_end_is_proof_enough(engine: ScriptedEngine, state_dir: Path, kind: str) -> None:
    """An engine that has killed it and does not say so keeps nobody waiting."""
    async with running(engine, settings_of(state_dir)) as pool:
        call = await call_of(kind, pool, engine)
        engine.always["kill"] = Fault(late=True)
        began = anyio.current_time()
        result = await outcome(call)
        assert isinstance(result, CallResult)
        assert result.timed_out
        assert anyio.current_time() - began < CUT_OFF
        engine.always.clear()


@KINDS
@pytest.mark.parametrize("fault", [Fault(hang=True), BUSY], ids=str)
async def test_timeout_without_proof_is_no_result_and_says_so(
    engine: ScriptedEngine, state_dir: Path, kind: str, fault: Fault
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        call = await call_of(kind, pool, engine)
        engine.always["kill"] = engine.always["remove"] = fault
        began = anyio.current_time()
        error = await outcome(call)
        assert isinstance(error, SandboxDied), error
        assert (error.cause, error.started) == ("engine", True)
        assert "may run on" in str(error)
        assert KILL_PATIENCE < anyio.current_time() - began < KILL_PATIENCE + CUT_OFF
        engine.always.clear()
        # Its container goes once the engine can be asked.
        await anyio.sleep(120)
        assert running_on(engine) == 0


@KINDS
async def test_engine_that_is_away_is_not_waited_for(engine: ScriptedEngine, state_dir: Path, kind: str) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        call = await call_of(kind, pool, engine)
        began, answers = anyio.current_time(), list[object]()

        async def run() -> None:
            answers.append(await outcome(call))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.sleep(1)
            engine.up_now = False  # it answers nobody any more, and its clients have not noticed
            engine.cut_events()
        (error,) = answers
        assert isinstance(error, SandboxDied), error
        assert (error.cause, error.started) == ("engine", True)
        assert anyio.current_time() - began < CUT_OFF + 1.0
        engine.up()


@pytest.mark.parametrize("confirmed", [True, False])
async def test_plain_call_whose_client_is_lost_has_no_result_and_costs_its_sandbox(
    engine: ScriptedEngine, state_dir: Path, confirmed: bool
) -> None:
    """It ends well inside, and what it printed after its client had gone is lost."""
    engine.python = False
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        answers: list[object] = []

        async def call() -> None:
            answers.append(await outcome(lambda: session.call(["sleep 1; echo x; exit 0"], timeout=5)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await until(lambda: running_on(engine) == 1, limit=5)
            if not confirmed:
                engine.always["kill"] = engine.always["remove"] = BUSY
            engine.kill_clients()
        (error,) = answers
        assert isinstance(error, SandboxDied), error
        assert (error.cause, error.started) == ("unknown" if confirmed else "engine", True)
        assert ("may run on" in str(error)) is not confirmed
        engine.always.clear()
        await until(lambda: running_on(engine) == 0, limit=120)


async def test_call_whose_runner_broke_the_protocol_names_the_engine_where_that_does_not_kill(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        engine.misdeeds["call"] = [says(encode(wire.HELLO, 1, b"{}"))]
        engine.always["kill"] = BUSY
        error = await outcome(lambda: session.call(code="hang", timeout=5))
        assert isinstance(error, SandboxDied)
        assert (error.cause, error.started) == ("engine", True)
        engine.always.clear()


async def test_sandbox_that_nobody_waits_for_is_killed_once_its_engine_does_it(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        kept = session.generation
        engine.always["kill"] = BUSY
        engine.misdeeds["clean"] = [falls_silent]
        await session.call(code="echo x")
        await anyio.sleep(100)
        assert len(engine.boxes) == 1
        assert engine.asked["kill"] < 40, "not again and again"
        engine.always.clear()
        await until(lambda: session.generation not in (kept, None), limit=60)
