"""Read directories of this host in threads that may hang, without taking anything else along.

A network directory whose server has gone blocks a thread that accesses it for good, and nothing ends that thread. So such work has
threads of its own, neither the event loop's nor the gateway's; its caller stops waiting at its deadline or when it is
cancelled, and the thread is abandoned. While a directory has one, no further thread is spent on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import anyio
import anyio.lowlevel
from anyio import from_thread

from executor.errors import StagingFailed

MOST = 16
"""Threads at the same time that somebody waits for."""
MOST_OF_ONE = 4
"""The same for one directory, so that one that hangs does not stop the others."""
MOST_HUNG = 64
"""Abandoned threads, after which nothing is read until one comes back."""
HUNG = 5.0
"""Seconds after its abandonment in which a thread may come back before its directory counts as hung."""

_T = TypeVar("_T")


@dataclass(eq=False)
class _Job(Generic[_T]):
    """One piece of work. ``lock`` makes its end and its abandonment exclude each other."""

    work: Callable[[], _T]
    undo: Callable[[_T], object] | None
    done: anyio.Event = field(default_factory=anyio.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False
    abandoned: bool = False
    result: _T | None = None
    error: BaseException | None = None

    def carry_out(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:  # raised again where it is waited for
            self.error = error
        with self.lock:
            self.ended, unwanted = True, self.abandoned
        if unwanted:
            self.take_back()

    def take_back(self) -> None:
        """Undo what nobody waits for any more."""
        if self.undo is not None and self.error is None:
            self.undo(cast(_T, self.result))

    def abandon(self) -> bool:
        """Stop waiting; whether the work goes on, and takes itself back at its end."""
        with self.lock:
            self.abandoned = True
            return not self.ended


@dataclass(eq=False)
class _Place:
    """One directory: how many work on it or wait to, and since when each of its abandoned threads has been one."""

    what: str
    free: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(MOST_OF_ONE))
    users: int = 0
    hung: dict[_Job[object], float] = field(default_factory=dict)
    back: anyio.Event = field(default_factory=anyio.Event)


class StagingThreads:
    """The threads of one pool. All of it is for one event loop."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._free: anyio.Semaphore | None = None
        self._hung = 0

    def __repr__(self) -> str:
        return f"<StagingThreads places={len(self._places)} hung={self._hung}>"

    async def run(self, what: str, work: Callable[[], _T], *, undo: Callable[[_T], object] | None = None) -> _T:
        """Do ``work``, which reads the directory ``what``, and return its result or raise its error.

        When this is cancelled, ``work`` goes on without it, and ``undo`` takes its result back, in the same thread. Raises
        ``StagingFailed`` where an earlier one has hung on the same directory, or there is no thread to be had.
        """
        self._free = self._free or anyio.Semaphore(MOST)
        place = self._places.setdefault(what, _Place(what))
        place.users += 1
        try:
            async with place.free:
                await self._require_answer(place)
                async with self._free:
                    return await self._run(place, _Job(work, undo))
        finally:
            place.users -= 1
            self._forget(place)

    async def _require_answer(self, place: _Place) -> None:
        """Wait for the abandoned threads of a directory, for as long as they may be merely slow."""
        while place.hung:
            left = min(place.hung.values()) + HUNG - anyio.current_time()
            if left <= 0:
                raise StagingFailed(
                    f"{place.what!r:.300} hangs: reading it gets no answer; check its file system",
                    retry_after=HUNG,
                )
            with anyio.move_on_after(left):
                await place.back.wait()
        if self._hung >= MOST_HUNG:
            raise StagingFailed(
                f"{self._hung} threads hang in directories that give no answer; look after their file systems",
                retry_after=HUNG,
            )

    async def _run(self, place: _Place, job: _Job[_T]) -> _T:
        token, known = anyio.lowlevel.current_token(), cast("_Job[object]", job)

        def carry_out() -> None:
            job.carry_out()
            try:
                from_thread.run_sync(self._ended, place, known, token=token)
            except RuntimeError:  # the event loop has ended; nobody waits
                return

        try:
            # A daemon, or one that hangs would keep the process from ending.
            threading.Thread(target=carry_out, name="emberpool staging", daemon=True).start()
        except RuntimeError as error:
            raise StagingFailed(f"this host has no thread for reading a directory: {error}", retry_after=1.0) from error
        try:
            await job.done.wait()
        except BaseException:
            if job.abandon():
                self._hung += 1
                place.hung[known] = anyio.current_time()
            else:
                threading.Thread(target=job.take_back, daemon=True).start()
            raise
        if job.error is not None:
            raise job.error
        return cast(_T, job.result)

    def _ended(self, place: _Place, job: _Job[object]) -> None:
        job.done.set()
        if place.hung.pop(job, None) is not None:
            self._hung -= 1
            before, place.back = place.back, anyio.Event()
            before.set()
            self._forget(place)

    def _forget(self, place: _Place) -> None:
        if not place.users and not place.hung:
            self._places.pop(place.what, None)
