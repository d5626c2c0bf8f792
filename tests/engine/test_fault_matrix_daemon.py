"""A daemon that is killed, stopped, restarted or hangs under a pool: an idle session, a start and running calls at once."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import anyio
import pytest

from executor.errors import EngineUnavailable, SandboxDied
from executor.sandbox import cold, kill
from pool.pool import SandboxPool
from tests.engine.faulty import Daemon, Recovery, until
from tests.engine.scene import Hit, Scene, pool_settings, staged
from tests.engine.steered import processes
from tests.support.pools import outcome

COLD = f"32.{os.getpid():09d}"
"""Seconds for which nothing else of this machine sleeps, another run of these tests included."""

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # what happens is the engine's doing


async def refused_at_once(pool: SandboxPool) -> None:
    """While the engine is down nobody waits, and everybody is told when to come back."""
    for attempt in (lambda: pool.acquire("agent", "new"), lambda: pool.call_cold(["true"])):
        with anyio.fail_after(10.0):  # a busy machine; who waits would wait for 30 s
            error = await outcome(attempt)
        assert isinstance(error, EngineUnavailable), error
        assert error.retryable
        assert not error.started
        assert error.retry_after is not None
        assert 0 < error.retry_after <= 5.0


async def cold_call(scene: Scene, told: list[object]) -> None:
    """Begin a cold call; its outcome comes into ``told``."""

    async def call() -> None:
        told.append(await outcome(lambda: scene.pool.call_cold(["sleep", COLD], timeout=4.0)))

    scene.tasks.start_soon(call)
    await until(lambda: processes("sleep", COLD))


async def all_answered(scene: Scene, *hits: tuple[Hit, bool], lifted: float) -> None:
    async with anyio.create_task_group() as tasks:
        for hit, lost in hits:
            tasks.start_soon(partial(scene.answered, hit, lost=lost, lifted=lifted))


async def down(scene: Scene) -> None:
    await until(lambda: scene.pool.snapshot().engine == "down")


WAYS = {
    "killed": (signal.SIGKILL, ("engine",)),
    # It stops its containers first, and its events may end before they tell of that.
    "stopped": (signal.SIGTERM, ("killed", "engine")),
    "restarted": (signal.SIGTERM, ("killed", "engine")),
}


@pytest.mark.parametrize("way", WAYS)
async def test_daemon_that_ends_ends_calls_as_errors_and_the_pool_heals(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], way: str
) -> None:
    number, causes = WAYS[way]
    cold_told: list[object] = []
    async with staged(f"the daemon is {way}", daemon, recoveries, pool_settings(state_dir)) as scene:
        async with scene.at("idle") as idle, scene.at("busy") as busy, scene.at("starting") as starting:
            await cold_call(scene, cold_told)
            await daemon.end(number)
            if way != "restarted":
                await down(scene)
                await refused_at_once(scene.pool)
                await until(lambda: cold_told)
            await daemon.up()
            lifted = anyio.current_time()
        error = starting.refused(EngineUnavailable)
        assert error.retry_after is not None
        busy.died(*causes)
        await until(lambda: cold_told)
        await all_answered(scene, (idle, True), (busy, True), (starting, True), lifted=lifted)
        assert isinstance(cold_told[0], SandboxDied)
        assert cold_told[0].cause in causes
        assert cold_told[0].started
        await scene.recovered(idle, lost=True, all_lost=True, beside=2)
        await scene.recovered(busy, lost=True, beside=1)
        await scene.recovered(starting, lost=True)


async def test_daemon_that_hangs_holds_nobody_past_its_deadline_and_costs_only_who_ran(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold, "REMOVE_TIMEOUT", 0.5)
    monkeypatch.setattr(kill, "KILL_PATIENCE", 0.5)
    cold_told: list[object] = []
    settings = pool_settings(state_dir)
    async with staged("the daemon hangs", daemon, recoveries, settings, patience=2.0) as scene:
        async with (
            scene.at("idle") as idle,
            scene.at("busy", timeout=4.0) as busy,
            scene.at("starting") as starting,
        ):
            await cold_call(scene, cold_told)
            daemon.send(signal.SIGSTOP)
            await down(scene)
            await refused_at_once(scene.pool)
            await scene.outcome(starting)
            await scene.outcome(busy)
            await until(lambda: cold_told)
            daemon.send(signal.SIGCONT)
            lifted = anyio.current_time()
        starting.refused(EngineUnavailable)
        # Nobody could say that what had to be killed is dead, so there is no result.
        busy.died("engine")
        assert isinstance(cold_told[0], SandboxDied)
        assert (cold_told[0].cause, cold_told[0].started) == ("engine", True)
        await all_answered(scene, (idle, False), (busy, True), (starting, True), lifted=lifted)
        await scene.recovered(idle, lost=False, beside=2)
        await scene.recovered(busy, lost=True, beside=1)
        await scene.recovered(starting, lost=True)
