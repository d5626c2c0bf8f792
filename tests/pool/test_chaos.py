"""A pool under random use on an engine that fails at random: every call has one outcome, and afterwards all is well."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.errors import EmberpoolError, EngineFailed
from executor.result import CallResult
from executor.sandbox.wire import CLEAN, encode
from pool.pool import SandboxPool
from tests.support.core import check_invariants
from tests.support.pools import (
    LATENCY,
    assert_balanced,
    outcome,
    running,
    settings_of,
    virtual_backend,
    wall_clock_follows,
)
from tests.support.scripted import Fault, ScriptedEngine
from tests.support.scripted_runner import dies, falls_silent, loses_its_client, poisoned, says, takes

pytestmark = pytest.mark.anyio

STEPS = (
    "echo x",
    "exit 3",
    "sleep 3; echo y",
    "hang",
    "die 137",
    "die 0",
    "oom",
    "linger 0",
    "lose; hang",
    "cat",
    "stubborn; hang",
    "dirty",
    "kill 11",
    "flood 300000",
)
PLACES = ("hello", "armed", "idle", "call", "done", "clean")
OPERATIONS = ("info", "image", "start", "attach", "inspect", "kill", "remove", "list")
FAULTS = (
    Fault(error=EngineFailed("it failed")),
    Fault(hang=True),
    Fault(late=True),
    Fault(slow=3.0),
    Fault(garbage=True),
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return virtual_backend()


@pytest.fixture(autouse=True)
def _virtual_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_clock_follows(monkeypatch)


def _checked(pool: SandboxPool) -> None:
    """Check the core's invariants after every step that the shell takes."""
    step = pool._shell.state.step

    def checked(event: Any, now: float) -> Any:
        effects = step(event, now)
        check_invariants(pool._shell.state, now)
        return effects

    pool._shell.state.step = checked  # type: ignore[method-assign]


async def _use(pool: SandboxPool, dice: random.Random, name: str, ended: list[object]) -> None:
    for _ in range(12):
        await anyio.sleep(dice.expovariate(0.1))
        session = await outcome(
            lambda: pool.acquire("agent", f"{name}{dice.randrange(2)}", timeout=dice.choice((1, 90)))
        )
        if isinstance(session, EmberpoolError):
            ended.append(session)
            continue
        call = dice.choice((session.call, pool.call_cold))  # type: ignore[attr-defined]
        steps, patience = dice.choice(STEPS), dice.choice((0.5, 1000, 1000))
        with anyio.move_on_after(patience) as scope:
            ended.append(await outcome(lambda call=call, steps=steps: call(code=steps, timeout=20)))  # type: ignore[misc]
        if scope.cancelled_caught:
            ended.append(None)
        await dice.choice((session.release, session.close))()  # type: ignore[attr-defined]


MISDEEDS = (
    dies,
    falls_silent,
    loses_its_client,
    takes(4.0),
    poisoned(b"the runner's limits changed"),
    says(b"garbage that is no frame at all"),
    says(lambda runner: encode(CLEAN, runner.seq + 1), instead=False),
)


async def _fail(engine: ScriptedEngine, dice: random.Random) -> None:
    while True:
        await anyio.sleep(dice.expovariate(0.1))
        match dice.randrange(8):
            case 0:
                engine.down()
                await anyio.sleep(dice.choice((0.1, 5, 40)))
                engine.up()
            case 1 if engine.boxes:
                engine.die(dice.choice(list(engine.boxes.values())), dice.choice((137, 0)))
            case 2:
                engine.cut_events()
            case 3:
                engine.lose = {dice.choice(("exec_create", "exec_die", "create", "start", "die", "destroy", "oom"))}
                await anyio.sleep(2)
                engine.lose = set()
            case 4:
                engine.kill_clients()
            case 5:
                engine.misdeeds[dice.choice(PLACES)] = [dice.choice(MISDEEDS)]
            case _:
                engine.faults[dice.choice(OPERATIONS)].append(dice.choice(FAULTS))


@pytest.mark.seeds(quick=15, full=100)
async def test_whatever_fails_every_call_ends_once_and_the_pool_heals(state_dir: Path, seed: int) -> None:
    dice, ended = random.Random(seed), list[object]()
    settings = settings_of(state_dir, min_standby=1, max_sandboxes=3, resync_interval=15, drain_timeout=100)
    async with ScriptedEngine(latency=LATENCY) as engine, running(engine, settings) as pool:
        _checked(pool)
        async with anyio.create_task_group() as chaos:
            chaos.start_soon(_fail, engine, dice)
            async with anyio.create_task_group() as users:
                for name in "abcd":
                    users.start_soon(_use, pool, dice, name, ended)
            chaos.cancel_scope.cancel()
        engine.faults.clear()
        engine.misdeeds.clear()
        engine.lose = set()
        if not engine.up_now:
            engine.up()
        assert len(ended) == 4 * 12
        assert [end for end in ended if not isinstance(end, CallResult | EmberpoolError | None)] == []
        assert_balanced(pool)
        # Two resyncs and every backoff later nothing of it is left but the standby.
        await anyio.sleep(700)
        assert len(engine.boxes) == 1
        assert len(pool._shell.hub._watches) == 1
        assert len(list((state_dir / "ledger").iterdir())) == 1
        assert pool.snapshot().sandboxes.standby == 1
        assert (await (await pool.acquire("agent", "after")).call(code="echo well")).stdout == b"well\n"
