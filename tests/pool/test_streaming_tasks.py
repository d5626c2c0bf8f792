"""A stream belongs to no task: any may read and close it, a generator may yield in it, and dropped it ends its call."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from executor.result import CallResult
from executor.sandbox.stream import CallStream, Output
from pool.pool import SandboxPool
from pool.session import Session
from tests.support.pools import assert_balanced, running, settings_of, until
from tests.support.scripted import ScriptedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
async def pool(engine: ScriptedEngine, state_dir: Path) -> AsyncIterator[SandboxPool]:
    async with running(engine, settings_of(state_dir)) as pool:
        yield pool


async def still_as_good(pool: SandboxPool, session: Session, generation: str | None) -> None:
    """The call that a stream was has ended, and cost its session nothing."""
    await until(lambda: pool.snapshot().running == 0, limit=5)
    result = await session.call(code="echo on")
    assert (result.stdout, result.generation) == (b"on\n", generation)
    assert_balanced(pool)


async def test_each_event_is_read_and_the_stream_closed_in_tasks_of_their_own(pool: SandboxPool) -> None:
    session = await pool.acquire("agent", "session")
    events = session.stream(code="echo one; hang")
    heard: list[Output | CallResult] = []

    async def read() -> None:
        heard.append(await anext(events))

    for step in (events.__aenter__, read, events.aclose, events.aclose):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)
    assert heard == [Output("stdout", b"one\n")]
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    await still_as_good(pool, session, session.generation)


async def test_without_a_block_a_stream_begins_at_its_first_event(pool: SandboxPool) -> None:
    session = await pool.acquire("agent", "session")
    async with aclosing(session.stream(code="echo one; hang")) as events:
        assert await anext(events) == Output("stdout", b"one\n")
    await still_as_good(pool, session, session.generation)
    whole = [event async for event in session.stream(code="echo one")]
    assert isinstance(whole[-1], CallResult)
    assert whole[:-1] == [Output("stdout", b"one\n")]


async def lines(session: Session) -> AsyncIterator[bytes]:
    async with session.stream(code="echo one; echo two; hang") as events:
        async for event in events:
            if isinstance(event, Output):
                yield event.data


async def test_a_generator_over_a_stream_is_closed_or_abandoned(pool: SandboxPool) -> None:
    session = await pool.acquire("agent", "session")
    first = session.generation
    async with aclosing(lines(session)) as generator:  # type: ignore[type-var]
        async for _ in generator:
            break
    await still_as_good(pool, session, first)


@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")  # trio's own advice on the same
async def test_a_generator_over_a_stream_that_is_dropped_ends_its_call(pool: SandboxPool) -> None:
    session = await pool.acquire("agent", "session")
    first = session.generation
    async for _ in lines(session):
        break
    gc.collect()
    await still_as_good(pool, session, first)


@pytest.mark.parametrize("where", ["here", "in another thread"])
async def test_a_stream_that_is_dropped_ends_its_call(pool: SandboxPool, where: str) -> None:
    session = await pool.acquire("agent", "session")
    first = session.generation
    held: list[CallStream] = [session.stream(code="echo one; hang")]
    assert await anext(held[0]) == Output("stdout", b"one\n")
    assert pool.snapshot().running == 1
    if where == "here":
        held.clear()
    else:
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    await still_as_good(pool, session, first)


async def test_two_streams_are_left_in_any_order(pool: SandboxPool) -> None:
    sessions = [await pool.acquire("agent", name) for name in "ab"]
    first, second = (session.stream(code="echo one; hang") for session in sessions)
    await first.__aenter__()
    await second.__aenter__()
    with anyio.CancelScope():
        await first.__aexit__(None, None, None)
    assert await anext(second) == Output("stdout", b"one\n")
    await second.__aexit__(None, None, None)
    for session in sessions:
        await still_as_good(pool, session, session.generation)


async def test_a_timeout_around_one_event_leaves_the_stream_as_it_is(pool: SandboxPool, engine: ScriptedEngine) -> None:
    session = await pool.acquire("agent", "session")
    async with session.stream(code="gate go; echo one") as events:
        with anyio.move_on_after(0.05) as late:
            await anext(events)
        assert late.cancelled_caught
        engine.gates.add("go")
        assert await anext(events) == Output("stdout", b"one\n")
        result = await anext(events)
    assert isinstance(result, CallResult)
    assert result.ok
