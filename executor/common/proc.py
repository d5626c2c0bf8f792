"""Other processes on this host, by Linux's ``/proc`` and pidfds."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

KILL_WAIT = 10.0
"""Seconds that a process may take to end after SIGKILL (it may be in the middle of a write to a slow disk)."""

_POLL = 0.05


@contextmanager
def pidfd(pid: int, is_it: Callable[[], bool]) -> Iterator[int | None]:
    """A handle on the process, or ``None`` where it is gone or not the one meant. Opened first and checked after, so
    what was checked is what the handle names."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield fd if is_it() else None
    finally:
        os.close(fd)


async def gone(fd: int, timeout: float) -> bool:
    """Whether the process of a handle has ended, waiting ``timeout`` seconds at most."""
    deadline = anyio.current_time() + timeout
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not poll.poll(0):
        if anyio.current_time() >= deadline:
            return False
        await anyio.sleep(_POLL)
    return True


def pids() -> list[int]:
    """Every process there is now."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names, not paths


def argv_of(pid: int) -> tuple[str, ...]:
    """A process's argv; empty where it is gone, a zombie or a kernel thread."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(os.fsdecode(word) for word in raw.split(b"\0")[:-1])


def shares_files(pid: int) -> bool:
    """Whether a process has this one's root directory: the same path names the same file to both."""
    try:
        theirs, ours = Path(f"/proc/{pid}/root").stat(), Path("/").stat()
    except OSError:
        return False
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


def stat_number(pid: int, index: int) -> int:
    """A number of ``/proc/PID/stat``, counted from the state after the name; -1 where the process is gone."""
    try:
        # The name in parentheses may hold anything, parentheses too: what counts begins after the last one.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()[index])
    except (OSError, LookupError, ValueError):
        return -1


def start_time(pid: int) -> int:
    """When a process began, in clock ticks after boot; -1 where it is gone."""
    return stat_number(pid, 19)


def boot_id() -> str:
    """This boot of the machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
