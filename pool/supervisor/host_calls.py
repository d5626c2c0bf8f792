"""Bound the tool calls that run on this host itself (``python_tools = "limits"``), and end them with their pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from executor.errors import PoolClosed, PoolExhausted

END_PATIENCE = 30.0
"""Seconds that a closing pool waits for cancelled calls; each has its grace, and is then killed."""

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Waiter:
    answered: anyio.Event = field(default_factory=anyio.Event)
    granted: bool = False


class HostCalls:
    """The places for calls on this host: ``most`` run at a time, ``most_waiting`` wait for ``patience`` seconds, first come
    first served."""

    def __init__(self, most: int, most_waiting: int, patience: float) -> None:
        self._most, self._most_waiting, self._patience = most, most_waiting, patience
        self._waiting: deque[_Waiter] = deque()
        self._scopes: set[anyio.CancelScope] = set()
        self._running = 0
        self._closed = False
        self._idle: anyio.Event | None = None

    def __repr__(self) -> str:
        return f"<HostCalls running={self._running} waiting={len(self._waiting)}{' closed' if self._closed else ''}>"

    async def run(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Wait for a place, and do ``work`` there. Raises ``PoolExhausted`` without a place, ``PoolClosed`` once the pool
        closes, with ``started`` where it took the work down."""
        await self._enter()
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                return await work()
        finally:
            self._scopes.discard(scope)
            self._leave()
        raise PoolClosed("the pool closed while the tool ran; it was ended", started=True)

    def refuse(self) -> None:
        """Refuse who waits and who comes from now on."""
        self._closed = True
        for waiter in self._waiting:
            waiter.answered.set()

    async def close(self, drain: float) -> None:
        """``refuse``, give those that run ``drain`` seconds, then cancel them and wait for their end."""
        self.refuse()
        for patience in (drain, END_PATIENCE):
            if not self._running:
                return
            self._idle = anyio.Event()
            with anyio.move_on_after(patience):
                await self._idle.wait()
            for scope in self._scopes:
                scope.cancel()

    async def _enter(self) -> None:
        self._require_open()
        if self._running < self._most and not self._waiting:
            self._running += 1
            return
        if len(self._waiting) >= self._most_waiting:
            raise PoolExhausted(
                f"{self._most} calls run on this host (host.max_calls) and {self._most_waiting} wait (host.max_waiters)",
                retry_after=1.0,
            )
        waiter = _Waiter()
        self._waiting.append(waiter)
        try:
            with anyio.move_on_after(self._patience):
                await waiter.answered.wait()
        except BaseException:
            if waiter.granted:
                self._leave()
            raise
        finally:
            with suppress(ValueError):
                self._waiting.remove(waiter)
        if waiter.granted:
            return
        self._require_open()
        raise PoolExhausted(
            f"no place for a call on this host within {self._patience:g} s (pool.acquire_timeout): {self._most} calls run "
            "(host.max_calls)",
            retry_after=1.0,
        )

    def _leave(self) -> None:
        """Hand the place to the caller that has waited longest."""
        if self._waiting and not self._closed:
            waiter = self._waiting.popleft()
            waiter.granted = True
            waiter.answered.set()
            return
        self._running -= 1
        if not self._running and self._idle is not None:
            self._idle.set()

    def _require_open(self) -> None:
        if self._closed:
            raise PoolClosed("the pool is closed")
