"""What tool directories looked like when they were last read, so that one that has not changed is not read again.

A directory looks unchanged when nothing in it was added, removed, replaced or written since: every such change gives a
new change time (which no program can set), unless two fall into one tick of the file system's clock. So a look is trusted
only once the content has been read at least a tick after it was first seen. What is measured is time that passed here,
and no clock is compared with another: a file server's may be wrong.

One change shows in no look before the kernel has noticed it: bytes stored through a shared memory mapping of a file.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from executor.staging.source import skipped

Look = dict[str, tuple[int, ...]]
"""Of each entry's path in a tool directory (``""`` is the directory): device, inode, mode, size, and the times of its last
write and change in nanoseconds."""

facts: Callable[[os.stat_result], tuple[int, ...]] = attrgetter(
    "st_dev", "st_ino", "st_mode", "st_size", "st_mtime_ns", "st_ctime_ns"
)

_TICK = 0.1
"""Seconds; kernels stamp files in steps of 1 to 10 ms."""
_COARSE_TICK = 2.5
"""Seconds, where all times are whole seconds (FAT counts in twos)."""
_KEPT = 512
"""Sources; what one looked like takes about 350 bytes for each of its entries."""


def look(real: str, most: int) -> Look:
    """What a directory looks like now; with more than ``most`` entries in it, only a part of it. Raises ``OSError``."""
    found: Look = {"": facts(os.lstat(real))}
    todo = [(real, "")]
    while todo:
        folder, before = todo.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if skipped(entry.name):
                    continue
                if len(found) > most:
                    return found
                about = os.lstat(entry.path)
                path = before + entry.name
                found[path] = facts(about)
                if stat.S_ISDIR(about.st_mode):
                    todo.append((entry.path, path + "/"))
    return found


def differing(one: Look, other: Look) -> str:
    """The path of an entry that differs between two looks, ``""`` for the directory itself or none."""
    changed = [path for path in one.keys() | other.keys() if one.get(path) != other.get(path)]
    # A directory changes with what is in it; the deepest name says most.
    return max(changed, key=lambda path: (path.count("/"), path), default="")


@dataclass(frozen=True, slots=True)
class _Seen:
    look: Look
    since: float
    digest: str


class Fingerprints:
    """The digests of tool directories that look as they did when they were read; any number of ``Staging`` share one.

    A digest is of the source alone, not of a place. ``clock`` counts seconds that pass.
    """

    # Not `anyio.current_time`: this runs in worker threads, beside files whose clock is the real one.
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self._seen: dict[str, _Seen] = {}
        self._lock = threading.Lock()

    def digest(self, real: str, found: Look) -> str:
        """The digest of a directory that looks as ``found`` just now, ``""`` where its content must be read to know."""
        seen = self._seen.get(real)
        if seen is not None and seen.look == found:
            return seen.digest
        self._keep(real, _Seen(found, self.now(), ""))
        return ""

    def record(self, real: str, found: Look, digest: str, *, began: float) -> None:
        """A directory that looked as ``found`` before and after it was read, from ``began`` on, has this digest."""
        seen = self._seen.get(real)
        if seen is None or seen.look != found:
            self._keep(real, _Seen(found, self.now(), ""))
        elif began - seen.since >= _tick(found):
            self._keep(real, _Seen(found, seen.since, digest))

    def _keep(self, real: str, seen: _Seen) -> None:
        # Entries are replaced whole and each is true by itself, so readers need no lock.
        with self._lock:
            self._seen.pop(real, None)
            self._seen[real] = seen
            if len(self._seen) > _KEPT:
                del self._seen[next(iter(self._seen))]


def _tick(found: Look) -> float:
    return _COARSE_TICK if all(about[-1] % 1_000_000_000 == 0 for about in found.values()) else _TICK
