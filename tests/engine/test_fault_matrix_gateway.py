"""A gateway that is killed and started again; two pools on one engine; clocks that jump."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from executor.errors import PoolUnusable
from pool.config.load import Settings
from pool.pool import SandboxPool
from pool.supervisor import containers as manager
from pool.supervisor.snapshot import SandboxCounts
from tests.engine.faulty import LIMIT, Daemon, Recovery, until
from tests.engine.scene import HAS_STATE, MOMENTS, pool_settings, staged
from tests.engine.steered import processes
from tests.support.pools import ledger_entries

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

GATEWAY = """
import json
import sys

import anyio
from pool import logs
from pool.config.load import Settings
from pool.pool import SandboxPool

async def main():
    async with SandboxPool(Settings(**json.loads(sys.argv[1]))) as pool, anyio.create_task_group() as tasks:
        if sys.argv[2] == "starting":
            print("ready", flush=True)
        session = await pool.acquire("agent", "first")
        await session.call(["touch", "/tmp/began"])
        while pool.snapshot().sandboxes.standby < 1:
            await anyio.sleep(0.02)
        if sys.argv[2] == "busy":
            tasks.start_soon(session.call, ["sleep", sys.argv[3]])
            tasks.start_soon(pool.call_cold, ["sleep", sys.argv[3]])
        print("ready", flush=True)
        await anyio.sleep_forever()

logs.configure("error")
anyio.run(main)
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # what happens is the engine's doing


async def kill_a_gateway(words: str, moment: str) -> None:
    """Run a pool in a process of its own, and SIGKILL that at one moment of its session's life."""
    mark = f"32.{os.getpid()}"
    argv = [sys.executable, "-c", GATEWAY, words, moment, mark]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    gateway = await anyio.open_process(argv, stderr=None, env=env)
    try:
        assert gateway.stdout is not None
        with anyio.fail_after(LIMIT):
            assert (await gateway.stdout.receive()).startswith(b"ready")
        if moment == "busy":
            await until(lambda: len(processes("sleep", mark)) >= 2)
        elif moment == "starting":
            place = Path(json.loads(words)["pool"]["state_dir"])
            await until(lambda: ledger_entries(place, "standby"))
    finally:
        gateway.kill()
        await gateway.wait()
        await gateway.aclose()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_gateway_that_is_killed_is_cleaned_up_after_by_the_next(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], moment: str
) -> None:
    settings = pool_settings(state_dir, min_standby=1)
    given = settings.model_dump(mode="json")
    await kill_a_gateway(json.dumps({part: given[part] for part in ("sandbox", "pool", "call")}), moment)
    began = anyio.current_time()
    bound, standby = ledger_entries(state_dir, "bound"), ledger_entries(state_dir, "standby")
    assert len(bound) == (moment != "starting")
    async with SandboxPool(
        pool_settings(state_dir, min_standby=2)
    ) as pool:  # it has use for more than may be taken over
        await until(lambda: pool.snapshot().engine == "up")
        session = await pool.acquire("agent", "first")
        assert (await session.call(code=HAS_STATE)).stdout == b"False\n"
        recoveries.append(Recovery("the gateway is killed", moment, "-", anyio.current_time() - began))
        rest = SandboxCounts(standby=2, bound=1)
        await until(lambda: pool.snapshot().sandboxes == rest)
        ours = {name: key for state in ("bound", "standby") for name, key in ledger_entries(state_dir, state).items()}
        ours = {name: key for name, key in ours.items() if name in pool._shell.containers.names}
        assert not set(bound) & set(ours), "somebody's sandbox was given to another"
        assert all(standby[name] for name in set(standby) & set(ours)), "what never came up was taken over"
        # The dead gateway's clients live on, and one may still be having its container made.
        await until(lambda: not any(processes("run", name) for name in standby))
        await until(lambda: containers(daemon) == ours)


def containers(daemon: Daemon) -> dict[str, str]:
    rows = daemon.docker("ps", "-a", "--no-trunc", "--format", "{{.Names}} {{.ID}}").splitlines()
    # One that is being removed is listed without a name for a moment.
    return {name: container for name, _, container in (row.partition(" ") for row in rows) if name and container}


async def test_second_pool_of_one_name_is_refused_at_once_and_touches_nothing(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery]
) -> None:
    settings = pool_settings(state_dir)
    async with staged("a second pool of the name", daemon, recoveries, settings) as scene:
        for moment in MOMENTS:
            async with scene.at(moment, then="true") as hit:
                with anyio.fail_after(10.0), pytest.raises(PoolUnusable, match=f"live pool \\(pid {os.getpid()}"):
                    await SandboxPool(settings).__aenter__()
                if hit.tool:
                    os.kill(hit.tool, signal.SIGTERM)
            assert moment != "busy" or hit.result.ok
            await scene.recovered(hit, lost=False)


async def live_and_suffer(daemon: Daemon, settings: Settings) -> None:
    """Another pool from its start to its end, with a session of a key that is the first pool's too, and its deaths."""
    async with SandboxPool(settings, find=daemon.found) as pool:
        session = await pool.acquire("agent", "other")
        assert (await session.call(code=HAS_STATE)).stdout == b"False\n"
        lost = session.generation
        daemon.docker("kill", *(pool._shell.containers.name(n) for n in pool._shell.running()))
        await until(lambda: session.generation not in (None, lost))


async def test_pools_of_two_names_on_one_engine_leave_each_other_alone(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery]
) -> None:
    own, others = state_dir.with_name("own"), state_dir.with_name("others")
    own.mkdir(mode=0o700)
    others.mkdir(mode=0o700)
    neighbour = pool_settings(others / "state", name="neighbour", min_standby=1)
    async with staged("another pool's troubles", daemon, recoveries, pool_settings(own / "state")) as scene:
        for moment in MOMENTS:
            async with scene.at(moment, then="true") as hit:
                await live_and_suffer(daemon, neighbour)
                assert set(daemon.containers()) == {hit.container, scene.name(scene.kept)}
                if hit.tool:
                    os.kill(hit.tool, signal.SIGTERM)
            assert moment != "busy" or hit.result.ok
            await scene.recovered(hit, lost=False)


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0], ids=["ahead", "back"])
async def test_wall_clock_that_jumps_a_day_changes_nothing(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    async with staged(f"the wall clock jumps {jump:+.0f} s", daemon, recoveries, pool_settings(state_dir)) as scene:
        monkeypatch.setattr(manager, "time", SimpleNamespace(time=lambda: time.time() + jump))
        scene.docker.rule("ps", "slow")
        for moment in ("idle", "busy"):
            looks = scene.docker.met().count("ps")
            async with scene.at(moment, then="true") as hit:
                await until(lambda: scene.docker.met().count("ps") >= looks + 2)  # noqa: B023 - waited for right here
                if hit.tool:
                    os.kill(hit.tool, signal.SIGTERM)
            assert moment != "busy" or hit.result.ok
            await scene.recovered(hit, lost=False)
