"""Reads, at rest, everything that a pool could leave behind it: on this process, on the engine, and on the host."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from benchmarks.soak_judge import Reading
from executor.common.proc import argv_of, pids, stat_number
from executor.engine.docker import CommandLineEngine
from executor.engine.paths import engine_paths
from executor.engine.protocol import EngineInfo
from executor.errors import EmberpoolError
from executor.machine.daemon import find_daemon
from executor.sandbox.profile import LABEL_POOL
from pool.pool import SandboxPool
from pool.supervisor.snapshot import SandboxCounts

REST_PATIENCE = 90.0
"""Seconds that a pool without callers is given to come to rest: to reap, to remove, and to refill."""
SETTLE_PATIENCE, LOOK_EVERY = 30.0, 0.5
"""Seconds that what a pool at rest has let go of is given to be gone, and between two looks at it."""
IDLE_WORKERS = ("AnyIO worker thread", "Trio thread ")
"""How threads are called that wait for the next thing to do in a thread."""
PARENT = 1
"""Where ``/proc/PID/stat`` has the parent, counted from the state."""
REMEMBERED = 10_000
"""Containers whose IDs are kept once they are gone, so that a shim that stayed can be known for one of ours."""


class Gauge:
    """Reads one pool and its engine. ``watch`` has to run meanwhile: it learns which containers were ever the pool's."""

    def __init__(self, pool: SandboxPool, engine: CommandLineEngine, info: EngineInfo) -> None:
        self.created = self.destroyed = 0
        self.lost = ""
        self._pool, self._engine, self._info = pool, engine, info
        self._pool_id = str(pool.snapshot().pool)
        self._ours: deque[str] = deque(maxlen=REMEMBERED)

    async def watch(self, *, task_status: TaskStatus[None]) -> None:
        """Follow the pool's containers by the engine's own events, for as long as those come; ``lost`` says why they ended."""
        async with self._engine.events(LABEL_POOL, self._pool_id, self._info.time or "0") as events:
            task_status.started()
            try:
                async for event in events:
                    if event.action == "create":
                        self.created += 1
                        self._ours.append(event.container)
                    elif event.action == "destroy":
                        self.destroyed += 1
                self.lost = "the engine's event stream ended while the soak ran"
            except EmberpoolError as error:
                self.lost = f"the engine's event stream broke while the soak ran: {error}"

    async def at_rest(self, min_standby: int) -> bool:
        """Wait until the pool has its standbys and nothing else; false where it has not in time."""
        with anyio.move_on_after(REST_PATIENCE):
            while not self._rests(min_standby):  # noqa: ASYNC110 - from outside, a pool can only be polled
                await anyio.sleep(0.05)
            return True
        return False

    def _rests(self, min_standby: int) -> bool:
        it = self._pool.snapshot()
        rests = it.sandboxes == SandboxCounts(standby=min_standby)
        return rests and not any((it.sessions, it.waiting, it.running, it.cold))

    async def settled(self, min_standby: int, good: Callable[[Reading], bool] = lambda reading: True) -> Reading:
        """A reading that agrees with the one before it and is ``good``; the last one, where none is in time.

        What has ended is not gone at once: a daemon closes the descriptors of an exec when it comes to it.
        """
        last = await self.read()
        with anyio.move_on_after(SETTLE_PATIENCE):
            while True:
                await anyio.sleep(LOOK_EVERY)
                before, last = last, await self.read()
                if self._rests(min_standby) and before.steady() == last.steady() and good(last):
                    break
        return last

    async def containers(self) -> list[str]:
        """The names of all containers that carry the pool's label, running or not."""
        return [row.name for row in await self._engine.list(LABEL_POOL, self._pool_id)]

    async def read(self) -> Reading:
        """One reading. On a machine without ``/proc`` only containers and threads are read."""
        listed = await self._engine.list(LABEL_POOL, self._pool_id)
        gc.collect()
        threads = [it for it in threading.enumerate() if not it.name.startswith(IDLE_WORKERS)]
        counts = {"containers": len(listed), "running": sum(row.running for row in listed), "threads": len(threads)}
        if sys.platform != "linux":
            return Reading(**counts)
        shims, others = self._shims([row.id for row in listed])
        daemons = self._daemons()
        files = _open_files(daemons) if daemons else None
        return Reading(
            **counts,
            descriptors=_count(_open_files([os.getpid()])),
            memory=_memory([os.getpid()]),
            clients=len(_children(os.getpid())),
            shims=len(shims),
            shim_descriptors=_count(_open_files(shims)),
            daemons=len(daemons) or None,
            daemon_descriptors=_count(files, sockets=False),
            daemon_sockets=_count(files, sockets=True),
            daemon_memory=_memory(daemons) if daemons else None,
            others=others,
        )

    def _shims(self, listed: Iterable[str]) -> tuple[list[int], int]:
        """The processes that hold a container that is or was the pool's, and how many hold another one of its engine."""
        ours, found, others = {*self._ours, *listed}, [], 0
        # A shim of the private engine names it in its argv; of any other, each one may be its.
        engine = str(engine_paths().containerd_socket) if self._info.private else None
        for pid in pids():
            argv = argv_of(pid)
            if argv and Path(argv[0]).name.startswith(("containerd-shim", "conmon")):
                if not ours.isdisjoint(argv):
                    found.append(pid)
                elif engine is None or engine in argv:
                    others += 1
        return found, others

    def _daemons(self) -> list[int]:
        """The engine's daemon and its containerd; empty if it is not known which processes they are."""
        if self._info.private:
            daemon = find_daemon(engine_paths())
            found = [daemon.pid] if daemon else []
        else:
            found = [pid for pid in pids() if (argv := argv_of(pid)) and Path(argv[0]).name == "dockerd"]
        return [*found, *_children(found[0])] if len(found) == 1 else []


def _children(parent: int) -> list[int]:
    """The processes that this one has started and not yet reaped."""
    return [pid for pid in pids() if stat_number(pid, PARENT) == parent]


def _open_files(processes: Iterable[int]) -> list[str] | None:
    """What their descriptors lead to, all together; ``None`` where one of them does not let itself be read."""
    found = []
    try:
        for pid in processes:
            for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names, not paths
                # One that is closed meanwhile is none; the listing's own is among them.
                with suppress(FileNotFoundError):
                    found.append(os.readlink(f"/proc/{pid}/fd/{number}"))  # noqa: PTH115 - no path is meant
    except OSError:
        return None
    return found


def _count(names: list[str] | None, *, sockets: bool | None = None) -> int | None:
    """How many there are: all, the ``sockets``, or all but those."""
    if names is None:
        return None
    return sum(1 for name in names if sockets is None or name.startswith("socket:") is sockets)


def _memory(processes: Iterable[int]) -> int | None:
    """How many bytes of them are resident in all."""
    try:
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) for pid in processes)
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
