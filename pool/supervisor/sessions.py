"""Sessions as operators see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pool.core.state import PoolState, SessionState


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session now. ``id`` is its name in logs; ``generation`` is ``None`` while it has no sandbox; ``idle`` is the seconds
    since it was last used, 0 while a call runs or anybody waits."""

    agent: str
    session: str
    id: str
    generation: str | None
    handles: int
    running: int
    waiting: int
    idle: float


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """A session that has ended: it was ``closed``, or the pool was (``pool_closed``), or nobody has a handle on it any more
    and its sandbox has gone (``unused``)."""

    agent: str
    session: str
    id: str
    reason: str


OnSessionEnded = Callable[[SessionEnd], object]
"""Called on the pool's loop; it must not wait. What it raises is logged and changes nothing."""


def info_of(pool: PoolState, state: SessionState, session_id: str, instance: str, now: float) -> SessionInfo:
    """Return a session as ``SandboxPool.sessions`` lists it."""
    box = pool.sandboxes[state.sandbox] if state.sandbox is not None else None
    return SessionInfo(
        *state.key,
        id=session_id,
        generation=f"{instance}-{box.n}" if box is not None else None,
        handles=state.handles,
        running=len(box.running) if box is not None else 0,
        waiting=sum(1 for waiter in pool.waiters.values() if waiter.kind != "cold" and waiter.key == state.key),
        idle=0.0 if pool.in_use(state) else max(0.0, now - state.last_used),
    )
