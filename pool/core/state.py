"""The state of one pool instance: its sandboxes, sessions and waiters, what is derived from them, and the changes that more
than one decision makes.

``pool.core.handlers`` applies events to it, ``pool.core.plan`` what should follow; both work on this state and on nothing else.
All counts are derived. What is due is always written ``now >= since + span``, the same sum that ``wake_at`` returns:
``now - since >= span`` rounds differently, so a clock that wakes at that sum could be too early, and would not wake again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pool.core import events as ev
from pool.core.events import Effect, Fault, Policy, Refusal, RefusalKind, SessionKey
from pool.core.transitions import Phase, Trigger, follow

STOPS_TO_DOUBT = 2
"""Failed stops of one sandbox after which its place is not counted on any more. One may pass: it is repeated at once."""


@dataclass(slots=True)
class SandboxState:
    """One sandbox. ``since`` is when it entered its phase. ``running`` holds the waiters whose calls run in it."""

    n: int
    phase: Phase | None = None
    since: float = 0.0
    session: SessionKey | None = None
    recorded: bool = False
    running: set[int] = field(default_factory=set)
    served: int = 0
    stop_attempts: int = 0
    stop_again_at: float | None = None


@dataclass(slots=True)
class SessionState:
    """One session. ``deaths`` are the times of its involuntary losses, the recent ones and maybe older ones;
    ``restarting`` asks for a sandbox even while nobody waits; ``not_before`` is its restart backoff. ``granted``: somebody
    has had a handle on it."""

    key: SessionKey
    epoch: int
    last_used: float
    handles: int = 0
    sandbox: int | None = None
    restarting: bool = False
    granted: bool = False
    not_before: float = 0.0
    deaths: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Waiter:
    """A caller that waits: for a session's sandbox (``acquire``), for a turn in it (``call``), or for a cold place (``cold``)."""

    id: int
    kind: str
    deadline: float
    since: float
    key: SessionKey = ("", "")
    generation: int | None = None


@dataclass(slots=True)
class Circuit:
    """Failures in a row of one kind of work. After one there is one trial at a time, none before ``retry_at``. Once
    ``fault`` is set the circuit is open: a caller that would wait for such work is refused with it until the next trial. ``last`` is what went wrong last, open or
    not."""

    failures: int = 0
    retry_at: float = 0.0
    fault: Fault | None = None
    last: Fault | None = None

    def fail(self, fault: Fault, policy: Policy, now: float, jitter: float) -> None:
        """A fault of the boundary opens the circuit at once; an engine's may pass, so it gets some tries."""
        self.failures, self.last = self.failures + 1, fault
        self.retry_at = max(self.retry_at, now + policy.backoff(self.failures, jitter))
        certain = fault.kind is not RefusalKind.ENGINE_UNAVAILABLE
        if certain or self.failures >= policy.failures_to_open or self.fault is not None:
            self.fault = fault

    def pace(self, usual: int, busy: int, now: float) -> int:
        """How much more may be begun now, where ``usual`` may be in flight and ``busy`` are."""
        if not self.failures:
            return usual - busy
        return 1 - busy if now >= self.retry_at else 0


@dataclass(slots=True)
class Health:
    """``reachable``: the engine answered last time. ``down`` says why it does not, and ``back_at`` when it is asked again.
    Starts and binds fail for reasons of their own (engine and image; state directory), so one's success says nothing
    about the other."""

    reachable: bool = False
    down: Fault | None = None
    back_at: float = 0.0
    starts: Circuit = field(default_factory=Circuit)
    binds: Circuit = field(default_factory=Circuit)

    @property
    def fault(self) -> Fault | None:
        """Why sandboxes cannot be had; ``None`` while they can."""
        return self.down or self.starts.fault or self.binds.fault

    def refuses(self, now: float) -> tuple[Fault, float] | None:
        """The fault that speaks against waiting now, and when it is looked at again; a due trial speaks for it."""
        if not self.reachable:
            return (self.down, self.back_at) if self.down else None
        for circuit in (self.starts, self.binds):
            if circuit.fault is not None and now < circuit.retry_at:
                return circuit.fault, circuit.retry_at
        return None


class PoolState:
    """The state of one pool instance. Before ``next_wake`` nothing changes by time alone."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.sandboxes: dict[int, SandboxState] = {}
        self.sessions: dict[SessionKey, SessionState] = {}
        self.waiters: dict[int, Waiter] = {}
        self.cold: set[int] = set()
        self.ending: set[int] = set()
        self.health = Health()
        self.close_deadline: float | None = None
        self.next_wake = math.inf
        self._counter = 0
        self._epochs = 0
        self._effects: list[Effect] = []

    # --- what can be derived ------------------------------------------------------------------------------------------

    def in_phase(self, phase: Phase) -> list[SandboxState]:
        return [box for box in self.sandboxes.values() if box.phase is phase]

    @property
    def closing(self) -> bool:
        return self.close_deadline is not None

    @property
    def drained(self) -> bool:
        """Whether a closing pool has nothing left to wait for."""
        return self.closing and not self.sandboxes and not self.cold and not self.waiters

    @property
    def has_standbys(self) -> bool:
        """Whether the engine is reachable and every standby that the policy asks for, and that has room, is ready."""
        taken = len(self.in_phase(Phase.BOUND)) + len(self.in_phase(Phase.STOPPING))
        wanted = min(self.policy.min_standby, self.policy.max_sandboxes - taken)
        return self.health.reachable and len(self.in_phase(Phase.STANDBY)) >= wanted

    def waiting(self) -> dict[SessionKey, None]:
        """Return the sessions that have waiters, the longest waiting first."""
        if not self.waiters:
            return {}
        return dict.fromkeys(waiter.key for waiter in self.waiters.values() if waiter.kind != "cold")

    def in_use(self, session: SessionState) -> bool:
        """Return whether a call runs or waits in the session; handles alone do not count."""
        running = session.sandbox is not None and bool(self.sandboxes[session.sandbox].running)
        return running or any(waiter.key == session.key for waiter in self.waiters.values() if waiter.kind != "cold")

    def is_active(self, session: SessionState) -> bool:
        """Return whether a session has a handle, a waiter or a sandbox; otherwise only its deaths are remembered."""
        return bool(session.handles) or session.sandbox is not None or self.in_use(session)

    def claims(self, now: float) -> list[SessionState]:
        """Return the sessions that need a sandbox, have none and may be given one now (not in restart backoff, not past their
        restart intensity), in the order they get one: restarts, then first come."""
        restarting = [session for session in self.sessions.values() if session.restarting]
        if not self.waiters and not restarting:
            return []
        waiting = self.waiting()
        wanting = [session for session in restarting if session.handles or session.key in waiting]
        wanting.sort(key=lambda session: session.deaths[-1] if session.deaths else 0.0)
        wanting += [session for key in waiting if not (session := self.sessions[key]).restarting]
        return [
            session
            for session in wanting
            if session.sandbox is None and now >= session.not_before and not self.past_restart_limit(session, now)
        ]

    def due(self, box: SandboxState, now: float) -> bool:
        """Return whether a bound sandbox is to be recycled, and admits no new call."""
        policy = self.policy
        return now >= box.since + policy.max_lifetime or bool(policy.max_calls and box.served >= policy.max_calls)

    def has_turn(self, n: int, now: float) -> bool:
        """Return whether a call could begin in a session's sandbox now."""
        box = self.sandboxes[n]
        return box.recorded and len(box.running) < self.policy.parallel and not self.due(box, now)

    def past_restart_limit(self, session: SessionState, now: float) -> bool:
        """Return whether the session is past its restart intensity: it is refused until its deaths are old enough."""
        limit = self.policy.restart_limit
        return len(session.deaths) > limit and len(self.recent_deaths(session, now)) > limit

    def recent_deaths(self, session: SessionState, now: float) -> list[float]:
        return [death for death in session.deaths if now < death + self.policy.restart_window]

    # --- entries ------------------------------------------------------------------------------------------------------

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def move(self, box: SandboxState, trigger: Trigger, now: float) -> None:
        """Move a sandbox to its next phase. No other place does; a sandbox without a phase is not kept."""
        box.phase, box.since = follow(box.phase, trigger), now
        if box.phase is None:
            del self.sandboxes[box.n]
        else:
            self.sandboxes[box.n] = box

    def begin(self, now: float) -> None:
        """Ask for a new sandbox."""
        self._counter += 1
        self.move(SandboxState(self._counter), Trigger.WANTED, now)
        self.emit(ev.StartSandbox(self._counter))

    def stop(self, box: SandboxState, trigger: Trigger, now: float, cause: str = "") -> None:
        """Ask for a sandbox to be removed. If a session owns it, it no longer does."""
        if box.phase is Phase.BOUND and box.session is not None:
            self.sessions[box.session].sandbox = None
        self.move(box, trigger, now)
        box.recorded = False
        self.emit(ev.StopSandbox(box.n, f"{trigger.value}:{cause}" if cause else trigger.value))

    def give_turn(self, waiter: int, n: int) -> None:
        """Let a call begin in a sandbox."""
        box = self.sandboxes[n]
        box.running.add(waiter)
        box.served += 1
        self.emit(ev.RunCall(waiter, n))

    def refuse(
        self,
        waiter: int,
        kind: RefusalKind,
        message: str,
        retry_after: float | None = None,
        *,
        permanent: bool = False,
    ) -> None:
        self.waiters.pop(waiter, None)
        self.emit(ev.Refuse(waiter, Refusal(kind, message, retry_after, permanent=permanent)))

    def end_calls(self, waiters: set[int], refusal: Refusal) -> None:
        """Ask running calls to end, each of them once."""
        for waiter in sorted(waiters - self.ending):
            self.ending.add(waiter)
            self.emit(ev.EndCall(waiter, refusal))

    def new_session(self, key: SessionKey, now: float) -> SessionState:
        self._epochs += 1
        session = self.sessions[key] = SessionState(key, self._epochs, last_used=now)
        return session

    def forget(self, session: SessionState, reason: str) -> None:
        del self.sessions[session.key]
        self.emit(ev.SessionForgotten(session.key, session.epoch, reason, session.granted))

    def give_back(self, key: SessionKey, now: float) -> None:
        """Take back the sandbox of an acquire that was cancelled or failed. If nothing has run in it and nothing will, it is removed at
        once instead of idling out; the plan decides about the session and its deaths."""
        session = self.sessions.get(key)
        if session is None or session.sandbox is None or session.handles or self.in_use(session):
            return
        box = self.sandboxes[session.sandbox]
        if not box.served:
            self.stop(box, Trigger.DECLINED, now)
