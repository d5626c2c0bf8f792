"""Faults of a real engine under a real pool: a daemon that dies or hangs, hands that meddle, a gateway that is killed.

All of it happens to a second private daemon of this file's own, so that nobody else's containers suffer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from executor import cold, sandbox
from executor.daemon import exited, find_daemon
from executor.docker import CommandLineEngine
from executor.locate import find_engine
from executor.paths import ENGINE_HOME, engine_paths
from executor.profile import LABEL_POOL
from executor.result import CallResult, EmberpoolError, EngineUnavailable, ImageMissing, SandboxDied
from pool import pool as pool_module
from pool.config import Settings
from pool.pool import SandboxPool
from tests.engine.conftest import IMAGE

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

BUSY = ["sh", "-c", "touch /tmp/began; exec sleep 31"]
HAS_STATE = "import os; print(os.path.exists('/tmp/began'))"
LIMIT = 60.0
"""Seconds after which something that should have ended has hung."""


@dataclass(frozen=True)
class Daemon:
    """A private engine that may be stopped, killed and started at will."""

    home: Path

    def emberpool(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "pool.cli", *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, check=False)

    def up(self) -> None:
        done = self.emberpool("engine", "up")
        assert done.returncode == 0, done.stderr

    def docker(self, *words: str) -> str:
        argv = ["docker", "--host", engine_paths().url, *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, check=True).stdout

    def containers(self) -> list[str]:
        return self.docker("ps", "-a", "--format", "{{.Names}}").split()

    def send(self, number: signal.Signals) -> None:
        running = find_daemon(engine_paths())
        assert running is not None
        os.kill(running.pid, number)

    async def end(self, number: signal.Signals) -> None:
        """Send a signal that ends the daemon, and wait until it has."""
        running = find_daemon(engine_paths())
        assert running is not None
        os.kill(running.pid, number)
        await until(lambda: exited(running))


def _unable(reason: str) -> None:
    (pytest.fail if os.environ.get("EMBERPOOL_CI") else pytest.skip)(reason)


@pytest.fixture(scope="module")
def _daemon() -> Iterator[Daemon]:
    if not Path("/usr/sbin/dockerd").exists() or os.geteuid() != 0:
        _unable("a daemon of this test's own needs root and dockerd")
    try:
        engine, _ = anyio.run(find_engine)
        anyio.run(engine.image, IMAGE)
    except EmberpoolError as error:
        _unable(f"no engine with {IMAGE}: {error}")
    with (
        tempfile.TemporaryDirectory(prefix="ember-", dir="/tmp") as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        save = [*engine.endpoint.argv, "save", "-o", f"{directory}/image.tar", IMAGE]
        subprocess.run(save, env={**os.environ, **dict(engine.endpoint.env)}, check=True, timeout=LIMIT)
        patch.setenv(ENGINE_HOME, f"{directory}/e")
        daemon = Daemon(Path(directory) / "e")
        try:
            daemon.up()
            daemon.docker("load", "-i", f"{directory}/image.tar")
            yield daemon
        finally:
            done = daemon.emberpool("engine", "down", "--force")
            assert done.returncode == 0, done.stderr


@pytest.fixture
def daemon(_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """The daemon, up and empty; whatever the test did to it, it is so again afterwards."""
    monkeypatch.setenv(ENGINE_HOME, str(_daemon.home))
    yield _daemon
    if (running := find_daemon(engine_paths())) is not None:
        os.kill(running.pid, signal.SIGCONT)
    _daemon.up()
    left = _daemon.containers()
    for name in left:
        _daemon.docker("rm", "-f", name)
    assert left == [], "the test left containers behind"


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


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(LIMIT):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.02)


async def up_again(daemon: Daemon, pool: SandboxPool) -> None:
    await anyio.to_thread.run_sync(daemon.up)
    await until(lambda: pool.snapshot()["engine"] == "up")


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


def container(pool: SandboxPool, generation: str | None) -> str:
    return f"emberpool-{pool.snapshot()['pool']}-{generation}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_daemon_that_dies_ends_calls_as_errors_and_the_pool_heals(
    daemon: Daemon, settings: Settings, number: signal.Signals
) -> None:
    async with SandboxPool(settings) as pool:
        session = await pool.acquire("agent", "busy")
        idle = await pool.acquire("agent", "idle")
        before = session.generation, idle.generation
        async with under_way(daemon, lambda: session.call(BUSY), lambda: pool.call_cold(BUSY)) as outcomes:
            await daemon.end(number)
        for outcome in outcomes:
            assert isinstance(outcome, SandboxDied), outcome
            assert outcome.started
            assert outcome.cause == ("engine" if number is signal.SIGKILL else "killed")
        await until(lambda: pool.snapshot()["engine"] == "down")
        with pytest.raises(EngineUnavailable) as refused:
            await pool.acquire("agent", "new")
        assert not refused.value.started
        await up_again(daemon, pool)
        assert (await session.call(code=HAS_STATE)).stdout == b"False\n"
        await until(lambda: idle.generation != before[1])
        assert (await idle.call(code="print(1)")).stdout == b"1\n"
        assert session.generation not in before


async def test_daemon_that_dies_in_a_start_refuses_and_leaves_nothing(daemon: Daemon, settings: Settings) -> None:
    async with SandboxPool(settings) as pool:
        with anyio.fail_after(LIMIT):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(daemon_dies_once, daemon, lambda: pool.snapshot()["sandboxes"]["starting"] == 1)
                with pytest.raises(EngineUnavailable) as refused:
                    await pool.acquire("agent", "chat")
            assert not refused.value.started
            await up_again(daemon, pool)
            session = await pool.acquire("agent", "chat")
            assert (await session.call(code="print(1)")).ok


async def daemon_dies_once(daemon: Daemon, condition: Callable[[], object]) -> None:
    await until(condition)
    await daemon.end(signal.SIGKILL)


async def test_daemon_that_hangs_holds_nobody_past_its_deadline(
    daemon: Daemon, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold, "REMOVE_TIMEOUT", 0.5)
    monkeypatch.setattr(sandbox, "KILL_TIMEOUT", 0.5)
    async with SandboxPool(settings) as pool:
        session = await pool.acquire("agent", "chat")
        async with under_way(
            daemon, lambda: session.call(BUSY, timeout=3.0), lambda: pool.call_cold(BUSY, timeout=3.0)
        ) as outcomes:
            daemon.send(signal.SIGSTOP)
        assert all(isinstance(outcome, CallResult) and outcome.timed_out for outcome in outcomes), outcomes
        daemon.send(signal.SIGCONT)
        result = await session.call(code=HAS_STATE, timeout=30.0)
        assert result.stdout == b"False\n"
    # The cold container could not be removed in time; nobody but the closing pool has been here since.


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
async def test_sandbox_that_a_hand_ends_or_pauses_is_replaced(
    daemon: Daemon, settings: Settings, hand: tuple[str, ...]
) -> None:
    async with SandboxPool(settings) as pool:
        session = await pool.acquire("agent", "chat")
        async with under_way(daemon, lambda: session.call(BUSY)) as outcomes:
            daemon.docker(*hand, container(pool, session.generation))
        assert isinstance(outcomes[0], SandboxDied)
        assert (outcomes[0].cause, outcomes[0].started) == ("killed", True)
        assert (await session.call(code=HAS_STATE)).stdout == b"False\n"
        lost = session.generation
        daemon.docker(*hand, container(pool, lost))
        await until(lambda: session.generation != lost)
        assert (await session.call(code="print(1)")).stdout == b"1\n"


@pytest.mark.parametrize("hand", HANDS, ids=lambda hand: hand[0])
async def test_cold_container_that_a_hand_ends_or_pauses_has_no_result(
    daemon: Daemon, settings: Settings, hand: tuple[str, ...]
) -> None:
    async with SandboxPool(settings) as pool:
        await until(lambda: pool.snapshot()["engine"] == "up")
        async with under_way(daemon, lambda: pool.call_cold(BUSY)) as outcomes:
            daemon.docker(*hand, *daemon.containers())
        assert isinstance(outcomes[0], SandboxDied), outcomes
        assert (outcomes[0].cause, outcomes[0].started) == ("killed", True)


async def test_image_that_is_missing_is_a_refusal_until_it_is_there(daemon: Daemon, settings: Settings) -> None:
    late = settings.model_copy(update={"sandbox": settings.sandbox.model_copy(update={"image": "localhost/late:1"})})
    async with SandboxPool(late) as pool:
        with pytest.raises(ImageMissing, match="emberpool image build"):
            await pool.acquire("agent", "chat")
        daemon.docker("tag", IMAGE, "localhost/late:1")
        await until(lambda: pool.snapshot()["engine"] == "up")
        session = await pool.acquire("agent", "chat")
        assert (await session.call(code="print(1)")).ok
    daemon.docker("rmi", "localhost/late:1")


GATEWAY = """
import json
import sys

import anyio
from pool.config import Settings
from pool.pool import SandboxPool

async def main():
    async with SandboxPool(Settings(sandbox={"image": sys.argv[2]}, pool=json.loads(sys.argv[1]))) as pool:
        async with anyio.create_task_group() as tasks:
            async def use(name):
                session = await pool.acquire("agent", name)
                await session.call(sys.argv[3:])
            tasks.start_soon(use, "first")
            tasks.start_soon(use, "second")
            tasks.start_soon(lambda: pool.call_cold(sys.argv[3:]))

anyio.run(main)
"""


@pytest.mark.parametrize("busy", [0, 3], ids=["in its starts", "with calls of each kind"])
async def test_gateway_that_is_killed_is_cleaned_up_after_by_the_next(
    daemon: Daemon, settings: Settings, state_dir: Path, busy: int
) -> None:
    keys: dict[str, Any] = {"state_dir": str(state_dir), "overcommit": True, "min_standby": 2}
    argv = [sys.executable, "-c", GATEWAY, json.dumps(keys), IMAGE, *BUSY]
    gateway = subprocess.Popen(argv)  # noqa: ASYNC220 - killed in the middle
    try:
        await until(daemon.containers)
        await until(lambda: sum(_busy(daemon, name) for name in daemon.containers()) >= busy)
    finally:
        gateway.kill()
        gateway.wait()
    async with SandboxPool(settings) as pool:
        session = await pool.acquire("agent", "first")
        assert (await session.call(code=HAS_STATE)).stdout == b"False\n"
        await until(lambda: daemon.containers() == [container(pool, session.generation)])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_command_that_is_told_twice_to_end_removes_its_container(
    daemon: Daemon, state_dir: Path, number: signal.Signals
) -> None:
    config = state_dir.with_name("config.toml")
    config.write_text(f'[sandbox]\nimage = "{IMAGE}"\n[pool]\nstate_dir = "{state_dir}"\novercommit = true\n')
    argv = [sys.executable, "-m", "pool.cli", "call", "--config", str(config), "--", *BUSY]
    command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)  # noqa: ASYNC220
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
    monkeypatch.setattr(pool_module, "STOP_PATIENCE", 0.5)
    with anyio.fail_after(LIMIT):
        async with SandboxPool(settings) as pool:
            await pool.acquire("agent", "chat")
            daemon.send(signal.SIGSTOP)
    daemon.send(signal.SIGCONT)
    assert len(list((state_dir / "ledger").iterdir())) == 1
    async with SandboxPool(settings) as pool:
        await until(lambda: pool.snapshot()["engine"] == "up")
        engine, _ = await find_engine()
        assert isinstance(engine, CommandLineEngine)
        assert await engine.list(LABEL_POOL, pool.snapshot()["pool"]) == []


async def test_engine_is_not_stopped_under_a_pool(daemon: Daemon, settings: Settings) -> None:
    async with SandboxPool(settings) as pool:
        session = await pool.acquire("agent", "chat")
        done = await anyio.to_thread.run_sync(daemon.emberpool, "engine", "down")
        assert done.returncode == 1
        assert f"pid {os.getpid()}" in done.stderr
        assert (await session.call(code="print(1)")).ok
