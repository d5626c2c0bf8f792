"""The private engine's daemon process: install it, start it detached and wait for its answer, recognise it, stop exactly it.

A bare pid is never trusted, since pids are reused: a process is ours when the boot, its start time and its argv are
those that were recorded when it was started, and signals go through a pidfd that was opened before the check.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import anyio

from executor.common.log import get_logger
from executor.common.proc import KILL_WAIT, argv_of, boot_id, gone, pidfd, start_time
from executor.engine import process
from executor.engine.daemon_log import keep_small
from executor.engine.docker import CommandLineEngine
from executor.engine.locate import private_endpoint
from executor.engine.paths import EnginePaths
from executor.engine.protocol import EngineInfo
from executor.errors import EmberpoolError, EngineFailed, EngineUnavailable
from executor.machine.debian import Report, install, system_environment
from executor.machine.leftovers import sweep_containerd

log = get_logger("emberpool.engine")

STOP_GRACE = 30.0
"""Seconds for an orderly end: dockerd gives its containers ten to end by themselves, all at once."""

_DOCKERD = "/usr/sbin/dockerd"
_START_TIMEOUT = 60.0
_LOG_TAIL = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A daemon that was started: its pid, its start time (clock ticks after boot), the boot, its argv."""

    pid: int
    start_time: int
    boot_id: str
    argv: tuple[str, ...]


def daemon_argv(dockerd: str, paths: EnginePaths) -> tuple[str, ...]:
    """The private daemon's command line: its own places, and no bridge, no firewall rule, no forwarding on the host."""
    return (
        dockerd,
        "--config-file",
        str(paths.config_file),
        "--data-root",
        str(paths.data),
        "--exec-root",
        str(paths.exec_root),
        "--pidfile",
        str(paths.pid_file),
        "--host",
        paths.url,
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
    )


def spawn(argv: tuple[str, ...], paths: EnginePaths, env: dict[str, str]) -> Started:
    """Start the daemon in a session of its own, its output appended to the log, and record what was started."""
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # `cd /` first: a daemon must not keep the caller's directory busy. posix_spawn has no word for that, and a
    # subprocess.Popen would complain that its child outlives it, which is the point here.
    pid = os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", 'cd / && exec "$0" "$@"', *argv],
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(paths.log_file), log_flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD),
    )
    started = Started(pid=pid, start_time=start_time(pid), boot_id=boot_id(), argv=argv)
    write_started(paths.started_file, started)
    return started


def write_started(path: Path, started: Started) -> None:
    """Write the record, whole or not at all."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(json.dumps(asdict(started)))
    aside.chmod(0o600)
    aside.replace(path)


def read_started(path: Path) -> Started | None:
    """The record as it was written, ``None`` where there is none or it is damaged. Says nothing about the process."""
    try:
        raw = json.loads(path.read_text())
        started = Started(pid=raw["pid"], start_time=raw["start_time"], boot_id=raw["boot_id"], argv=tuple(raw["argv"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    whole = type(started.pid) is int and type(started.start_time) is int and started.pid > 1
    return started if whole and all(isinstance(word, str) for word in started.argv) else None


def is_running(started: Started) -> bool:
    """Whether that very process lives: same boot, same start time, same argv."""
    return (
        started.boot_id == boot_id()
        and started.start_time == start_time(started.pid)
        and started.argv == argv_of(started.pid)
    )


def find_daemon(paths: EnginePaths) -> Started | None:
    """The private daemon, if it lives: by the record, or else by the daemon's own pid file where that process's argv
    names our data root (``up`` may have been killed between the start and the record)."""
    started = read_started(paths.started_file)
    if started is not None and is_running(started):
        return started
    try:
        pid = int(paths.pid_file.read_text())
    except (OSError, ValueError):
        return None
    argv = argv_of(pid)
    ours = ("--data-root", str(paths.data)) in pairwise(argv)
    if not ours or Path(argv[0]).name != "dockerd":
        return None
    return Started(pid=pid, start_time=start_time(pid), boot_id=boot_id(), argv=argv)


def exited(started: Started) -> bool:
    """Whether a daemon that this process spawned has ended; reaps it."""
    try:
        return os.waitpid(started.pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return not is_running(started)


async def stop(started: Started, *, grace: float) -> None:
    """SIGTERM, and SIGKILL after ``grace`` seconds; returns once the process is gone."""
    with pidfd(started.pid, lambda: is_running(started)) as fd:
        if fd is None:
            return
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        if not await gone(fd, grace):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            await gone(fd, KILL_WAIT)
            log.warning("engine.killed", pid=started.pid, grace=grace)
    exited(started)  # reaps it where it is this process's child


# --- its start --------------------------------------------------------------------------------------------------------


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
    started = spawn(daemon_argv(dockerd, paths), paths, system_environment())
    try:
        info = await _wait(started, paths)
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await stop(started, grace=STOP_GRACE)
            await sweep_containerd(paths)
        paths.started_file.unlink(missing_ok=True)
        if isinstance(error, EmberpoolError):
            raise EngineFailed(f"{error}; the end of {paths.log_file}:\n{_tail(paths.log_file, begin)}") from error
        raise
    log.info("engine.started", pid=started.pid, socket=str(paths.socket))
    return info


async def _wait(started: Started, paths: EnginePaths) -> EngineInfo:
    """Until the daemon answers, ends, or has had its time."""
    deadline = anyio.current_time() + _START_TIMEOUT
    engine = CommandLineEngine(private_endpoint(paths), timeout=10.0)
    while not exited(started):
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
