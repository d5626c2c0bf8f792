"""Random schedules under virtual time: clients that come, cancel and go, an engine that fails, a pool that is resized.
Whatever happens, the accounts balance, grants are first come first served, and the pool comes to rest.

Each test is one schedule, drawn from its seed. Every run draws new ones; ``--seed N`` runs one again.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
import trio._core._run as scheduler

from executor.errors import SandboxDied
from pool.config.load import Settings
from pool.core import events as ev
from pool.pool import SandboxPool
from pool.session import Session
from pool.supervisor.snapshot import SandboxCounts
from tests.pool.test_chaos import FAULTS, MISDEEDS, OPERATIONS, PLACES
from tests.support.pools import (
    LATENCY,
    assert_balanced,
    outcome,
    running,
    settings_of,
    until,
    virtual_backend,
    wall_clock_follows,
)
from tests.support.scripted import ScriptedEngine
from tests.support.storm import Accounts, Judge

pytestmark = pytest.mark.anyio

STEPS = (
    "echo x",
    "echo x",
    "exit 3",
    "sleep 2; echo y",
    "hang",
    "die 137",
    "oom",
    "lose; hang",
    "dirty",
    "flood 100000",
)
NEVER = 1e6


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return virtual_backend()


@pytest.fixture(autouse=True)
def _virtual_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_clock_follows(monkeypatch)


def random_settings(dice: random.Random, state_dir: Path) -> Settings:
    most = dice.randint(2, 5)
    call = {"parallel": dice.choice((1, 1, 2)), "calls_per_exec": dice.choice((0, 1, 3)), "timeout": 10.0}
    return settings_of(
        state_dir,
        call=call,
        max_sandboxes=most,
        min_standby=dice.randint(0, 2),
        max_starting=dice.randint(1, 2),
        max_waiters=dice.choice((1, 4, 100)),
        max_cold=dice.choice((1, 2)),
        reclaim_idle_after=dice.choice(("off", 0.5, 5)),
        max_calls=dice.choice((0, 0, 3)),
        idle_timeout=dice.choice((4, 40)),
        restart_limit=dice.choice((1, 5)),
        resync_interval=20,
        drain_timeout=100,
    )


async def client(pool: SandboxPool, accounts: Accounts, dice: random.Random) -> None:
    def patience() -> float:
        return dice.choice((dice.expovariate(2.0), NEVER, NEVER))

    for _ in range(dice.randint(1, 4)):
        await anyio.sleep(dice.expovariate(0.5))
        name, wait = str(dice.randrange(8)), dice.choice((1.0, 30.0))
        session = await accounts.ask("acquire", lambda: pool.acquire("agent", name, timeout=wait), patience())  # noqa: B023
        if not isinstance(session, Session):
            continue
        for _ in range(dice.randint(0, 3)):
            kind, steps, timeout = (
                dice.choice(("call", "call", "call", "cold")),
                dice.choice(STEPS),
                dice.choice((3.0, 8.0)),
            )
            act = session.call if kind == "call" else pool.call_cold
            await accounts.ask(kind, lambda: act(code=steps, timeout=timeout), patience())  # noqa: B023
        await dice.choice((session.release, session.release, session.close))()


async def trouble(pool: SandboxPool, engine: ScriptedEngine, dice: random.Random) -> None:
    while True:
        await anyio.sleep(dice.expovariate(0.4))
        match dice.randrange(10):
            case 0:
                engine.down()
                await anyio.sleep(dice.choice((0.1, 5.0)))
                engine.up()
            case 1 | 2 if engine.boxes:
                engine.die(dice.choice(list(engine.boxes.values())), dice.choice((137, 0)))
            case 3:
                engine.cut_events()
            case 4 if engine.boxes:
                engine.lose = {"die", "destroy", dice.choice(("exec_die", "oom", "create"))}
                engine.die(dice.choice(list(engine.boxes.values())), 137)
                await anyio.sleep(1.0)
                engine.lose = set()
            case 5:
                engine.kill_clients()
            case 6:
                engine.misdeeds[dice.choice(PLACES)] = [dice.choice(MISDEEDS)]
            case 7 | 8:
                most = dice.randint(1, 6)
                pool.resize(max_sandboxes=most, min_standby=dice.randint(0, min(most, 3)))
            case _:
                engine.faults[dice.choice(OPERATIONS)].append(dice.choice(FAULTS))


@pytest.mark.seeds(quick=100, full=2000)
async def test_schedule_leaves_balanced_accounts_and_a_pool_at_rest(
    state_dir: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, accounts = random.Random(seed), Accounts()
    # Trio draws the order of its tasks; to be the same again a schedule needs the same draws.
    monkeypatch.setattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    monkeypatch.setattr(scheduler, "_r", random.Random(seed))
    with structlog.testing.capture_logs() as lines:
        async with (
            ScriptedEngine(latency=LATENCY) as engine,
            running(engine, random_settings(dice, state_dir)) as pool,
        ):
            pool._shell._random = random.Random(seed)
            Judge(pool)
            async with anyio.create_task_group() as troubles:
                troubles.start_soon(trouble, pool, engine, dice)
                async with anyio.create_task_group() as clients:
                    for _ in range(dice.randint(3, 12)):
                        clients.start_soon(client, pool, accounts, dice)
                troubles.cancel_scope.cancel()
            engine.faults.clear()
            engine.misdeeds.clear()
            engine.lose = set()
            if not engine.up_now:
                engine.up()
            assert_balanced(pool)
            accounts.check(lines)
            pool.resize(max_sandboxes=4, min_standby=2)
            # Every backoff, two resyncs and the patience for late starts after the last trouble.
            for _ in range(300):
                await anyio.sleep(1.0)
                if at_rest(pool, engine):
                    break
            assert at_rest(pool, engine), pool.snapshot()


async def test_call_whose_sandbox_dies_at_the_very_moment_of_its_turn_is_told_so(state_dir: Path) -> None:
    settings = settings_of(state_dir, restart_limit=100, restart_window=1.0)
    async with ScriptedEngine(latency=LATENCY) as engine, running(engine, settings) as pool:
        session, step = await pool.acquire("agent", "session"), pool._shell.state.step
        dying: list[int] = []

        def dies_at_its_turn(event: ev.Event, now: float) -> list[ev.Effect]:
            effects = step(event, now)
            for effect in effects:
                if isinstance(effect, ev.RunCall) and effect.waiter in dying:
                    pool._shell._queue.append(ev.SandboxDied(effect.n, "killed"))
            return effects

        pool._shell.state.step = dies_at_its_turn  # type: ignore[method-assign]
        for _ in range(20):  # trio runs the tasks of one turn in any order
            ends: list[object] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.call, ["sleep", "2"])
                await until(lambda: pool.snapshot().running == 1)
                dying.append(pool._shell._waiters + 1)
                ends.append(await outcome(lambda: session.call(code="echo x")))
            assert isinstance(ends[0], SandboxDied), ends
            assert (await session.call(code="echo on")).ok
            await anyio.sleep(2.0)


def at_rest(pool: SandboxPool, engine: ScriptedEngine) -> bool:
    """Two standbys and nothing else is left, in the books, on the engine and in the ledger."""
    now = pool.snapshot()
    if now.sandboxes != SandboxCounts(standby=2) or now.sessions:
        return False
    named = {file.stem for file in (pool.settings.pool.state_dir / "ledger").iterdir()}
    return named == set(engine.boxes) == pool._shell.containers.names
