"""What tests of the whole pool share: a pool on a scripted engine, and the check that its books balance."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from trio.testing import MockClock

from pool.config.load import Settings
from pool.core.handlers import Phase
from pool.pool import SandboxPool
from pool.supervisor import containers
from tests.support.scripted import EPOCH, ScriptedEngine

LATENCY = {"start": 0.3, "attach": 0.1, "inspect": 0.02, "remove": 0.2, "kill": 0.05, "list": 0.02, "info": 0.02}
"""Seconds that a real engine takes, roughly. Only for virtual time: on a real clock a scripted engine needs none."""


def virtual_backend() -> tuple[str, dict[str, Any]]:
    """An ``anyio_backend`` under which time passes at once whenever every task waits. Never with real subprocesses."""
    return "trio", {"clock": MockClock(autojump_threshold=0)}


def wall_clock_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the wall clock by which the ledger's entries age run with virtual time."""
    clock = SimpleNamespace(time=lambda: EPOCH + anyio.current_time())
    monkeypatch.setattr(containers, "time", clock)


def settings_of(state_dir: Path, *, call: dict[str, Any] | None = None, **pool: Any) -> Settings:
    """Settings with ``[pool]`` keys by name; no standbys unless they are asked for."""
    keys = {"min_standby": 0, "max_sandboxes": 4, "max_starting": 2, "overcommit": True, **pool}
    return Settings(pool={"state_dir": state_dir, **keys}, call=call or {})


@asynccontextmanager
async def running(engine: ScriptedEngine, settings: Settings) -> AsyncIterator[SandboxPool]:
    """A pool on ``engine``; once it has closed nothing may be left of it."""
    async with SandboxPool(settings, find=engine.find) as pool:
        yield pool
    assert_closed(pool, engine)


async def until(condition: Callable[[], object], *, limit: float = 10_000.0) -> None:
    """Let time pass, ``limit`` seconds at most, until ``condition`` holds; on a real clock for a few turns only."""
    with anyio.fail_after(limit):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.01)


async def outcome(call: Callable[[], Awaitable[object]]) -> object:
    """What a call returned, or the error that it raised."""
    try:
        return await call()
    except Exception as error:
        return error


def count(pool: SandboxPool, phase: str) -> int:
    return int(getattr(pool.snapshot().sandboxes, phase))


def assert_balanced(pool: SandboxPool) -> None:
    """Nobody waits, nobody runs, and every bound sandbox has its session."""
    state = pool._shell.state
    assert pool._shell.waiting == {}
    assert state.waiters == {}
    assert state.cold == set()
    assert state.ending == set()
    for box in state.sandboxes.values():
        assert box.running == set()
        if box.phase is Phase.BOUND:
            assert box.session is not None
            assert state.sessions[box.session].sandbox == box.n


def assert_closed(pool: SandboxPool, engine: ScriptedEngine) -> None:
    """Nothing is left of a closed pool: no container, no ledger entry, no staging directory, nobody waiting.

    A start whose ID was never told stays in the ledger on purpose: the daemon may carry it out after all.
    """
    assert_balanced(pool)
    assert engine.boxes == {}
    path = pool.settings.pool.state_dir
    with contextlib.suppress(FileNotFoundError):
        for file in (path / "ledger").iterdir():
            assert file.stem in engine.unanswered
            assert json.loads(file.read_text())["container"] == ""
        assert {place.name for place in (path / "staging").iterdir()} <= engine.unanswered.keys()
    assert pool._shell.state.sandboxes == {}
    assert pool._shell.containers.names == set()
    assert list(pool._shell.hub._watches) == []


def ledger_entries(state_dir: Path, state: str = "*") -> dict[str, str]:
    """The full container IDs that a ledger knows of what is in this state, by name."""
    found = {}
    for file in (state_dir / "ledger").glob(f"*.{state}"):
        # A pool that lives renames, removes or writes it just now.
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            found[file.stem] = json.loads(file.read_text())["container"]
    return found
