"""The life of a sandbox as a table: which phase follows which, and upon what.

What the table lacks cannot happen: the core changes a sandbox's phase in one place (``PoolState.move``), and that place
looks here. The diagram in docs/architecture.md is drawn from it by ``scripts/diagram.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class Phase(Enum):
    """Where a sandbox is in its life; before it and after it there is no phase, and the sandbox is absent."""

    STARTING = "starting"
    STANDBY = "standby"
    BOUND = "bound"
    STOPPING = "stopping"


class Trigger(Enum):
    """What happened to a sandbox. Where it is stopped for it, the word is also the reason that the log names."""

    WANTED = "wanted"  # the plan asks for one more
    STARTED = "started"  # and verified
    START_FAILED = "start_failed"  # and nothing of it is on the engine
    START_UNKNOWN = "start_unknown"  # something of it may be on the engine
    GIVEN = "given"  # to the session that it belongs to from now on
    AGED = "aged"  # a standby older than standby_max_age
    SURPLUS = "surplus"  # a standby more than is wanted
    DIED = "died"  # a standby that ended by itself
    LOST = "lost"  # a session's that ended by itself or cannot be trusted any more
    BIND_FAILED = "bind_failed"  # the ledger did not take it; the session never had it
    DECLINED = "declined"  # nobody has run anything in it, and nobody will
    IDLE = "idle"  # its session was not in use for idle_timeout
    RECYCLED = "recycled"  # it has had max_lifetime or max_calls
    RECLAIMED = "reclaimed"  # it gives way to somebody who waits
    CLOSED = "closed"  # its session was closed
    CLOSING = "closing"  # the pool closes
    STOPPED = "stopped"  # its absence is confirmed


TABLE: Mapping[tuple[Phase | None, Trigger], Phase | None] = MappingProxyType(
    {
        (None, Trigger.WANTED): Phase.STARTING,
        (Phase.STARTING, Trigger.STARTED): Phase.STANDBY,
        (Phase.STARTING, Trigger.START_FAILED): None,
        (Phase.STARTING, Trigger.START_UNKNOWN): Phase.STOPPING,
        (Phase.STANDBY, Trigger.GIVEN): Phase.BOUND,
        (Phase.STANDBY, Trigger.AGED): Phase.STOPPING,
        (Phase.STANDBY, Trigger.SURPLUS): Phase.STOPPING,
        (Phase.STANDBY, Trigger.DIED): Phase.STOPPING,
        (Phase.STANDBY, Trigger.CLOSING): Phase.STOPPING,
        (Phase.BOUND, Trigger.LOST): Phase.STOPPING,
        (Phase.BOUND, Trigger.BIND_FAILED): Phase.STOPPING,
        (Phase.BOUND, Trigger.DECLINED): Phase.STOPPING,
        (Phase.BOUND, Trigger.IDLE): Phase.STOPPING,
        (Phase.BOUND, Trigger.RECYCLED): Phase.STOPPING,
        (Phase.BOUND, Trigger.RECLAIMED): Phase.STOPPING,
        (Phase.BOUND, Trigger.CLOSED): Phase.STOPPING,
        (Phase.BOUND, Trigger.CLOSING): Phase.STOPPING,
        (Phase.STOPPING, Trigger.STOPPED): None,
    }
)
"""(phase, what happened) -> the next phase. ``None`` is absence: before the start, and once nothing is left."""


def follow(phase: Phase | None, trigger: Trigger) -> Phase | None:
    """The phase after ``phase`` upon ``trigger``. Raises ``LookupError`` where the table has no such row, which is always
    a defect of the core."""
    try:
        return TABLE[phase, trigger]
    except KeyError:
        was = phase.value if phase else "absent"
        hint = "mend the caller, or add the row to pool/core/transitions.py"
        raise LookupError(f"a sandbox that is {was} cannot be {trigger.value}; {hint}") from None
