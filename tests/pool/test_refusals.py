"""A refusal lets others run: whoever is refused and asks again at once starves nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from executor.errors import EmberpoolError
from executor.tool import Tool
from pool.pool import SandboxPool
from pool.session import Session
from tests.support.pools import running, settings_of
from tests.support.scripted import ScriptedEngine

pytestmark = pytest.mark.anyio

Attempt = Callable[[SandboxPool, Session], Awaitable[object]]

ATTEMPTS: dict[str, Attempt] = {
    "call for a lost generation": lambda pool, session: session.call(
        code="echo x", generation=f"{pool._shell.containers.instance}-99"
    ),
    "call for a generation of an earlier start": lambda pool, session: session.call(
        code="echo x", generation="other-1"
    ),
    "call that is wrong": lambda pool, session: session.call(code="echo x", timeout=-1),
    "streamed call for a lost generation": lambda pool, session: _stream(
        session, f"{pool._shell.containers.instance}-99"
    ),
    "tool call that is wrong": lambda pool, session: session.tool(Tool(name="t", inline="x"), 5),
    "file that is wrong": lambda pool, session: session.read_file("x", max_bytes=-1),
    "acquire past the quota": lambda pool, session: pool.acquire("agent", "other"),
    "acquire that is wrong": lambda pool, session: pool.acquire("", "other"),
    "cold call that is wrong": lambda pool, session: pool.call_cold(["true"], timeout=-1),
}


async def _stream(session: Session, generation: str) -> None:
    async with session.stream(code="echo x", generation=generation) as events:
        async for _ in events:
            pass


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.mark.parametrize("what", ATTEMPTS)
async def test_each_refusal_lets_another_task_run(engine: ScriptedEngine, state_dir: Path, what: str) -> None:
    async with running(engine, settings_of(state_dir, max_sessions_per_agent=1)) as pool:
        session = await pool.acquire("agent", "session")
        turns = 0

        async def another() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(another)
            await anyio.lowlevel.checkpoint()
            before = turns
            for _ in range(50):
                with pytest.raises(EmberpoolError):
                    await ATTEMPTS[what](pool, session)
            assert turns - before >= 49  # in which order two tasks run is not told
            tasks.cancel_scope.cancel()
