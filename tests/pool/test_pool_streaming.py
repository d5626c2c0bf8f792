"""Streams of a session: the pool keeps its books of them as of every other call."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from executor.errors import EmberpoolError, InvalidCall, SandboxDied, SessionBusy, SessionClosed, StateLost
from executor.result import CallResult
from executor.sandbox.stream import WINDOW, CallStream, Output
from pool.session import Session
from tests.support.pools import assert_balanced, running, settings_of, virtual_backend
from tests.support.scripted import ScriptedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> object:
    return virtual_backend()


async def last(events: CallStream) -> CallResult:
    async for event in events:
        if isinstance(event, CallResult):
            return event
    raise AssertionError("a stream ended without a result")


async def refusal(events: CallStream) -> EmberpoolError:
    """The error with which the iteration ends."""
    async with events:
        try:
            await last(events)
        except EmberpoolError as error:
            return error
    raise AssertionError("the stream was not refused")


async def test_a_streams_result_names_its_generation_and_its_session_is_free_again(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "a")
        async with session.stream(code="echo hello; exit 3") as events:
            assert await anext(events) == Output("stdout", b"hello\n")
            result = await last(events)
        assert (result.exit_code, result.generation, result.stdout_total) == (3, session.generation, 6)
        assert_balanced(pool)
        assert (await session.call(code="echo again")).stdout == b"again\n"


async def test_a_call_after_a_stream_waits_its_turn_and_a_late_reader_keeps_nobody(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "a")
        async with session.stream(code=f"flood {WINDOW}; sleep 5") as events:
            began = anyio.current_time()
            assert (await session.call(code="echo next")).ok
            assert anyio.current_time() - began >= 5.0
            assert (await last(events)).stdout_total == WINDOW


async def test_a_stream_that_is_left_early_gives_its_turn_and_keeps_its_sandbox(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "a")
        generation = session.generation
        async with session.stream(code="flood 1000000; hang") as events:
            await anext(events)
        assert_balanced(pool)
        assert (await session.call(code="echo on")).generation == generation


async def test_a_stream_left_while_it_waits_for_its_turn_never_runs(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "a")
        async with session.stream(code="sleep 3") as first:
            async with session.stream(code="exit 9"):
                await anyio.wait_all_tasks_blocked()
            assert (await last(first)).ok
        assert_balanced(pool)


async def test_a_session_that_is_closed_under_a_stream_is_told_by_the_iteration(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "a")
        async with session.stream(code="hang") as events:
            await session.close()
            with pytest.raises(SessionClosed):
                await last(events)


async def test_a_pool_that_closes_does_not_wait_for_a_reader(state_dir: Path) -> None:
    closed = anyio.Event()

    async def hold(session: Session) -> None:
        async with session.stream(code="flood 1000000; hang") as events:
            await closed.wait()
            with pytest.raises(SandboxDied) as died:
                await last(events)
        assert died.value.cause == "drained"

    async with ScriptedEngine() as engine, anyio.create_task_group() as tasks:
        async with running(engine, settings_of(state_dir, drain_timeout=1.0)) as pool:
            tasks.start_soon(hold, await pool.acquire("agent", "a"))
            await anyio.wait_all_tasks_blocked()
        closed.set()


async def test_refusals_of_the_pool_come_from_the_iteration_and_wrong_arguments_at_once(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "a")
        with pytest.raises(InvalidCall):
            session.stream(["true"], code="true")
        assert isinstance(await refusal(session.stream(code="exit 0", generation="0-1")), StateLost)
        async with session.stream(code="hang"):
            assert isinstance(await refusal(session.stream(code="exit 0", timeout=1.0)), SessionBusy)
        await session.release()
        with pytest.raises(SessionClosed):
            session.stream(code="exit 0")
        assert_balanced(pool)


async def test_time_held_back_counts_towards_the_deadline(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "a")
        began = anyio.current_time()
        async with session.stream(code=f"flood {WINDOW * 2}", timeout=4.0) as events:
            assert (await session.call(code="echo next")).ok
            assert 4.0 <= anyio.current_time() - began < 8.0
            result = await last(events)
        assert (result.timed_out, result.stdout_total) == (True, WINDOW)
