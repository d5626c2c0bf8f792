"""The supervisor over hours: a whole pool on a scripted engine, under virtual time."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from executor.errors import (
    EmberpoolError,
    EngineFailed,
    EngineUnavailable,
    ImageMissing,
    PoolClosed,
    PoolExhausted,
    ProfileMismatch,
    QuotaExceeded,
    SandboxDied,
    StateLost,
)
from executor.result import CallResult
from pool.pool import SandboxPool
from pool.session import Session
from pool.supervisor import containers
from pool.supervisor.containers import LAST_SWEEP, LATE_START
from pool.supervisor.lifecycle import STOP_PATIENCE
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
from tests.support.scripted import EPOCH, IMAGE, Fault, ScriptedEngine

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


async def timed(act: Callable[[], Awaitable[object]]) -> tuple[object, float]:
    """The outcome of ``act`` and the seconds that it took."""
    began = anyio.current_time()
    return await outcome(act), anyio.current_time() - began


async def acquired(pool: SandboxPool, *, within: float) -> Session:
    """A session, asked for again and again."""
    with anyio.fail_after(within):
        while True:
            try:
                return await pool.acquire("agent", "session")
            except EmberpoolError as error:
                await anyio.sleep(error.retry_after or 5.0)


# --- standbys and recycling -------------------------------------------------------------------------------------------


async def test_an_idle_session_loses_its_sandbox_and_gets_another_for_its_next_call(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir, idle_timeout=100)) as pool:
        session = await pool.acquire("agent", "session")
        first = session.generation
        await anyio.sleep(90)
        assert (await session.call(code="echo still")).generation == first
        await anyio.sleep(90)
        assert session.generation == first
        await anyio.sleep(20)
        assert repr(session) == f"<Session {session.id} generation=None>"
        assert engine.boxes == {}
        assert (await session.call(code="echo anew")).generation not in (first, "")


async def test_a_running_call_keeps_its_session_from_being_reaped(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, idle_timeout=5)) as pool:
        session = await pool.acquire("agent", "session")
        assert (await session.call(code="sleep 50; echo done")).stdout == b"done\n"


async def test_a_sandbox_past_its_lifetime_is_replaced_between_calls(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, max_lifetime=100)) as pool:
        session = await pool.acquire("agent", "session")
        first = session.generation
        await anyio.sleep(80)
        result = await session.call(code="sleep 50; echo long")
        assert (result.stdout, result.generation) == (b"long\n", first)
        await until(lambda: session.generation is None)
        assert (await session.call(code="echo anew")).generation != first


async def test_a_sandbox_that_served_max_calls_is_replaced(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, max_calls=2)) as pool:
        session = await pool.acquire("agent", "session")
        used = [(await session.call(code="echo x")).generation for _ in range(5)]
        assert used[0] == used[1] != used[2] == used[3] != used[4]


async def test_standbys_are_kept_and_replaced_by_age(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, min_standby=2, standby_max_age=300)) as pool:
        await until(lambda: count(pool, "standby") == 2)
        first = set(engine.boxes)
        await anyio.sleep(310)
        assert count(pool, "standby") == 2
        assert not first & set(engine.boxes)


async def test_an_acquire_takes_a_standby_at_once_and_the_standbys_refill(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir, min_standby=1)) as pool:
        await until(lambda: count(pool, "standby") == 1)
        _, seconds = await timed(lambda: pool.acquire("agent", "session"))
        assert seconds < 0.01
        assert count(pool, "standby") == 0
        await anyio.sleep(1)
        assert count(pool, "standby") == 1


async def test_a_standby_that_dies_is_replaced(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, min_standby=1)) as pool:
        await until(lambda: count(pool, "standby") == 1)
        dead = engine.the_box()
        engine.die(dead, 137)
        await anyio.sleep(2)
        assert count(pool, "standby") == 1
        assert engine.the_box() is not dead


# --- waiting ----------------------------------------------------------------------------------------------------------


async def test_waiters_are_served_first_come_first_served(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, max_sandboxes=1, max_starting=1)) as pool:
        order: list[str] = []

        async def use(name: str) -> None:
            session = await pool.acquire("agent", name)
            order.append(name)
            await session.call(code="sleep 2; echo x")
            await session.close()

        async with anyio.create_task_group() as tasks:
            for name in "abcde":
                tasks.start_soon(use, name)
                await anyio.sleep(0.01)
        assert order == list("abcde")
        assert engine.most == 1


async def test_a_waiter_past_its_deadline_is_refused_at_that_moment(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(
        engine, settings_of(state_dir, max_sandboxes=1, max_starting=1, reclaim_idle_after="off")
    ) as pool:
        await pool.acquire("agent", "holder")
        error, seconds = await timed(lambda: pool.acquire("agent", "late", timeout=7.5))
        assert isinstance(error, PoolExhausted)
        assert error.retry_after
        assert seconds == pytest.approx(7.5, abs=0.01)


async def test_a_full_queue_refuses_at_once(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, max_sandboxes=1, max_starting=1, max_waiters=1, reclaim_idle_after="off")
    async with running(engine, settings) as pool:
        await pool.acquire("agent", "holder")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outcome, lambda: pool.acquire("agent", "first"))
            await anyio.sleep(0.1)
            error, seconds = await timed(lambda: pool.acquire("agent", "second"))
            assert isinstance(error, PoolExhausted)
            assert seconds == 0
            tasks.cancel_scope.cancel()


async def test_an_agent_past_its_quota_is_refused_and_others_are_not(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, max_sessions_per_agent=1)) as pool:
        session = await pool.acquire("greedy", "one")
        assert isinstance(await outcome(lambda: pool.acquire("greedy", "two")), QuotaExceeded)
        await pool.acquire("greedy", "one")
        await pool.acquire("modest", "one")
        await session.close()
        await pool.acquire("greedy", "two")


async def test_under_pressure_the_session_idle_longest_gives_way(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, max_sandboxes=2, reclaim_idle_after=60)) as pool:
        oldest = await pool.acquire("agent", "oldest")
        await anyio.sleep(30)
        newer = await pool.acquire("agent", "newer")
        _, seconds = await timed(lambda: pool.acquire("agent", "third", timeout=100))
        assert 30 <= seconds < 32
        assert oldest.generation is None
        assert newer.generation is not None
        assert engine.most == 2


# --- deaths -----------------------------------------------------------------------------------------------------------


async def test_a_dead_session_gets_a_new_sandbox_unasked(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        first = session.generation
        engine.die(engine.the_box(), 137)
        await anyio.sleep(2)
        assert session.generation not in (None, first)
        lost = await outcome(lambda: session.call(code="echo x", generation=first))
        assert isinstance(lost, StateLost)


@pytest.mark.parametrize(("steps", "cause"), [("die 137", "killed"), ("die 143", "killed"), ("die 0", "unknown")])
async def test_a_death_under_a_call_tells_its_cause(
    engine: ScriptedEngine, state_dir: Path, steps: str, cause: str
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        error = await outcome(lambda: session.call(code=steps))
        assert isinstance(error, SandboxDied)
        assert (error.cause, error.started) == (cause, True)
        assert (await session.call(code="echo again")).ok


async def test_a_session_that_keeps_dying_is_refused_and_the_rest_goes_on(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir, restart_limit=2, restart_window=1000)) as pool:
        session, calm = await pool.acquire("agent", "dying"), await pool.acquire("agent", "calm")
        pauses = []
        for _ in range(3):
            error, seconds = await timed(lambda: session.call(code="die 137"))
            assert isinstance(error, SandboxDied)
            assert error.started
            pauses.append(seconds)
        error, seconds = await timed(lambda: session.call(code="die 137"))
        assert isinstance(error, SandboxDied)
        assert not error.started
        assert seconds == 0
        assert error.retry_after is not None
        assert (await calm.call(code="echo fine")).ok
        await anyio.sleep(error.retry_after + 1)
        assert (await session.call(code="echo healed")).ok


@pytest.mark.parametrize(("steps", "signal", "after"), [("hang", 15, 5), ("stubborn; hang", 9, 7)])
async def test_a_timeout_is_a_result_and_leaves_the_sandbox_its_state(
    engine: ScriptedEngine, state_dir: Path, steps: str, signal: int, after: float
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        first = session.generation
        result, seconds = await timed(lambda: session.call(code=f"echo begun; {steps}", timeout=5))
        assert isinstance(result, CallResult)
        assert (result.timed_out, result.stdout, result.exit_code) == (True, b"begun\n", None)
        assert result.signal == signal
        assert seconds == pytest.approx(after, abs=0.01)
        assert (await session.call(code="echo on")).generation == first


async def test_a_timeout_in_an_image_without_python_costs_the_sandbox(engine: ScriptedEngine, state_dir: Path) -> None:
    engine.python = False
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        first = session.generation
        result = await session.call(["echo", "begun;", "hang"], timeout=5)
        assert (result.timed_out, result.stdout, result.exit_code) == (True, b"begun\n", None)
        assert (await session.call(["echo", "anew"])).generation != first
        assert engine.runners == []


async def test_a_timeout_that_cannot_be_proven_clean_costs_the_sandbox(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        first = session.generation
        assert (await session.call(code="dirty; hang", timeout=5)).timed_out
        # The answer came before the proof failed, so whoever calls at once learns that the session's state is gone.
        error = await outcome(lambda: session.call(code="echo early"))
        assert isinstance(error, SandboxDied)
        assert (error.cause, error.started) == ("runner", False)
        assert (await session.call(code="echo anew")).generation != first


@pytest.mark.parametrize("asked", [True, False])
async def test_a_start_that_never_told_its_container_stays_in_the_ledger_for_a_while(
    engine: ScriptedEngine, state_dir: Path, asked: bool
) -> None:
    # Where the engine was never asked for the start, nothing can come of it later.
    engine.faults["start" if asked else "attach"] = [Fault(hang=True)]
    async with running(engine, settings_of(state_dir, resync_interval=10)) as pool:
        await (await acquired(pool, within=100)).close()
        await until(lambda: not engine.boxes)
        entries = [file.stem for file in (state_dir / "ledger").iterdir()]
        assert entries == list(engine.unanswered)
        assert bool(entries) == asked
        await anyio.sleep(LATE_START + 20)
        assert list((state_dir / "ledger").iterdir()) == []


@pytest.mark.parametrize("step", [-1e9, -50.0, 0.0])
async def test_a_clock_that_was_set_back_keeps_no_entry_in_the_ledger_for_long(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    engine.faults["start"] = [Fault(hang=True)]
    async with running(engine, settings_of(state_dir, resync_interval=10)) as pool:
        began = anyio.current_time()
        await (await acquired(pool, within=100)).close()
        clock = SimpleNamespace(time=lambda: EPOCH + anyio.current_time() + step)
        monkeypatch.setattr(containers, "time", clock)
        # Not earlier than without: the start may still be carried out.
        await anyio.sleep(began + LATE_START - 11 - anyio.current_time())
        assert list((state_dir / "ledger").iterdir()) != []
        await anyio.sleep(LATE_START)
        assert list((state_dir / "ledger").iterdir()) == []


async def test_a_start_that_is_carried_out_late_is_removed(engine: ScriptedEngine, state_dir: Path) -> None:
    engine.faults["start"] = [Fault(hang=True)]
    async with running(engine, settings_of(state_dir, resync_interval=10)) as pool:
        await (await acquired(pool, within=100)).close()
        (name,) = engine.unanswered
        await anyio.sleep(20)
        assert engine.boxes == {}
        engine.carry_out_late(name)
        await anyio.sleep(15)
        assert engine.boxes == {}
        assert list((state_dir / "ledger").iterdir()) == []


async def test_a_call_killed_for_memory_says_so(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        result = await session.call(code="oom")
        assert (result.oom_killed, result.signal, result.exit_code) == (True, 9, None)


async def test_a_lost_client_is_never_an_exit_status(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        error = await outcome(lambda: session.call(code="lose; hang"))
        assert isinstance(error, SandboxDied)
        assert error.started


async def test_a_resync_heals_a_death_that_no_event_told(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, resync_interval=30, min_standby=1)) as pool:
        session = await pool.acquire("agent", "session")
        first = session.generation
        await until(lambda: count(pool, "standby") == 1)
        engine.lose = {"die", "destroy"}
        for box in list(engine.boxes.values()):
            engine.die(box, 137)
        engine.lose = set()
        assert session.generation == first
        await anyio.sleep(35)
        assert session.generation not in (None, first)
        assert count(pool, "standby") == 1


@pytest.mark.parametrize("lost", ["exec_create", "exec_die", "create", "start", "die", "destroy", "oom"])
async def test_no_lost_event_makes_a_call_hang_or_leak(engine: ScriptedEngine, state_dir: Path, lost: str) -> None:
    async with running(engine, settings_of(state_dir, resync_interval=10)) as pool:
        # The engine is asked once, by a container of its own, whether the image has Python; that must come through.
        await (await pool.acquire("agent", "before")).close()
        engine.lose = {lost}
        session = await pool.acquire("agent", "session")
        for call in (session.call, pool.call_cold):
            for steps in ("echo x", "exit 3", "oom", "die 137"):
                answer, seconds = await timed(lambda call=call, steps=steps: call(code=steps))  # type: ignore[misc]
                assert seconds < 40
                if not isinstance(answer, SandboxDied | EngineFailed):
                    assert not isinstance(answer, Exception)
        await anyio.sleep(60)
        assert len(engine.boxes) <= 1


async def test_what_was_told_while_the_events_were_cut_is_still_heard(engine: ScriptedEngine, state_dir: Path) -> None:
    answers: list[object] = []
    async with running(engine, settings_of(state_dir)) as pool, anyio.create_task_group() as tasks:

        async def call() -> None:
            answers.append(await outcome(lambda: pool.call_cold(code="gate go; exit 4")))

        tasks.start_soon(call)
        await until(lambda: engine.boxes)
        engine.cut_events()
        engine.gates.add("go")
        await until(lambda: not engine.boxes)
        assert not pool._shell.hub.connected
        await until(lambda: answers)
        assert getattr(answers[0], "exit_code", answers[0]) == 4


async def test_a_paused_sandbox_is_dead_to_its_session(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        first, box = session.generation, engine.the_box()
        engine._event("pause", box)
        await anyio.sleep(0.1)
        result = await session.call(code="echo on")
        assert (result.stdout, result.generation != first) == (b"on\n", True)
        assert box.id not in [other.id for other in engine.boxes.values()]


@pytest.mark.parametrize("how", ["repeated", "late"])
async def test_repeated_and_late_events_change_nothing(engine: ScriptedEngine, state_dir: Path, how: str) -> None:
    engine.repeat, engine.event_delay = how == "repeated", 0.5 if how == "late" else 0.0
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        first = session.generation
        for _ in range(3):
            result = await session.call(code="exit 3")
            assert (result.exit_code, result.generation) == (3, first)
        assert (await pool.call_cold(code="exit 4")).exit_code == 4
        engine.die(engine.the_box(), 137)
        await anyio.sleep(5)
        assert engine.asked["start"] == 2
        assert pool._shell.state.sessions["agent", "session"].deaths[1:] == []


# --- the engine -------------------------------------------------------------------------------------------------------


async def test_an_engine_that_is_down_refuses_at_once_and_heals(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        await (await pool.acquire("agent", "before")).close()
        engine.down()
        await anyio.sleep(1)
        for act in (lambda: pool.acquire("agent", "session"), lambda: pool.call_cold(code="echo x")):
            error, seconds = await timed(act)
            assert isinstance(error, EngineUnavailable)
            assert (error.started, seconds) == (False, 0)
            assert error.retry_after
        engine.up()
        await anyio.sleep(6)
        assert (await (await pool.acquire("agent", "session")).call(code="echo back")).ok


async def test_engine_killed_during_a_call_is_the_reported_cause(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, restart_limit=1)) as pool:
        session = await pool.acquire("agent", "session")
        for _ in range(3):
            async with anyio.create_task_group() as tasks:

                async def call() -> None:
                    error = await outcome(lambda: session.call(code="sleep 30; echo x"))
                    assert isinstance(error, SandboxDied)
                    assert (error.cause, error.started) == ("engine", True)

                tasks.start_soon(call)
                await anyio.sleep(1)
                engine.down()
                await anyio.sleep(10)
                engine.up()
            await anyio.sleep(10)
            # However often the engine restarts, no session is worn out by it.
            assert (await session.call(code="echo back")).ok


async def test_a_cut_event_stream_costs_no_call(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        first = session.generation
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                result = await session.call(code="sleep 1; exit 7")
                assert (result.exit_code, result.generation) == (7, first)

            tasks.start_soon(call)
            await anyio.sleep(1)
            engine.cut_events()
        assert session.generation == first


async def test_a_missing_image_is_refused_and_healed_once_it_appears(engine: ScriptedEngine, state_dir: Path) -> None:
    del engine.images["default"]
    async with running(engine, settings_of(state_dir)) as pool:
        await anyio.sleep(1)
        error, seconds = await timed(lambda: pool.acquire("agent", "session"))
        assert isinstance(error, ImageMissing)
        assert seconds == 0
        assert "emberpool image build" in str(error)
        engine.images["default"] = IMAGE
        await anyio.sleep(6)
        await pool.acquire("agent", "session")


async def test_an_engine_that_weakens_the_profile_is_refused(engine: ScriptedEngine, state_dir: Path) -> None:
    def weaken(record: dict[str, Any]) -> None:
        record["HostConfig"]["Memory"] = 0

    engine.patch = weaken
    async with running(engine, settings_of(state_dir)) as pool:
        error = await outcome(lambda: pool.acquire("agent", "session"))
        assert isinstance(error, ProfileMismatch)
        assert "memory" in str(error)
        await anyio.sleep(5)
        assert engine.boxes == {}
        engine.patch = lambda record: None
        await anyio.sleep(40)
        await pool.acquire("agent", "session")


async def test_an_inside_that_is_weaker_is_refused(engine: ScriptedEngine, state_dir: Path) -> None:
    engine.inside = lambda output: output.replace(b"NoNewPrivs:\t1", b"NoNewPrivs:\t0")
    async with running(engine, settings_of(state_dir)) as pool:
        error = await outcome(lambda: pool.acquire("agent", "session"))
        assert isinstance(error, ProfileMismatch)
        assert "NoNewPrivs" in str(error)


@pytest.mark.parametrize("operation", ["start", "inspect", "attach", "remove", "kill", "list", "info", "image"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(error=EngineFailed("it failed", retry_after=1.0)),
        Fault(hang=True),
        Fault(late=True),
        Fault(slow=5.0),
        Fault(garbage=True),
    ],
    ids=["error", "hang", "late", "slow", "garbage"],
)
async def test_one_fault_of_any_operation_heals_by_itself(
    engine: ScriptedEngine, state_dir: Path, operation: str, fault: Fault
) -> None:
    engine.faults[operation] = [fault]
    async with running(engine, settings_of(state_dir, resync_interval=10, drain_timeout=100)) as pool:
        session = await acquired(pool, within=100)
        await outcome(lambda: session.call(code="echo x; hang", timeout=5))
        await outcome(lambda: pool.call_cold(code="echo x"))
        await anyio.sleep(120)
        assert (await session.call(code="echo x")).ok
        assert (await pool.call_cold(code="echo x")).ok
        await anyio.sleep(30)
        assert len(engine.boxes) == 1


async def test_a_stop_that_fails_is_repeated_until_it_succeeds_and_keeps_its_place(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir, max_sandboxes=1, max_starting=1)) as pool:
        session = await pool.acquire("agent", "one")
        engine.faults["remove"] = [Fault(error=EngineFailed("busy"))] * 4
        await session.close()
        await pool.acquire("agent", "two")
        assert engine.asked["remove"] == 5
        assert engine.most == 1


async def test_one_container_that_cannot_be_removed_does_not_close_the_pool(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir, resync_interval=5)) as pool:
        session = await pool.acquire("agent", "session")
        engine.always["kill"] = engine.always["remove"] = Fault(error=EngineFailed("device or resource busy"))
        error = await outcome(lambda: pool.call_cold(code="hang", timeout=1))
        assert isinstance(error, SandboxDied)
        assert (error.cause, error.started) == ("engine", True)
        assert len(engine.boxes) == 2
        await anyio.sleep(30)
        assert (await session.call(code="echo on")).ok
        assert pool.snapshot().engine == "up"
        engine.always.clear()
        await anyio.sleep(10)
        assert len(engine.boxes) == 1


@pytest.mark.parametrize("operation", ["info", "image", "list", "start", "inspect", "remove"])
async def test_a_want_of_the_hosts_own_is_a_failure_like_any_other(
    engine: ScriptedEngine, state_dir: Path, operation: str
) -> None:
    error: Any = OSError(errno.EMFILE, "Too many open files")
    engine.faults[operation] = [Fault(error=error)] * 2
    async with running(engine, settings_of(state_dir, min_standby=1, resync_interval=5)) as pool:
        await until(lambda: count(pool, "standby") == 1)
        session = await pool.acquire("agent", "session", timeout=60)
        assert (await session.call(code="echo on")).ok
        await session.close()
        await until(lambda: not engine.faults[operation] and count(pool, "standby") == len(engine.boxes) == 1)


async def test_a_start_whose_name_is_taken_leaves_the_other_container_alone(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with SandboxPool(settings_of(state_dir), find=engine.find) as pool:
        await anyio.sleep(1)
        other = engine.foreign(pool._shell.containers.name(1))
        session = await pool.acquire("agent", "session")
        assert session.generation == f"{pool._shell.containers.instance}-2"
    assert list(engine.boxes.values()) == [other]
    assert list((state_dir / "ledger").iterdir()) == []


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_closing_lets_a_running_call_finish(engine: ScriptedEngine, state_dir: Path) -> None:
    answers: list[object] = []
    settings = settings_of(state_dir, drain_timeout=10)
    async with anyio.create_task_group() as tasks, running(engine, settings) as pool:
        session = await pool.acquire("agent", "session")

        async def call() -> None:
            answers.append(await outcome(lambda: session.call(code="sleep 5; echo done")))

        tasks.start_soon(call)
        await anyio.sleep(0.5)
    (answer,) = answers
    assert getattr(answer, "stdout", answer) == b"done\n"
    assert isinstance(await outcome(lambda: session.call(code="echo x")), PoolClosed)


@pytest.mark.parametrize("cold", [False, True])
async def test_call_that_outlasts_the_drain_is_reported_as_drained(
    engine: ScriptedEngine, state_dir: Path, cold: bool
) -> None:
    answers: list[object] = []
    async with anyio.create_task_group() as tasks:
        async with running(engine, settings_of(state_dir, drain_timeout=3)) as pool:
            session = await pool.acquire("agent", "session")
            act = pool.call_cold if cold else session.call

            async def call() -> None:
                answers.append(await outcome(lambda: act(code="sleep 50; echo done")))

            tasks.start_soon(call)
            await anyio.sleep(0.5)
            began = anyio.current_time()
        assert 3 <= anyio.current_time() - began < 10
    (error,) = answers
    assert isinstance(error, SandboxDied)
    assert (error.cause, error.started) == ("drained", True)


async def test_a_pool_whose_engine_is_gone_still_closes_and_its_handles_still_release(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with SandboxPool(settings_of(state_dir), find=engine.find) as pool:
        session = await pool.acquire("agent", "session")
        engine.down()
        began = anyio.current_time()
    assert anyio.current_time() - began < 60
    await anyio.sleep(100)
    await session.release()
    await session.close()
    # What could not be removed stands in the ledger, and the next start removes it.
    assert len(list((state_dir / "ledger").iterdir())) == 1
    engine.up_now = True
    assert len(engine.boxes) == 1
    async with running(engine, settings_of(state_dir)):
        await until(lambda: not engine.boxes)


async def test_hours_of_use_leave_no_trace(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1, max_sandboxes=3, idle_timeout=30, max_lifetime=200)
    async with running(engine, settings) as pool:

        async def live(name: str) -> None:
            for hour in range(20):
                session = await pool.acquire("agent", f"{name}{hour % 3}", timeout=500)
                steps = ("echo x", "exit 1", "die 137", "sleep 40", "hang", "oom")[hour % 6]
                await outcome(lambda session=session, steps=steps: session.call(code=steps))  # type: ignore[misc]
                await (session.close if hour % 2 else session.release)()
                await anyio.sleep(100 * (hour % 4))

        async with anyio.create_task_group() as tasks:
            for name in "abcde":
                tasks.start_soon(live, name)
        assert engine.most <= 3 + settings.pool.max_cold
        await anyio.sleep(3600)
        assert count(pool, "standby") == len(engine.boxes) == 1
        assert pool._shell.state.sessions == {}
        assert len(pool._shell.hub._watches) == 1
        assert len(list((state_dir / "ledger").iterdir())) == 1


async def test_a_cold_call_whose_name_is_taken_leaves_the_other_container_alone(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with SandboxPool(settings_of(state_dir, resync_interval=5), find=engine.find) as pool:
        await anyio.sleep(1)
        other = engine.foreign(pool._shell.containers.name(0)[:-1] + "c1")
        assert isinstance(await outcome(lambda: pool.call_cold(code="echo x")), EngineFailed)
        assert (await pool.call_cold(code="echo x")).ok
        await anyio.sleep(10)
    assert list(engine.boxes.values()) == [other]
    assert list((state_dir / "ledger").iterdir()) == []


async def test_pool_that_closes_waits_for_as_long_as_its_containers_go(engine: ScriptedEngine, state_dir: Path) -> None:
    """However many there are: what counts is that one after the other goes."""
    turn = anyio.Semaphore(1)
    remove = engine.remove

    async def one_by_one(name: str) -> None:
        async with turn:
            await anyio.sleep(STOP_PATIENCE - 1)
            await remove(name)

    async with running(engine, settings_of(state_dir, max_sandboxes=10, max_starting=10)) as pool:
        held = [await pool.acquire("agent", str(n)) for n in range(10)]
        engine.remove = one_by_one  # type: ignore[method-assign]
    assert len(held) == 10


async def test_pool_that_closes_gives_up_once_nothing_goes_any_more(engine: ScriptedEngine, state_dir: Path) -> None:
    async with SandboxPool(settings_of(state_dir, drain_timeout=1), find=engine.find) as pool:
        await pool.acquire("agent", "session")
        engine.always["remove"] = Fault(hang=True)
        began = anyio.current_time()
    assert anyio.current_time() - began < 1 + STOP_PATIENCE + LAST_SWEEP + 1
