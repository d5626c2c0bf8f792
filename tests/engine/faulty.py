"""A container engine that may be harmed, and what tests of faults need to harm it and to see what came of it.

The daemon is a private one on a small tmpfs of its own, so that nobody else's containers suffer and its disk can be
filled. It is one for the whole run: each test leaves it up and empty.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from executor.engine.docker import CommandLineEngine, Endpoint
from executor.engine.locate import find_engine
from executor.engine.paths import ENGINE_HOME, engine_paths
from executor.engine.protocol import EngineInfo
from executor.errors import EmberpoolError
from executor.machine import private_engine
from executor.machine.daemon import Started, exited, find_daemon

IMAGE = os.environ.get("EMBERPOOL_TEST_IMAGE", "localhost/emberpool-python:2")
LIMIT = 60.0
"""Seconds after which something that should have ended has hung."""
DISK = "900m"
"""Size of the daemon's disk: the image (100 MB), the containers, and as much again where a test needs a second image."""


async def until(condition: Callable[[], object], *, limit: float = LIMIT) -> None:
    with anyio.fail_after(limit):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.02)


# --- the daemon -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Daemon:
    """A private engine that may be stopped, killed, hung, filled and started at will. ``place`` is its disk."""

    place: Path

    @property
    def home(self) -> Path:
        return self.place / "e"

    @property
    def url(self) -> str:
        return f"unix://{self.home}/run/docker.sock"

    def emberpool(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The command, on this engine."""
        argv = [sys.executable, "-m", "pool.cli", *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, check=False)

    def docker(self, *words: str) -> str:
        """What docker prints; blocks, and the pool with it: nothing is done behind the back of a hand."""
        argv = ["docker", "--host", self.url, *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, check=True).stdout

    async def ask(self, *words: str) -> str:
        """``docker``, beside the pool."""
        return await anyio.to_thread.run_sync(self.docker, *words)

    def containers(self) -> list[str]:
        return self.docker("ps", "-a", "--format", "{{.Names}}").split()

    async def up(self) -> None:
        await private_engine.up(lambda line: None)

    def send(self, number: signal.Signals) -> Started:
        running = find_daemon(engine_paths())
        assert running is not None
        os.kill(running.pid, number)
        return running

    async def end(self, number: signal.Signals) -> None:
        """Send a signal that ends the daemon, and wait until it has."""
        running = self.send(number)
        await until(lambda: exited(running))

    @contextmanager
    def full(self) -> Iterator[None]:
        """The disk of its images and containers is full for the block."""
        with full(self.place):
            yield

    async def found(self, binary: str = "docker", *, timeout: float = 15.0) -> tuple[CommandLineEngine, EngineInfo]:
        """The engine by a command of one's own; ``timeout`` bounds each question and each start, in seconds."""
        endpoint = Endpoint(binary, env=(("DOCKER_HOST", self.url),), found="the test's own daemon")
        engine = CommandLineEngine(endpoint, timeout=timeout, start_timeout=timeout)
        return engine, await engine.info()


def unable(reason: str) -> None:
    """A test that cannot be run here: in CI that is a failure."""
    (pytest.fail if os.environ.get("EMBERPOOL_CI") else pytest.skip)(reason)


@contextmanager
def disk(size: str, *, at: Path | None = None) -> Iterator[Path]:
    """A small disk in memory, at a place or at one of its own, of a short path."""
    with tempfile.TemporaryDirectory(prefix="ember-", dir="/tmp") as directory:
        place = at or Path(directory)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "emberpool-test", str(place)]
        subprocess.run(mount, check=True, timeout=LIMIT)
        try:
            yield place
        finally:
            # Lazily, as ended programs may be a moment in going; and `engine down` may have been here before.
            if os.path.ismount(place):
                subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=LIMIT)


@contextmanager
def full(place: Path) -> Iterator[None]:
    """The disk at ``place`` has not a byte left for the block."""
    ballast = place / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            for size in (1 << 20, 4_096, 1):
                while True:
                    try:
                        file.write(b"\0" * size)
                    except OSError:
                        break
        yield
    finally:
        ballast.unlink()


@pytest.fixture(scope="session")
def private_daemon() -> Iterator[Daemon]:
    """The daemon that all tests of faults share."""
    if not Path("/usr/sbin/dockerd").exists() or os.geteuid() != 0:
        unable("a daemon of the tests' own needs root and dockerd")
    try:
        engine, _ = anyio.run(find_engine)
        anyio.run(engine.image, IMAGE)
    except EmberpoolError as error:
        unable(f"no engine with {IMAGE}: {error}")
    # Its runtime files are on another disk, as /run is elsewhere: it answers while its own is full.
    with disk(DISK) as place, disk("64m", at=place / "e" / "run"):
        archive = place / "image.tar"
        save = [*engine.endpoint.argv, "save", "-o", str(archive), IMAGE]
        subprocess.run(save, env={**os.environ, **dict(engine.endpoint.env)}, check=True, timeout=LIMIT)
        daemon = Daemon(place)
        try:
            with _at_home(daemon):
                anyio.run(daemon.up)
            daemon.docker("load", "-i", str(archive))
            archive.unlink()
            yield daemon
        finally:
            with _at_home(daemon):
                done = daemon.emberpool("engine", "down", "--force")
            assert done.returncode == 0, done.stderr


@contextmanager
def _at_home(daemon: Daemon) -> Iterator[None]:
    """Whoever looks for an engine in the block finds this one; all other tests' is another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENGINE_HOME, str(daemon.home))
        yield


@pytest.fixture
def daemon(private_daemon: Daemon) -> Iterator[Daemon]:
    """The daemon, up and empty; whatever the test did to it, it is so again afterwards."""
    with _at_home(private_daemon):
        yield private_daemon
        running = find_daemon(engine_paths())
        if running is not None:
            os.kill(running.pid, signal.SIGCONT)
        if running is None or exited(running):
            anyio.run(private_daemon.up)
    left = private_daemon.containers()
    for name in left:
        with suppress(subprocess.CalledProcessError):  # it has just gone
            private_daemon.docker("rm", "-f", name)
    assert left == [], "the test left containers behind"


# --- what came of it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """One cell of the matrix. ``seconds`` go from the fault, or from its end where it lasts, to the next call's answer."""

    fault: str
    moment: str
    told: str
    seconds: float


_RECOVERIES = pytest.StashKey[list[Recovery]]()


@pytest.fixture(scope="session")
def recoveries(pytestconfig: pytest.Config) -> list[Recovery]:
    """The record of this run; it is printed at its end."""
    return pytestconfig.stash.setdefault(_RECOVERIES, [])


def hand_over_recoveries(config: pytest.Config) -> None:
    """Send a worker process's record to the one that prints, for ``pytest_sessionfinish``."""
    if hasattr(config, "workeroutput"):
        config.workeroutput["recoveries"] = [astuple(row) for row in config.stash.get(_RECOVERIES, [])]


def take_over_recoveries(config: pytest.Config, output: dict[str, Any]) -> None:
    """Add what a worker process has recorded, for ``pytest_testnodedown``."""
    config.stash.setdefault(_RECOVERIES, []).extend(Recovery(*row) for row in output.get("recoveries", ()))


def report_recoveries(terminal: pytest.TerminalReporter) -> None:
    """The record as one table, for ``pytest_terminal_summary``."""
    rows = terminal.config.stash.get(_RECOVERIES, [])
    if rows:
        terminal.section("time to recovery")
    for row in rows:
        terminal.write_line(f"{row.fault:<44} {row.moment:<9} {row.seconds:6.2f} s  {row.told}")
