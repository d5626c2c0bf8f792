"""Hold settings against the host that they are meant for: what the settings themselves cannot know."""

from __future__ import annotations

import shutil
from pathlib import Path

from executor.printable import printable
from pool.config_errors import Problem
from pool.config_models import Settings
from pool.descriptors import shortage


def check_host(settings: Settings, host_memory_bytes: int) -> list[str]:
    """What stands between ``settings`` and this host (memory, paths, commands), one line for each problem."""
    sandbox, pool = settings.sandbox, settings.pool
    problems: list[Problem] = []
    containers = pool.max_sandboxes + pool.max_cold
    wanted = containers * sandbox.memory_mb * 1024**2
    if wanted > host_memory_bytes and not pool.overcommit:
        problems.append(
            Problem(
                "sandbox.memory_mb",
                f"(pool.max_sandboxes {pool.max_sandboxes} + pool.max_cold {pool.max_cold}) x {sandbox.memory_mb} MiB "
                f"is {wanted // 1024**2:,} MiB, and the host has {host_memory_bytes // 1024**2:,} MiB; "
                "lower one of them, or set pool.overcommit = true",
            )
        )
    if text := shortage(settings):
        problems.append(Problem("pool.max_sandboxes", text))
    for index, spec in enumerate(sandbox.mounts):
        if text := _check_source(spec, sandbox.user):
            problems.append(Problem(f"sandbox.mounts[{index}]", text))
    if sandbox.seccomp.startswith("/") and not Path(sandbox.seccomp).is_file():
        problems.append(Problem("sandbox.seccomp", f"there is no file {_shown(sandbox.seccomp)} on this host"))
    if sandbox.binary and shutil.which(sandbox.binary) is None:
        problems.append(Problem("sandbox.binary", f"there is no command {_shown(sandbox.binary)} on this host"))
    return [str(problem) for problem in problems]


def _shown(path: str) -> str:
    return printable(path, name=True, limit=300)


def _check_source(spec: str, user: str) -> str:
    source, _, *options = spec.split(":")
    name = _shown(source)
    try:
        owner = Path(source).stat().st_uid
    except OSError as error:
        return f"its source {name} cannot be used: {error.strerror}; make it before the pool starts"
    writable = "ro" not in (options[0].split(",") if options else [])
    if writable and user == "auto" and owner == 0:
        return (
            f"its source {name} is writable and belongs to root, and calls never run as root; "
            f"mount it :ro, or give it away: chown 1000:1000 {name}"
        )
    return ""
