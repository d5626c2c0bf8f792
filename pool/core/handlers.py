"""Every decision about sandboxes, sessions, waiters, backoff and health: ``StateMachine.step(event, now) -> effects``.

Pure: no awaits, no clock, no logging, no random numbers. A handler below enters into the state (``pool.core.state``) what an
event says; then the plan (``pool.core.plan``) compares what is with what should be. ``now`` never goes backwards (the
shell's monotonic clock).

A handler that returns ``True`` vouches that the plan would find nothing to do; it is left out then, unless time alone has
made something due. Only the two events of a call that nobody else is concerned by are worth that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pool.core import events as ev
from pool.core.events import Effect, Event, Fault, Refusal, RefusalKind, SessionKey
from pool.core.plan import lost, plan, wake_at
from pool.core.state import Circuit, Health, PoolState, SandboxState, SessionState, Waiter
from pool.core.transitions import Phase as Phase
from pool.core.transitions import Trigger

_CLOSED_UNDER = Refusal(RefusalKind.SESSION_CLOSED, "the session was closed while this call ran", started=True)


class StateMachine(PoolState):
    """One pool instance. Feed it events with ``step``; carry the effects out in order."""

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event in at time ``now`` and return the effects, in the order in which to carry them out."""
        self._effects = []
        settled = _HANDLERS[type(event)](self, event, now)
        if not settled or now >= self.next_wake:
            plan(self, now)
            wake = wake_at(self, now)
            self.next_wake = math.inf if wake is None else wake
        return self._effects

    # --- what callers want --------------------------------------------------------------------------------------------

    def _on_acquire(self, event: ev.AcquireWanted, now: float) -> None:
        session = self.sessions.get(event.key)
        if event.generation is not None and (session is None or session.sandbox != event.generation):
            self.refuse(event.waiter, RefusalKind.STATE_LOST, lost(event.generation))
            return
        if not self._within_quota(event, session):
            return
        if session is None:
            session = self.new_session(event.key, now)
        if session.sandbox is None and self._queue_full(session, event.waiter):
            return
        self.waiters[event.waiter] = Waiter(event.waiter, "acquire", event.deadline, now, event.key, event.generation)

    def _on_call(self, event: ev.CallWanted, now: float) -> bool:
        session = self._session(event.key, event.epoch)
        if session is None:
            self.refuse(event.waiter, RefusalKind.SESSION_CLOSED, "the session is closed; acquire it again")
            return False
        if event.generation is not None and event.generation != session.sandbox:
            self.refuse(event.waiter, RefusalKind.STATE_LOST, lost(event.generation))
            return False
        if session.sandbox is None:
            if self._queue_full(session, event.waiter):
                return False
        elif not self.closing and now < event.deadline and self.has_turn(session.sandbox, now):
            self.give_turn(event.waiter, session.sandbox)
            return True
        queued = sum(1 for waiter in self.waiters.values() if waiter.kind == "call" and waiter.key == event.key)
        if queued >= self.policy.max_waiters:
            message = f"{queued} calls of this session wait already (pool.max_waiters)"
            self.refuse(event.waiter, RefusalKind.SESSION_BUSY, message, 1.0)
            return False
        self.waiters[event.waiter] = Waiter(event.waiter, "call", event.deadline, now, event.key, event.generation)
        return False

    def _on_cold(self, event: ev.ColdWanted, now: float) -> None:
        waiting = sum(1 for waiter in self.waiters.values() if waiter.kind == "cold")
        if len(self.cold) >= self.policy.max_cold and waiting >= self.policy.max_cold_waiters:
            message = f"{waiting} cold calls wait already (pool.max_cold_waiters); come back later"
            self.refuse(event.waiter, RefusalKind.POOL_EXHAUSTED, message, 1.0)
            return
        self.waiters[event.waiter] = Waiter(event.waiter, "cold", event.deadline, now)

    def _on_waiter_gone(self, event: ev.WaiterGone, now: float) -> None:
        waiter = self.waiters.pop(event.waiter, None)
        if waiter is None:
            self._call_over(event.waiter, now)
        elif waiter.kind == "acquire":
            self.give_back(waiter.key, now)

    def _on_call_ended(self, event: ev.CallEnded, now: float) -> bool:
        box = self._call_over(event.waiter, now)
        if box is None or box.phase is not Phase.BOUND:
            return False
        if event.poisoned:
            self._lose(box, event.poisoned, now, event.jitter)
            return False
        # From now on its session idles.
        self.next_wake = min(self.next_wake, now + self.policy.idle_timeout)
        return not (self.waiters or self.closing or self.due(box, now) or self.claims(now))

    def _on_grant_declined(self, event: ev.GrantDeclined, now: float) -> None:
        self._detach(event.key, event.epoch)
        if self._session(event.key, event.epoch) is not None:
            self.give_back(event.key, now)

    def _on_released(self, event: ev.HandleReleased, now: float) -> None:
        self._detach(event.key, event.epoch)

    def _on_session_ended(self, event: ev.SessionEnded, now: float) -> None:
        session = self._session(event.key, event.epoch)
        if session is None:
            return
        for waiter in [w for w in self.waiters.values() if w.kind != "cold" and w.key == session.key]:
            self.refuse(waiter.id, RefusalKind.SESSION_CLOSED, "the session was closed while this call waited")
        if session.sandbox is not None:
            box = self.sandboxes[session.sandbox]
            self.end_calls(box.running, _CLOSED_UNDER)
            self.stop(box, Trigger.CLOSED, now)
        self.forget(session, "closed")
        if deaths := self.recent_deaths(session, now):
            # Whoever acquires this session anew does not begin with a clean sheet: closing must not undo its backoff.
            heir = self.new_session(session.key, now)
            heir.deaths, heir.not_before = deaths, session.not_before

    # --- what becomes of sandboxes ------------------------------------------------------------------------------------

    def _on_started(self, event: ev.SandboxStarted, now: float) -> None:
        box = self._box(event.n, Phase.STARTING)
        if box is not None:
            self.move(box, Trigger.STARTED, now - event.age)
            self.health.starts = Circuit()

    def _on_start_failed(self, event: ev.SandboxStartFailed, now: float) -> None:
        box = self._box(event.n, Phase.STARTING)
        if box is not None:
            self.move(box, Trigger.START_FAILED, now)
            self._start_failed(event.fault, now, event.jitter)

    def _on_start_unknown(self, event: ev.SandboxStartUnknown, now: float) -> None:
        box = self._box(event.n, Phase.STARTING)
        if box is not None:
            self.stop(box, Trigger.START_UNKNOWN, now)
            self._start_failed(event.fault, now, event.jitter)

    def _on_died(self, event: ev.SandboxDied, now: float) -> None:
        # A death while starting is the start's own failure, and reported as such.
        box = self.sandboxes.get(event.n)
        if box is not None and box.phase is Phase.STANDBY:
            self.stop(box, Trigger.DIED, now, event.cause)
        elif box is not None and box.phase is Phase.BOUND:
            self._lose(box, event.cause, now, event.jitter)

    def _on_stopped(self, event: ev.SandboxStopped, now: float) -> None:
        box = self._box(event.n, Phase.STOPPING)
        if box is not None:
            self.move(box, Trigger.STOPPED, now)

    def _on_stop_failed(self, event: ev.SandboxStopFailed, now: float) -> None:
        box = self._box(event.n, Phase.STOPPING)
        if box is not None:
            box.stop_attempts += 1
            box.stop_again_at = now + self.policy.backoff(box.stop_attempts, event.jitter)

    def _on_bind_recorded(self, event: ev.BindRecorded, now: float) -> None:
        box = self._box(event.n, Phase.BOUND)
        if box is not None and not box.recorded:
            box.recorded = True
            self.health.binds = Circuit()

    def _on_bind_failed(self, event: ev.BindFailed, now: float) -> None:
        box = self._box(event.n, Phase.BOUND)
        if box is not None and not box.recorded:
            self.stop(box, Trigger.BIND_FAILED, now)
            self.health.binds.fail(event.fault, self.policy, now, event.jitter)

    # --- what the engine, the operator and time do --------------------------------------------------------------------

    def _on_engine_up(self, event: ev.EngineUp, now: float) -> None:
        # Only an engine that was away begins anew: to hear of it again says nothing about the starts that fail on it.
        if not self.health.reachable:
            self.health = Health(reachable=True, binds=self.health.binds)
            self._stop_sooner(now)

    def _on_engine_down(self, event: ev.EngineDown, now: float) -> None:
        health = self.health
        went_down, health.reachable = health.reachable, False
        health.down, health.back_at = event.fault, now + event.retry_after
        # An engine that goes down in order stops its containers first: those deaths were its own, not their sessions'.
        for session in self.sessions.values() if went_down else ():
            session.deaths = [death for death in session.deaths if now - death >= self.policy.engine_grace]
            session.not_before = min(session.not_before, now)

    def _on_policy(self, event: ev.PolicyChanged, now: float) -> None:
        self.policy = event.policy

    def _on_close(self, event: ev.CloseBegan, now: float) -> None:
        self.close_deadline = min(
            event.drain_deadline, math.inf if self.close_deadline is None else self.close_deadline
        )
        self._stop_sooner(now)

    def _on_tick(self, event: ev.Tick, now: float) -> None:
        """Only the plan is wanted."""

    # --- small steps --------------------------------------------------------------------------------------------------

    def _session(self, key: SessionKey, epoch: int) -> SessionState | None:
        session = self.sessions.get(key)
        return session if session is not None and session.epoch == epoch else None

    def _box(self, n: int, phase: Phase) -> SandboxState | None:
        """Sandbox ``n`` if it is in ``phase``; an event about any other comes too late."""
        box = self.sandboxes.get(n)
        return box if box is not None and box.phase is phase else None

    def _stop_sooner(self, now: float) -> None:
        """Try what could not be stopped again now, whatever its backoff is: what was in the way may be gone, or time short."""
        for box in self.sandboxes.values():
            if box.stop_again_at is not None:
                box.stop_again_at = now

    def _within_quota(self, event: ev.AcquireWanted, session: SessionState | None) -> bool:
        """Whether the agent may hold this session too; refuses where it may not."""
        agent, policy = event.key[0], self.policy
        quota = policy.agent_quotas.get(agent, policy.max_sessions_per_agent)
        if not quota or (session is not None and self.is_active(session)):
            return True
        held = sum(1 for other in self.sessions.values() if other.key[0] == agent and self.is_active(other))
        if held < quota:
            return True
        own = agent in policy.agent_quotas
        setting = "max_sessions in the agent's own table" if own else "pool.max_sessions_per_agent"
        message = f"this agent holds {held} sessions, its share is {quota} ({setting}); close one"
        self.refuse(event.waiter, RefusalKind.QUOTA_EXCEEDED, message, 1.0)
        return False

    def _queue_full(self, session: SessionState, waiter: int) -> bool:
        """Whether no further session may wait for a sandbox; refuses ``waiter`` then. Any number of callers may wait for
        one: a single sandbox serves them all."""
        limit = self.policy.max_waiters
        waiting = [key for key in self.waiting() if self.sessions[key].sandbox is None]
        if len(waiting) < limit or session.key in waiting:
            return False
        message = f"{limit} sessions wait already (pool.max_waiters); come back later"
        self.refuse(waiter, RefusalKind.POOL_EXHAUSTED, message, 1.0)
        return True

    def _detach(self, key: SessionKey, epoch: int) -> None:
        session = self._session(key, epoch)
        if session is not None and session.handles:
            session.handles -= 1

    def _call_over(self, waiter: int, now: float) -> SandboxState | None:
        """Take a running call off the state; the sandbox it ran in, unless it was cold or its sandbox is gone."""
        self.cold.discard(waiter)
        self.ending.discard(waiter)
        for box in self.sandboxes.values():
            if waiter in box.running:
                box.running.discard(waiter)
                if box.phase is Phase.BOUND and box.session is not None:
                    self.sessions[box.session].last_used = now
                return box
        return None

    def _lose(self, box: SandboxState, cause: str, now: float, jitter: float) -> None:
        """A bound sandbox was lost against its session's will: the session keeps its place and is restarted. This never
        counts against the engine: a hostile session must not close the pool for all."""
        session = self.sessions[box.session] if box.session is not None else None
        self.stop(box, Trigger.LOST, now, cause)
        if session is None:
            return
        session.restarting = True
        if box.running:
            session.last_used = now  # its calls ran until now; their ends are reported later
        # An engine that restarts takes every sandbox with it, which says nothing about any session.
        if cause != "engine":
            session.deaths = [*self.recent_deaths(session, now), now]
            # The first death is healed at once; a session that keeps dying waits longer each time.
            again = len(session.deaths) - 1
            session.not_before = now + (self.policy.backoff(again, jitter) if again else 0.0)

    def _start_failed(self, fault: Fault, now: float, jitter: float) -> None:
        # What the link last said of the engine is nearer the truth than a start that was cut off by it.
        if self.health.reachable:
            self.health.starts.fail(fault, self.policy, now, jitter)


_HANDLERS: dict[type, Callable[[StateMachine, Any, float], bool | None]] = {
    ev.Tick: StateMachine._on_tick,
    ev.AcquireWanted: StateMachine._on_acquire,
    ev.CallWanted: StateMachine._on_call,
    ev.ColdWanted: StateMachine._on_cold,
    ev.WaiterGone: StateMachine._on_waiter_gone,
    ev.CallEnded: StateMachine._on_call_ended,
    ev.GrantDeclined: StateMachine._on_grant_declined,
    ev.HandleReleased: StateMachine._on_released,
    ev.SessionEnded: StateMachine._on_session_ended,
    ev.SandboxStarted: StateMachine._on_started,
    ev.SandboxStartFailed: StateMachine._on_start_failed,
    ev.SandboxStartUnknown: StateMachine._on_start_unknown,
    ev.SandboxDied: StateMachine._on_died,
    ev.SandboxStopped: StateMachine._on_stopped,
    ev.SandboxStopFailed: StateMachine._on_stop_failed,
    ev.BindRecorded: StateMachine._on_bind_recorded,
    ev.BindFailed: StateMachine._on_bind_failed,
    ev.EngineUp: StateMachine._on_engine_up,
    ev.EngineDown: StateMachine._on_engine_down,
    ev.PolicyChanged: StateMachine._on_policy,
    ev.CloseBegan: StateMachine._on_close,
}
