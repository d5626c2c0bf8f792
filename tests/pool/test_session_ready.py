"""``Session.ready``: a wait for an armed runner, that runs nothing and refuses like a call does."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from executor.errors import PoolClosed, SessionClosed
from executor.sandbox.runner_client import RunnerState
from pool.config.load import Settings
from pool.pool import SandboxPool
from tests.support.pools import outcome, running, settings_of, until
from tests.support.scripted import ScriptedEngine

pytestmark = pytest.mark.anyio


async def test_ready_of_a_released_handle_or_a_closed_session_is_refused(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        released, closed = await pool.acquire("agent", "a"), await pool.acquire("agent", "b")
        other = await pool.acquire("agent", "b")
        await released.release()
        await closed.close()
        assert isinstance(await outcome(released.ready), SessionClosed)
        assert isinstance(await outcome(other.ready), SessionClosed)
        successor = await pool.acquire("agent", "b")
        assert isinstance(await outcome(other.ready), SessionClosed)
        await successor.ready()
    assert isinstance(await outcome(successor.ready), PoolClosed)


async def test_ready_of_a_session_without_a_sandbox_waits_for_the_next_one(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "a")
        first = session.generation
        engine.die(engine.the_box(), 137)
        await until(lambda: session.generation != first, limit=5)
        await session.ready()
        assert session.generation not in (None, first)
        assert (await session.call(code="echo x")).stdout == b"x\n"


@pytest.mark.engine
async def test_ready_returns_once_the_next_runner_is_armed(engine_settings: Settings) -> None:
    async with SandboxPool(engine_settings) as pool:
        with anyio.fail_after(60):
            await until(lambda: pool.snapshot().engine == "up")
        session = await pool.acquire("agent", "a")
        for _ in range(2):
            await session.call(code="print(1)")
            runners = next(iter(pool._shell.containers.sandboxes.values()))._runners
            assert runners is not None
            before = runners.lanes.runners[0]
            await session.ready()
            assert runners.lanes.runners[0] is not None
            assert runners.lanes.runners[0] is not before
            assert runners.lanes.runners[0].state is RunnerState.ARMED
