"""What ends or stands still inside a sandbox, or at the host's end of it: memory that runs out, runners, exec clients."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.faulty import Daemon, Recovery
from tests.engine.scene import Hit, Scene, pool_settings, staged
from tests.engine.steered import kill_clients, parent

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

EATS = "exec python3 -I -c 'bytearray(300 << 20)'"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # what happens is the engine's doing


def score(pid: int, adjustment: int) -> None:
    """How soon the kernel ends a process when memory runs out: 1000 comes before whatever has 0, however large that is."""
    Path(f"/proc/{pid}/oom_score_adj").write_text(str(adjustment))


def runner(scene: Scene, hit: Hit) -> int:
    """The armed runner in a sandbox; its next child, which is forked ahead, looks like it."""
    rows = [line.split(None, 1) for line in scene.daemon.docker("top", hit.container, "-eo", "pid,args").splitlines()]
    found = [int(pid) for pid, args in rows if "python3" in args]
    (top,) = [pid for pid in found if parent(pid) not in found]
    return top


def of_the_tool(scene: Scene, hit: Hit) -> None:
    """The tool is what the kernel ends first, as it is without anybody's help."""


def of_the_runner(scene: Scene, hit: Hit) -> None:
    tool = parent(hit.tool)
    score(tool, 0)
    score(parent(tool), 1000)


def of_the_container(scene: Scene, hit: Hit) -> None:
    score(parent(hit.tool), 0)
    score(int(scene.daemon.docker("inspect", "--format", "{{.State.Pid}}", hit.container)), 1000)


async def test_out_of_memory_is_reported_for_the_process_that_it_ended(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery]
) -> None:
    settings = pool_settings(state_dir, sandbox={"memory_mb": 64})
    async with staged("", daemon, recoveries, settings) as scene:
        for victim in (of_the_tool, of_the_runner, of_the_container):
            scene.fault = f"out of memory {victim.__name__.replace('_', ' ')}"
            async with scene.at("busy", then=EATS) as hit:
                victim(scene, hit)
                os.kill(hit.tool, signal.SIGTERM)
            if victim is of_the_tool:
                assert (hit.result.oom_killed, hit.result.signal, hit.result.exit_code) == (True, signal.SIGKILL, None)
            else:
                hit.died("oom")
            await scene.recovered(hit, lost=victim is not of_the_tool)


def kills_the_runner(scene: Scene, hit: Hit) -> None:
    os.kill(parent(hit.tool) if hit.tool else runner(scene, hit), signal.SIGKILL)


def kills_the_client(scene: Scene, hit: Hit) -> None:
    kill_clients("exec", hit.container)


@pytest.mark.parametrize("fault", [kills_the_runner, kills_the_client], ids=["the runner", "the exec's client"])
async def test_runner_or_client_that_is_killed_costs_the_sandbox_and_nothing_else(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], fault: Callable[[Scene, Hit], None]
) -> None:
    async with staged(
        f"a hand {fault.__name__.replace('_', ' ')}", daemon, recoveries, pool_settings(state_dir)
    ) as scene:
        for moment in ("idle", "busy"):
            async with scene.at(moment) as hit:
                fault(scene, hit)
            if moment == "busy":
                hit.died("runner")
            await scene.recovered(hit, lost=True)


async def test_runner_that_the_tool_stops_is_answered_for_at_the_deadline(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery]
) -> None:
    async with staged("the tool stops its runner", daemon, recoveries, pool_settings(state_dir)) as scene:
        async with scene.at("busy", then="kill -STOP $PPID; exec sleep 31", timeout=3.0) as hit:
            os.kill(hit.tool, signal.SIGTERM)
        assert hit.result.timed_out
        assert hit.result.duration < 3.0 + 10.0  # the tool would take 31 s
        await scene.recovered(hit, lost=True)


async def test_runner_that_was_stopped_while_idle_answers_the_next_call_at_its_deadline(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery]
) -> None:
    async with staged("a hand stops the runner", daemon, recoveries, pool_settings(state_dir)) as scene:
        async with scene.at("idle") as hit:
            os.kill(runner(scene, hit), signal.SIGSTOP)
        assert hit.session is not None
        hit.outcome = await hit.session.call(["true"], timeout=1.0)
        assert hit.result.timed_out
        await scene.recovered(hit, lost=True)
