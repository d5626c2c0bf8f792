"""What a pool is doing at one moment, as one value for operators, health checks and tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from executor.common.log import lost_lines
from pool.core.handlers import Phase
from pool.supervisor.shell import Shell

PoolPhase = Literal["new", "running", "closing", "closed", "failed"]


@dataclass(frozen=True, slots=True)
class SandboxCounts:
    """Sandboxes by phase: being started, in the warm pool, owned by a session, being removed."""

    starting: int = 0
    standby: int = 0
    bound: int = 0
    stopping: int = 0


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool at one moment. All counts are derived from its state.

    ``state``: ``new`` (not started), ``running``, ``closing``, ``closed``, or ``failed`` (its supervisor failed, or its event
    loop ended before it was closed; ``error`` says which). Only a ``running`` pool takes work. ``pool`` is the id in its
    state directory, ``instance`` this start's part of every generation; both are ``""`` before the start. ``sessions``
    counts those that it knows, ``waiting`` the callers that wait, ``running`` the calls under way in sessions, ``cold`` the cold
    calls. ``engine`` is ``up`` or ``down``. ``fault`` is the reason (``EmberpoolError.reason``) for which sandboxes cannot be
    had at the moment, ``None`` while they can. ``lost_log_lines`` counts the lines that this process could not log.
    """

    pool: str
    instance: str
    state: PoolPhase
    sandboxes: SandboxCounts
    sessions: int
    waiting: int
    running: int
    cold: int
    engine: Literal["up", "down"]
    fault: str | None
    error: str | None
    lost_log_lines: int

    @property
    def healthy(self) -> bool:
        """Whether the pool takes work, and can have sandboxes for it."""
        return self.state == "running" and self.engine == "up" and self.fault is None

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries, for JSON."""
        return asdict(self)


def take_snapshot(shell: Shell) -> PoolSnapshot:
    """Read a pool's state. Raises ``PoolUnusable`` in a forked process, and in another thread while the pool lives."""
    life, state = shell.life, shell.state
    started = life.pid != 0
    if started:
        life.require_thread()
    phase: PoolPhase = life.phase if life.phase != "running" or not state.closing else "closing"
    alive = phase in ("running", "closing")
    error = life.error()
    return PoolSnapshot(
        pool=shell.directory.pool_id if started else "",
        instance=shell.containers.instance if started else "",
        state=phase,
        sandboxes=SandboxCounts(**{item.value: len(state.in_phase(item)) for item in Phase}),
        sessions=len(state.sessions),
        waiting=len(state.waiters),
        running=sum(len(box.running) for box in state.sandboxes.values()),
        cold=len(state.cold),
        engine="up" if alive and state.health.reachable else "down",
        fault=state.health.fault.kind.value if state.health.fault else None,
        error=str(error) if error is not None else None,
        lost_log_lines=lost_lines(),
    )
