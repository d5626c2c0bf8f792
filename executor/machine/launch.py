"""Install and start the private engine's daemon, and wait until it answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio

from executor.common.log import get_logger
from executor.engine import process
from executor.engine.daemon_log import keep_small
from executor.engine.docker import CommandLineEngine
from executor.engine.locate import private_endpoint
from executor.engine.paths import EnginePaths
from executor.engine.protocol import EngineInfo
from executor.errors import EmberpoolError, EngineFailed, EngineUnavailable
from executor.machine import daemon
from executor.machine.debian import Report, install, system_environment
from executor.machine.leftovers import sweep_containerd

log = get_logger("emberpool.engine")

STOP_GRACE = 30.0
"""Seconds for an orderly end: dockerd gives its containers ten to end by themselves, all at once."""

_DOCKERD = "/usr/sbin/dockerd"
_START_TIMEOUT = 60.0
_LOG_TAIL = 2_000


async def ensure_dockerd(report: Report) -> str:
    """The daemon's command, installed where it is missing."""
    path = system_environment()["PATH"]
    found = shutil.which(_DOCKERD) or shutil.which("dockerd", path=path)
    if found is None:
        units = _units()
        await install(["docker.io"], report)
        found = shutil.which("dockerd", path=path) or _DOCKERD
        await _disable(_units() - units)
    if shutil.which("docker") is None:
        # A package of its own from Debian 13 on.
        await install(["docker-cli"], report)
    return found


def _units() -> frozenset[str]:
    names = ("docker.service", "docker.socket", "containerd.service")
    places = (Path("/lib/systemd/system"), Path("/usr/lib/systemd/system"))
    return frozenset(name for name in names if any((place / name).exists() for place in places))


async def _disable(units: frozenset[str]) -> None:
    """Keep services that our own installation brought from starting at the next boot, with a bridge and a firewall."""
    if units and shutil.which("systemctl"):
        done = await process.run(["systemctl", "disable", *sorted(units)], system_environment(), timeout=60.0)
        log.debug("engine.units_disabled", units=sorted(units), code=done.code)


async def start(dockerd: str, paths: EnginePaths) -> EngineInfo:
    """Start the daemon and return what it says of itself. Raises ``EngineFailed`` with the end of its log."""
    paths.config_file.write_text("{}\n")
    # What a SIGKILLed daemon leaves: it refuses to start over a pid file whose pid lives again as something else, and
    # waits for a containerd that it did not start.
    await sweep_containerd(paths)
    for file in (paths.pid_file, paths.socket, paths.containerd_config.with_name("containerd.pid")):
        file.unlink(missing_ok=True)
    await keep_small(paths.log_file)
    begin = paths.log_file.stat().st_size if paths.log_file.exists() else 0
    started = daemon.spawn(daemon.daemon_argv(dockerd, paths), paths, system_environment())
    try:
        info = await _wait(started, paths)
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await daemon.stop(started, grace=STOP_GRACE)
            await sweep_containerd(paths)
        paths.started_file.unlink(missing_ok=True)
        if isinstance(error, EmberpoolError):
            raise EngineFailed(f"{error}; the end of {paths.log_file}:\n{_tail(paths.log_file, begin)}") from error
        raise
    log.info("engine.started", pid=started.pid, socket=str(paths.socket))
    return info


async def _wait(started: daemon.Started, paths: EnginePaths) -> EngineInfo:
    """Until the daemon answers, ends, or has had its time."""
    deadline = anyio.current_time() + _START_TIMEOUT
    engine = CommandLineEngine(private_endpoint(paths), timeout=10.0)
    while not daemon.exited(started):
        try:
            if paths.socket.exists():
                return await engine.info()
        except EmberpoolError as error:
            log.debug("engine.not_yet", error=str(error))
        if anyio.current_time() >= deadline:
            raise EngineUnavailable(f"the private engine did not answer within {_START_TIMEOUT:g} s")
        await anyio.sleep(0.1)
    raise EngineUnavailable("the private engine ended while it was starting")


def _tail(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(begin, path.stat().st_size - _LOG_TAIL))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return "(no log)"
