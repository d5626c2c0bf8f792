"""A pool that changes its size while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.errors import InvalidCall, PoolClosed, PoolExhausted
from pool.config.load import ConfigError, Settings
from pool.pool import SandboxPool
from tests.support.pools import LATENCY, count, outcome, running, settings_of, until, virtual_backend
from tests.support.scripted import ScriptedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return virtual_backend()


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(latency=LATENCY) as engine:
        yield engine


async def test_growth_starts_at_once_and_serves_who_waits(engine: ScriptedEngine, tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "s", max_sandboxes=1, max_starting=1, reclaim_idle_after="off")
    async with running(engine, settings) as pool:
        first = await pool.acquire("a", "1")
        assert isinstance(await outcome(lambda: pool.acquire("a", "2", timeout=5)), PoolExhausted)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.acquire, "a", "3")
            await until(lambda: pool.snapshot().waiting == 1)
            pool.resize(max_sandboxes=3, min_standby=1)
        await until(lambda: count(pool, "standby") == 1)
        assert count(pool, "bound") == 2
        assert (await first.call(code="echo x")).ok


async def test_a_shrink_stops_standbys_and_waits_for_sessions(engine: ScriptedEngine, tmp_path: Path) -> None:
    async with running(engine, settings_of(tmp_path / "s", max_sandboxes=4, min_standby=2)) as pool:
        sessions = [await pool.acquire("a", str(n)) for n in range(2)]
        await until(lambda: count(pool, "standby") == 2)
        generations = [one.generation for one in sessions]
        pool.resize(max_sandboxes=1, min_standby=0)
        await until(lambda: len(engine.boxes) == 2)
        await anyio.sleep(60)
        assert [one.generation for one in sessions] == generations
        assert [(await one.call(code="echo x")).ok for one in sessions] == [True, True]
        await sessions[0].close()
        await until(lambda: len(engine.boxes) == 1)
        await anyio.sleep(60)
        assert count(pool, "bound") == len(engine.boxes) == 1


BAD = {
    "negative": {"min_standby": -1},
    "no sandbox": {"max_sandboxes": 0},
    "a float": {"max_sandboxes": 2.5},
    "a boolean": {"min_standby": True},
    "text": {"max_sandboxes": "3"},
    "beyond any pool": {"max_sandboxes": 10_001},
    "more standbys than sandboxes": {"min_standby": 5},
    "more standbys than sandboxes of both": {"min_standby": 3, "max_sandboxes": 2},
}


@pytest.mark.parametrize("sizes", BAD.values(), ids=BAD)
async def test_a_size_that_cannot_be_changes_nothing(
    engine: ScriptedEngine, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    async with running(engine, settings_of(tmp_path / "s", max_sandboxes=4)) as pool:
        before = pool._shell.state.policy
        with pytest.raises(InvalidCall, match=r"min_standby|max_sandboxes"):
            pool.resize(**sizes)
        assert pool._shell.state.policy is before


async def test_a_size_beyond_the_uids_is_refused(engine: ScriptedEngine, tmp_path: Path) -> None:
    keys = {"state_dir": tmp_path / "s", "min_standby": 0, "max_sandboxes": 4, "max_starting": 2, "overcommit": True}
    settings = Settings(pool=keys, sandbox={"uid_range": "1879048192:8"})
    async with running(engine, settings) as pool:
        pool.resize(max_sandboxes=5)
        with pytest.raises(InvalidCall, match="uid_range"):
            pool.resize(max_sandboxes=6)


async def test_a_pool_that_is_closed_is_not_resized(engine: ScriptedEngine, tmp_path: Path) -> None:
    pool = SandboxPool(settings_of(tmp_path / "s"), find=engine.find)
    with pytest.raises(PoolClosed):
        pool.resize(max_sandboxes=2)
    async with pool:
        pool.resize(max_sandboxes=2)
    with pytest.raises(PoolClosed):
        pool.resize(max_sandboxes=2)


# --- the host's memory


def _sized(tmp_path: Path, **pool: Any) -> Settings:
    keys = {"state_dir": tmp_path / "s", "min_standby": 0, "max_sandboxes": 4, "max_cold": 2, **pool}
    return Settings(pool=keys, sandbox={"memory_mb": 1024})


async def test_a_pool_that_may_use_more_memory_than_the_host_has_is_refused(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.config.host.host_memory", lambda: 6 * 1024**3 - 1)
    with pytest.raises(ConfigError, match=r"is 6,144 MiB, and the host has 6,143 MiB; .* pool.overcommit = true"):
        SandboxPool(_sized(tmp_path), find=engine.find)
    assert not (tmp_path / "s").exists()
    SandboxPool(_sized(tmp_path, overcommit=True), find=engine.find)
    monkeypatch.setattr("pool.config.host.host_memory", lambda: 0)  # a system that does not tell
    SandboxPool(_sized(tmp_path), find=engine.find)


@pytest.mark.parametrize("overcommit", [False, True])
async def test_a_pool_does_not_grow_beyond_the_hosts_memory(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overcommit: bool
) -> None:
    for module in ("config.host", "supervisor.requests"):
        monkeypatch.setattr(f"pool.{module}.host_memory", lambda: 7 * 1024**3)
    async with running(engine, _sized(tmp_path, overcommit=overcommit)) as pool:
        pool.resize(max_sandboxes=5)
        if overcommit:
            pool.resize(max_sandboxes=6)
            return
        before = pool._shell.state.policy
        with pytest.raises(InvalidCall, match=r"max_sandboxes: .*pool.max_sandboxes 6 .* is 8,192 MiB"):
            pool.resize(max_sandboxes=6)
        assert pool._shell.state.policy is before
        pool.resize(max_sandboxes=1)
