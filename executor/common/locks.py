"""Locks between processes, on files: they end with the process that holds them, however it ends."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import ClassVar

import anyio

from executor.errors import EngineUnavailable

_RETRY = 0.05


class HeldLock:
    """An open file that holds a lock. A lock belongs to the open file, which a forked child has too: so the child closes its
    copy at once, and ``close`` unlocks whatever copies there are."""

    _all: ClassVar[weakref.WeakSet[HeldLock]] = weakref.WeakSet()

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._all.add(self)

    def close(self) -> None:
        """Give the lock back; twice is harmless, and a forked child gives nothing back that is its parent's."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child: close the copies, which leaves the parent's locks as they are."""
        for lock in list(cls._all):
            fd, lock.fd = lock.fd, -1
            if fd >= 0:
                os.close(fd)


os.register_at_fork(after_in_child=HeldLock.forget_all)


def private_directory(path: Path) -> None:
    """Make a directory that only its owner enters; its parents stay open to everyone where they are new."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def try_lock(path: Path, *, shared: bool = False) -> Iterator[bool]:
    """Lock ``path`` without waiting and hold the lock inside the block; yields whether it was free."""
    private_directory(path.parent)
    # No program that this process starts may inherit it: O_CLOEXEC is Python's default.
    lock = HeldLock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    try:
        try:
            fcntl.flock(lock.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        lock.close()


@asynccontextmanager
async def exclusive(path: Path, *, timeout: float, doing: str) -> AsyncIterator[None]:
    """Hold ``path`` locked inside the block; waits ``timeout`` seconds at most, then raises ``EngineUnavailable``."""
    deadline = anyio.current_time() + timeout
    while True:
        with try_lock(path) as free:
            if free:
                yield
                return
        # A blocking flock in a thread could not be cancelled.
        if anyio.current_time() >= deadline:
            raise EngineUnavailable(
                f"another process is still {doing} after {timeout:g} s (it holds {path})", retry_after=10.0
            )
        await anyio.sleep(_RETRY)


def holders(path: Path) -> list[int]:
    """Return the pids that hold ``path``'s lock shared, each once, as Linux reports them; empty on other systems."""
    try:
        info = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    found = [line.split() for line in lines if "->" not in line]
    return sorted(
        {int(words[4]) for words in found if words[1] == "FLOCK" and words[3] == "READ" and words[5] == place}
    )
