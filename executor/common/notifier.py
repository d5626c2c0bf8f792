"""Waiting for something to change, for less than an event costs where nobody waits."""

from __future__ import annotations

import anyio


class Notifier:
    """Wakes all that wait at the moment of ``notify``. Nothing is kept for those that come later: what has changed is read elsewhere,
    and read again before each ``wait``."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: anyio.Event | None = None

    def notify(self) -> None:
        """Wake all who wait now."""
        if self._next is not None:
            self._next.set()
            self._next = None

    async def wait(self) -> None:
        """Wait for the next ``notify``."""
        if self._next is None:
            self._next = anyio.Event()
        await self._next.wait()
