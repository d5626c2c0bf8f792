"""The plan: compare what is with what should be, and ask for the difference.

It runs whole after every event, so an event that was missed heals at the next tick. Each step below looks at the books
as the steps before it left them.
"""

from __future__ import annotations

from pool.core import events as ev
from pool.core.events import Fault, Refusal, RefusalKind
from pool.core.state import STOPS_TO_DOUBT, Books, SandboxState
from pool.core.transitions import Phase, Trigger

_DRAINED = Refusal(RefusalKind.SANDBOX_DIED, "the pool closed while this call ran", cause="drained", started=True)


def lost(generation: int) -> str:
    """What is told to whoever asks for a generation that its session does not have."""
    return f"generation {generation} of this session is gone, and with it what it kept"


def plan(books: Books, now: float) -> None:
    """Decide all that follows from the books at ``now``. Twice at the same moment is the same as once."""
    if books.waiters:
        _expire(books, now)
    _retire(books, now)
    if books.waiters:
        _refuse_lost(books, now)
    _shrink(books, now)
    _bind(books, now)
    if books.waiters:
        _refuse_faulty(books, now)
        _serve(books, now)
        _admit_cold(books)
    # Nothing from here on adds or removes a claim.
    claims = len(books.claims(now))
    _reclaim(books, claims, now)
    _forget(books, now)
    _level(books, claims, now)
    _stop_again(books, now)


def wake_at(books: Books, now: float) -> float | None:
    """The next moment at which time alone changes something; ``None`` while only events can."""
    policy, health = books.policy, books.health
    times = [waiter.deadline for waiter in books.waiters.values()]
    for box in books.sandboxes.values():
        if box.phase is Phase.STANDBY:
            times.append(box.since + policy.standby_max_age)
        elif box.phase is Phase.BOUND:
            times.append(box.since + policy.max_lifetime)
        elif box.stop_again_at is not None:
            times.append(box.stop_again_at)
    # Nobody gives way unless somebody wants a place.
    reclaim_after = policy.reclaim_idle_after if books.claims(now) else None
    for session in books.sessions.values():
        if session.sandbox is not None or session.restarting:
            times.append(session.last_used + policy.idle_timeout)
            if reclaim_after is not None:
                times.append(session.last_used + reclaim_after)
        if session.deaths:
            times.append(session.not_before)
            times += [death + policy.restart_window for death in session.deaths]
    times += (health.starts.retry_at, health.binds.retry_at)
    if books.close_deadline is not None:
        times.append(books.close_deadline)
    return min([time for time in times if time > now], default=None)


def _expire(books: Books, now: float) -> None:
    for waiter in [waiter for waiter in books.waiters.values() if waiter.deadline <= now]:
        waited = f"{now - waiter.since:.1f} s"
        if waiter.kind == "call" and books.sessions[waiter.key].sandbox is not None:
            message = f"the session's earlier calls took this call's whole deadline ({waited}); it never started"
            books.refuse(waiter.id, RefusalKind.SESSION_BUSY, message, 1.0)
        elif not books.health.reachable:
            message = f"the engine has not answered within {waited}; look at it with: emberpool engine status"
            books.refuse(waiter.id, RefusalKind.ENGINE_UNAVAILABLE, message, 1.0)
        elif waiter.kind != "cold" and (fault := books.health.starts.last) is not None:
            message = f"no sandbox could be started within {waited}: {fault.message}"
            books.refuse(waiter.id, fault.kind, message, 1.0 if _passes(fault) else None)
        else:
            what = "cold place" if waiter.kind == "cold" else "sandbox"
            message = f"no {what} became free within {waited}; retry, or raise the pool's limits"
            books.refuse(waiter.id, RefusalKind.POOL_EXHAUSTED, message, 1.0)
        if waiter.kind == "acquire":
            books.give_back(waiter.key, now)


def _retire(books: Books, now: float) -> None:
    """Stop what has had its time: aged standbys, idle sessions, used-up sandboxes; everything when closing."""
    policy, closing = books.policy, books.closing
    past_drain = books.close_deadline is not None and now >= books.close_deadline
    if past_drain:
        books.end_calls(books.cold, _DRAINED)
    for box in books.sandboxes.values():
        if box.phase is Phase.STANDBY:
            if closing or now >= box.since + policy.standby_max_age:
                books.stop(box, Trigger.CLOSING if closing else Trigger.AGED, now)
        elif box.phase is Phase.BOUND and box.session is not None:
            if past_drain:
                books.end_calls(box.running, _DRAINED)
            elif box.running:
                continue
            session = books.sessions[box.session]
            if closing:
                books.stop(box, Trigger.CLOSING, now)
            elif now >= session.last_used + policy.idle_timeout and session.key not in books.waiting():
                books.stop(box, Trigger.IDLE, now)
            elif books.due(box, now):
                books.stop(box, Trigger.RECYCLED, now)
    for session in books.sessions.values():
        if session.restarting and now >= session.last_used + policy.idle_timeout and session.key not in books.waiting():
            session.restarting = False  # it would have been reaped by now


def _refuse_lost(books: Books, now: float) -> None:
    """Answer whoever waits for what cannot come: a closing pool, a lost generation, a worn-out session."""
    policy = books.policy
    for waiter in list(books.waiters.values()):
        if books.closing:
            books.refuse(waiter.id, RefusalKind.POOL_CLOSED, "the pool is closing")
            continue
        session = books.sessions.get(waiter.key) if waiter.kind != "cold" else None
        if session is None:
            continue
        if waiter.generation is not None and waiter.generation != session.sandbox:
            books.refuse(waiter.id, RefusalKind.STATE_LOST, lost(waiter.generation))
        elif session.sandbox is None and books.worn_out(session, now):
            recent, window = books.recent_deaths(session, now), policy.restart_window
            again = recent[-policy.restart_limit - 1] + window - now
            message = f"this session's sandboxes died {len(recent)} times in {window:g} s (pool.restart_limit)"
            books.refuse(waiter.id, RefusalKind.SANDBOX_DIED, message, max(0.1, again))


def _shrink(books: Books, now: float) -> None:
    """In a pool that was made smaller no standby stands beyond its limit, also one whose start was in flight then.
    It goes before anybody is given it; sandboxes that have a session stay, and the pool shrinks as they end."""
    limit = books.policy.max_sandboxes
    if len(books.sandboxes) > limit:
        standbys = books.in_phase(Phase.STANDBY)
        over = len(standbys) + len(books.in_phase(Phase.BOUND)) - limit
        for box in standbys[: max(0, over)]:
            books.stop(box, Trigger.SURPLUS, now)


def _bind(books: Books, now: float) -> None:
    """Give standbys to those who want one."""
    standbys = books.in_phase(Phase.STANDBY)
    if not standbys or not books.health.reachable or books.closing:
        return
    if books.health.binds.failures:
        # Each failed bind costs a standby, so one is tried at a time.
        recording = sum(1 for box in books.in_phase(Phase.BOUND) if not box.recorded)
        del standbys[max(0, books.health.binds.pace(1, recording, now)) :]
    for session, box in zip(books.claims(now), standbys, strict=False):
        books.move(box, Trigger.GIVEN, now)
        box.session, session.sandbox = session.key, box.n
        session.restarting, session.last_used = False, now
        books.emit(ev.BindSandbox(box.n, session.key))


def _passes(fault: Fault) -> bool:
    """An engine comes back and a disk is emptied; the other faults need the operator, so no time to come back is named."""
    return fault.kind in (RefusalKind.ENGINE_UNAVAILABLE, RefusalKind.POOL_UNUSABLE)


def _refuse_faulty(books: Books, now: float) -> None:
    """While sandboxes cannot be had, refuse whoever would wait for one; a due trial comes first."""
    refuses = books.health.refuses(now)
    if refuses is None:
        return
    fault, again = refuses
    retry_after = max(0.1, again - now) if _passes(fault) else None
    for waiter in list(books.waiters.values()):
        # Cold calls start containers of their own: only an engine that does not answer speaks for them too.
        cold = waiter.kind == "cold"
        cannot = not books.health.reachable if cold else books.sessions[waiter.key].sandbox is None
        if cannot:
            books.refuse(waiter.id, fault.kind, fault.message, retry_after)


def _serve(books: Books, now: float) -> None:
    """Hand out handles and turns in sandboxes whose ledger entries are made."""
    for waiter in list(books.waiters.values()):
        session = books.sessions[waiter.key] if waiter.kind != "cold" else None
        if session is None or session.sandbox is None:
            continue
        box = books.sandboxes[session.sandbox]
        if not box.recorded:
            continue
        if waiter.kind == "acquire":
            del books.waiters[waiter.id]
            session.handles += 1
            session.granted = True
            session.last_used = now
            books.emit(ev.Grant(waiter.id, box.n, session.epoch))
        elif books.has_turn(box.n, now):
            del books.waiters[waiter.id]
            books.give_turn(waiter.id, box.n)


def _admit_cold(books: Books) -> None:
    for waiter in [waiter for waiter in books.waiters.values() if waiter.kind == "cold"]:
        if len(books.cold) >= books.policy.max_cold or not books.health.reachable:
            return
        del books.waiters[waiter.id]
        books.cold.add(waiter.id)
        books.emit(ev.RunCold(waiter.id))


def _reclaim(books: Books, claims: int, now: float) -> None:
    """Under pressure, whoever waits takes the place of the session that has been idle longest.

    No more places are taken than starts can use now: whoever stops waiting before its start has cost nobody's state.
    """
    after, health = books.policy.reclaim_idle_after, books.health
    starting, standing = len(books.in_phase(Phase.STARTING)), len(books.in_phase(Phase.STANDBY))
    pace = max(0, health.starts.pace(books.policy.max_starting, starting, now))
    # Binds are tried one at a time while the ledger takes none.
    useful = min(claims, pace + starting + standing, 1 if health.binds.failures else claims)
    if not useful or after is None or not health.reachable:
        return
    # Every other place is free, or will be when what is in flight ends.
    taken = len(books.in_phase(Phase.BOUND))
    taken += sum(1 for box in books.in_phase(Phase.STOPPING) if box.stop_attempts >= STOPS_TO_DOUBT)
    over = taken - books.policy.max_sandboxes
    waiting = books.waiting()
    idle: list[tuple[float, SandboxState]] = []
    for session in books.sessions.values():
        if session.sandbox is not None and session.key not in waiting and now >= session.last_used + after:
            box = books.sandboxes[session.sandbox]
            if not box.running:
                idle.append((session.last_used, box))
    # In a pool that was made smaller the first few would make no place for anybody: then nobody gives way for nothing.
    if len(idle) > over:
        idle.sort(key=lambda pair: pair[0])
        for _, box in idle[: max(0, over + useful)]:
            books.stop(box, Trigger.RECLAIMED, now)


def _forget(books: Books, now: float) -> None:
    """Drop sessions that nobody holds. Recent deaths are remembered all the same: acquiring anew must not reset them."""
    unheld = [session for session in books.sessions.values() if session.sandbox is None and not session.handles]
    waiting = books.waiting() if unheld else {}
    for session in unheld:
        if session.key not in waiting:
            session.restarting = False
            if books.closing or not books.recent_deaths(session, now):
                books.forget(session, "pool_closed" if books.closing else "unused")


def _level(books: Books, claims: int, now: float) -> None:
    """Standbys beyond what is wanted go. For what is missing ask for as many starts as places, pace and the engine's state
    allow."""
    policy, health, standbys = books.policy, books.health, books.in_phase(Phase.STANDBY)
    missing = policy.min_standby + claims - len(standbys)
    for box in standbys[: max(0, -missing)]:
        books.stop(box, Trigger.SURPLUS, now)
    free = policy.max_sandboxes - len(books.sandboxes)
    if missing <= 0 or free <= 0 or books.closing or not health.reachable:
        return
    starting = len(books.in_phase(Phase.STARTING))
    for _ in range(min(missing - starting, health.starts.pace(policy.max_starting, starting, now), free)):
        books.begin(now)


def _stop_again(books: Books, now: float) -> None:
    for box in books.sandboxes.values():
        if box.stop_again_at is not None and now >= box.stop_again_at:
            box.stop_again_at = None
            books.emit(ev.StopSandbox(box.n, "again"))
