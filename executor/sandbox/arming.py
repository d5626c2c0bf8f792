"""Bound how many execs are armed at once, and how long a caller waits for one.

An exec costs its engine some 100 ms of processor time. Beyond what the machine can do at once, more of them make each one
slower and none of them sooner.
"""

from __future__ import annotations

import os

import anyio

AT_ONCE = max(8, 2 * (os.cpu_count() or 1))
SLOT_TIME = 5.0
"""Seconds after which an exec that is not armed yet no longer keeps others waiting."""


class Slot:
    """The right to arm one exec now; ``release`` may be called more than once."""

    def __init__(self, limit: ArmingLimit) -> None:
        self.until = anyio.current_time() + SLOT_TIME
        self._limit, self._held, self._counted = limit, True, True
        limit.under_way += 1

    def release(self) -> None:
        """Let the next one begin."""
        if self._held:
            self._held = False
            self._limit.free.release()

    def end(self) -> None:
        """Note that the exec is armed, or has ended."""
        self.release()
        if self._counted:
            self._counted = False
            self._limit.under_way -= 1


class ArmingLimit:
    """Bound how many execs of a pool are armed at the same time; the others wait, first come first served.

    ``under_way`` are those that have begun and are not armed yet: more than ``at_once`` where some take longer than
    ``SLOT_TIME``.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self.at_once, self.under_way = at_once, 0
        self.free = anyio.Semaphore(at_once, fast_acquire=True)

    async def slot(self) -> Slot:
        """Wait for a slot. The caller must ``end`` it."""
        await self.free.acquire()
        return Slot(self)

    def patience(self, usual: float) -> float:
        """Return the seconds to wait for a step that takes at most ``usual`` while no more than ``at_once`` are under way."""
        return usual * max(1.0, self.under_way / self.at_once)
