"""What tests of the pure core share: the invariants that hold after every step, and a driver that checks them."""

from __future__ import annotations

import math
from typing import TypeVar

from pool.core import events as ev
from pool.core.handlers import Phase, StateMachine
from pool.core.plan import wake_at
from pool.core.state import SandboxState, SessionState

E = TypeVar("E")

UNREACHABLE = ev.Fault(ev.RefusalKind.ENGINE_UNAVAILABLE, "the engine does not answer")
NO_IMAGE = ev.Fault(ev.RefusalKind.IMAGE_MISSING, "the image is not on the engine")
NOT_INSTALLED = ev.Fault(ev.RefusalKind.ENGINE_UNAVAILABLE, "there is no such command", permanent=True)
UNUSABLE = ev.Fault(ev.RefusalKind.POOL_UNUSABLE, "the ledger cannot be written")

RETRYABLE_AFTER = {
    ev.RefusalKind.ENGINE_UNAVAILABLE,
    ev.RefusalKind.POOL_UNUSABLE,
    ev.RefusalKind.POOL_EXHAUSTED,
    ev.RefusalKind.QUOTA_EXCEEDED,
}
"""The kinds that tell the caller when to come back."""
RETRYABLE = RETRYABLE_AFTER | {ev.RefusalKind.SESSION_BUSY, ev.RefusalKind.SANDBOX_DIED}


def recent_deaths(state: StateMachine, session: SessionState, now: float) -> int:
    return sum(1 for death in session.deaths if now < death + state.policy.restart_window)


def may_have_one(state: StateMachine, session: SessionState, now: float) -> bool:
    """Whether this session wants a sandbox and may be given one now."""
    waits = any(w.kind != "cold" and w.key == session.key for w in state.waiters.values())
    wants = session.sandbox is None and (waits or (session.restarting and session.handles > 0))
    return wants and now >= session.not_before and recent_deaths(state, session, now) <= state.policy.restart_limit


def check_invariants(state: StateMachine, now: float) -> None:
    """Assert what holds after every ``step`` at ``now``, whatever the events were."""
    boxes, sessions, waiters, policy = state.sandboxes, state.sessions, state.waiters, state.policy
    for box in boxes.values():
        _check_sandbox(state, box)
    for session in sessions.values():
        if session.sandbox is not None:
            assert boxes[session.sandbox].session == session.key
            assert boxes[session.sandbox].phase is Phase.BOUND
        assert session.handles >= 0
    running = [waiter for box in boxes.values() for waiter in box.running]
    assert len(running) == len(set(running))
    assert not set(running) & state.cold
    assert not set(waiters) & (set(running) | state.cold)
    for waiter in waiters.values():
        assert waiter.deadline > now, f"{waiter} outlived its deadline"
        assert waiter.kind == "cold" or waiter.key in sessions
    wake = wake_at(state, now)
    assert wake is None or wake > now
    assert state.next_wake <= (math.inf if wake is None else wake), "it would be woken too late"
    standing = [box for box in boxes.values() if box.phase is Phase.STANDBY]
    if state.closing:
        assert not waiters
        assert not standing
        return
    _check_service(state, now)
    claims = sum(1 for session in sessions.values() if may_have_one(state, session, now))
    _check_binds(state, len(standing), claims, now)
    assert len(standing) <= policy.min_standby + claims
    bound = [box for box in boxes.values() if box.phase is Phase.BOUND]
    assert not standing or len(bound) + len(standing) <= policy.max_sandboxes, "standbys go first when the pool shrinks"
    starting = sum(1 for box in boxes.values() if box.phase is Phase.STARTING)
    wanted = claims + policy.min_standby - len(standing)
    places = policy.max_sandboxes - len(boxes) + starting
    if state.health.reachable and not state.health.starts.failures:
        assert starting >= min(wanted, policy.max_starting, places)
    elif state.health.reachable and now >= state.health.starts.retry_at:
        assert starting >= min(wanted, 1, places), "after a failure one trial at a time, once its backoff has passed"


def _check_binds(state: StateMachine, standing: int, claims: int, now: float) -> None:
    """No waiter waits while a standby is free; after a failed bind one bind at a time is tried, after its backoff."""
    binds = state.health.binds
    recording = sum(1 for box in state.in_phase(Phase.BOUND) if not box.recorded)
    if not state.health.reachable or not (standing and claims):
        return
    assert binds.failures, "somebody waits while a standby is free"
    assert now < binds.retry_at or recording, "the trial of a bind is due"


def _check_sandbox(state: StateMachine, box: SandboxState) -> None:
    if box.phase is Phase.BOUND:
        assert box.session is not None
        assert state.sessions[box.session].sandbox == box.n
    else:
        assert not box.recorded
    if box.phase in (Phase.STARTING, Phase.STANDBY):
        assert box.session is None
        assert not box.running


def _check_service(state: StateMachine, now: float) -> None:
    """No waiter is left waiting for what is there, or for what cannot come."""
    health = state.health
    refusing = health.down is not None and not health.reachable
    refusing |= any(circuit.fault and now < circuit.retry_at for circuit in (health.starts, health.binds))
    for waiter in state.waiters.values():
        if waiter.kind == "cold":
            assert len(state.cold) >= state.policy.max_cold or not health.reachable
            continue
        session = state.sessions[waiter.key]
        if session.sandbox is None:
            assert not refusing
            assert recent_deaths(state, session, now) <= state.policy.restart_limit
            continue
        box = state.sandboxes[session.sandbox]
        assert waiter.generation in (None, box.n)
        if box.recorded:
            assert waiter.kind == "call"
            assert len(box.running) >= state.policy.parallel or state.due(box, now)


class Core:
    """A ``StateMachine`` with a clock that only the test moves; the invariants are checked after every step."""

    def __init__(self, policy: ev.Policy, *, reachable: bool = True, now: float = 0.0) -> None:
        self.state, self.now, self._ids = StateMachine(policy), now, 0
        self.effects: list[ev.Effect] = []
        if reachable:
            self.feed(ev.EngineUp())

    def feed(self, *events: ev.Event, after: float = 0.0) -> list[ev.Effect]:
        """Move the clock by ``after`` seconds, step through ``events`` and return all their effects."""
        self.now += after
        self.effects = []
        for event in events:
            self.effects += self.state.step(event, self.now)
            check_invariants(self.state, self.now)
        return self.effects

    def only(self, kind: type[E]) -> E:
        """The one effect of this kind that the last ``feed`` had."""
        (found,) = self.all(kind)
        return found

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def _id(self) -> int:
        self._ids += 1
        return self._ids

    def acquire(self, session: str, *, agent: str = "agent", wait: float = 1000.0) -> int:
        """Ask for a session; the waiter's id."""
        waiter = self._id()
        self.feed(ev.AcquireWanted(waiter, (agent, session), self.now + wait))
        return waiter

    def call(self, grant: ev.Grant, session: str, *, wait: float = 1000.0, generation: int | None = None) -> int:
        waiter = self._id()
        self.feed(ev.CallWanted(waiter, ("agent", session), grant.epoch, self.now + wait, generation))
        return waiter

    def cold(self, *, wait: float = 1000.0) -> int:
        waiter = self._id()
        self.feed(ev.ColdWanted(waiter, self.now + wait))
        return waiter

    def start_all(self) -> list[ev.Effect]:
        """Every start that is in flight succeeds."""
        return self.feed(*(ev.SandboxStarted(box.n) for box in self.state.in_phase(Phase.STARTING)))

    def stop_all(self) -> list[ev.Effect]:
        """Every stop succeeds."""
        return self.feed(*(ev.SandboxStopped(box.n) for box in self.state.in_phase(Phase.STOPPING)))

    def granted(self, session: str) -> ev.Grant:
        """Acquire a session and carry out what it takes until its grant."""
        self.acquire(session)
        if not self.all(ev.BindSandbox):
            self.start_all()
        self.feed(ev.BindRecorded(self.only(ev.BindSandbox).n))
        return self.only(ev.Grant)

    def wake(self) -> list[ev.Effect]:
        """Sleep until the core asks to be woken."""
        wake = wake_at(self.state, self.now)
        assert wake is not None, "nothing is waited for"
        return self.feed(ev.Tick(), after=wake - self.now)
