"""Run short blocking work of the library's own in threads apart from the event loop's default ones.

The default limiter is shared with the gateway: work of its own that hangs there would hang calls and their clean-up too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

MOST = 16

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")
_limiter: RunVar[CapacityLimiter] = RunVar("emberpool_threads")


async def in_thread(work: Callable[[Unpack[_Args]], _T], *args: *_Args) -> _T:
    """Do ``work``, which never hangs (this host's own disk, ``/proc``), in a thread; not to be torn by a cancel."""
    try:
        limiter = _limiter.get()
    except LookupError:
        _limiter.set(limiter := CapacityLimiter(MOST))
    return await to_thread.run_sync(work, *args, limiter=limiter)
