"""Kill a container and prove that it is dead: a call that was cut off has a result only with that proof."""

from __future__ import annotations

import anyio

from executor.common.log import get_logger
from executor.engine.events import EventHub, Watch
from executor.engine.protocol import ContainerGone, Engine
from executor.errors import EmberpoolError, SandboxDied

log = get_logger("emberpool.sandbox")

KILL_PATIENCE = 20.0
"""Seconds that a caller waits for the proof: one question to a slow engine, and some more."""
RETRY = 0.5


async def kill_container(engine: Engine, hub: EventHub, watch: Watch, container: str, *, why: str) -> bool:
    """Kill a container that was started, and return whether nothing in it runs any more. Never raises, even when it is cancelled.

    The proof is the engine's answer, or the event of the container's end, whichever comes first. An engine that is away
    (``hub``) is asked once.
    """
    proven, error = watch.ended.is_set(), ""
    with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_PATIENCE):
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                nonlocal proven, error
                again = RETRY
                while True:
                    try:
                        await engine.kill(container)
                        proven = True
                    except ContainerGone:
                        proven = True
                    except EmberpoolError as raised:
                        error = str(raised)
                    if proven or not hub.connected:
                        tasks.cancel_scope.cancel()
                        return
                    await anyio.sleep(again)
                    again *= 2

            if not proven:
                tasks.start_soon(ask)
                await watch.ended.wait()
                tasks.cancel_scope.cancel()
    proven = proven or watch.ended.is_set()
    if not proven:
        log.warning("sandbox.kill_failed", sandbox=watch.name, why=why, error=error or "no answer in time")
    return proven


def not_confirmed() -> SandboxDied:
    """The error of a call that was cut off while its engine would not confirm that its container is dead."""
    return SandboxDied(
        "the call was cut off, and the engine did not confirm that its container was killed: it may run on until the engine"
        " answers again and the pool has removed it",
        cause="engine",
        started=True,
    )
