"""The pure core under every event in any order, beside a plain model of what its shell owes and is owed."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RULE_MARKER, RuleBasedStateMachine, initialize, precondition, rule

from pool.core import events as ev
from pool.core.handlers import Phase, StateMachine
from pool.core.plan import wake_at
from pool.core.state import STOPS_TO_DOUBT
from tests.support.core import (
    NO_IMAGE,
    RETRYABLE,
    RETRYABLE_AFTER,
    UNREACHABLE,
    UNUSABLE,
    check_invariants,
    may_have_one,
)

KEYS = [("a", "1"), ("a", "2"), ("b", "1"), ("", ""), ("c", "1")]
# Decimal fractions are not exact in binary: due times reached by addition must be recognised all the same.
SPANS = [0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.7, 1.1, 2.3, 10.1]

policies = st.builds(
    ev.Policy,
    min_standby=st.integers(0, 2),
    max_sandboxes=st.integers(2, 4),
    max_starting=st.integers(1, 2),
    max_waiters=st.integers(1, 5),
    max_cold=st.integers(1, 2),
    max_cold_waiters=st.integers(0, 2),
    max_sessions_per_agent=st.sampled_from([0, 0, 1]),
    agent_quotas=st.sampled_from([{}, {}, {"a": 1}, {"a": 0, "b": 1}]),
    max_calls=st.sampled_from([0, 0, 1, 2]),
    parallel=st.integers(1, 2),
    idle_timeout=st.sampled_from([0.7, 3.1, 20.3]),
    standby_max_age=st.sampled_from([0.9, 5.3, 50.0]),
    max_lifetime=st.sampled_from([1.1, 9.7, 100.0]),
    reclaim_idle_after=st.sampled_from([None, 0.3, 2.1]),
    restart_limit=st.integers(0, 2),
    restart_window=st.sampled_from([1.3, 7.9]),
    backoff_base=st.sampled_from([0.1, 0.5]),
    backoff_cap=st.just(2.0),
    failures_to_open=st.integers(1, 3),
    engine_grace=st.sampled_from([0.2, 2.0]),
)
faults = st.sampled_from([UNREACHABLE, NO_IMAGE, UNUSABLE])
jitters = st.sampled_from([0.0, 0.3, 0.9])
spans = st.sampled_from(SPANS)
waits = st.sampled_from([0.0, 0.3, 1.1, 10.1, 50.0, 50.0, 50.0])
picks = st.integers(0, 30)


def every(number: int) -> Callable[[PoolMachine], bool]:
    """Keeps an upheaval rare, so that something has been built up when it comes."""
    return lambda machine: machine.steps % number == number - 1


class PoolMachine(RuleBasedStateMachine):
    """Plays the shell. The sets below are the oracle: they are kept from events and effects alone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.1
        self.ids = self.steps = 0
        self.reachable = self.closing = False
        self.starts: set[int] = set()  # starts in flight
        self.stops: set[int] = set()  # stops in flight
        self.stopping: set[int] = set()  # to be stopped, whether or not a stop is in flight
        self.binds: set[int] = set()  # binds to be recorded
        self.standing: set[int] = set()
        self.recorded: set[int] = set()
        self.known: set[int] = set()  # whatever may exist on the engine
        self.born: set[int] = set()
        self.owner: dict[int, ev.SessionKey] = {}
        self.pending: dict[int, ev.AcquireWanted | ev.CallWanted | ev.ColdWanted] = {}
        self.running: dict[int, int | None] = {}  # a call and its sandbox; None for a cold one
        self.ended: set[int] = set()  # calls that were told to end
        self.handles: list[tuple[ev.SessionKey, int]] = []
        self.old_handles: list[tuple[ev.SessionKey, int]] = []
        self.forgotten: set[int] = set()
        self.deaths: defaultdict[ev.SessionKey, list[float]] = defaultdict(list)
        self.not_before: defaultdict[ev.SessionKey, float] = defaultdict(float)
        self.bind_failures, self.bind_again = 0, 0.0

    @initialize(policy=policies, up=st.sampled_from([True, True, True, False]))
    def begin(self, policy: ev.Policy, up: bool) -> None:
        self.state, self.twin = StateMachine(policy), StateMachine(policy)
        self.feed(ev.EngineUp() if up else ev.Tick())

    # --- the oracle ---------------------------------------------------------------------------------------------------

    def feed(self, event: ev.Event) -> list[ev.Effect]:
        self.steps += 1
        self._note(event)
        before, restarting = set(self.known), {s.key for s in self.state.sessions.values() if s.restarting}
        if isinstance(event, ev.SandboxDied) and event.n in self.owner:
            restarting.add(self.owner[event.n])
        if isinstance(event, ev.CallEnded) and event.poisoned:
            restarting |= set(KEYS)
        effects = list(self.state.step(event, self.now))
        assert effects == self.twin.step(event, self.now), "not deterministic"
        for effect in effects:
            self._check(effect)
        self._check_calls_of_stopped(effects)
        self._check_order(effects, restarting)
        self._check_starts(effects)
        self._check_reclaims(effects)
        limit = self.state.policy.max_sandboxes
        assert len(self.known) <= max(limit, len(before))
        assert self.known == set(self.state.sandboxes)
        assert self.pending.keys() == self.state.waiters.keys()
        alive = {waiter for waiter, n in self.running.items() if n is None or n in self.known}
        assert alive == self.state.cold | {w for box in self.state.sandboxes.values() for w in box.running}
        check_invariants(self.state, self.now)
        again = self.state.step(ev.Tick(), self.now)
        self.twin.step(ev.Tick(), self.now)
        assert not again, f"one step left work for the next: {again}"
        window = self.state.policy.restart_window
        self.deaths = defaultdict(
            list, {key: [d for d in ds if self.now < d + window] for key, ds in self.deaths.items()}
        )
        return effects

    def _note(self, event: ev.Event) -> None:
        """What the event itself says about obligations."""
        match event:
            case ev.AcquireWanted() | ev.CallWanted() | ev.ColdWanted():
                self.pending[event.waiter] = event
            case ev.WaiterGone(waiter) | ev.CallEnded(waiter):
                if not (isinstance(event, ev.CallEnded) and waiter in self.pending):
                    self.pending.pop(waiter, None)
                    n = self.running.pop(waiter, None)
                    if isinstance(event, ev.CallEnded) and event.poisoned:
                        self._note_death(n, event.poisoned, event.jitter)
            case ev.SandboxDied(n, cause, jitter):
                self._note_death(n, cause, jitter)
            case ev.SandboxStarted(n) if n in self.starts:
                self.starts.discard(n)
                self.standing.add(n)
            case ev.SandboxStartFailed(n) if n in self.starts:
                self.starts.discard(n)
                self.known.discard(n)
            case ev.SandboxStartUnknown(n):
                self.starts.discard(n)
            case ev.SandboxStopped(n) if n in self.stopping:
                for group in (self.stops, self.stopping, self.known):
                    group.discard(n)
            case ev.SandboxStopFailed(n):
                self.stops.discard(n)
            case ev.BindRecorded(n) if n in self.binds:
                self.binds.discard(n)
                self.recorded.add(n)
                if n in self.known - self.stopping:
                    self.bind_failures, self.bind_again = 0, 0.0
            case ev.BindFailed(n, _, jitter) if n in self.binds:
                self.binds.discard(n)
                if n in self.known - self.stopping:
                    self.bind_failures += 1
                    wait = self.state.policy.backoff(self.bind_failures, jitter)
                    self.bind_again = max(self.bind_again, self.now + wait)
            case ev.EngineUp():
                self.reachable = True
            case ev.EngineDown():
                if self.reachable:
                    self._forgive()
                self.reachable = False
            case ev.CloseBegan():
                self.closing = True
            case _:
                pass

    def _note_death(self, n: int | None, cause: str, jitter: float) -> None:
        if n is None or n not in self.owner or n not in self.known - self.stopping or cause == "engine":
            return
        deaths = self.deaths[self.owner[n]]
        deaths[:] = [*(d for d in deaths if self.now < d + self.state.policy.restart_window), self.now]
        if len(deaths) > 1:
            self.not_before[self.owner[n]] = self.now + self.state.policy.backoff(len(deaths) - 1, jitter)

    def _forgive(self) -> None:
        """An engine that went down in order had stopped its containers first."""
        for key, deaths in self.deaths.items():
            deaths[:] = [d for d in deaths if self.now - d >= self.state.policy.engine_grace]
            self.not_before[key] = min(self.not_before[key], self.now)

    def _check(self, effect: ev.Effect) -> None:
        policy = self.state.policy
        match effect:
            case ev.StartSandbox(n):
                assert self.reachable
                assert not self.closing
                assert n not in self.born
                self.born.add(n)
                self.starts.add(n)
                self.known.add(n)
                assert len(self.starts) <= policy.max_starting
                assert len(self.known) <= policy.max_sandboxes
            case ev.StopSandbox(n):
                assert n in self.known
                assert n not in self.starts
                assert n not in self.stops, "one stop at a time"
                self.stops.add(n)
                self.stopping.add(n)
                self.standing.discard(n)
            case ev.BindSandbox(n, key):
                assert self.reachable
                assert n in self.standing
                assert n not in self.owner, "a sandbox belongs to one session, ever"
                self._check_restart(key)
                if self.bind_failures:
                    assert self.now >= self.bind_again, "a bind before its backoff has passed"
                    assert not self.binds & self.known - self.stopping, "after a failed bind one at a time"
                self.standing.discard(n)
                self.owner[n] = key
                self.binds.add(n)
            case ev.Grant(waiter, n, epoch):
                asked = self.pending.pop(waiter)
                assert isinstance(asked, ev.AcquireWanted)
                self._check_usable(n, asked.key)
                assert epoch not in self.forgotten
                self.handles.append((asked.key, epoch))
            case ev.RunCall(waiter, n):
                asked = self.pending.pop(waiter)
                assert isinstance(asked, ev.CallWanted)
                self._check_usable(n, asked.key)
                assert asked.generation in (None, n)
                assert asked.epoch not in self.forgotten
                self.running[waiter] = n
                assert sum(1 for other in self.running.values() if other == n) <= policy.parallel
            case ev.RunCold(waiter):
                assert self.reachable
                assert not self.closing
                assert isinstance(self.pending.pop(waiter), ev.ColdWanted)
                self.running[waiter] = None
                assert sum(1 for other in self.running.values() if other is None) <= policy.max_cold
            case ev.Refuse(waiter, refusal):
                del self.pending[waiter]
                assert not refusal.started
                if refusal.kind in RETRYABLE_AFTER:
                    assert refusal.retry_after is not None
                    assert refusal.retry_after > 0
                if refusal.kind not in RETRYABLE:
                    assert refusal.retry_after is None
            case ev.EndCall(waiter, refusal):
                assert waiter in self.running
                assert waiter not in self.ended, "a call is told to end once"
                assert refusal.started
                self.ended.add(waiter)
            case ev.SessionForgotten(key, epoch):
                assert epoch not in self.forgotten
                self.forgotten.add(epoch)
                assert not any(not isinstance(w, ev.ColdWanted) and w.key == key for w in self.pending.values())
                self.old_handles += [handle for handle in self.handles if handle[1] == epoch]
                self.handles = [handle for handle in self.handles if handle[1] != epoch]

    def _check_usable(self, n: int, key: ev.SessionKey) -> None:
        assert not self.closing
        assert n in self.known
        assert n not in self.stopping
        assert n in self.recorded, "nothing is granted before the ledger says bound"
        assert self.owner[n] == key

    def _check_restart(self, key: ev.SessionKey) -> None:
        """No session has more sandboxes than its deaths allow, whatever it does with its handles."""
        recent = [death for death in self.deaths[key] if self.now < death + self.state.policy.restart_window]
        assert len(recent) <= self.state.policy.restart_limit, f"{key} is past its restart intensity"
        assert not recent or self.now >= self.not_before[key], f"{key} is in restart backoff"

    def _check_calls_of_stopped(self, effects: list[ev.Effect]) -> None:
        """A sandbox is taken from under a call only when it was lost, or when the call is told to end."""
        for effect in effects:
            if isinstance(effect, ev.StopSandbox) and not effect.reason.startswith(("lost", "again")):
                assert {waiter for waiter, n in self.running.items() if n == effect.n} <= self.ended

    def _check_starts(self, effects: list[ev.Effect]) -> None:
        """Each session that wants a sandbox accounts for one start at most, and the standbys for what they lack."""
        if any(isinstance(effect, ev.StartSandbox) for effect in effects):
            claims = sum(1 for session in self.state.sessions.values() if may_have_one(self.state, session, self.now))
            assert len(self.starts) <= claims + max(0, self.state.policy.min_standby - len(self.standing))

    def _check_reclaims(self, effects: list[ev.Effect]) -> None:
        """Nobody gives way but for a start that could begin now: so many places at most are free or on their way to be."""
        if any(isinstance(effect, ev.StopSandbox) and effect.reason == "reclaimed" for effect in effects):
            coming = {n for n in self.stopping if self.state.sandboxes[n].stop_attempts < STOPS_TO_DOUBT}
            free = self.state.policy.max_sandboxes - len(self.known - coming)
            starts = self.state.health.starts
            assert free <= (1 if starts.failures else self.state.policy.max_starting) - len(self.starts)
            assert self.now >= starts.retry_at

    def _check_order(self, effects: list[ev.Effect], restarting: set[ev.SessionKey]) -> None:
        """Sandboxes go to restarts first, then to whoever has waited longest."""
        bound = [effect.key for effect in effects if isinstance(effect, ev.BindSandbox)]
        fresh = [key for key in bound if key not in restarting]
        order = list(dict.fromkeys(w.key for w in self.pending.values() if not isinstance(w, ev.ColdWanted)))
        left = [s for s in self.state.sessions.values() if may_have_one(self.state, s, self.now)]
        assert [key for key in order if key in fresh] == fresh
        if fresh:
            assert not any(session.restarting for session in left)
            assert all(order.index(session.key) > order.index(fresh[-1]) for session in left)

    # --- what callers do ----------------------------------------------------------------------------------------------

    def _waiter(self) -> int:
        self.ids += 1
        return self.ids

    @rule(key=st.sampled_from(KEYS), wait=waits)
    def acquire(self, key: ev.SessionKey, wait: float) -> None:
        policy, held = self.state.policy, {handle[0] for handle in self.handles}
        share = policy.agent_quotas.get(key[0], policy.max_sessions_per_agent)
        session = self.state.sessions.get(key)
        counts = session is not None and (session.sandbox is not None or key in held or self.state.in_use(session))
        effects = self.feed(ev.AcquireWanted(self._waiter(), key, self.now + wait))
        if share and not counts and sum(1 for agent, _ in held if agent == key[0]) >= share:
            refusals = [effect.refusal.kind for effect in effects if isinstance(effect, ev.Refuse)]
            assert ev.RefusalKind.QUOTA_EXCEEDED in refusals

    @precondition(lambda self: self.handles)
    @rule(pick=picks, wait=waits, generation=st.sampled_from(["any", "any", "this", "other"]))
    def call(self, pick: int, wait: float, generation: str) -> None:
        key, epoch = self.handles[pick % len(self.handles)]
        session = self.state.sessions[key]
        asked = None if generation == "any" else session.sandbox if generation == "this" else pick
        self.feed(ev.CallWanted(self._waiter(), key, epoch, self.now + wait, asked))

    @rule(key=st.sampled_from(KEYS))
    def acquire_and_wait(self, key: ev.SessionKey) -> None:
        self.feed(ev.AcquireWanted(self._waiter(), key, self.now + 50.0))
        self._succeed()

    @precondition(lambda self: self.handles)
    @rule(pick=picks)
    def call_and_wait(self, pick: int) -> None:
        key, epoch = self.handles[pick % len(self.handles)]
        self.feed(ev.CallWanted(self._waiter(), key, epoch, self.now + 50.0))
        self._succeed()

    @rule(wait=waits, served=st.booleans())
    def burst(self, wait: float, served: bool) -> None:
        """Every session is wanted at once, and has its time to idle where all of them are served."""
        for key in KEYS:
            self.feed(ev.AcquireWanted(self._waiter(), key, self.now + wait))
        if served:
            self._succeed()
            self.now += 2.3
            self.feed(ev.Tick())

    @rule(wait=waits)
    def cold(self, wait: float) -> None:
        self.feed(ev.ColdWanted(self._waiter(), self.now + wait))

    @precondition(lambda self: self.pending or self.running)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        everyone = [*self.pending, *self.running]
        self.feed(ev.WaiterGone(everyone[pick % len(everyone)]))

    @precondition(lambda self: self.running)
    @rule(pick=picks, poisoned=st.sampled_from(["", "", "runner", "engine"]), jitter=jitters)
    def finish_call(self, pick: int, poisoned: str, jitter: float) -> None:
        self.feed(ev.CallEnded(list(self.running)[pick % len(self.running)], poisoned, jitter))

    @precondition(lambda self: self.handles)
    @rule(pick=picks, how=st.sampled_from([ev.GrantDeclined, ev.HandleReleased]))
    def give_up_handle(self, pick: int, how: type[ev.GrantDeclined] | type[ev.HandleReleased]) -> None:
        handle = self.handles.pop(pick % len(self.handles))
        self.old_handles.append(handle)
        self.feed(how(*handle))

    @precondition(lambda self: self.handles)
    @rule(pick=picks)
    def close_session(self, pick: int) -> None:
        handle = self.handles[pick % len(self.handles)]
        self.feed(ev.SessionEnded(*handle))
        assert handle[1] in self.forgotten

    # --- what the engine and the ledger say ---------------------------------------------------------------------------

    @precondition(lambda self: self.starts)
    @rule(pick=picks)
    def started(self, pick: int) -> None:
        self.feed(ev.SandboxStarted(sorted(self.starts)[pick % len(self.starts)]))

    @precondition(lambda self: self.starts)
    @rule(
        pick=picks, fault=faults, jitter=jitters, how=st.sampled_from([ev.SandboxStartFailed, ev.SandboxStartUnknown])
    )
    def start_failed(
        self, pick: int, fault: ev.Fault, jitter: float, how: type[ev.SandboxStartFailed] | type[ev.SandboxStartUnknown]
    ) -> None:
        self.feed(how(sorted(self.starts)[pick % len(self.starts)], fault, jitter))

    @precondition(lambda self: self.known)
    @rule(pick=picks, cause=st.sampled_from(["oom", "killed", "engine"]), jitter=jitters)
    def died(self, pick: int, cause: str, jitter: float) -> None:
        self.feed(ev.SandboxDied(sorted(self.known)[pick % len(self.known)], cause, jitter))

    @precondition(lambda self: self.stopping)
    @rule(pick=picks)
    def stopped(self, pick: int) -> None:
        """By its own stop, or found absent by a listing while no stop is in flight."""
        self.feed(ev.SandboxStopped(sorted(self.stopping)[pick % len(self.stopping)]))

    @precondition(lambda self: self.stops)
    @rule(pick=picks, jitter=jitters)
    def stop_failed(self, pick: int, jitter: float) -> None:
        self.feed(ev.SandboxStopFailed(sorted(self.stops)[pick % len(self.stops)], jitter))

    @precondition(lambda self: self.binds)
    @rule(pick=picks)
    def bind_recorded(self, pick: int) -> None:
        self.feed(ev.BindRecorded(sorted(self.binds)[pick % len(self.binds)]))

    @precondition(lambda self: self.binds)
    @rule(pick=picks, jitter=jitters)
    def bind_failed(self, pick: int, jitter: float) -> None:
        self.feed(ev.BindFailed(sorted(self.binds)[pick % len(self.binds)], UNUSABLE, jitter))

    @precondition(every(4))
    @rule()
    def engine_up(self) -> None:
        self.feed(ev.EngineUp())

    @precondition(every(7))
    @rule(retry_after=spans)
    def engine_down(self, retry_after: float) -> None:
        self.feed(ev.EngineDown(UNREACHABLE, retry_after))

    # --- what the operator and time do --------------------------------------------------------------------------------

    @precondition(every(6))
    @rule(policy=policies)
    def policy_changed(self, policy: ev.Policy) -> None:
        self.feed(ev.PolicyChanged(policy))

    @precondition(every(4))
    @rule(max_sandboxes=st.sampled_from([1, 1, 2, 3, 5]), min_standby=st.integers(0, 3))
    def resize(self, max_sandboxes: int, min_standby: int) -> None:
        owned = {box.n for box in self.state.in_phase(Phase.BOUND)}
        resized = replace(self.state.policy, max_sandboxes=max_sandboxes, min_standby=min_standby)
        effects = self.feed(ev.PolicyChanged(resized))
        assert not [e for e in effects if isinstance(e, ev.StopSandbox) and e.n in owned and e.reason != "reclaimed"]

    @precondition(lambda self: self.ids > 12 and self.steps % 8 == 0)
    @rule(span=spans)
    def close(self, span: float) -> None:
        self.feed(ev.CloseBegan(self.now + span))

    @rule(span=spans)
    def time_passes(self, span: float) -> None:
        self.now += span
        self.feed(ev.Tick())

    @rule()
    def sleep_until_woken(self) -> None:
        self._sleep()

    @precondition(every(5))
    @rule(pick=picks, fault=faults)
    def what_nobody_asked_for(self, pick: int, fault: ev.Fault) -> None:
        """Unknown ids, and answers to questions that are not open, change nothing."""
        view = repr(vars(self.state))
        n, key = pick, KEYS[pick % len(KEYS)]
        strays: list[ev.Event] = [
            ev.WaiterGone(-1), ev.CallEnded(-1, "runner"), ev.GrantDeclined(key, 0), ev.HandleReleased(key, 0),
            ev.SessionEnded(key, 0), ev.SandboxDied(-1, "oom"), ev.BindRecorded(-1), ev.BindFailed(-1, fault),
        ]  # fmt: skip
        strays += [ev.CallEnded(waiter, "runner") for waiter in self.pending]
        strays += [ev.EngineUp()] if self.reachable else []
        strays += [ev.BindRecorded(n) for n in self.recorded] + [ev.BindFailed(n, fault) for n in self.recorded]
        strays += [ev.SandboxDied(n, "oom") for n in self.stopping]
        if n not in self.starts:
            strays += [ev.SandboxStarted(n), ev.SandboxStartFailed(n, fault), ev.SandboxStartUnknown(n, fault)]
        if n not in self.stopping:
            strays += [ev.SandboxStopped(n), ev.SandboxStopFailed(n)]
        for handle in self.old_handles:
            if handle[1] in self.forgotten:
                strays += [ev.SessionEnded(*handle), ev.HandleReleased(*handle), ev.GrantDeclined(*handle)]
        for event in strays:
            assert not (effects := self.feed(event)), f"{event} had {effects}"
        # ``_effects`` is scratch space of one step and empty again.
        assert repr({**vars(self.state)}) == view

    # --- how it ends --------------------------------------------------------------------------------------------------

    def _succeed(self) -> None:
        """Carry out whatever is asked for until nothing is."""
        for _ in range(200):
            events: list[ev.Event] = [ev.SandboxStarted(n) for n in sorted(self.starts)]
            events += [ev.SandboxStopped(n) for n in sorted(self.stops)]
            events += [ev.BindRecorded(n) for n in sorted(self.binds)]
            if not events:
                return
            for event in events:
                self.feed(event)
        raise AssertionError("success alone does not come to rest")

    def _sleep(self) -> bool:
        """Sleep until ``wake_at``; nothing may have been due in the meantime. False if nobody would wake the pool."""
        wake = wake_at(self.state, self.now)
        just_before = self.now + 1000.0 if wake is None else math.nextafter(wake, 0.0)
        if just_before > self.now:
            self.now = just_before
            assert not (effects := self.feed(ev.Tick())), f"due before wake_at: {effects}"
        if wake is not None:
            self.now = wake
            self.feed(ev.Tick())
        return wake is not None

    def _wake(self) -> bool:
        woken = self._sleep()
        self._succeed()
        return woken

    def _full(self) -> bool:
        policy, standing = self.state.policy, len(self.standing)
        return standing == min(policy.min_standby, max(0, policy.max_sandboxes - len(self.known) + standing))

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        if not self.closing and self.ids % 2:
            self._heal()
        self._drain()

    def _heal(self) -> None:
        """Once failures stop, time alone refills the standbys, and idle sessions leave for good."""
        if not self.reachable:
            self.feed(ev.EngineUp())
        for _ in range(300):
            self._succeed()
            while self.running:
                self.feed(ev.CallEnded(next(iter(self.running))))
                self._succeed()
            if self._full() and not self.pending and not self.stopping and not self.state.in_phase(Phase.BOUND):
                break
            assert self._wake(), "nobody will wake the pool, and it is not at rest"
        assert self._full()
        assert not self.pending
        assert not self.state.in_phase(Phase.BOUND)
        assert not self.stopping

    def _drain(self) -> None:
        """After close everything goes, also while the engine starts nothing, once stops succeed."""
        if not self.closing:
            self.feed(ev.CloseBegan(self.now + 0.7))
        for _ in range(300):
            for waiter in [waiter for waiter in self.ended if waiter in self.running]:
                self.feed(ev.CallEnded(waiter))
            self._succeed()
            if self.state.drained:
                break
            assert self._wake(), "nobody will wake the pool, and it is not drained"
        assert self.state.drained
        assert not self.known
        assert not self.pending


def test_the_machine_has_a_rule_for_every_event() -> None:
    rules = {name: method for name, method in vars(PoolMachine).items() if hasattr(method, RULE_MARKER)}
    del rules["what_nobody_asked_for"]  # it shows that nothing comes of them
    fed: set[str] = set()
    for method in rules.values():
        source = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method))))
        fed |= {node.attr for node in source if isinstance(node, ast.Attribute)}
    assert {event.__name__ for event in get_args(ev.Event)} - fed == set()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=60)  # 100 examples, and 400 with --full
