"""How long a recovery takes, to the millisecond, under virtual time: what tells of the fault, the backoff, one start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio.lowlevel
from trio.testing import MockClock

from executor.engine.protocol import EngineInfo
from executor.errors import EngineFailed, EngineUnavailable, PoolExhausted
from executor.result import CallResult
from executor.sandbox.profile import LABEL_POOL
from pool.config.load import Settings
from pool.config.types import UidRange
from pool.core import events as ev
from pool.ledger.ledger import Entry, EntryState, StateDirectory
from pool.pool import SandboxPool
from pool.session import Session
from pool.supervisor.sweep import LOOK_PATIENCE
from tests.support.pools import (
    LATENCY,
    assert_balanced,
    assert_closed,
    count,
    outcome,
    running,
    settings_of,
    until,
    virtual_backend,
    wall_clock_follows,
)
from tests.support.scripted import Fault, ScriptedEngine

pytestmark = pytest.mark.anyio

START = LATENCY["start"] + LATENCY["inspect"] + LATENCY["attach"]
"""Seconds from the wish for a sandbox to one that is verified: one start."""
EXACT = 1e-6
"""Seconds that sums of decimal fractions may be off."""
JITTERS = [0.0, 0.5, 0.999]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return virtual_backend()


@pytest.fixture(autouse=True)
def _virtual_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_clock_follows(monkeypatch)


class Watched:
    """A pool whose events are noted with their times, and whose jitter is always the same."""

    def __init__(self, pool: SandboxPool, engine: ScriptedEngine, jitter: float) -> None:
        self.pool, self.engine = pool, engine
        self.events: list[tuple[float, ev.Event]] = []
        self.held: Session | None = None  # a handle that nobody holds is released
        pool._shell.jitter = lambda: jitter  # type: ignore[method-assign]
        self.jitter, step = jitter, pool._shell.state.step

        def noted(event: ev.Event, now: float) -> list[ev.Effect]:
            self.events.append((now, event))
            return step(event, now)

        pool._shell.state.step = noted  # type: ignore[method-assign]

    def backoff(self, attempt: int) -> float:
        """Half a second, doubled each time, half a minute at most, of which jitter takes up to the half."""
        return min(30.0, 0.5 * 2.0 ** (attempt - 1)) * (0.5 + 0.5 * self.jitter)

    def begin(self) -> None:
        """Times are counted from here, and events before are forgotten."""
        self.events.clear()
        self.began = anyio.current_time()

    async def next(self, kind: type) -> float:
        """The time of the first event of this kind, come or to come."""
        found: list[float] = []

        def come() -> bool:
            found[:] = [when for when, event in self.events if isinstance(event, kind)]
            return bool(found)

        await until(come)
        return found[0] - self.began


@asynccontextmanager
async def watched(settings: Settings, jitter: float = 0.5) -> AsyncIterator[Watched]:
    async with ScriptedEngine(latency=LATENCY) as engine, running(engine, settings) as pool:
        yield Watched(pool, engine, jitter)


async def calm(one: Watched) -> Session:
    """A session on an engine that is well known by now: its acquire took one start and nothing else."""
    await (await one.pool.acquire("agent", "first")).close()
    await until(lambda: not one.engine.boxes)
    began = anyio.current_time()
    one.held = session = await one.pool.acquire("agent", "session")
    assert anyio.current_time() - began == pytest.approx(START, abs=EXACT)
    return session


# --- a sandbox dies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitter", JITTERS)
async def test_session_whose_death_is_told_has_a_sandbox_after_its_backoff_and_one_start(
    state_dir: Path, jitter: float
) -> None:
    async with watched(settings_of(state_dir, restart_limit=9), jitter) as one:
        await calm(one)
        for deaths in range(1, 5):
            one.begin()
            one.engine.die(one.engine.the_box(), 137)
            assert await one.next(ev.SandboxDied) == pytest.approx(0.0, abs=EXACT)
            backoff = one.backoff(deaths - 1) if deaths > 1 else 0.0
            assert await one.next(ev.BindRecorded) == pytest.approx(backoff + START, abs=EXACT)
            await until(lambda: len(one.engine.boxes) == 1)


async def test_standby_whose_death_is_told_is_replaced_after_one_start(state_dir: Path) -> None:
    async with watched(settings_of(state_dir, min_standby=1)) as one:
        await until(lambda: count(one.pool, "standby") == 1)
        one.begin()
        one.engine.die(one.engine.the_box(), 137)
        assert await one.next(ev.SandboxStarted) == pytest.approx(START, abs=EXACT)


@pytest.mark.parametrize("after", [0.0, 7.0, 29.0])
async def test_death_that_no_event_tells_is_found_by_the_next_look_at_the_engine(state_dir: Path, after: float) -> None:
    interval = 30.0
    async with watched(settings_of(state_dir, resync_interval=interval)) as one:
        await calm(one)
        looks = one.engine.asked["list"]
        await until(lambda: one.engine.asked["list"] == looks + 1, limit=2 * interval)
        # `until` looks every hundredth of a second, so that the next look is due at most that much sooner.
        await anyio.sleep(LATENCY["list"] + after)
        one.engine.lose = {"die", "destroy"}
        one.begin()
        one.engine.die(one.engine.the_box(), 137)
        found = await one.next(ev.SandboxDied)
        assert found == pytest.approx(interval - after + LATENCY["list"], abs=0.011)
        assert await one.next(ev.BindRecorded) == pytest.approx(found + START, abs=EXACT)


# --- the engine goes and comes back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitter", JITTERS)
@pytest.mark.parametrize("away", [0.05, 1.0, 10.0, 300.0])
async def test_engine_that_comes_back_is_found_within_the_links_backoff_and_then_it_is_one_start(
    state_dir: Path, away: float, jitter: float
) -> None:
    async with watched(settings_of(state_dir), jitter) as one:
        await calm(one)
        one.begin()
        one.engine.down()
        assert await one.next(ev.EngineDown) == pytest.approx(0.0, abs=EXACT)
        await anyio.sleep_until(one.began + away)
        one.engine.up()
        # Each round waits twice as long as the one before, five seconds at most, and asks the engine what it is.
        asks, failures = one.began, 1
        while True:
            asks += min(5.0, 0.2 * 2.0**failures) * (0.5 + 0.5 * jitter) + LATENCY["info"]
            if asks >= one.began + away:
                break
            failures += 1
        up = asks - one.began + LATENCY["list"]
        assert up - away < 5.0 + LATENCY["info"] + LATENCY["list"] + EXACT
        assert await one.next(ev.EngineUp) == pytest.approx(up, abs=EXACT)
        assert await one.next(ev.BindRecorded) == pytest.approx(up + START, abs=EXACT)
        assert one.pool._shell.state.sessions["agent", "session"].deaths == []


# --- starts fail --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitter", JITTERS)
@pytest.mark.parametrize("failures", [1, 2, 3, 6, 12])
async def test_standby_whose_start_fails_is_there_after_each_backoff_and_one_start(
    state_dir: Path, failures: int, jitter: float
) -> None:
    async with watched(settings_of(state_dir, max_starting=1), jitter) as one:
        await calm(one)
        one.engine.faults["start"] = [Fault(error=EngineFailed("no"))] * failures
        one.begin()
        one.pool.resize(min_standby=1)
        backoffs = sum(one.backoff(attempt) for attempt in range(1, failures + 1))
        wanted = failures * LATENCY["start"] + backoffs + START
        assert await one.next(ev.SandboxStarted) == pytest.approx(wanted, abs=EXACT)
        assert one.engine.faults["start"] == []


@pytest.mark.parametrize("jitter", JITTERS)
async def test_waiter_outlasts_two_failed_starts_and_the_third_refuses_it(state_dir: Path, jitter: float) -> None:
    for failures in (2, 3):
        async with watched(settings_of(state_dir / str(failures), max_starting=1), jitter) as one:
            await calm(one)
            one.engine.faults["start"] = [Fault(error=EngineFailed("no"))] * failures
            began = anyio.current_time()
            answer = await outcome(lambda one=one: one.pool.acquire("agent", "other"))  # type: ignore[misc]
            seconds = anyio.current_time() - began
            two = 2 * LATENCY["start"] + one.backoff(1) + one.backoff(2)
            if failures == 2:
                assert isinstance(answer, Session)
                assert seconds == pytest.approx(two + START, abs=EXACT)
            else:
                assert seconds == pytest.approx(two + LATENCY["start"], abs=EXACT)
                assert getattr(answer, "retry_after", None) == pytest.approx(one.backoff(3), abs=EXACT)


async def test_waiter_whose_wait_ends_while_starts_fail_is_told_so_and_not_that_the_pool_is_full(
    state_dir: Path,
) -> None:
    async with watched(settings_of(state_dir)) as one:
        await calm(one)
        one.engine.always["start"] = Fault(error=EngineFailed("the disk is on fire"), slow=20.0)
        error = await outcome(lambda: one.pool.acquire("agent", "other", timeout=30.0))
        assert type(error) is EngineUnavailable, error
        assert "the disk is on fire" in str(error)
        assert (error.started, error.retryable) == (False, True)
        assert error.retry_after
        one.engine.always.clear()


@pytest.mark.parametrize("jitter", JITTERS)
async def test_engine_command_that_is_installed_while_the_pool_runs_is_found_without_a_restart(
    state_dir: Path, jitter: float
) -> None:
    missing = True

    async def find() -> tuple[ScriptedEngine, EngineInfo]:
        if missing:
            raise EngineUnavailable("sandbox.binary: there is no such command", retryable=False)
        return await engine.find()

    async with ScriptedEngine(latency=LATENCY) as engine, SandboxPool(settings_of(state_dir), find=find) as pool:
        one = Watched(pool, engine, jitter)
        for _ in range(20):
            for ask in (
                lambda: pool.acquire("agent", "session"),
                lambda: pool.call_cold(["true"]),
                pool.ready,
            ):
                began = anyio.current_time()
                error = await outcome(ask)
                assert type(error) is EngineUnavailable, error
                assert (str(error), error.retryable) == ("sandbox.binary: there is no such command", False)
                assert (error.retry_after, error.started) == (None, False)
                assert anyio.current_time() - began == pytest.approx(0.0, abs=0.2)
            await anyio.sleep(7.0)
        assert pool.snapshot().fault == "EngineUnavailable"
        assert not pool._shell.state.health.starts.failures
        missing = False
        one.begin()
        assert await one.next(ev.EngineUp) <= 5.0 + 1.0
        assert pool.snapshot().fault is None
        assert isinstance(await pool.acquire("agent", "session"), Session)
    assert_closed(pool, engine)


# --- the machine sleeps -------------------------------------------------------------------------------------------------


def suspend(seconds: float) -> None:
    """The machine is suspended for so long, on a clock that counts it (Linux's monotonic clock does not, and there
    nothing happens at all)."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)
    clock.jump(seconds)


async def test_machine_that_was_suspended_for_an_hour_has_idle_sessions_reaped_and_its_standbys_renewed(
    state_dir: Path,
) -> None:
    async with watched(settings_of(state_dir, min_standby=1, standby_max_age=3600, idle_timeout=600)) as one:
        session = await one.pool.acquire("agent", "session")
        await until(lambda: count(one.pool, "standby") == 1)
        before, kept = set(one.engine.boxes), session.generation
        suspend(3600.0)
        began = anyio.current_time()
        await until(lambda: count(one.pool, "standby") == 1 and not before & set(one.engine.boxes))
        assert anyio.current_time() - began == pytest.approx(START, abs=0.02)
        assert session.generation is None
        assert (await session.call(code="echo anew")).generation != kept
        assert one.pool._shell.state.sessions["agent", "session"].deaths == []


async def test_calls_and_waiters_of_a_machine_that_was_suspended_have_one_outcome_each(state_dir: Path) -> None:
    settings = settings_of(state_dir, max_sandboxes=2, max_starting=1, reclaim_idle_after="off")
    async with watched(settings) as one:
        session = await calm(one)
        ended: dict[str, object] = {}

        async def call(name: str) -> None:
            if name == "cold":
                ended[name] = await outcome(lambda: one.pool.call_cold(code="sleep 30; echo x"))
            elif name == "warm":
                ended[name] = await outcome(lambda: session.call(code="sleep 30; echo x"))
            else:
                ended[name] = await outcome(lambda: one.pool.acquire("agent", name))

        async with anyio.create_task_group() as tasks:
            for name in ("cold", "warm", "second", "third"):
                tasks.start_soon(call, name)
            await until(lambda: ended)
            await anyio.sleep(1.0)
            suspend(3600.0)
        # Its time is up when it goes on, and so is its program's: which of the two is seen first is not told.
        for name in ("cold", "warm"):
            result = ended[name]
            assert isinstance(result, CallResult)
            assert result.timed_out or result.stdout == b"x\n"
        assert {type(ended[name]) for name in ("second", "third")} == {Session, PoolExhausted}
        await anyio.sleep(60.0)
        assert_balanced(one.pool)
        assert (await session.call(code="echo on")).ok


# --- what is stuck keeps nobody waiting -----------------------------------------------------------------------------------


def left(engine: ScriptedEngine, state_dir: Path, number: int, state: EntryState = "bound") -> list[str]:
    """Containers that an earlier start of the pool left, with their entries."""
    directory = StateDirectory.open(state_dir)
    names = [f"emberpool-{directory.pool_id}-0-{n}" for n in range(number)]
    for n, name in enumerate(names):
        box = engine.foreign(name, {LABEL_POOL: directory.pool_id})
        directory.enter(Entry(name, state, container=box.id, user=f"{7000 + n}:{7000 + n}"))
    directory.close()
    return names


@pytest.mark.parametrize("operation", ["remove", "inspect"])
async def test_container_that_is_stuck_delays_neither_the_engine_nor_the_others(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    async with ScriptedEngine(latency=LATENCY) as engine:
        stuck, *others = left(engine, state_dir, 20)
        ids, work = engine.boxes[stuck].id, getattr(engine, operation)

        async def hangs(name: str) -> object:
            if name in (stuck, ids):
                await anyio.sleep(3600)
            return await work(name)

        monkeypatch.setattr(engine, operation, hangs)
        async with SandboxPool(settings_of(state_dir), find=engine.find) as pool:
            began = anyio.current_time()
            await until(lambda: pool.snapshot().engine == "up")
            assert anyio.current_time() - began == pytest.approx(LATENCY["info"] + LATENCY["list"], abs=0.02)
            # Beside the probe of the image, which comes first.
            await pool.acquire("agent", "session")
            assert anyio.current_time() - began < 1.5
            await until(lambda: not set(others) & set(engine.boxes))
            assert anyio.current_time() - began < 4.0
            await anyio.sleep(300)
            assert pool.snapshot().engine == "up"
            assert stuck in engine.boxes
            monkeypatch.setattr(engine, operation, work)
            await until(lambda: stuck not in engine.boxes, limit=120)


async def test_standbys_that_the_engine_does_not_tell_of_in_time_are_not_waited_for(state_dir: Path) -> None:
    async with ScriptedEngine(latency=LATENCY) as engine:
        left(engine, state_dir, 3, "standby")
        engine.faults["inspect"] = [Fault(hang=True)] * 2
        async with running(engine, settings_of(state_dir, min_standby=1)) as pool:
            began = anyio.current_time()
            await until(lambda: count(pool, "standby") == 1)
            assert anyio.current_time() - began < LOOK_PATIENCE + 2.0


async def test_user_of_a_container_that_is_not_removed_yet_is_nobody_elses(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers of one uid would share the kernel's quotas."""
    async with ScriptedEngine(latency=LATENCY) as engine:
        left(engine, state_dir, 1)
        engine.always["remove"] = Fault(error=EngineFailed("device or resource busy"))
        settings = settings_of(state_dir, max_sandboxes=3, max_cold=0)
        settings = settings.model_copy(
            update={"sandbox": settings.sandbox.model_copy(update={"uid_range": UidRange(6999, 5)})}
        )
        async with SandboxPool(settings, find=engine.find) as pool:
            for n in range(3):
                await pool.acquire("agent", str(n))
            users = [box.user for box in pool._shell.containers.sandboxes.values()]
            assert len(set(users)) == 3
            assert "7000:7000" not in users
            engine.always.clear()
            await anyio.sleep(60)
            assert pool._shell.containers._sweeper.left == {}


async def test_events_are_heard_while_the_engine_is_looked_at(state_dir: Path) -> None:
    async with watched(settings_of(state_dir)) as one:
        session = await calm(one)
        one.engine.latency["list"] = 10.0
        one.engine.cut_events()
        await until(lambda: one.pool._shell.hub.links == 2)
        assert one.pool.snapshot().engine == "down"
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outcome, lambda: session.call(code="hang"))
            await anyio.sleep(1)
            one.begin()
            one.engine.die(one.engine.the_box(), 137)
            assert await one.next(ev.SandboxDied) == pytest.approx(0.0, abs=0.011)
        assert anyio.current_time() - began < 3.0
