"""A pool has no task of its caller's: it is started, used, drained and closed from any task of its loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio

from executor.errors import (
    EngineUnavailable,
    ImageMissing,
    PoolClosed,
    PoolExhausted,
    PoolUnusable,
    SandboxDied,
    SessionClosed,
    StateLost,
)
from pool.pool import SandboxPool
from pool.session import Session
from pool.supervisor.sessions import SessionEnd
from tests.support.pools import assert_closed, count, outcome, running, settings_of, until, virtual_backend
from tests.support.scripted import Fault, ScriptedEngine

pytestmark = pytest.mark.anyio

in_virtual_time = pytest.mark.parametrize("anyio_backend", [virtual_backend()], ids=["virtual"])


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


async def in_a_task(function: object) -> None:
    """Run an async function in a task that ends with it, as a framework does."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(function)  # type: ignore[arg-type]


# --- tasks ------------------------------------------------------------------------------------------------------------


async def test_a_pool_is_started_used_and_closed_in_tasks_of_their_own(engine: ScriptedEngine, state_dir: Path) -> None:
    pool = SandboxPool(settings_of(state_dir, min_standby=1), find=engine.find)
    answers: list[bytes] = []

    async def use() -> None:
        session = await pool.acquire("agent", "session")
        answers.append((await session.call(code="echo one")).stdout)

    for step in (pool.start, use, use, pool.aclose):
        await in_a_task(step)
    assert answers == [b"one\n", b"one\n"]
    assert_closed(pool, engine)
    assert isinstance(await outcome(lambda: pool.acquire("agent", "session")), PoolClosed)


async def test_a_block_is_entered_and_left_in_different_tasks(engine: ScriptedEngine, state_dir: Path) -> None:
    pool = SandboxPool(settings_of(state_dir), find=engine.find)
    await in_a_task(pool.__aenter__)
    await pool.acquire("agent", "session")

    async def leave() -> None:
        await pool.__aexit__(None, None, None)

    await in_a_task(leave)
    assert_closed(pool, engine)


async def test_two_pools_are_left_in_any_order(engine: ScriptedEngine, state_dir: Path) -> None:
    first = await SandboxPool(settings_of(state_dir), find=engine.find).start()
    second = await SandboxPool(settings_of(state_dir.with_name("second")), find=engine.find).start()
    with anyio.CancelScope():  # and not in that of any scope either
        await first.aclose()
    session = await second.acquire("agent", "session")
    assert (await session.call(code="echo on")).ok
    await second.aclose()
    assert_closed(second, engine)


async def test_a_pool_lives_between_the_steps_of_a_generator(engine: ScriptedEngine, state_dir: Path) -> None:
    async def fixture() -> AsyncIterator[SandboxPool]:
        async with SandboxPool(settings_of(state_dir), find=engine.find) as pool:
            yield pool

    made = fixture()
    pools: list[SandboxPool] = []

    async def set_up() -> None:
        pools.append(await anext(made))

    async def tear_down() -> None:
        assert await anext(made, None) is None

    await in_a_task(set_up)
    await in_a_task(tear_down)
    assert_closed(pools[0], engine)


async def test_closing_twice_and_at_once_is_harmless_and_everybody_waits_for_the_end(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    pool = SandboxPool(settings_of(state_dir, min_standby=1), find=engine.find)
    await pool.aclose()  # not started, so there is nothing to close
    await pool.start()
    await until(lambda: count(pool, "standby") == 1, limit=5)
    left: list[int] = []

    async def close() -> None:
        await pool.aclose()
        left.append(len(engine.boxes))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        tasks.start_soon(close)
    await close()
    assert left == [0, 0, 0]
    with pytest.raises(PoolClosed, match="once"):
        await pool.start()


async def test_a_start_that_was_refused_can_be_tried_again(engine: ScriptedEngine, state_dir: Path) -> None:
    pool = SandboxPool(settings_of(state_dir), find=engine.find)
    async with running(engine, settings_of(state_dir)):
        with pytest.raises(PoolUnusable, match="live pool"):
            await pool.start()
    await pool.start()
    await pool.aclose()


async def test_a_close_goes_on_although_whoever_waits_for_it_is_cancelled(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    pool = await SandboxPool(settings_of(state_dir, min_standby=2), find=engine.find).start()
    await until(lambda: count(pool, "standby") == 2, limit=5)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await pool.aclose()
    assert_closed(pool, engine)


async def test_the_callers_cancel_scopes_do_not_reach_the_supervisor(engine: ScriptedEngine, state_dir: Path) -> None:
    pool = SandboxPool(settings_of(state_dir), find=engine.find)
    with anyio.CancelScope() as scope:
        await pool.start()
        scope.cancel()
        await anyio.lowlevel.checkpoint()
    session = await pool.acquire("agent", "session")
    assert (await session.call(code="echo on")).ok
    await pool.aclose()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("turns", range(4))
async def test_a_start_that_asyncio_cancels_leaves_no_pool_behind(
    engine: ScriptedEngine, state_dir: Path, turns: int
) -> None:
    pool = SandboxPool(settings_of(state_dir, min_standby=1), find=engine.find)
    starting = asyncio.ensure_future(pool.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    if starting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(lambda: pool._shell.life.ended or not pool._shell.life.pid, limit=5)
    await pool.aclose()
    assert engine.boxes == {}
    async with running(engine, settings_of(state_dir)):
        pass


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_close_goes_on_although_asyncio_cancels_whoever_waits(engine: ScriptedEngine, state_dir: Path) -> None:
    pool = await SandboxPool(settings_of(state_dir, min_standby=2), find=engine.find).start()
    await pool.ready()
    closing = asyncio.ensure_future(pool.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: pool._shell.life.ended, limit=5)
    assert_closed(pool, engine)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_when_every_task_is_cancelled_the_pool_says_so_and_leaves_nothing(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    pool = await SandboxPool(settings_of(state_dir, min_standby=1), find=engine.find).start()
    await pool.ready()
    for task in asyncio.all_tasks():
        if "emberpool" in task.get_name() or "pool." in task.get_name():  # a gateway's own shutdown spares only itself
            task.cancel()
    error = await outcome(pool.aclose)
    assert isinstance(error, PoolUnusable)
    assert "cancelled" in str(error)
    assert engine.boxes == {}
    async with running(engine, settings_of(state_dir)):
        pass


# --- a nursery of the user's --------------------------------------------------------------------------------------------


async def test_a_pool_runs_in_a_nursery_that_is_given(engine: ScriptedEngine, state_dir: Path) -> None:
    pool = SandboxPool(settings_of(state_dir, min_standby=1), find=engine.find)
    async with anyio.create_task_group() as nursery:
        await pool.start(nursery=nursery)
        await pool.ready()
        await pool.aclose()  # else the nursery would not end
    assert_closed(pool, engine)


async def test_a_nursery_that_is_cancelled_closes_its_pool(engine: ScriptedEngine, state_dir: Path) -> None:
    pool = SandboxPool(settings_of(state_dir, min_standby=1), find=engine.find)
    async with anyio.create_task_group() as nursery:
        await pool.start(nursery=nursery)
        await pool.ready()
        nursery.cancel_scope.cancel()
    assert_closed(pool, engine)
    await pool.aclose()


def test_a_trio_run_that_ends_closes_the_pool_that_was_forgotten(state_dir: Path) -> None:
    async def main() -> tuple[SandboxPool, ScriptedEngine]:
        engine = ScriptedEngine()
        engine._tasks = trio_tasks = anyio.create_task_group()
        pool = SandboxPool(settings_of(state_dir, min_standby=1), find=engine.find)

        async def serve() -> None:
            async with trio_tasks:
                trio_tasks.cancel_scope.shield = True
                await until(lambda: pool._shell.life.ended)
                trio_tasks.cancel_scope.cancel()

        trio.lowlevel.spawn_system_task(serve)
        await pool.start()
        await pool.ready()
        return pool, engine

    pool, engine = trio.run(main)
    assert_closed(pool, engine)


# --- drain --------------------------------------------------------------------------------------------------------------


async def test_a_drain_refuses_at_once_lets_a_call_end_and_closes_the_pool(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    pool = await SandboxPool(settings_of(state_dir, min_standby=1, drain_timeout=30.0), find=engine.find).start()
    session = await pool.acquire("agent", "session")
    answers: list[object] = []

    async def call() -> None:
        answers.append(await outcome(lambda: session.call(code="gate go; echo done")))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await until(lambda: pool.snapshot().running == 1, limit=5)
        pool.drain()
        assert isinstance(await outcome(lambda: pool.acquire("agent", "other")), PoolClosed)
        assert isinstance(await outcome(lambda: session.call(code="echo one")), PoolClosed)
        await until(lambda: pool._shell.state.closing, limit=5)
        assert isinstance(await outcome(lambda: pool.acquire("agent", "other")), PoolClosed)
        assert isinstance(await outcome(lambda: session.call(code="echo two")), PoolClosed)
        assert answers == []
        engine.gates.add("go")
    assert answers[0].stdout == b"done\n"  # type: ignore[attr-defined]
    await until(lambda: pool._shell.life.ended, limit=5)  # by itself
    assert_closed(pool, engine)
    await pool.aclose()
    pool.drain()


@in_virtual_time
async def test_of_two_drains_the_earlier_end_holds(engine: ScriptedEngine, state_dir: Path) -> None:
    for first, second in ((50.0, 2.0), (2.0, 50.0)):
        pool = await SandboxPool(settings_of(state_dir), find=engine.find).start()
        session = await pool.acquire("agent", "session")
        began = anyio.current_time()

        async def end(pool: SandboxPool = pool, first: float = first, second: float = second) -> None:
            await anyio.sleep(1)
            pool.drain(first)
            pool.drain(second)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end)
            assert isinstance(await outcome(lambda: session.call(code="hang")), SandboxDied)  # noqa: B023 - awaited here
        assert anyio.current_time() - began == pytest.approx(3.0, abs=0.5)
        await pool.aclose()


async def test_a_signal_handler_and_a_thread_may_drain(engine: ScriptedEngine, state_dir: Path) -> None:
    pool = await SandboxPool(settings_of(state_dir), find=engine.find).start()
    before = signal.signal(signal.SIGUSR1, lambda *_: pool.drain())
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    await until(lambda: pool._shell.life.ended, limit=5)
    second = await SandboxPool(settings_of(state_dir), find=engine.find).start()
    await anyio.to_thread.run_sync(second.drain)
    await until(lambda: second._shell.life.ended, limit=5)


# --- ready --------------------------------------------------------------------------------------------------------------


async def test_ready_waits_for_the_standbys(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, min_standby=2)) as pool:
        await pool.ready()
        assert count(pool, "standby") == 2
        await pool.acquire("agent", "session")
        await pool.ready()
        assert count(pool, "standby") == 2


async def test_ready_asks_for_no_standby_that_finds_no_place(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, min_standby=2, max_sandboxes=2)) as pool:
        await pool.acquire("agent", "session")
        await pool.ready()
        assert count(pool, "standby") == 1


@in_virtual_time
async def test_ready_waits_for_an_engine_and_says_at_last_why_not(engine: ScriptedEngine, state_dir: Path) -> None:
    engine.up_now = False
    async with running(engine, settings_of(state_dir, min_standby=1)) as pool:
        assert isinstance(await outcome(lambda: pool.ready(timeout=5)), EngineUnavailable)

        async def come() -> None:
            await anyio.sleep(5)
            engine.up()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come)
            await pool.ready(timeout=60)


@in_virtual_time
async def test_ready_does_not_wait_for_what_only_a_hand_can_mend(engine: ScriptedEngine, state_dir: Path) -> None:
    async def missing(*args: object) -> object:
        raise ImageMissing("nobody has it")

    engine.images.clear()
    pool = SandboxPool(settings_of(state_dir, min_standby=1), find=engine.find, make_image=missing)  # type: ignore[arg-type]
    async with pool:
        began = anyio.current_time()
        assert isinstance(await outcome(lambda: pool.ready(timeout=60)), ImageMissing)
        assert anyio.current_time() - began < 10


@in_virtual_time
async def test_ready_is_refused_when_starts_take_too_long(engine: ScriptedEngine, state_dir: Path) -> None:
    engine.latency["start"] = 30.0
    async with running(engine, settings_of(state_dir, min_standby=1)) as pool:
        assert isinstance(await outcome(lambda: pool.ready(timeout=3)), PoolExhausted)


# --- sessions without handles -------------------------------------------------------------------------------------------


async def test_sessions_are_listed_and_closed_without_acquiring(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        assert pool.sessions() == []
        first, _ = await pool.acquire("agent", "a"), await pool.acquire("agent", "b")
        a, b = pool.sessions()
        assert (a.agent, a.session, a.id, a.generation, a.handles) == ("agent", "a", first.id, first.generation, 1)
        assert (b.session, b.running, b.waiting, b.idle >= 0) == ("b", 0, 0, True)
        assert await pool.close_session("agent", "a")
        assert [info.session for info in pool.sessions()] == ["b"]
        assert isinstance(await outcome(lambda: first.call(code="echo x")), SessionClosed)
        started = engine.asked["start"]
        assert not await pool.close_session("agent", "a")
        assert not await pool.close_session("agent", "never")
        assert engine.asked["start"] == started


async def test_what_a_session_is_asked_that_does_not_exist_starts_no_sandbox(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        known = session.generation
        await session.close()

        async def streamed() -> None:
            async for _ in session.stream(code="echo x"):
                pass

        for ask in (
            lambda: session.call(code="echo x"),
            lambda: session.call(code="echo x", generation=known),
            streamed,
            session.ready,
            lambda: session.read_file("x"),
        ):
            assert isinstance(await outcome(ask), SessionClosed)
        assert isinstance(await outcome(lambda: pool.acquire("agent", "session", generation=known)), StateLost)
        assert isinstance(await outcome(lambda: pool.acquire("agent", "other", generation=known)), StateLost)
        assert engine.asked["start"] == 1
        assert pool.sessions() == []


async def test_a_handle_is_had_on_a_generation_that_is_still_there(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        first = await pool.acquire("agent", "session")
        known = first.generation
        await first.release()
        again = await pool.acquire("agent", "session", generation=known)
        assert again.generation == known
        engine.die(engine.the_box(), 137)
        await until(lambda: again.generation != known, limit=5)
        assert isinstance(await outcome(lambda: pool.acquire("agent", "session", generation=known)), StateLost)


@in_virtual_time
async def test_the_end_of_a_session_is_told_once_with_its_reason(engine: ScriptedEngine, state_dir: Path) -> None:
    ended: list[SessionEnd] = []
    settings = settings_of(state_dir, idle_timeout=60.0)
    pool = await SandboxPool(settings, find=engine.find, on_session_ended=ended.append).start()
    sessions: dict[str, Session] = {name: await pool.acquire("agent", name) for name in ("closed", "unused", "kept")}
    engine.die(
        next(iter(engine.boxes.values())), 137
    )  # its deaths are remembered after it is closed: no end of their own
    await until(lambda: sessions["closed"].generation, limit=60)
    await sessions["closed"].close()
    assert [(end.session, end.reason) for end in ended] == [("closed", "closed")]
    assert ended[0] == SessionEnd("agent", "closed", sessions["closed"].id, "closed")
    await sessions["unused"].release()
    await anyio.sleep(300)
    engine.faults["start"] = [Fault(hang=True)]
    assert [(end.session, end.reason) for end in ended[1:]] == [("unused", "unused")]
    await outcome(lambda: pool.acquire("agent", "never", timeout=1))  # nobody ever had it
    await anyio.sleep(300)
    await pool.aclose()
    assert [(end.session, end.reason) for end in ended[2:]] == [("kept", "pool_closed")]


async def test_a_callback_that_raises_or_calls_the_pool_changes_nothing(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    pools: list[SandboxPool] = []

    def callback(end: SessionEnd) -> None:
        pools[0].resize(max_sandboxes=3)
        raise ZeroDivisionError

    pools.append(await SandboxPool(settings_of(state_dir), find=engine.find, on_session_ended=callback).start())
    session = await pools[0].acquire("agent", "session")
    await session.close()
    assert (await (await pools[0].acquire("agent", "session")).call(code="echo on")).ok
    assert pools[0]._shell.state.policy.max_sandboxes == 3
    await pools[0].aclose()
    assert_closed(pools[0], engine)


# --- a failure ----------------------------------------------------------------------------------------------------------


async def test_a_failed_supervisor_ends_calls_is_told_at_each_call_and_leaves_nothing(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    pool = await SandboxPool(settings_of(state_dir), find=engine.find).start()
    session = await pool.acquire("agent", "session")

    async def fail() -> None:
        await until(lambda: engine.the_box().busy, limit=5)

        async def bug() -> None:
            raise ZeroDivisionError("a bug")

        pool._shell.life.tasks.start_soon(bug)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail)
        error = await outcome(lambda: session.call(code="hang"))
    assert isinstance(error, PoolUnusable)
    assert error.started
    for ask in (
        lambda: pool.acquire("agent", "other"),
        lambda: session.call(code="echo x"),
        lambda: pool.call_cold(["true"]),
        pool.ready,
        pool.aclose,
        pool.aclose,
    ):
        failed = await outcome(ask)
        assert isinstance(failed, PoolUnusable)
        assert "ZeroDivisionError: a bug" in str(failed)
    await session.release()
    assert engine.boxes == {}
    async with running(engine, settings_of(state_dir)):
        pass  # its lock was given back


async def test_a_blocks_own_error_is_not_lost_to_the_supervisors(engine: ScriptedEngine, state_dir: Path) -> None:
    async def find() -> object:
        raise ZeroDivisionError("a bug")

    with pytest.raises(KeyError) as caught:  # noqa: PT012 - the block is what is tested
        async with SandboxPool(settings_of(state_dir), find=find) as pool:  # type: ignore[arg-type]
            await until(lambda: pool._shell.life.ended, limit=5)
            raise KeyError("mine")
    assert "ZeroDivisionError: a bug" in caught.value.__notes__[0]


async def test_pools_are_kept_on_an_exit_stack(engine: ScriptedEngine, state_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        pools = [SandboxPool(settings_of(state_dir.with_name(name)), find=engine.find) for name in "ab"]
        for pool in pools:
            await stack.enter_async_context(pool)
        moved = stack.pop_all()
    await in_a_task(moved.aclose)
    for pool in pools:
        assert_closed(pool, engine)
