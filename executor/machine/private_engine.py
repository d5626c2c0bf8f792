"""The engine on a fresh machine: find one, or install and run a private one; and stop what was started.

A private engine is the distribution's dockerd with places of its own (``executor.engine.paths``). A system daemon is used
where one answers, and never started, stopped or configured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from executor.common.locks import exclusive, holders, private_directory, try_lock
from executor.common.log import get_logger
from executor.engine.docker import CommandLineEngine, Endpoint
from executor.engine.locate import find_engine, private_endpoint
from executor.engine.paths import EnginePaths, engine_home, engine_paths
from executor.engine.protocol import EngineInfo
from executor.errors import EmberpoolError, EngineUnavailable
from executor.machine import daemon, leftovers
from executor.machine.daemon import STOP_GRACE, ensure_dockerd, start
from executor.machine.debian import Report, is_root, release

log = get_logger("emberpool.engine")

_LOCK_TIMEOUT = 300.0


class EngineInUse(EmberpoolError):
    """The private engine was not stopped: a pool lives on it."""

    reason = "engine_in_use"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUp:
    """An engine that answers; ``started`` is true where this call started it."""

    endpoint: Endpoint
    info: EngineInfo
    started: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Which engine is used and how it was found; ``pid`` is the private daemon's where it runs, ``pools`` the pids of
    the pools on it. ``problem`` says why no engine answers, and is empty where one does."""

    answers: bool
    kind: str = ""
    version: str = ""
    found: str = ""
    private: bool = False
    pid: int | None = None
    pools: tuple[int, ...] = ()
    problem: str = ""


async def up(report: Report) -> EngineUp:
    """Make sure that an engine answers: use one that does, or else start the private one, installing it first.

    Any number of these may run at once; one starts the daemon and the others use it. Raises ``EngineUnavailable`` with
    the next step where this machine is not one on which emberpool installs an engine, ``EngineFailed`` where it tried.
    """
    paths = _paths()
    try:
        engine, info = await find_engine()
        return EngineUp(endpoint=engine.endpoint, info=info, started=False)
    except EngineUnavailable as error:
        _check_host(error, paths)
    async with _locked(paths):
        running = daemon.find_daemon(paths)
        if running is not None:
            return await _answering(running, paths)
        dockerd = await ensure_dockerd(report)
        report(f"starting a private engine (its log: {paths.log_file})")
        info = await start(dockerd, paths)
        return EngineUp(endpoint=private_endpoint(paths), info=info, started=True)


async def down(*, force: bool = False, report: Report = lambda line: None) -> bool:
    """Stop the private engine and what it left behind; returns whether there was anything to stop.

    Raises ``EngineInUse`` while a pool lives on it, unless ``force`` is set. Containers that are left on it end with
    it; its images stay.
    """
    paths = _paths()
    if not paths.run.exists():
        return False
    # Held to the end: a pool that starts meanwhile is refused, rather than left without its engine.
    with try_lock(paths.users_file) as free:
        if not free and not force:
            pids = ", ".join(map(str, holders(paths.users_file))) or "unknown"
            raise EngineInUse(f"a pool lives on the private engine (pid {pids}); stop that first, or use --force")
        async with _locked(paths):
            running = daemon.find_daemon(paths)
            if running is not None:
                report(f"stopping the private engine (pid {running.pid})")
                await daemon.stop(running, grace=STOP_GRACE)
                log.info("engine.stopped", pid=running.pid)
            # After an orderly end there is none of these; after a SIGKILL of the daemon there may be all.
            left = await leftovers.sweep_containerd(paths)
            left = await leftovers.sweep_containers(paths) or left
            await leftovers.unmount(paths)
            for file in (paths.started_file, paths.pid_file, paths.socket):
                file.unlink(missing_ok=True)
    return running is not None or left


async def status() -> EngineStatus:
    """Which engine answers, and whether it is the private one. Raises nothing for an engine that is missing."""
    paths = _paths()
    running = daemon.find_daemon(paths)
    pid = None if running is None else running.pid
    pools = tuple(holders(paths.users_file))
    try:
        engine, info = await find_engine()
    except EmberpoolError as error:
        return EngineStatus(answers=False, pid=pid, pools=pools, problem=str(error))
    return EngineStatus(
        answers=True,
        kind=info.kind,
        version=info.version,
        found=engine.endpoint.found,
        private=engine.endpoint.private,
        pid=pid,
        pools=pools,
    )


@contextmanager
def hold_engine(paths: EnginePaths) -> Iterator[None]:
    """Keep ``down`` from stopping the private engine inside the block. Any number may hold it at once.

    Raises ``EngineUnavailable`` while the engine is being stopped.
    """
    with try_lock(paths.users_file, shared=True) as free:
        if not free:
            raise EngineUnavailable(
                "the private engine is being stopped; start it with `emberpool engine up`", retry_after=5.0
            )
        yield


def next_step() -> str:
    """What to do for an engine on a machine where emberpool does not install one."""
    command = Path(sys.argv[0]).absolute() if Path(sys.argv[0]).name == "emberpool" else "emberpool"
    if sys.platform == "darwin":
        return "start Docker Desktop, or: brew install colima docker && colima start"
    here = release()
    kinds = (here.id, *here.like)
    if "debian" in kinds or "ubuntu" in kinds:
        podman = "sudo apt-get install -y podman"
        return f"sudo {command} engine up (then run the pool as root too), or: {podman}" if here.is_debian else podman
    for kind, step in _INSTALL_PODMAN.items():
        if kind in kinds:
            return step
    return "install podman or docker with this system's package manager, and start it"


_INSTALL_PODMAN = {
    "fedora": "sudo dnf install -y podman",
    "rhel": "sudo dnf install -y podman",
    "suse": "sudo zypper install -y podman",
    "arch": "sudo pacman -S --noconfirm podman",
    "alpine": "sudo apk add podman",
}


def _home() -> str:
    try:
        return engine_home()
    except ValueError as error:
        raise EngineUnavailable(str(error)) from error


def _paths() -> EnginePaths:
    try:
        paths = engine_paths()
        paths.check()
    except ValueError as error:
        raise EngineUnavailable(str(error)) from error
    return paths


def _check_host(error: EngineUnavailable, paths: EnginePaths) -> None:
    """Raise where a private engine would not be used, or is not for this machine."""
    named = os.environ.get("DOCKER_HOST") or os.environ.get("DOCKER_CONTEXT")
    if named and named != paths.url and not _home():
        raise error
    if not (release().is_debian and is_root()):
        raise EngineUnavailable(f"no container engine answers. Next step: {next_step()}") from error


def _locked(paths: EnginePaths) -> AbstractAsyncContextManager[None]:
    for directory in (paths.root, paths.run):
        private_directory(directory)
    return exclusive(paths.lock_file, timeout=_LOCK_TIMEOUT, doing="starting or stopping the private engine")


async def _answering(running: daemon.Started, paths: EnginePaths) -> EngineUp:
    """The daemon that another ``up`` started, once it answers."""
    try:
        info = await CommandLineEngine(private_endpoint(paths)).info()
    except EmberpoolError as error:
        raise EngineUnavailable(
            f"the private engine (pid {running.pid}) runs and does not answer: {error}. "
            "Stop it with `emberpool engine down --force`, then start it again"
        ) from error
    if daemon.read_started(paths.started_file) != running:
        daemon.write_started(paths.started_file, running)
    return EngineUp(endpoint=private_endpoint(paths), info=info, started=False)
