"""A disk that is full: the engine's, the state directory's, a sandbox's own /tmp."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from executor.errors import EngineUnavailable, FileFailed, PoolUnusable
from pool.session import Session
from tests.engine.faulty import Daemon, Recovery, disk, full, until
from tests.engine.scene import Hit, pool_settings, staged
from tests.support.pools import outcome

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # what happens is the engine's doing


async def test_engine_whose_disk_is_full_refuses_starts_and_goes_on_with_what_runs(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery]
) -> None:
    async with staged("the engine's disk is full", daemon, recoveries, pool_settings(state_dir)) as scene:
        async with scene.at("idle") as idle, scene.at("busy", then="true") as busy:
            starting = Hit("starting", "starting", "")
            with daemon.full():
                scene.tasks.start_soon(scene._acquire, starting)
                await scene.outcome(starting)
                os.kill(busy.tool, signal.SIGTERM)
                await scene.outcome(busy)
                assert (await scene.other.call(["true"])).ok
                assert scene.pool.snapshot().fault == "EngineUnavailable"
            lifted = anyio.current_time()
        error = starting.refused(EngineUnavailable)
        assert "no space left on device" in str(error)
        assert error.retry_after is not None
        assert busy.result.ok
        for hit, beside in ((starting, 2), (idle, 1), (busy, 0)):
            await scene.recovered(hit, lost=False, lifted=lifted, beside=beside)


async def test_state_directory_whose_disk_is_full_refuses_starts_and_goes_on_with_what_runs(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery]
) -> None:
    with disk("256k") as place:
        settings = pool_settings(place / "state")
        async with staged("the state's disk is full", daemon, recoveries, settings, place=state_dir.parent) as scene:
            async with scene.at("idle") as idle, scene.at("busy", then="true") as busy:
                starting = Hit("starting", "starting", "")
                with full(place):
                    refused = await outcome(lambda: scene.pool.acquire("agent", "starting"))
                    os.kill(busy.tool, signal.SIGTERM)
                    await scene.outcome(busy)
                    assert (await scene.other.call(["true"])).ok
                    assert scene.pool.snapshot().fault == "PoolUnusable"
                lifted = anyio.current_time()
            assert isinstance(refused, PoolUnusable)
            starting.outcome = refused
            assert "No space left on device" in str(starting.refused(PoolUnusable))
            assert busy.result.ok
            for hit, beside in ((starting, 2), (idle, 1), (busy, 0)):
                await scene.recovered(hit, lost=False, lifted=lifted, beside=beside)


async def test_state_directory_that_fills_up_while_a_container_starts_costs_that_container(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery]
) -> None:
    with disk("256k") as place:
        settings = pool_settings(place / "state")
        async with staged("the state's disk fills up", daemon, recoveries, settings, place=state_dir.parent) as scene:
            hit = Hit("starting", "starting", "")
            scene.docker.rule("run", "hold")
            scene.tasks.start_soon(scene._acquire, hit)
            await until(lambda: "run" in scene.docker.met())
            with full(place):
                scene.docker.lift("run")
                await scene.outcome(hit)
            hit.refused(PoolUnusable)
            lifted = anyio.current_time()
            await scene.recovered(hit, lost=True, lifted=lifted)


async def test_full_tmp_is_the_tools_own_affair(daemon: Daemon, state_dir: Path, recoveries: list[Recovery]) -> None:
    fills = ["sh", "-c", "cat /dev/zero >/tmp/ballast"]
    settings = pool_settings(state_dir, sandbox={"tmpfs_mb": 8})
    async with staged("a sandbox's /tmp is full", daemon, recoveries, settings) as scene:
        async with scene.at("idle") as idle, scene.at("starting") as starting:
            assert idle.session is not None
            result = await idle.session.call(fills)
            assert (result.exit_code, b"No space left on device" in result.stderr) == (1, True)
            error = await outcome(lambda: idle.session.write_file("x", b"x" * 9_000))  # type: ignore[union-attr]
            assert isinstance(error, FileFailed)
            assert error.code == "ENOSPC"
        assert isinstance(starting.outcome, Session)
        async with scene.at("busy", then=fills[2]) as busy:
            os.kill(busy.tool, signal.SIGTERM)
        assert busy.result.exit_code == 1
        for hit, beside in ((idle, 2), (starting, 1), (busy, 0)):
            await scene.recovered(hit, lost=False, beside=beside)
