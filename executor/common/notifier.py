"""Waiting for something to change, for less than an event costs where nobody waits."""

from __future__ import annotations

import anyio


class Notifier:
    """Wakes whoever waits when it is told. Nothing is kept for those who come later: what has changed is read elsewhere,
    and read again before each ``wait``."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: anyio.Event | None = None

    def tell(self) -> None:
        """Wake all who wait now."""
        if self._next is not None:
            self._next.set()
            self._next = None

    async def wait(self) -> None:
        """Wait until it is told."""
        if self._next is None:
            self._next = anyio.Event()
        await self._next.wait()
