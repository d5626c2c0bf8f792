"""File descriptors of the gateway's process: every armed runner holds some for as long as its sandbox lives."""

from __future__ import annotations

import resource

from pool.config.models import Settings

ARMED = 4
"""Of an armed runner: three pipes, and the handle by which its client's end is noticed."""
COMMAND = 12
"""Of an engine command while it is started."""
COMMANDS = 12
"""Commands that run besides starts and cold calls: what the engine is asked, its events, removals."""
OWN = 64
"""For the process's own files."""
HIGHEST = 1 << 20
"""Higher than this the limit is not raised: the process's children get it too, and some close all that it allows."""


def needed(settings: Settings, max_sandboxes: int | None = None) -> int:
    """Return how many files a pool of this size may hold open at once."""
    pool = settings.pool
    armed = (pool.max_sandboxes if max_sandboxes is None else max_sandboxes) * settings.call.parallel
    return ARMED * armed + COMMAND * (pool.max_starting + pool.max_cold + COMMANDS) + OWN


def shortage(settings: Settings, max_sandboxes: int | None = None) -> str:
    """Return what is wrong if this process may not open that many files; ``""`` if it may, now or once the limit is raised."""
    most, wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[1], needed(settings, max_sandboxes)
    if most == resource.RLIM_INFINITY or wanted <= most:
        return ""
    count = settings.pool.max_sandboxes if max_sandboxes is None else max_sandboxes
    return (
        f"{count} sandboxes may need {wanted} open files, and this process may have {most} (RLIMIT_NOFILE); "
        "lower it, or raise the hard limit: ulimit -Hn, LimitNOFILE= in a systemd unit, --ulimit nofile= of a container"
    )


def raise_limit() -> None:
    """Raise this process's limit on open files as far as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = HIGHEST if hard == resource.RLIM_INFINITY else min(hard, HIGHEST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
