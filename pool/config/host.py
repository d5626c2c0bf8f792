"""Hold settings against the host that they are meant for: what the settings themselves cannot know."""

from __future__ import annotations

import os
from pathlib import Path

from executor.common.printable import printable
from executor.engine.locate import missing_binary
from executor.sandbox.mount import Mount
from pool.config.descriptors import shortage
from pool.config.errors import ConfigError, Problem
from pool.config.models import Settings


def check_host(settings: Settings, host_memory_bytes: int) -> list[str]:
    """What stands between ``settings`` and this host (memory, paths, commands), one line for each problem."""
    sandbox = settings.sandbox
    problems: list[Problem] = []
    if text := memory_problem(settings, host_memory_bytes):
        problems.append(Problem("sandbox.memory_mb", text))
    if text := shortage(settings):
        problems.append(Problem("pool.max_sandboxes", text))
    for index, mount in enumerate(sandbox.mounts):
        if text := _check_source(mount, sandbox.user):
            problems.append(Problem(f"sandbox.mounts[{index}]", text))
    if sandbox.seccomp.startswith("/") and not Path(sandbox.seccomp).is_file():
        problems.append(Problem("sandbox.seccomp", f"there is no file {_shown(sandbox.seccomp)} on this host"))
    if sandbox.binary and (text := missing_binary(sandbox.binary)):
        problems.append(Problem("sandbox.binary", text))
    return [str(problem) for problem in problems]


def _shown(path: str) -> str:
    return printable(path, name=True, limit=300)


def host_memory() -> int:
    """Return this host's memory in bytes; 0 where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def memory_problem(settings: Settings, host_memory_bytes: int, *, max_sandboxes: int | None = None) -> str:
    """Why all containers together may use more memory than the host has; empty where they may not, or may by intention.

    ``max_sandboxes`` stands in for the settings' own while a pool is resized.
    """
    pool, memory_mb = settings.pool, settings.sandbox.memory_mb
    most = pool.max_sandboxes if max_sandboxes is None else max_sandboxes
    wanted = (most + pool.max_cold) * memory_mb * 1024**2
    if pool.overcommit or wanted <= host_memory_bytes:
        return ""
    return (
        f"(pool.max_sandboxes {most} + pool.max_cold {pool.max_cold}) x {memory_mb} MiB "
        f"is {wanted // 1024**2:,} MiB, and the host has {host_memory_bytes // 1024**2:,} MiB; "
        "lower one of them, or set pool.overcommit = true"
    )


def require_memory(settings: Settings) -> None:
    """Raise ``ConfigError`` where all containers together may use more memory than this host has."""
    if (memory := host_memory()) and (text := memory_problem(settings, memory)):
        raise ConfigError([Problem("sandbox.memory_mb", text)])


def _check_source(mount: Mount, user: str) -> str:
    name = _shown(mount.source)
    try:
        owner = Path(mount.source).stat().st_uid
    except OSError as error:
        return f"its source {name} cannot be used: {error.strerror}; make it before the pool starts"
    if not mount.read_only and user == "auto" and owner == 0:
        return (
            f"its source {name} is writable and belongs to root, and calls never run as root; "
            f"mount it :ro, or give it away: chown 1000:1000 {name}"
        )
    return ""
