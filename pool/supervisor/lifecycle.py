"""A pool's life on its event loop: its start, its close, its failure, and who may use it meanwhile.

The supervisor runs in a task of its own, so a pool may be started in one task and closed in another. ``async with`` is
nothing but the two.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal, Protocol

import anyio
from anyio.abc import TaskGroup

from executor.common.event_loop import EventLoop, Nursery, current_loop
from executor.errors import PoolClosed, PoolUnusable

STOP_PATIENCE = 30.0
"""Seconds beyond the drain, and from there beyond each container that is confirmed gone, for which a closing pool waits for
the next one: however many there are, it goes on for as long as they go."""

Work = Callable[[], Coroutine[Any, Any, None]]


class Owner(Protocol):
    """What a life needs of the pool that it belongs to."""

    def begin_close(self, deadline: float) -> float:
        """Refuse new work, and end what runs at ``deadline`` or at an earlier one that was named before; that one."""

    def give_up(self, error: PoolUnusable) -> None:
        """End all waiters and running calls: the supervisor has ended."""

    async def clear_away(self, *, everything: bool) -> None:
        """Remove what may still be on the engine, ``everything`` or what is in no use."""

    def release(self) -> None:
        """The pool has ended: give back what it holds outside."""


class Lifecycle:
    """``tasks`` runs all that the pool does by itself; ``gone`` is to be set once a closing pool has nothing left."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop: EventLoop | None = None
        self._failure: BaseException | None = None
        self._patience: anyio.CancelScope | None = None
        self._finishing = self._torn = self._told = self.over = self.ended = self.draining = False

    @property
    def pid(self) -> int:
        """The process that the pool was started in; 0 before its start."""
        return self._loop.pid if self._loop is not None else 0

    # --- who may use it -----------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise ``PoolUnusable`` or ``PoolClosed`` unless the pool runs, and on the loop of the caller."""
        loop = self._require_process()
        if self.ended or self._failure is not None:
            raise self.error() or PoolClosed("the pool is closed")
        self._require_loop(loop)

    def require_here(self) -> None:
        """As ``require_open``, and a closed pool is no error: for what does no harm there."""
        loop = self._require_process()
        if not self.ended:
            self._require_loop(loop)

    def require_thread(self) -> None:
        """For what only looks: raise ``PoolUnusable`` in another process, and in another thread while the pool lives."""
        loop = self._require_process()
        if not self.ended and threading.get_ident() != loop.thread:
            raise self._elsewhere()

    def _require_process(self) -> EventLoop:
        if self._loop is None:
            raise PoolClosed("the pool is not running; `await pool.start()`, or use it inside `async with`")
        if self._loop.pid != os.getpid():
            raise PoolUnusable(
                f"this pool belongs to process {self._loop.pid}, of which this one is a fork; "
                "make a pool in each process, after the fork, with a pool.name or pool.state_dir of its own"
            )
        return self._loop

    def _require_loop(self, loop: EventLoop) -> None:
        if not loop.is_current():
            raise self._elsewhere() if loop.alive else self._left()

    def _elsewhere(self) -> PoolUnusable:
        return PoolUnusable(
            "this pool belongs to another event loop or thread; use it on the loop that it was started on "
            "(from threads through a portal, see docs/embedding.md), or make a pool for each loop"
        )

    def _left(self) -> PoolUnusable:
        return PoolUnusable(
            "the event loop that this pool was started on ended before the pool was closed, or all of its tasks were "
            "cancelled; make a new pool, which removes what this one left"
        )

    @property
    def phase(self) -> Literal["new", "running", "closing", "closed", "failed"]:
        """Where in its life the pool is; ``failed`` also once its loop is gone, which nothing else notices."""
        if self._loop is None:
            return "new"
        if self.error() is not None:
            return "failed"
        if self.ended:
            return "closed"
        return "closing" if self.draining or self.over else "running"

    def error(self) -> PoolUnusable | None:
        """Why the pool did not end as it should have; ``None`` while nothing is wrong."""
        if self._failure is not None:
            first = _first(self._failure)
            error = PoolUnusable(f"the pool's supervisor failed ({type(first).__name__}: {first}); make a new pool")
            error.__cause__ = self._failure
            return error
        gone = self._loop is not None and not self.ended and not self._loop.alive
        return self._left() if self._torn or gone else None

    # --- its life -----------------------------------------------------------------------------------------------------

    def enter_loop(self) -> None:
        """Take the loop that the caller runs on as the pool's own. Raises ``PoolClosed`` the second time."""
        if self._loop is not None:
            self._require_process()
            raise PoolClosed("this SandboxPool was started before, and can be only once; make a new one")
        self._loop = current_loop()
        self.tasks: TaskGroup = anyio.create_task_group()
        self._began, self._close_wanted = anyio.Event(), anyio.Event()
        self.gone, self._closed = anyio.Event(), anyio.Event()

    async def start(self, nursery: Nursery | None, *work: Work) -> None:
        """Begin, with each of ``work`` in a task for as long as the pool lives."""

        async def supervise() -> None:
            await self._supervise(work)

        if nursery is not None:
            nursery.start_soon(supervise)
        else:
            assert self._loop is not None  # noqa: S101 - settled before
            self._loop.start(supervise, "emberpool supervisor")
        # A cancel that comes now is seen at the caller's next checkpoint; torn here, nobody would close the pool.
        try:
            with anyio.CancelScope(shield=True):
                await self._began.wait()
        except BaseException:  # asyncio's own cancel, which no scope holds up
            self._begin_close(0.0)
            raise

    def close_soon(self, drain: float) -> None:
        """Begin the close, from any thread or a signal handler. It then goes on by itself."""
        loop = self._require_process()
        self.draining = True  # at once: the next caller is refused already
        loop.call_soon(lambda: self._begin_close(drain))

    async def close(self, drain: float) -> None:
        """Close, and wait until all is gone. Raises ``PoolUnusable`` where the supervisor failed."""
        if self._loop is None:
            return
        try:
            self.require_here()
        except PoolUnusable:
            if self._loop.pid == os.getpid() and not self._loop.alive:
                self._torn = True
                self._end()
            raise
        self._begin_close(drain)
        with anyio.CancelScope(shield=True):
            await self._closed.wait()
        if (error := self.error()) is not None:
            self._told = True
            if self._failure is not None and not isinstance(_first(self._failure), Exception):
                raise self._failure  # an interrupt is the caller's, as it would be in any task of his own
            raise error

    def one_gone(self) -> None:
        """A container is confirmed gone: a closing pool has time for the next one."""
        if self._patience is not None:
            self._patience.deadline = max(self._patience.deadline, anyio.current_time() + STOP_PATIENCE)

    def abandoned(self) -> bool:
        """Whether the pool was started and will never be closed, when nobody can reach it any more; ends it then."""
        if self._loop is None or self._loop.pid != os.getpid() or self._told or (self.ended and not self.error()):
            return False
        if not self.ended:
            self._torn = True
            self._end()
        return True

    def _begin_close(self, drain: float) -> None:
        if self.over:
            return
        deadline = self._owner.begin_close(anyio.current_time() + drain)
        self._close_wanted.set()
        if self._patience is not None:
            self._patience.deadline = min(self._patience.deadline, deadline + STOP_PATIENCE)

    async def _supervise(self, work: tuple[Work, ...]) -> None:
        """The whole life. Raises nothing but a cancellation, since on trio nobody could take it."""
        drain = 0.0  # where it is cancelled from outside: the loop or the nursery that it runs in ends
        try:
            async with anyio.create_task_group() as outer:
                outer.start_soon(self._work, work)
                try:
                    await self._close_wanted.wait()
                    drain = float("inf")  # the one that was asked for holds
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._wind_up(drain)
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            try:
                self._end()
            except BaseException as error:  # an interrupt in a log line
                self._failure = self._failure or error

    async def _work(self, work: tuple[Work, ...]) -> None:
        """Run the pool's tasks. No cancel from outside reaches them, since containers have to be removed then too."""
        try:
            async with self.tasks:
                self.tasks.cancel_scope.shield = True
                for one in work:
                    self.tasks.start_soon(one)
                self._began.set()
        except anyio.get_cancelled_exc_class():
            self._torn = True  # asyncio.run cancels every task at its end, each by itself
            raise
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self.over = True
            try:
                if not self._finishing:
                    self._torn = self._torn or self._failure is None
                    self._owner.give_up(self.error() or self._left())
            finally:
                self.gone.set()
                self._close_wanted.set()

    async def _wind_up(self, drain: float) -> None:
        try:
            if not self.over:
                deadline = self._owner.begin_close(anyio.current_time() + drain)
                with anyio.CancelScope(deadline=deadline + STOP_PATIENCE) as self._patience:
                    await self.gone.wait()
            await self._owner.clear_away(everything=self.over)
        finally:
            self._finishing = True
            self.tasks.cancel_scope.cancel()

    def _end(self) -> None:
        if not self.ended:
            self.over = self.ended = True
            try:
                self._owner.release()
            finally:
                with suppress(RuntimeError):  # the loop is closed, so that nobody waits
                    for event in (self._began, self.gone, self._closed):
                        event.set()


def _first(error: BaseException) -> BaseException:
    """The first error in a group, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
