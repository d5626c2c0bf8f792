"""Handles that nobody released: they hold nothing once they are forgotten."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.errors import QuotaExceeded
from pool.session import Session
from tests.support.pools import LATENCY, outcome, running, settings_of, virtual_backend, wall_clock_follows
from tests.support.scripted import ScriptedEngine

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


async def test_handles_that_are_forgotten_hold_neither_session_nor_share(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir, max_sessions_per_agent=2, idle_timeout=60)) as pool:
        for n in range(2):
            await pool.acquire("agent", str(n))
        gc.collect()
        # Their sandboxes are there until they idle out, and so are they.
        assert isinstance(await outcome(lambda: pool.acquire("agent", "third")), QuotaExceeded)
        await anyio.sleep(61)
        assert isinstance(await outcome(lambda: pool.acquire("agent", "third")), Session)
        await anyio.sleep(61)
        assert pool._shell.state.sessions == {}


async def test_handle_that_is_kept_holds_its_session_whatever_became_of_others(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir, max_sessions_per_agent=1, idle_timeout=60)) as pool:
        kept = await pool.acquire("agent", "session")
        for _ in range(3):
            await pool.acquire("agent", "session")
        gc.collect()
        await anyio.sleep(120)
        assert isinstance(await outcome(lambda: pool.acquire("agent", "other")), QuotaExceeded)
        assert (await kept.call(code="echo x")).ok
        assert pool._shell.state.sessions["agent", "session"].handles == 1


async def test_handle_is_counted_once_whether_it_was_released_or_its_session_closed(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        first, second = await pool.acquire("agent", "session"), await pool.acquire("agent", "session")
        await first.release()
        del first
        gc.collect()
        await anyio.sleep(1)
        await second.call(code="echo x")
        assert pool._shell.state.sessions["agent", "session"].handles == 1
        await second.close()
        anew = await pool.acquire("agent", "session")
        del second
        gc.collect()
        await anew.call(code="echo x")
        assert pool._shell.state.sessions["agent", "session"].handles == 1


async def test_handle_may_be_collected_in_any_thread_and_after_its_pool(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir, idle_timeout=60)) as pool:
        held = [await pool.acquire("agent", "session"), await pool.acquire("agent", "session")]
        thread = threading.Thread(target=held.pop)
        thread.start()
        thread.join()
        gc.collect()
        assert (await held[0].call(code="echo x")).ok
        assert pool._shell.state.sessions["agent", "session"].handles == 1
    held.clear()
    gc.collect()
