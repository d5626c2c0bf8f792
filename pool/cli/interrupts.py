"""A command that is interrupted removes its containers first, whichever signal it was and however often it comes."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

_T = TypeVar("_T")


def run(main: Callable[..., Awaitable[_T]], *args: object) -> _T:
    """As ``anyio.run``, for commands: SIGINT, SIGTERM and SIGHUP cancel ``main`` and let it close what it has open.

    Raises ``KeyboardInterrupt`` once it has. A second signal changes nothing: closing is bounded, and torn it would leave
    containers behind. SIGHUP is left alone where it is ignored, as under ``nohup``.
    """
    return anyio.run(_interruptible, main, args)


async def _interruptible(main: Callable[..., Awaitable[_T]], args: tuple[object, ...]) -> _T:
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    results: list[_T] = []
    failures: list[Exception] = []
    with anyio.open_signal_receiver(*numbers) as signals:
        async with anyio.create_task_group() as tasks:

            async def cancel_on_signal() -> None:
                async for _ in signals:
                    interrupted.cancel()

            with anyio.CancelScope() as interrupted:
                tasks.start_soon(cancel_on_signal)
                try:
                    results.append(await main(*args))
                except Exception as error:  # kept, not raised: a task group would wrap it
                    failures.append(error)
            tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    if not results:
        raise KeyboardInterrupt
    return results[0]
