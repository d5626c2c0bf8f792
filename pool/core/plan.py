"""The plan: compare what is with what should be, and ask for the difference.

It runs whole after every event, so an event that was missed heals at the next tick. Each step below looks at the state
as the steps before it left them.
"""

from __future__ import annotations

from pool.core import events as ev
from pool.core.events import Refusal, RefusalKind
from pool.core.state import STOPS_TO_DOUBT, PoolState, SandboxState
from pool.core.transitions import Phase, Trigger

_DRAINED = Refusal(RefusalKind.SANDBOX_DIED, "the pool closed while this call ran", cause="drained", started=True)


def lost(generation: int) -> str:
    """Return the message for a request that names a generation that its session does not have."""
    return f"generation {generation} of this session is gone, and with it what it kept"


def plan(state: PoolState, now: float) -> None:
    """Decide all that follows from the state at ``now``. Twice at the same moment is the same as once."""
    if state.waiters:
        _expire(state, now)
    _retire(state, now)
    if state.waiters:
        _refuse_lost(state, now)
    _shrink(state, now)
    _bind(state, now)
    if state.waiters:
        _refuse_faulty(state, now)
        _serve(state, now)
        _admit_cold(state)
    # Nothing from here on adds or removes a claim.
    claims = len(state.claims(now))
    _reclaim(state, claims, now)
    _forget(state, now)
    _level(state, claims, now)
    _stop_again(state, now)


def wake_at(state: PoolState, now: float) -> float | None:
    """The next moment at which time alone changes something; ``None`` while only events can."""
    policy, health = state.policy, state.health
    times = [waiter.deadline for waiter in state.waiters.values()]
    for box in state.sandboxes.values():
        if box.phase is Phase.STANDBY:
            times.append(box.since + policy.standby_max_age)
        elif box.phase is Phase.BOUND:
            times.append(box.since + policy.max_lifetime)
        elif box.stop_again_at is not None:
            times.append(box.stop_again_at)
    # Nothing is reclaimed unless a waiter needs a place.
    reclaim_after = policy.reclaim_idle_after if state.claims(now) else None
    for session in state.sessions.values():
        if session.sandbox is not None or session.restarting:
            times.append(session.last_used + policy.idle_timeout)
            if reclaim_after is not None:
                times.append(session.last_used + reclaim_after)
        if session.deaths:
            times.append(session.not_before)
            times += [death + policy.restart_window for death in session.deaths]
    times += (health.starts.retry_at, health.binds.retry_at)
    if state.close_deadline is not None:
        times.append(state.close_deadline)
    return min([time for time in times if time > now], default=None)


def _expire(state: PoolState, now: float) -> None:
    for waiter in [waiter for waiter in state.waiters.values() if waiter.deadline <= now]:
        waited = f"{now - waiter.since:.1f} s"
        if waiter.kind == "call" and state.sessions[waiter.key].sandbox is not None:
            message = f"the session's earlier calls took this call's whole deadline ({waited}); it never started"
            state.refuse(waiter.id, RefusalKind.SESSION_BUSY, message, 1.0)
        elif not state.health.reachable:
            message = f"the engine has not answered within {waited}; look at it with: emberpool engine status"
            state.refuse(waiter.id, RefusalKind.ENGINE_UNAVAILABLE, message, 1.0)
        elif waiter.kind != "cold" and (fault := state.health.starts.last) is not None:
            message = f"no sandbox could be started within {waited}: {fault.message}"
            state.refuse(waiter.id, fault.kind, message, 1.0 if fault.may_pass else None, permanent=fault.permanent)
        else:
            what = "cold place" if waiter.kind == "cold" else "sandbox"
            message = f"no {what} became free within {waited}; retry, or raise the pool's limits"
            state.refuse(waiter.id, RefusalKind.POOL_EXHAUSTED, message, 1.0)
        if waiter.kind == "acquire":
            state.give_back(waiter.key, now)


def _retire(state: PoolState, now: float) -> None:
    """Stop what has had its time: aged standbys, idle sessions, used-up sandboxes; everything when closing."""
    policy, closing = state.policy, state.closing
    past_drain = state.close_deadline is not None and now >= state.close_deadline
    if past_drain:
        state.end_calls(state.cold, _DRAINED)
    for box in state.sandboxes.values():
        if box.phase is Phase.STANDBY:
            if closing or now >= box.since + policy.standby_max_age:
                state.stop(box, Trigger.CLOSING if closing else Trigger.AGED, now)
        elif box.phase is Phase.BOUND and box.session is not None:
            if past_drain:
                state.end_calls(box.running, _DRAINED)
            elif box.running:
                continue
            session = state.sessions[box.session]
            if closing:
                state.stop(box, Trigger.CLOSING, now)
            elif now >= session.last_used + policy.idle_timeout and session.key not in state.waiting():
                state.stop(box, Trigger.IDLE, now)
            elif state.due(box, now):
                state.stop(box, Trigger.RECYCLED, now)
    for session in state.sessions.values():
        if session.restarting and now >= session.last_used + policy.idle_timeout and session.key not in state.waiting():
            session.restarting = False  # it would have been reaped by now


def _refuse_lost(state: PoolState, now: float) -> None:
    """Answer the waiters for what cannot come: a closing pool, a lost generation, a worn-out session."""
    policy = state.policy
    for waiter in list(state.waiters.values()):
        if state.closing:
            state.refuse(waiter.id, RefusalKind.POOL_CLOSED, "the pool is closing")
            continue
        session = state.sessions.get(waiter.key) if waiter.kind != "cold" else None
        if session is None:
            continue
        if waiter.generation is not None and waiter.generation != session.sandbox:
            state.refuse(waiter.id, RefusalKind.STATE_LOST, lost(waiter.generation))
        elif session.sandbox is None and state.past_restart_limit(session, now):
            recent, window = state.recent_deaths(session, now), policy.restart_window
            again = recent[-policy.restart_limit - 1] + window - now
            message = f"this session's sandboxes died {len(recent)} times in {window:g} s (pool.restart_limit)"
            state.refuse(waiter.id, RefusalKind.SANDBOX_DIED, message, max(0.1, again))


def _shrink(state: PoolState, now: float) -> None:
    """In a pool that was made smaller no standby stands beyond its limit, also one whose start was in flight then.
    It goes before anybody is given it; sandboxes that have a session stay, and the pool shrinks as they end."""
    limit = state.policy.max_sandboxes
    if len(state.sandboxes) > limit:
        standbys = state.in_phase(Phase.STANDBY)
        over = len(standbys) + len(state.in_phase(Phase.BOUND)) - limit
        for box in standbys[: max(0, over)]:
            state.stop(box, Trigger.SURPLUS, now)


def _bind(state: PoolState, now: float) -> None:
    """Give standbys to the sessions that need one."""
    standbys = state.in_phase(Phase.STANDBY)
    if not standbys or not state.health.reachable or state.closing:
        return
    if state.health.binds.failures:
        # Each failed bind costs a standby, so one is tried at a time.
        recording = sum(1 for box in state.in_phase(Phase.BOUND) if not box.recorded)
        del standbys[max(0, state.health.binds.pace(1, recording, now)) :]
    for session, box in zip(state.claims(now), standbys, strict=False):
        state.move(box, Trigger.GIVEN, now)
        box.session, session.sandbox = session.key, box.n
        session.restarting, session.last_used = False, now
        state.emit(ev.BindSandbox(box.n, session.key))


def _refuse_faulty(state: PoolState, now: float) -> None:
    """While sandboxes cannot be had, refuse callers that would wait for one; a due trial comes first."""
    refuses = state.health.refuses(now)
    if refuses is None:
        return
    fault, again = refuses
    retry_after = max(0.1, again - now) if fault.may_pass else None
    for waiter in list(state.waiters.values()):
        # Cold calls start containers of their own: only an engine that does not answer speaks for them too.
        cold = waiter.kind == "cold"
        cannot = not state.health.reachable if cold else state.sessions[waiter.key].sandbox is None
        if cannot:
            state.refuse(waiter.id, fault.kind, fault.message, retry_after, permanent=fault.permanent)


def _serve(state: PoolState, now: float) -> None:
    """Hand out handles and turns in sandboxes whose ledger entries are made."""
    for waiter in list(state.waiters.values()):
        session = state.sessions[waiter.key] if waiter.kind != "cold" else None
        if session is None or session.sandbox is None:
            continue
        box = state.sandboxes[session.sandbox]
        if not box.recorded:
            continue
        if waiter.kind == "acquire":
            del state.waiters[waiter.id]
            session.handles += 1
            session.granted = True
            session.last_used = now
            state.emit(ev.Grant(waiter.id, box.n, session.epoch))
        elif state.has_turn(box.n, now):
            del state.waiters[waiter.id]
            state.give_turn(waiter.id, box.n)


def _admit_cold(state: PoolState) -> None:
    for waiter in [waiter for waiter in state.waiters.values() if waiter.kind == "cold"]:
        if len(state.cold) >= state.policy.max_cold or not state.health.reachable:
            return
        del state.waiters[waiter.id]
        state.cold.add(waiter.id)
        state.emit(ev.RunCold(waiter.id))


def _reclaim(state: PoolState, claims: int, now: float) -> None:
    """Under pressure, a waiter takes the place of the session that has been idle longest.

    No more places are taken than starts can use now: a waiter that stops waiting before its start has cost no session its state.
    """
    after, health = state.policy.reclaim_idle_after, state.health
    starting, standing = len(state.in_phase(Phase.STARTING)), len(state.in_phase(Phase.STANDBY))
    pace = max(0, health.starts.pace(state.policy.max_starting, starting, now))
    # Binds are tried one at a time while the ledger takes none.
    useful = min(claims, pace + starting + standing, 1 if health.binds.failures else claims)
    if not useful or after is None or not health.reachable:
        return
    # Every other place is free, or will be when what is in flight ends.
    taken = len(state.in_phase(Phase.BOUND))
    taken += sum(1 for box in state.in_phase(Phase.STOPPING) if box.stop_attempts >= STOPS_TO_DOUBT)
    over = taken - state.policy.max_sandboxes
    waiting = state.waiting()
    idle: list[tuple[float, SandboxState]] = []
    for session in state.sessions.values():
        if session.sandbox is not None and session.key not in waiting and now >= session.last_used + after:
            box = state.sandboxes[session.sandbox]
            if not box.running:
                idle.append((session.last_used, box))
    # In a pool that was made smaller the first few would make no place for anybody: then nobody gives way for nothing.
    if len(idle) > over:
        idle.sort(key=lambda pair: pair[0])
        for _, box in idle[: max(0, over + useful)]:
            state.stop(box, Trigger.RECLAIMED, now)


def _forget(state: PoolState, now: float) -> None:
    """Drop sessions that nobody holds. Recent deaths are remembered all the same: acquiring anew must not reset them."""
    unheld = [session for session in state.sessions.values() if session.sandbox is None and not session.handles]
    waiting = state.waiting() if unheld else {}
    for session in unheld:
        if session.key not in waiting:
            session.restarting = False
            if state.closing or not state.recent_deaths(session, now):
                state.forget(session, "pool_closed" if state.closing else "unused")


def _level(state: PoolState, claims: int, now: float) -> None:
    """Standbys beyond what is wanted go. For what is missing ask for as many starts as places, pace and the engine's state
    allow."""
    policy, health, standbys = state.policy, state.health, state.in_phase(Phase.STANDBY)
    missing = policy.min_standby + claims - len(standbys)
    for box in standbys[: max(0, -missing)]:
        state.stop(box, Trigger.SURPLUS, now)
    free = policy.max_sandboxes - len(state.sandboxes)
    if missing <= 0 or free <= 0 or state.closing or not health.reachable:
        return
    starting = len(state.in_phase(Phase.STARTING))
    for _ in range(min(missing - starting, health.starts.pace(policy.max_starting, starting, now), free)):
        state.begin(now)


def _stop_again(state: PoolState, now: float) -> None:
    for box in state.sandboxes.values():
        if box.stop_again_at is not None and now >= box.stop_again_at:
            box.stop_again_at = None
            state.emit(ev.StopSandbox(box.n, "again"))
