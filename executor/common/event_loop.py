"""The event loop that a pool or a stream lives on: start a task of its own there, reach it from elsewhere, and see whether
the caller is on it.

AnyIO has no task that outlives the block that started it, so this one module asks asyncio and trio themselves.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

Run = Callable[[], Awaitable[None]]
"""What a task of its own does. It raises nothing but a cancellation: nobody is there to take an error."""


class Nursery(Protocol):
    """A ``trio.Nursery`` or an AnyIO task group."""

    def start_soon(self, run: Any, /, *args: Any) -> Any: ...


class EventLoop:
    """One running event loop in one process. Make one with ``current_loop``."""

    def __init__(self) -> None:
        self.pid, self.thread = os.getpid(), threading.get_ident()

    def is_current(self) -> bool:
        """Whether the caller runs on this loop. False in a forked child, although that has a copy of it."""
        raise NotImplementedError

    def start(self, run: Run, name: str) -> None:
        """Start a task that belongs to the loop alone: neither the caller's task nor its cancel scopes reach it. It is
        cancelled when the loop's main function has ended."""
        raise NotImplementedError

    def call_soon(self, function: Callable[[], object]) -> bool:
        """Have a task of the loop call ``function``, from any thread and from a signal handler; whether it is still there."""
        if not self.alive:
            return False
        try:
            self._call_soon(function)
        except RuntimeError:  # asyncio's for a closed loop; trio's RunFinishedError is one too
            return False
        return True

    @property
    def alive(self) -> bool:
        """Whether the loop can still be reached: from a forked child it cannot, since what wakes it is its parent's."""
        return os.getpid() == self.pid

    def _call_soon(self, function: Callable[[], object]) -> None:
        raise NotImplementedError


class _AsyncioLoop(EventLoop):
    tasks: set[asyncio.Task[None]] = set()  # noqa: RUF012 - the loop itself refers weakly to its tasks

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()

    def is_current(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop and os.getpid() == self.pid
        except RuntimeError:
            return False

    def start(self, run: Run, name: str) -> None:
        async def task() -> None:
            await run()

        started = self._loop.create_task(task(), name=name)
        self.tasks.add(started)
        started.add_done_callback(self.tasks.discard)

    @property
    def alive(self) -> bool:
        return super().alive and not self._loop.is_closed()

    def _call_soon(self, function: Callable[[], object]) -> None:
        async def call() -> None:
            function()

        # Outside of a task AnyIO knows no event loop.
        self._loop.call_soon_threadsafe(self.start, call, "emberpool call")


class _TrioLoop(EventLoop):
    def __init__(self) -> None:
        super().__init__()
        import trio

        self._trio = trio.lowlevel
        self._token = trio.lowlevel.current_trio_token()

    def is_current(self) -> bool:
        running = self._trio.in_trio_run() and self._trio.current_trio_token() is self._token
        return running and os.getpid() == self.pid

    def start(self, run: Run, name: str) -> None:
        self._trio.spawn_system_task(run, name=name, context=contextvars.copy_context())

    @property
    def alive(self) -> bool:
        try:
            if super().alive:
                self._token.run_sync_soon(_nothing)
        except RuntimeError:
            return False
        return super().alive

    def _call_soon(self, function: Callable[[], object]) -> None:
        self._token.run_sync_soon(function)


def _nothing() -> None:
    """To see whether a loop takes calls."""


def current_loop() -> EventLoop:
    """The loop that the caller runs on. Raises ``RuntimeError`` where there is none."""
    trio = sys.modules.get("trio")
    return _TrioLoop() if trio is not None and trio.lowlevel.in_trio_task() else _AsyncioLoop()
