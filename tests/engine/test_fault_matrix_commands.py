"""An engine's command that is slow, fails once or always, prints garbage or floods stderr; the daemon behind it is well."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from executor.errors import EngineUnavailable
from executor.sandbox import runners, sandbox
from pool.session import Session
from tests.engine.faulty import Daemon, Recovery, until
from tests.engine.scene import Hit, Scene, pool_settings, staged
from tests.engine.test_fault_matrix_daemon import down, refused_at_once

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

STARTS = ("run", "container-inspect", "exec")
"""What a start asks the engine for."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # what happens is the engine's doing


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool gives a start up in seconds; the order of what it does stays."""
    monkeypatch.setattr(sandbox, "PROBE_TIMEOUT", 1.0)
    monkeypatch.setattr(runners, "EVENT_PATIENCE", 0.3)


def impatient(scene: Scene) -> None:
    state = scene.pool._shell.state
    state.policy = replace(state.policy, backoff_base=0.1)


async def bitten(scene: Scene) -> None:
    """The rule has been met by something that the pool asked."""
    await until(scene.docker.met)


@pytest.mark.parametrize("how", ["slow", "flood"])
async def test_command_that_is_slow_or_floods_stderr_costs_time_and_nothing_else(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], how: str
) -> None:
    async with staged(f"each command: {how}", daemon, recoveries, pool_settings(state_dir)) as scene:
        impatient(scene)
        scene.docker.rule("all", how)
        async with scene.at("idle") as hit:
            await bitten(scene)
        await scene.recovered(hit, lost=False)
        async with scene.at("starting") as hit:
            pass
        assert isinstance(hit.outcome, Session)
        await scene.recovered(hit, lost=True)
        async with scene.at("busy", then="true") as hit:
            os.kill(hit.tool, signal.SIGTERM)
        assert hit.result.ok
        await scene.recovered(hit, lost=False)
        assert {"run", "exec", "ps", "rm"} <= set(scene.docker.met())


@pytest.mark.parametrize("how", ["fail", "garbage"])
async def test_command_that_fails_once_is_asked_again(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], how: str
) -> None:
    async with staged(f"one command: {how}", daemon, recoveries, pool_settings(state_dir)) as scene:
        impatient(scene)
        async with scene.at("idle") as hit:
            scene.docker.rule("ps", how, once=True)
            await bitten(scene)
        await scene.recovered(hit, lost=False)
        for word in STARTS:
            scene.fault = f"one {word}: {how}"
            hit = Hit("starting", f"starting-{word}", "")
            scene.docker.rule(word, how, once=True)
            hit.outcome = hit.session = await scene.pool.acquire("agent", hit.key)
            assert word in scene.docker.met()
            await scene.recovered(hit, lost=True)
        scene.fault = f"one command: {how}"
        async with scene.at("busy", then="true") as hit:
            scene.docker.rule("ps", how, once=True)
            await until(lambda: scene.docker.met().count("ps") == 2)
            os.kill(hit.tool, signal.SIGTERM)
        assert hit.result.ok
        await scene.recovered(hit, lost=False)


@pytest.mark.parametrize("how", ["fail", "garbage"])
async def test_commands_that_always_fail_are_a_refusal_until_they_work(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], how: str
) -> None:
    async with staged(f"each command: {how}", daemon, recoveries, pool_settings(state_dir)) as scene:
        impatient(scene)
        for moment in ("idle", "busy"):
            async with scene.at(moment, then="true") as hit:
                scene.docker.rule("all", how)
                await down(scene)
                await refused_at_once(scene.pool)
                if moment == "busy":
                    os.kill(hit.tool, signal.SIGTERM)
                    await scene.outcome(hit)
                    assert hit.result.ok
                scene.docker.lift("all")
                lifted = anyio.current_time()
            await scene.recovered(hit, lost=False, lifted=lifted)
        for word in STARTS:
            scene.fault = f"each {word}: {how}"
            hit = Hit("starting", f"starting-{word}", "")
            scene.docker.rule(word, how)
            scene.tasks.start_soon(scene._acquire, hit)
            await scene.outcome(hit)
            error = hit.refused(EngineUnavailable)
            assert error.retry_after is not None
            scene.docker.lift(word)
            await scene.recovered(hit, lost=True, lifted=anyio.current_time())
