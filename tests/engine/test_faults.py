"""Faults of a real engine under a real pool that the matrix (test_fault_matrix_*.py) has no row for: engines that were never
there, cold containers in strange hands, commands and pools that end in the middle.

All of it happens to a private daemon of the tests' own, so that nobody else's containers suffer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from executor.engine.docker import CommandLineEngine
from executor.engine.locate import find_engine
from executor.engine.paths import ENGINE_HOME, engine_paths
from executor.engine.protocol import Engine, ImageInfo
from executor.errors import EmberpoolError, EngineUnavailable, ImageMissing, SandboxDied
from executor.machine import private_engine
from executor.result import CallResult
from executor.sandbox.profile import LABEL_POOL
from pool.config.load import Settings
from pool.pool import SandboxPool
from pool.supervisor import lifecycle
from pool.supervisor.startup import Report
from tests.engine.faulty import IMAGE, LIMIT, Daemon, disk, until

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

BUSY = ["sh", "-c", "touch /tmp/began; exec sleep 31"]


@pytest.fixture
def anyio_backend() -> str:
    """One backend is enough here: what happens is the engine's doing, and each of these takes seconds."""
    return "asyncio"


@pytest.fixture
def settings(state_dir: Path) -> Settings:
    pool = {
        "state_dir": state_dir,
        "min_standby": 0,
        "overcommit": True,
        "drain_timeout": 0.1,
        "acquire_timeout": 30.0,
    }
    return Settings(sandbox={"image": IMAGE}, pool=pool, call={"grace": 0.2})


@asynccontextmanager
async def under_way(
    daemon: Daemon, *calls: Callable[[], Awaitable[CallResult]]
) -> AsyncIterator[list[CallResult | EmberpoolError]]:
    """The calls run inside the block, and leave their outcomes in the list by its end."""
    outcomes: list[CallResult | EmberpoolError] = []

    async def one(call: Callable[[], Awaitable[CallResult]]) -> None:
        try:
            outcomes.append(await call())
        except EmberpoolError as error:
            outcomes.append(error)

    with anyio.fail_after(LIMIT):
        async with anyio.create_task_group() as tasks:
            for call in calls:
                tasks.start_soon(one, call)
            await until(lambda: sum(_busy(daemon, name) for name in daemon.containers()) == len(calls))
            yield outcomes


def _busy(daemon: Daemon, name: str) -> bool:
    """Seen from outside: an exec of ours in there would be a process that the pool does not know."""
    try:
        return "sleep 31" in daemon.docker("top", name, "-eo", "pid,args")
    except subprocess.CalledProcessError:
        return False  # it is still being made, or gone


async def test_acquire_on_a_daemon_that_never_answers_is_not_told_that_the_pool_is_full(
    daemon: Daemon, settings: Settings
) -> None:
    daemon.send(signal.SIGSTOP)
    async with SandboxPool(settings) as pool:
        with pytest.raises(EngineUnavailable, match="has not answered"):
            await pool.acquire("agent", "chat", timeout=0.5)
        with pytest.raises(EngineUnavailable, match="has not answered"):
            await pool.call_cold(code="print(1)", timeout=0.5)
        daemon.send(signal.SIGCONT)
        session = await pool.acquire("agent", "chat")
        assert (await session.call(code="print(1)")).ok


HANDS: list[tuple[str, ...]] = [("rm", "-f"), ("kill",), ("stop", "-t", "1"), ("pause",)]


@pytest.mark.parametrize("hand", HANDS, ids=lambda hand: hand[0])
async def test_cold_container_that_a_hand_ends_or_pauses_has_no_result(
    daemon: Daemon, settings: Settings, hand: tuple[str, ...]
) -> None:
    async with SandboxPool(settings) as pool:
        await until(lambda: pool.snapshot().engine == "up")
        async with under_way(daemon, lambda: pool.call_cold(BUSY)) as outcomes:
            daemon.docker(*hand, *daemon.containers())
        assert isinstance(outcomes[0], SandboxDied), outcomes
        assert (outcomes[0].cause, outcomes[0].started) == ("killed", True)


async def test_image_that_is_missing_is_a_refusal_until_it_is_there(daemon: Daemon, settings: Settings) -> None:
    async def no_registry(engine: Engine, reference: str, report: Report) -> ImageInfo:
        raise ImageMissing("no registry can be reached")

    late = settings.model_copy(update={"sandbox": settings.sandbox.model_copy(update={"image": "localhost/late:1"})})
    async with SandboxPool(late, make_image=no_registry) as pool:
        await until(lambda: pool.snapshot().fault == "ImageMissing")
        with pytest.raises(ImageMissing, match="emberpool image build"):
            await pool.acquire("agent", "chat")
        daemon.docker("tag", IMAGE, "localhost/late:1")
        await until(lambda: pool.snapshot().engine == "up")
        session = await pool.acquire("agent", "chat")
        assert (await session.call(code="print(1)")).ok
    daemon.docker("rmi", "localhost/late:1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_command_that_is_told_twice_to_end_removes_its_container(
    daemon: Daemon, state_dir: Path, number: signal.Signals
) -> None:
    config = state_dir.with_name("config.toml")
    config.write_text(f'[sandbox]\nimage = "{IMAGE}"\n[pool]\nstate_dir = "{state_dir}"\novercommit = true\n')
    argv = [sys.executable, "-m", "pool.cli", "call", "--config", str(config), "--", *BUSY]
    command = subprocess.Popen(  # noqa: ASYNC220
        argv,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # also where the tests run under nohup
    )
    await until(lambda: any(_busy(daemon, name) for name in daemon.containers()))
    command.send_signal(number)
    command.send_signal(number)  # whoever is impatient tears nothing
    said = command.communicate(timeout=LIMIT)[1]
    assert (command.returncode, said) == (130, b"error: interrupted\n")
    assert daemon.containers() == []
    assert list(config.parent.glob("one-shot-*")) == []


async def test_pool_that_closes_without_its_engine_leaves_its_containers_to_the_next(
    daemon: Daemon, settings: Settings, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "STOP_PATIENCE", 0.5)
    with anyio.fail_after(LIMIT):
        async with SandboxPool(settings) as pool:
            await pool.acquire("agent", "chat")
            daemon.send(signal.SIGSTOP)
    daemon.send(signal.SIGCONT)
    assert len(list((state_dir / "ledger").iterdir())) == 1
    async with SandboxPool(settings) as pool:
        await until(lambda: pool.snapshot().engine == "up")
        engine, _ = await find_engine()
        assert isinstance(engine, CommandLineEngine)
        with anyio.fail_after(LIMIT):
            while await engine.list(LABEL_POOL, pool.snapshot().pool):  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.1)


async def test_engine_is_not_stopped_under_a_pool(daemon: Daemon, settings: Settings) -> None:
    async with SandboxPool(settings) as pool:
        session = await pool.acquire("agent", "chat")
        done = await anyio.to_thread.run_sync(daemon.emberpool, "engine", "down")
        assert done.returncode == 1
        assert f"pid {os.getpid()}" in done.stderr
        assert (await session.call(code="print(1)")).ok


async def test_engine_down_leaves_a_disk_mounted_that_the_operator_gave_it(daemon: Daemon) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="ember-", dir="/tmp") as directory,
        # Taken back before ``daemon`` takes back its own: the fixture of that name would end after it.
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(ENGINE_HOME, f"{directory}/e")
        with disk("64m", at=engine_paths().data) as data:
            await private_engine.up(lambda line: None)
            await private_engine.down()
            assert data.is_mount()
