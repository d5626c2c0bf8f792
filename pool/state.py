"""Every decision about sandboxes, sessions, waiters, backoff and health: ``PoolState.step(event, now) -> effects``.

Pure: no awaits, no clock, no logging, no random numbers. A handler notes what an event says; then one ``_plan``
compares what is with what should be and asks for the difference, so an event that was missed heals at the next tick.
All counts are derived. ``now`` never goes backwards (the shell's monotonic clock). What is due is always written
``now >= since + span``, the very sum that ``wake_at`` returns: ``now - since >= span`` rounds differently, so that a
sleeper woken at that sum could be too early and would not be woken again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pool import events as ev
from pool.events import Effect, Event, Fault, Policy, Refusal, RefusalKind, SessionKey


class Phase(Enum):
    """Where a sandbox is in its life; gone means absent."""

    STARTING = "starting"
    STANDBY = "standby"
    BOUND = "bound"
    STOPPING = "stopping"


@dataclass(slots=True)
class SandboxState:
    """One sandbox. ``since`` is when it entered its phase. ``running`` holds the waiters whose calls run in it."""

    n: int
    since: float
    phase: Phase = Phase.STARTING
    session: SessionKey | None = None
    recorded: bool = False
    running: set[int] = field(default_factory=set)
    served: int = 0
    stop_attempts: int = 0
    stop_again_at: float | None = None


@dataclass(slots=True)
class SessionState:
    """One session. ``deaths`` are the times of its recent involuntary losses; ``restarting`` asks for a sandbox even
    while nobody waits; ``not_before`` is its restart backoff."""

    key: SessionKey
    epoch: int
    last_used: float
    handles: int = 0
    sandbox: int | None = None
    restarting: bool = False
    not_before: float = 0.0
    deaths: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Waiter:
    """Somebody who waits: for a session's sandbox (``acquire``), for a turn in it (``call``), or for a cold place."""

    id: int
    kind: str
    deadline: float
    since: float
    key: SessionKey = ("", "")
    generation: int | None = None


@dataclass(slots=True)
class Health:
    """``reachable``: the engine answered last time. ``fault``: why waiters are refused; ``None`` while they are not."""

    reachable: bool = False
    fault: Fault | None = None
    failures: int = 0
    retry_at: float = 0.0


_DRAINED = Refusal(RefusalKind.SANDBOX_DIED, "the pool closed while this call ran", cause="drained", started=True)
_CLOSED_UNDER = Refusal(RefusalKind.SESSION_CLOSED, "the session was closed while this call ran", started=True)


def _lost(generation: int) -> str:
    return f"generation {generation} of this session is gone, and with it what it kept"


class PoolState:
    """The whole truth about one pool instance. Feed it events with ``step``; carry the effects out in order."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.sandboxes: dict[int, SandboxState] = {}
        self.sessions: dict[SessionKey, SessionState] = {}
        self.waiters: dict[int, Waiter] = {}
        self.cold: set[int] = set()
        self.ending: set[int] = set()
        self.health = Health()
        self.close_deadline: float | None = None
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

    def in_use(self, session: SessionState) -> bool:
        """A call runs or anyone waits; handles alone do not count."""
        running = session.sandbox is not None and bool(self.sandboxes[session.sandbox].running)
        return running or any(waiter.key == session.key for waiter in self.waiters.values() if waiter.kind != "cold")

    def claims(self) -> list[SessionState]:
        """The sessions that want a sandbox and have none, in the order they get one: restarts, then first come."""
        waiting: dict[SessionKey, None] = dict.fromkeys(w.key for w in self.waiters.values() if w.kind != "cold")
        wanting = [self.sessions[key] for key in waiting if self.sessions[key].sandbox is None]
        restarts = [
            session
            for session in self.sessions.values()
            if session.sandbox is None and session.restarting and (session.handles or session.key in waiting)
        ]
        restarts.sort(key=lambda session: session.deaths[-1] if session.deaths else 0.0)
        return restarts + [session for session in wanting if not session.restarting]

    def eligible_claims(self, now: float) -> list[SessionState]:
        """The claims that may be served now: not in restart backoff, and not past their restart intensity."""
        return [session for session in self.claims() if now >= session.not_before and not self._worn_out(session, now)]

    def due(self, box: SandboxState, now: float) -> bool:
        """Whether a bound sandbox admits no new call any more."""
        policy = self.policy
        return now >= box.since + policy.max_lifetime or bool(policy.max_calls and box.served >= policy.max_calls)

    def wake_at(self, now: float) -> float | None:
        """The next moment at which time alone changes something; ``None`` while only events can."""
        policy, times = self.policy, [w.deadline for w in self.waiters.values()]
        for box in self.sandboxes.values():
            if box.phase is Phase.STANDBY:
                times.append(box.since + policy.standby_max_age)
            elif box.phase is Phase.BOUND:
                times.append(box.since + policy.max_lifetime)
            elif box.stop_again_at is not None:
                times.append(box.stop_again_at)
        for session in self.sessions.values():
            times += [session.last_used + policy.idle_timeout, session.not_before]
            times += [death + policy.restart_window for death in session.deaths]
            if policy.reclaim_idle_after is not None:
                times.append(session.last_used + policy.reclaim_idle_after)
        times.append(self.health.retry_at)
        if self.close_deadline is not None:
            times.append(self.close_deadline)
        return min((time for time in times if time > now), default=None)

    # --- events -------------------------------------------------------------------------------------------------------

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event in at time ``now`` and return the effects, in the order in which to carry them out."""
        self._effects = []
        _HANDLERS[type(event)](self, event, now)
        self._plan(now)
        return self._effects

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _refuse_now(self, waiter: int, kind: RefusalKind, message: str, retry_after: float | None = None) -> None:
        self.waiters.pop(waiter, None)
        self._emit(ev.Refuse(waiter, Refusal(kind, message, retry_after)))

    def _on_tick(self, event: ev.Tick, now: float) -> None:
        """Only ``_plan`` is wanted."""

    def _on_acquire(self, event: ev.AcquireWanted, now: float) -> None:
        session = self.sessions.get(event.key)
        policy, agent = self.policy, event.key[0]
        if session is None or not self._counts(session):
            held = sum(1 for other in self.sessions.values() if other.key[0] == agent and self._counts(other))
            if policy.max_sessions_per_agent and held >= policy.max_sessions_per_agent:
                message = f"this agent holds {held} sessions, its share (pool.max_sessions_per_agent); close one"
                return self._refuse_now(event.waiter, RefusalKind.QUOTA_EXCEEDED, message, 1.0)
        if session is None:
            session = self._new_session(event.key, now)
        if session.sandbox is None and self._queue_full():
            message = f"{policy.max_waiters} callers wait already (pool.max_waiters); come back later"
            self._refuse_now(event.waiter, RefusalKind.POOL_EXHAUSTED, message, 1.0)
            return None
        self.waiters[event.waiter] = Waiter(event.waiter, "acquire", event.deadline, now, event.key)
        return None

    def _on_call(self, event: ev.CallWanted, now: float) -> None:
        session = self._session(event.key, event.epoch)
        if session is None:
            return self._refuse_now(event.waiter, RefusalKind.SESSION_CLOSED, "the session is closed; acquire it again")
        queued = sum(1 for waiter in self.waiters.values() if waiter.kind != "cold" and waiter.key == event.key)
        if event.generation is not None and event.generation != session.sandbox:
            return self._refuse_now(event.waiter, RefusalKind.STATE_LOST, _lost(event.generation))
        if session.sandbox is not None and queued >= self.policy.max_waiters:
            message = f"{queued} calls of this session wait already (pool.max_waiters)"
            return self._refuse_now(event.waiter, RefusalKind.SESSION_BUSY, message, 1.0)
        if session.sandbox is None and self._queue_full():
            message = f"{self.policy.max_waiters} callers wait already (pool.max_waiters); come back later"
            return self._refuse_now(event.waiter, RefusalKind.POOL_EXHAUSTED, message, 1.0)
        self.waiters[event.waiter] = Waiter(event.waiter, "call", event.deadline, now, event.key, event.generation)
        return None

    def _on_cold(self, event: ev.ColdWanted, now: float) -> None:
        waiting = sum(1 for waiter in self.waiters.values() if waiter.kind == "cold")
        if len(self.cold) >= self.policy.max_cold and waiting >= self.policy.max_cold_waiters:
            message = f"{waiting} cold calls wait already (pool.max_cold_waiters); come back later"
            return self._refuse_now(event.waiter, RefusalKind.POOL_EXHAUSTED, message, 1.0)
        self.waiters[event.waiter] = Waiter(event.waiter, "cold", event.deadline, now)
        return None

    def _on_waiter_gone(self, event: ev.WaiterGone, now: float) -> None:
        waiter = self.waiters.pop(event.waiter, None)
        if waiter is None:
            self._call_over(event.waiter, now)
        elif waiter.kind == "acquire":
            self._give_back(waiter.key)

    def _on_call_ended(self, event: ev.CallEnded, now: float) -> None:
        box = self._call_over(event.waiter, now)
        if box is not None and event.poisoned and box.phase is Phase.BOUND:
            self._lose(box, event.poisoned, now, event.jitter)

    def _on_grant_declined(self, event: ev.GrantDeclined, now: float) -> None:
        self._detach(event.key, event.epoch)
        if self._session(event.key, event.epoch) is not None:
            self._give_back(event.key)

    def _on_released(self, event: ev.HandleReleased, now: float) -> None:
        self._detach(event.key, event.epoch)

    def _on_session_ended(self, event: ev.SessionEnded, now: float) -> None:
        session = self._session(event.key, event.epoch)
        if session is not None:
            self._end_session(session, "closed")

    def _on_started(self, event: ev.SandboxStarted, now: float) -> None:
        box = self.sandboxes.get(event.n)
        if box is not None and box.phase is Phase.STARTING:
            box.phase, box.since = Phase.STANDBY, now
            self.health.failures = 0
            if self.health.reachable:
                self.health.fault = None

    def _on_start_failed(self, event: ev.SandboxStartFailed, now: float) -> None:
        box = self.sandboxes.get(event.n)
        if box is not None and box.phase is Phase.STARTING:
            del self.sandboxes[event.n]
            self._note_failure(event.fault, now, event.jitter)

    def _on_start_unknown(self, event: ev.SandboxStartUnknown, now: float) -> None:
        box = self.sandboxes.get(event.n)
        if box is not None and box.phase is Phase.STARTING:
            self._stop(box, "start_unknown")
            self._note_failure(event.fault, now, event.jitter)

    def _on_died(self, event: ev.SandboxDied, now: float) -> None:
        box = self.sandboxes.get(event.n)
        # A death while starting is the start's own failure, and reported as such.
        if box is None or box.phase in (Phase.STARTING, Phase.STOPPING):
            return
        if box.phase is Phase.STANDBY:
            self._stop(box, f"died:{event.cause}")
        else:
            self._lose(box, event.cause, now, event.jitter)

    def _on_stopped(self, event: ev.SandboxStopped, now: float) -> None:
        box = self.sandboxes.get(event.n)
        if box is not None and box.phase is Phase.STOPPING:
            del self.sandboxes[event.n]

    def _on_stop_failed(self, event: ev.SandboxStopFailed, now: float) -> None:
        box = self.sandboxes.get(event.n)
        if box is not None and box.phase is Phase.STOPPING:
            box.stop_attempts += 1
            box.stop_again_at = now + self.policy.backoff(box.stop_attempts, event.jitter)

    def _on_bind_recorded(self, event: ev.BindRecorded, now: float) -> None:
        box = self.sandboxes.get(event.n)
        if box is not None and box.phase is Phase.BOUND:
            box.recorded = True

    def _on_bind_failed(self, event: ev.BindFailed, now: float) -> None:
        box = self.sandboxes.get(event.n)
        if box is None or box.phase is not Phase.BOUND or box.session is None:
            return
        self.sessions[box.session].sandbox = None
        self._stop(box, "bind_failed")
        self._note_failure(event.fault, now, event.jitter)

    def _on_engine_up(self, event: ev.EngineUp, now: float) -> None:
        self.health = Health(reachable=True)

    def _on_engine_down(self, event: ev.EngineDown, now: float) -> None:
        went_down, self.health.reachable = self.health.reachable, False
        self.health.fault, self.health.retry_at = event.fault, now + event.retry_after
        # An engine that goes down in order stops its containers first: those deaths were its own, not their sessions'.
        for session in self.sessions.values() if went_down else ():
            session.deaths = [death for death in session.deaths if now - death >= self.policy.engine_grace]
            session.not_before = min(session.not_before, now)

    def _on_policy(self, event: ev.PolicyChanged, now: float) -> None:
        self.policy = event.policy

    def _on_close(self, event: ev.CloseBegan, now: float) -> None:
        self.close_deadline = event.drain_deadline

    # --- small steps that handlers and the plan share -----------------------------------------------------------------

    def _session(self, key: SessionKey, epoch: int) -> SessionState | None:
        session = self.sessions.get(key)
        return session if session is not None and session.epoch == epoch else None

    def _new_session(self, key: SessionKey, now: float) -> SessionState:
        self._epochs += 1
        session = self.sessions[key] = SessionState(key, self._epochs, last_used=now)
        return session

    def _counts(self, session: SessionState) -> bool:
        return bool(session.handles) or session.sandbox is not None or self.in_use(session)

    def _queue_full(self) -> bool:
        waiting = sum(1 for w in self.waiters.values() if w.kind != "cold" and self.sessions[w.key].sandbox is None)
        return waiting >= self.policy.max_waiters

    def _detach(self, key: SessionKey, epoch: int) -> None:
        session = self._session(key, epoch)
        if session is not None and session.handles:
            session.handles -= 1

    def _give_back(self, key: SessionKey) -> None:
        """An acquire came to nothing. If nobody has run anything in its sandbox and nobody will, the sandbox goes at
        once instead of idling out; the session itself, and its deaths, are ``_forget``'s business."""
        session = self.sessions.get(key)
        if session is None or session.sandbox is None or session.handles or self.in_use(session):
            return
        box = self.sandboxes[session.sandbox]
        if not box.served:
            session.sandbox = None
            self._stop(box, "declined")

    def _call_over(self, waiter: int, now: float) -> SandboxState | None:
        """Take a running call off the books; the sandbox it ran in, unless it was cold or its sandbox is gone."""
        self.cold.discard(waiter)
        self.ending.discard(waiter)
        for box in self.sandboxes.values():
            if waiter in box.running:
                box.running.discard(waiter)
                if box.session is not None and box.session in self.sessions:
                    self.sessions[box.session].last_used = now
                return box
        return None

    def _stop(self, box: SandboxState, reason: str) -> None:
        box.phase, box.recorded = Phase.STOPPING, False
        self._emit(ev.StopSandbox(box.n, reason))

    def _lose(self, box: SandboxState, cause: str, now: float, jitter: float) -> None:
        """A bound sandbox was lost against its session's will: the session keeps its place and is restarted."""
        session = self.sessions[box.session] if box.session is not None else None
        self._stop(box, f"lost:{cause}")
        if session is None:
            return
        session.sandbox, session.restarting = None, True
        # An engine that restarts takes every sandbox with it, which says nothing about any session.
        if cause != "engine":
            session.deaths.append(now)
            recent = len(self._recent(session, now))
            # The first death is healed at once; a session that keeps dying waits longer each time.
            session.not_before = now + (self.policy.backoff(recent - 1, jitter) if recent > 1 else 0.0)

    def _end_session(self, session: SessionState, reason: str) -> None:
        for waiter in [w for w in self.waiters.values() if w.kind != "cold" and w.key == session.key]:
            self._refuse_now(waiter.id, RefusalKind.SESSION_CLOSED, "the session was closed while this call waited")
        if session.sandbox is not None:
            box = self.sandboxes[session.sandbox]
            self._end_calls(box.running, _CLOSED_UNDER)
            self._stop(box, reason)
        del self.sessions[session.key]
        self._emit(ev.SessionForgotten(session.key, session.epoch, reason))

    def _end_calls(self, waiters: set[int], refusal: Refusal) -> None:
        for waiter in sorted(waiters - self.ending):
            self.ending.add(waiter)
            self._emit(ev.EndCall(waiter, refusal))

    def _worn_out(self, session: SessionState, now: float) -> bool:
        """Whether the session is past its restart intensity: it is refused until its deaths are old enough."""
        return len(self._recent(session, now)) > self.policy.restart_limit

    def _recent(self, session: SessionState, now: float) -> list[float]:
        return [death for death in session.deaths if now < death + self.policy.restart_window]

    def _note_failure(self, fault: Fault, now: float, jitter: float) -> None:
        """A start failed. A fault of the boundary refuses at once; an engine's may pass, so it gets some tries."""
        health = self.health
        health.failures += 1
        health.retry_at = max(health.retry_at, now + self.policy.backoff(health.failures, jitter))
        certain = fault.kind is not RefusalKind.ENGINE_UNAVAILABLE
        if not health.reachable:
            return  # what the link last said of the engine is nearer the truth than a start that was cut off by it
        if certain or health.failures >= self.policy.failures_to_open or health.fault is not None:
            health.fault = fault

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _plan(self, now: float) -> None:
        self._expire(now)
        self._retire(now)
        self._refuse_lost(now)
        self._bind(now)
        self._refuse_faulty(now)
        self._serve(now)
        self._admit_cold()
        self._reclaim(now)
        self._forget(now)
        self._trim(now)
        self._start(now)
        self._stop_again(now)

    def _expire(self, now: float) -> None:
        for waiter in [w for w in self.waiters.values() if w.deadline <= now]:
            waited = f"{now - waiter.since:.1f} s"
            if waiter.kind == "call" and self.sessions[waiter.key].sandbox is not None:
                message = f"the session's earlier calls took this call's whole deadline ({waited}); it never started"
                self._refuse_now(waiter.id, RefusalKind.SESSION_BUSY, message, 1.0)
            elif not self.health.reachable:
                message = f"the engine has not answered within {waited}; look at it with: emberpool engine status"
                self._refuse_now(waiter.id, RefusalKind.ENGINE_UNAVAILABLE, message, 1.0)
            else:
                what = "cold place" if waiter.kind == "cold" else "sandbox"
                message = f"no {what} became free within {waited}; retry, or raise the pool's limits"
                self._refuse_now(waiter.id, RefusalKind.POOL_EXHAUSTED, message, 1.0)
            if waiter.kind == "acquire":
                self._give_back(waiter.key)

    def _retire(self, now: float) -> None:
        """Stop what has had its time: aged standbys, idle sessions, used-up sandboxes; everything when closing."""
        policy = self.policy
        past_drain = self.close_deadline is not None and now >= self.close_deadline
        if past_drain:
            self._end_calls(self.cold, _DRAINED)
        for box in list(self.sandboxes.values()):
            if box.phase is Phase.STANDBY and (self.closing or now >= box.since + policy.standby_max_age):
                self._stop(box, "closing" if self.closing else "aged")
            elif box.phase is Phase.BOUND and box.session is not None:
                session = self.sessions[box.session]
                if past_drain:
                    self._end_calls(box.running, _DRAINED)
                elif box.running:
                    continue
                idle = now >= session.last_used + policy.idle_timeout and not self.in_use(session)
                if self.closing or idle or self.due(box, now):
                    session.sandbox, session.restarting = None, False
                    self._stop(box, "closing" if self.closing else "idle" if idle else "recycled")

        for session in self.sessions.values():
            if session.restarting and now >= session.last_used + policy.idle_timeout and not self.in_use(session):
                session.restarting = False  # it would have been reaped by now

    def _refuse_lost(self, now: float) -> None:
        """Answer whoever waits for what cannot come: a closing pool, a lost generation, a worn-out session."""
        window = self.policy.restart_window
        for waiter in list(self.waiters.values()):
            if self.closing:
                self._refuse_now(waiter.id, RefusalKind.POOL_CLOSED, "the pool is closing")
                continue
            session = self.sessions.get(waiter.key) if waiter.kind != "cold" else None
            if session is None:
                continue
            if waiter.generation is not None and waiter.generation != session.sandbox:
                self._refuse_now(waiter.id, RefusalKind.STATE_LOST, _lost(waiter.generation))
            elif session.sandbox is None and self._worn_out(session, now):
                recent = self._recent(session, now)
                again = recent[-self.policy.restart_limit - 1] + window - now
                message = f"this session's sandboxes died {len(recent)} times in {window:g} s (pool.restart_limit)"
                self._refuse_now(waiter.id, RefusalKind.SANDBOX_DIED, message, max(0.1, again))

    def _refuse_faulty(self, now: float) -> None:
        """While sandboxes cannot be had, refuse whoever would wait for one; a due trial start comes first."""
        fault, health = self.health.fault, self.health
        if fault is None or (health.reachable and now >= health.retry_at):
            return
        # Only an engine's fault may pass by itself; the others need the operator, so no time to come back is named.
        passes = fault.kind is RefusalKind.ENGINE_UNAVAILABLE
        retry_after = max(0.1, health.retry_at - now) if passes else None
        for waiter in list(self.waiters.values()):
            # Cold calls start containers of their own: only an engine that does not answer speaks for them too.
            cannot = self.sessions[waiter.key].sandbox is None if waiter.kind != "cold" else not health.reachable
            if cannot:
                self._refuse_now(waiter.id, fault.kind, fault.message, retry_after)

    def _bind(self, now: float) -> None:
        if not self.health.reachable or self.closing:
            return
        for session, box in zip(self.eligible_claims(now), self.in_phase(Phase.STANDBY), strict=False):
            box.phase, box.since, box.session = Phase.BOUND, now, session.key
            session.sandbox, session.restarting, session.last_used = box.n, False, now
            self._emit(ev.BindSandbox(box.n, session.key))

    def _serve(self, now: float) -> None:
        for waiter in list(self.waiters.values()):
            if waiter.kind == "cold":
                continue
            session = self.sessions[waiter.key]
            box = self.sandboxes[session.sandbox] if session.sandbox is not None else None
            if box is None or not box.recorded:
                continue
            if waiter.kind == "acquire":
                del self.waiters[waiter.id]
                session.handles += 1
                session.last_used = now
                self._emit(ev.Grant(waiter.id, box.n, session.epoch))
            elif len(box.running) < self.policy.parallel and not self.due(box, now):
                del self.waiters[waiter.id]
                box.running.add(waiter.id)
                box.served += 1
                self._emit(ev.RunCall(waiter.id, box.n))

    def _admit_cold(self) -> None:
        for waiter in [w for w in self.waiters.values() if w.kind == "cold"]:
            if len(self.cold) >= self.policy.max_cold or not self.health.reachable:
                return
            del self.waiters[waiter.id]
            self.cold.add(waiter.id)
            self._emit(ev.RunCold(waiter.id))

    def _forget(self, now: float) -> None:
        for session in list(self.sessions.values()):
            session.deaths = self._recent(session, now)
            if session.sandbox is not None or self.in_use(session):
                continue
            if session.handles:
                continue
            session.restarting = False
            # Recent deaths are remembered although nobody holds the session: acquiring anew must not reset the count.
            if not session.deaths or self.closing:
                del self.sessions[session.key]
                self._emit(ev.SessionForgotten(session.key, session.epoch, "unused"))

    def _reclaim(self, now: float) -> None:
        """Under pressure, whoever waits takes the place of the session that has been idle longest."""
        after = self.policy.reclaim_idle_after
        free = max(0, self.policy.max_sandboxes - len(self.sandboxes))
        coming = free + len(self.in_phase(Phase.STARTING)) + len(self.in_phase(Phase.STOPPING))
        missing = len(self.eligible_claims(now)) - coming
        if after is None or missing <= 0 or not self.health.reachable:
            return
        idle = [s for s in self.sessions.values() if s.sandbox is not None and not self.in_use(s)]
        for session in sorted(idle, key=lambda s: s.last_used)[:missing]:
            if now >= session.last_used + after and session.sandbox is not None:
                box, session.sandbox = self.sandboxes[session.sandbox], None
                self._stop(box, "reclaimed")

    def _trim(self, now: float) -> None:
        """Standbys beyond what is wanted, or beyond a pool that shrank, go; bound sandboxes are never killed for it."""
        standbys = self.in_phase(Phase.STANDBY)
        surplus = len(standbys) - max(self.policy.min_standby, len(self.eligible_claims(now)))
        over = len(self.sandboxes) - len(self.in_phase(Phase.STOPPING)) - self.policy.max_sandboxes
        for box in standbys[: max(surplus, over, 0)]:
            self._stop(box, "surplus")

    def _start(self, now: float) -> None:
        if self.closing or not self.health.reachable:
            return
        policy, starting = self.policy, len(self.in_phase(Phase.STARTING))
        standing = len(self.in_phase(Phase.STANDBY))
        wanted = len(self.eligible_claims(now)) + max(0, policy.min_standby - standing) - starting
        pace = policy.max_starting - starting
        if self.health.failures:
            # After a failure one trial at a time, and not before its backoff has passed.
            pace = 0 if now < self.health.retry_at else 1 - starting
        for _ in range(min(wanted, pace, policy.max_sandboxes - len(self.sandboxes))):
            self._counter += 1
            self.sandboxes[self._counter] = SandboxState(self._counter, since=now)
            self._emit(ev.StartSandbox(self._counter))

    def _stop_again(self, now: float) -> None:
        for box in self.in_phase(Phase.STOPPING):
            if box.stop_again_at is not None and now >= box.stop_again_at:
                box.stop_again_at = None
                self._emit(ev.StopSandbox(box.n, "again"))


_HANDLERS: dict[type, Callable[[PoolState, Any, float], None]] = {
    ev.Tick: PoolState._on_tick,
    ev.AcquireWanted: PoolState._on_acquire,
    ev.CallWanted: PoolState._on_call,
    ev.ColdWanted: PoolState._on_cold,
    ev.WaiterGone: PoolState._on_waiter_gone,
    ev.CallEnded: PoolState._on_call_ended,
    ev.GrantDeclined: PoolState._on_grant_declined,
    ev.HandleReleased: PoolState._on_released,
    ev.SessionEnded: PoolState._on_session_ended,
    ev.SandboxStarted: PoolState._on_started,
    ev.SandboxStartFailed: PoolState._on_start_failed,
    ev.SandboxStartUnknown: PoolState._on_start_unknown,
    ev.SandboxDied: PoolState._on_died,
    ev.SandboxStopped: PoolState._on_stopped,
    ev.SandboxStopFailed: PoolState._on_stop_failed,
    ev.BindRecorded: PoolState._on_bind_recorded,
    ev.BindFailed: PoolState._on_bind_failed,
    ev.EngineUp: PoolState._on_engine_up,
    ev.EngineDown: PoolState._on_engine_down,
    ev.PolicyChanged: PoolState._on_policy,
    ev.CloseBegan: PoolState._on_close,
}
