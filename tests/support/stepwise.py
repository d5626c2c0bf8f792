"""Cancel a coroutine at every place where it can be cancelled, one after another.

Two measures of "place": the coroutine's own pauses, and turns of the scheduler. A pause of the coroutine lasts many turns
in which the tasks that it waits for go on, and a cancel may fall on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

Scenario = Callable[[], Coroutine[Any, Any, None]]
Cancelled = Callable[[int, Scenario], Coroutine[Any, Any, bool]]


async def at_pause(pause: int, scenario: Scenario) -> bool:
    """Run ``scenario`` under a scope that is cancelled at its ``pause``-th pause; whether it had that many."""
    with anyio.CancelScope() as scope:
        return await _drive(scenario(), pause, scope)
    return True


async def after_turns(turns: int, scenario: Scenario) -> bool:
    """Run ``scenario`` under a scope that is cancelled after ``turns`` turns; whether it took that many."""
    ended = False
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                for _ in range(turns):
                    await checkpoint()
                if not ended:
                    scope.cancel()

            tasks.start_soon(cancel)
            await scenario()
            ended = True
            tasks.cancel_scope.cancel()
    return scope.cancel_called


@coroutine
def _drive(scenario: Coroutine[Any, Any, None], pause: int, scope: anyio.CancelScope) -> Generator[Any, Any, bool]:
    pauses, answer = 0, None
    error: BaseException | None = None
    while True:
        try:
            asked = scenario.send(answer) if error is None else scenario.throw(error)
        except StopIteration:
            return pauses > pause
        if pauses == pause:
            scope.cancel()
        pauses += 1
        answer, error = None, None
        try:
            answer = yield asked
        except BaseException as thrown:
            error = thrown


async def every_place(scenario: Callable[[int], Coroutine[Any, Any, bool]], *, most: int = 1000) -> int:
    """Run ``scenario(k)`` for k = 0, 1, ... until it is through before the cancel; how many places it had.

    Within one turn trio runs its tasks in any order, so a scenario counts as through once it was so three times running.
    """
    reached = missed = 0
    for place in range(most):
        if await scenario(place):
            reached, missed = place + 1, 0
        elif (missed := missed + 1) == 3:
            return reached
    raise AssertionError(f"still not through after {most} places")
