"""The plan, scenario by scenario: what time, pressure, faults and the operator do, and what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pool.core import events as ev
from pool.core.events import Policy, RefusalKind
from pool.core.handlers import Phase
from tests.support.core import NO_IMAGE, NOT_INSTALLED, UNREACHABLE, UNUSABLE, Core

A, B = ("agent", "a"), ("agent", "b")
BARE = Policy(min_standby=0, max_sandboxes=2)


# --- standbys ---------------------------------------------------------------------------------------------------------


def test_standbys_start_at_the_pace_of_max_starting() -> None:
    core = Core(Policy(min_standby=3, max_starting=2))
    assert core.all(ev.StartSandbox) == [ev.StartSandbox(1), ev.StartSandbox(2)]
    assert core.start_all() == [ev.StartSandbox(3)]
    assert core.start_all() == []


def test_nothing_starts_before_the_engine_answered() -> None:
    core = Core(Policy(min_standby=1), reachable=False)
    assert core.feed(ev.Tick()) == []
    core.acquire("a")
    assert core.effects == []
    assert core.cold()
    assert core.effects == []
    core.feed(ev.EngineUp())
    assert core.all(ev.StartSandbox)
    assert core.all(ev.RunCold)


def test_a_standby_older_than_its_age_is_replaced() -> None:
    core = Core(Policy(min_standby=1, standby_max_age=10.0))
    core.start_all()
    assert core.wake() == [ev.StopSandbox(1, "aged"), ev.StartSandbox(2)]
    assert core.now == 10.0


@pytest.mark.parametrize("start", [0.7, 1.1, 2.3, 1e6 + 0.1])
def test_due_times_are_met_at_the_moment_of_waking_despite_rounding(start: float) -> None:
    core = Core(Policy(min_standby=1, standby_max_age=0.1), now=start)
    core.start_all()
    assert core.wake()[0] == ev.StopSandbox(1, "aged")


@pytest.mark.parametrize("start", [0.7, 1.1, 2.3, 1e6 + 0.1])
def test_a_death_ages_out_at_the_moment_of_waking_despite_rounding(start: float) -> None:
    core = Core(replace(BARE, restart_limit=0, restart_window=0.1, reclaim_idle_after=None), now=start)
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "oom"))
    assert core.all(ev.StartSandbox) == []
    assert core.wake() == [ev.StartSandbox(2)]


@pytest.mark.parametrize("start", [0.7, 1.1, 2.3, 1e6 + 0.1])
@pytest.mark.parametrize("setting", ["idle_timeout", "max_lifetime"])
def test_a_bound_sandbox_goes_at_the_moment_of_waking_despite_rounding(start: float, setting: str) -> None:
    policy = Policy(min_standby=0, reclaim_idle_after=None, **{setting: 0.1})  # type: ignore[arg-type]
    core = Core(policy, now=start)
    core.granted("a")
    assert [type(effect) for effect in core.wake()] == [ev.StopSandbox]


def test_a_surplus_standby_is_stopped_when_its_waiter_left_during_the_start() -> None:
    core = Core(BARE)
    waiter = core.acquire("a")
    core.feed(ev.WaiterGone(waiter))
    assert core.start_all() == [ev.StopSandbox(1, "surplus")]


def test_a_start_of_unknown_result_occupies_its_place_until_it_is_gone() -> None:
    core = Core(replace(BARE, max_sandboxes=1, backoff_base=1.0))
    core.acquire("a")
    assert core.feed(ev.SandboxStartUnknown(1, UNREACHABLE)) == [ev.StopSandbox(1, "start_unknown")]
    assert core.feed(ev.Tick(), after=5.0) == []
    assert core.stop_all() == [ev.StartSandbox(2)]


def test_a_late_start_failure_of_a_running_sandbox_is_not_believed() -> None:
    core = Core(BARE)
    grant = core.granted("a")
    assert core.feed(ev.SandboxStartFailed(grant.n, UNREACHABLE)) == []
    core.call(grant, "a")
    assert core.only(ev.RunCall).n == grant.n


# --- idle sessions and pressure ---------------------------------------------------------------------------------------


def test_an_idle_session_loses_its_sandbox_and_gets_another_for_its_next_call() -> None:
    core = Core(replace(BARE, idle_timeout=10.0, reclaim_idle_after=None))
    grant = core.granted("a")
    assert core.wake() == [ev.StopSandbox(1, "idle")]
    core.call(grant, "a")
    assert core.all(ev.StartSandbox)
    core.start_all()
    core.feed(ev.BindRecorded(2))
    assert core.only(ev.RunCall).n == 2


def test_a_session_with_a_call_running_is_not_idle() -> None:
    core = Core(replace(BARE, idle_timeout=10.0))
    grant = core.granted("a")
    core.call(grant, "a")
    assert core.feed(ev.Tick(), after=50.0) == []


def test_under_pressure_the_longest_idle_session_gives_way() -> None:
    core = Core(replace(BARE, reclaim_idle_after=5.0))
    core.granted("a")
    core.feed(ev.Tick(), after=1.0)
    core.granted("b")
    core.acquire("c")
    assert core.effects == []
    assert core.wake() == [ev.StopSandbox(1, "reclaimed")]
    assert core.now == 5.0


def test_a_reclaimed_session_that_nobody_holds_is_forgotten_in_the_same_step() -> None:
    core = Core(replace(BARE, max_sandboxes=1, reclaim_idle_after=5.0))
    grant = core.granted("a")
    core.feed(ev.HandleReleased(A, grant.epoch))
    core.acquire("b")
    assert core.wake() == [ev.StopSandbox(1, "reclaimed"), ev.SessionForgotten(A, grant.epoch, "unused", granted=True)]


def test_a_dead_session_that_nobody_used_for_idle_timeout_is_not_restarted_any_more() -> None:
    core = Core(replace(BARE, max_sandboxes=1, idle_timeout=10.0, reclaim_idle_after=None))
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "oom"))
    core.feed(ev.Tick(), after=10.0)
    assert core.stop_all() == []


def test_a_standby_kept_for_a_dead_session_goes_once_that_session_would_have_been_reaped() -> None:
    core = Core(replace(BARE, idle_timeout=10.0))
    grant = core.granted("a")
    core.acquire("b")
    core.feed(ev.EngineDown(UNREACHABLE, 1.0))
    core.feed(ev.SandboxDied(grant.n, "engine"))
    assert core.start_all() == []
    core.wake()
    assert core.now == 10.0
    assert core.effects == [ev.StopSandbox(2, "surplus")]


def test_a_dead_session_that_everybody_left_returns_as_a_newcomer() -> None:
    core = Core(replace(BARE, max_sandboxes=1))
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "oom"), ev.HandleReleased(A, grant.epoch))
    core.acquire("b")
    core.acquire("a")
    core.stop_all()
    assert core.start_all() == [ev.BindSandbox(2, B)]


def test_a_stop_that_keeps_failing_is_no_place_to_wait_for() -> None:
    core = Core(replace(BARE, reclaim_idle_after=5.0, backoff_base=100.0, backoff_cap=100.0))
    grant = core.granted("a")
    core.granted("b")
    core.feed(ev.SessionEnded(A, grant.epoch))
    core.feed(ev.SandboxStopFailed(1), after=6.0)
    core.acquire("c")
    assert core.effects == []  # one failure may pass
    core.wake()
    core.feed(ev.SandboxStopFailed(1))
    assert core.effects == [ev.StopSandbox(2, "reclaimed")]


def test_nobody_gives_way_where_it_would_make_no_place_for_anybody() -> None:
    core = Core(replace(BARE, max_sandboxes=3, reclaim_idle_after=5.0))
    grants = [core.granted(name) for name in "abc"]
    core.feed(ev.PolicyChanged(replace(core.state.policy, max_sandboxes=1)))
    for grant, name in zip(grants[:2], "ab", strict=True):
        core.call(grant, name)
    core.acquire("d")
    assert core.feed(ev.Tick(), after=6.0) == []


def test_no_more_give_way_than_can_be_started_now() -> None:
    """Places are taken as starts can use them: whoever stops waiting meanwhile has cost no state that nobody needed."""
    core = Core(replace(BARE, max_sandboxes=8, max_starting=8, reclaim_idle_after=5.0))
    for n in range(8):
        core.granted(str(n))
    core.feed(ev.PolicyChanged(replace(core.state.policy, max_starting=1)), after=10.0)
    waiters = [core.acquire(f"new{n}") for n in range(6)]
    assert len(core.state.in_phase(Phase.STOPPING)) == 1
    assert core.stop_all() == [ev.StartSandbox(9)]
    # What is being started takes its place with it; the next one gives way when it stands.
    assert core.feed(ev.SandboxStarted(9)) == [ev.BindSandbox(9, ("agent", "new0")), ev.StopSandbox(2, "reclaimed")]
    core.feed(ev.BindRecorded(9))
    core.feed(*(ev.WaiterGone(waiter) for waiter in waiters[1:]))
    core.stop_all()
    assert len(core.state.in_phase(Phase.BOUND)) == 7


def test_nobody_gives_way_while_starts_fail() -> None:
    core = Core(replace(BARE, reclaim_idle_after=5.0, backoff_base=100.0, backoff_cap=100.0))
    core.granted("a")
    core.acquire("b")
    core.feed(ev.SandboxStartFailed(2, UNREACHABLE), after=10.0)
    core.acquire("c")
    assert not core.state.in_phase(Phase.STOPPING), "what failed may fail again, and one place is free for the trial"
    core.start_all()


def test_one_at_a_time_gives_way_while_the_ledger_takes_no_bind() -> None:
    core = Core(replace(BARE, max_sandboxes=4, max_starting=4, reclaim_idle_after=5.0, backoff_base=1.0))
    for name in "abcd":
        core.granted(name)
    core.state.health.binds.fail(ev.Fault(RefusalKind.ENGINE_UNAVAILABLE, "once"), core.state.policy, core.now, 0.5)
    for name in "efgh":
        core.acquire(name)
    core.feed(ev.Tick(), after=10.0)
    assert len(core.state.in_phase(Phase.STOPPING)) == 1


def test_in_a_pool_that_shrank_as_many_give_way_as_it_takes_to_make_a_place() -> None:
    core = Core(replace(BARE, max_sandboxes=3, reclaim_idle_after=5.0))
    for name in "abc":
        core.granted(name)
    core.feed(ev.PolicyChanged(replace(core.state.policy, max_sandboxes=1)))
    core.acquire("d")
    core.feed(ev.Tick(), after=6.0)
    assert core.effects == [ev.StopSandbox(n, "reclaimed") for n in (1, 2, 3)]
    core.stop_all()
    assert len(core.state.in_phase(Phase.STARTING)) == 1


# --- resize -----------------------------------------------------------------------------------------------------------


def test_standbys_go_when_the_pool_shrinks_below_what_it_holds() -> None:
    policy = Policy(min_standby=1, max_sandboxes=2)
    core = Core(policy)
    core.start_all()
    core.granted("a")
    core.start_all()
    assert core.feed(ev.PolicyChanged(replace(policy, max_sandboxes=1))) == [ev.StopSandbox(2, "surplus")]


def test_a_shrunken_pool_keeps_its_bound_sandboxes_and_starts_nothing_until_it_fits() -> None:
    core = Core(BARE)
    core.granted("a")
    core.granted("b")
    assert core.feed(ev.PolicyChanged(replace(BARE, max_sandboxes=1, min_standby=1))) == []
    core.feed(ev.SessionEnded(A, 1))
    assert core.stop_all() == []
    core.feed(ev.SessionEnded(B, 2))
    assert core.stop_all() == [ev.StartSandbox(3)]


def test_a_pool_that_shrinks_stops_the_starts_beyond_it_when_they_arrive() -> None:
    core = Core(Policy(min_standby=3, max_sandboxes=3, max_starting=3))
    assert core.feed(ev.PolicyChanged(Policy(min_standby=1, max_sandboxes=1))) == []
    core.feed(ev.SandboxStarted(1), ev.SandboxStarted(2), ev.SandboxStarted(3))
    assert len(core.all(ev.StopSandbox)) == 2
    assert core.stop_all() == []
    assert len(core.state.in_phase(Phase.STANDBY)) == 1


def test_a_start_beyond_a_pool_that_shrank_is_stopped_although_somebody_waits_for_one() -> None:
    core = Core(BARE)
    core.granted("a")
    waiter = core.acquire("b")
    core.feed(ev.PolicyChanged(replace(BARE, max_sandboxes=1)))
    assert core.start_all() == [ev.StopSandbox(2, "surplus")]
    assert core.stop_all() == []
    core.feed(ev.SessionEnded(A, 1))
    core.stop_all()
    core.start_all()
    core.feed(ev.BindRecorded(3))
    assert core.only(ev.Grant).waiter == waiter


def test_a_start_that_fits_into_a_pool_that_shrank_is_given_to_whoever_waits() -> None:
    core = Core(BARE)
    core.acquire("a")
    core.acquire("b")
    core.feed(ev.PolicyChanged(replace(BARE, max_sandboxes=1)))
    assert core.feed(ev.SandboxStarted(1)) == [ev.BindSandbox(1, A)]
    assert core.feed(ev.SandboxStarted(2)) == [ev.StopSandbox(2, "surplus")]


def test_a_pool_that_shrinks_below_its_bound_sandboxes_ends_no_call_and_only_falls() -> None:
    core = Core(replace(BARE, max_sandboxes=4, min_standby=1, reclaim_idle_after=None))
    grants = [core.granted(name) for name in "abc"]
    core.start_all()
    calls = [core.call(grant, name) for grant, name in zip(grants, "abc", strict=True)]
    core.feed(ev.PolicyChanged(replace(core.state.policy, max_sandboxes=1)))
    assert [stop.reason for stop in core.effects if isinstance(stop, ev.StopSandbox)] == ["surplus"]
    held = len(core.state.sandboxes)
    for grant, name, call in zip(grants, "abc", calls, strict=True):
        core.stop_all()
        assert not core.all(ev.StartSandbox)
        assert len(core.state.sandboxes) < held
        held = len(core.state.sandboxes)
        core.feed(ev.CallEnded(call), ev.SessionEnded(("agent", name), grant.epoch))
    assert core.stop_all() == [ev.StartSandbox(5)]


def test_a_pool_that_grows_starts_at_once_and_serves_whoever_waits() -> None:
    core = Core(replace(BARE, max_sandboxes=1, max_starting=4))
    core.granted("a")
    waiters = [core.acquire("b"), core.acquire("c")]
    core.feed(ev.PolicyChanged(replace(core.state.policy, max_sandboxes=4, min_standby=1)))
    assert len(core.all(ev.StartSandbox)) == 3
    core.start_all()
    core.feed(*(ev.BindRecorded(bind.n) for bind in core.all(ev.BindSandbox)))
    assert [grant.waiter for grant in core.all(ev.Grant)] == waiters
    assert len(core.state.in_phase(Phase.STANDBY)) == 1


def test_fewer_standbys_go_and_more_are_started_at_once() -> None:
    policy = Policy(min_standby=2, max_sandboxes=4, max_starting=4)
    core = Core(policy)
    core.start_all()
    assert core.feed(ev.PolicyChanged(replace(policy, min_standby=1))) == [ev.StopSandbox(1, "surplus")]
    assert len(core.feed(ev.PolicyChanged(replace(policy, min_standby=3)))) == 2


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_missing_image_refuses_at_once_and_does_not_promise_that_time_helps() -> None:
    core = Core(BARE)
    core.acquire("a")
    core.feed(ev.SandboxStartFailed(1, NO_IMAGE))
    refusal = core.only(ev.Refuse).refusal
    assert refusal.kind is RefusalKind.IMAGE_MISSING
    assert refusal.retry_after is None


def test_an_engine_that_fails_once_is_tried_again_before_anyone_is_refused() -> None:
    core = Core(replace(BARE, failures_to_open=2))
    core.acquire("a")
    assert core.feed(ev.SandboxStartFailed(1, UNREACHABLE)) == []
    assert core.wake() == [ev.StartSandbox(2)]
    core.feed(ev.SandboxStartFailed(2, UNREACHABLE))
    refusal = core.only(ev.Refuse).refusal
    assert refusal.kind is RefusalKind.ENGINE_UNAVAILABLE
    assert refusal.retry_after


def test_after_a_fault_one_trial_at_a_time_until_one_succeeds() -> None:
    core = Core(Policy(min_standby=3, max_starting=3))
    core.feed(*(ev.SandboxStartFailed(n, NO_IMAGE) for n in (1, 2, 3)))
    assert core.wake() == [ev.StartSandbox(4)]
    core.feed(ev.SandboxStarted(4))
    assert len(core.all(ev.StartSandbox)) == 2


def test_a_start_that_succeeds_closes_the_fault() -> None:
    core = Core(replace(BARE, failures_to_open=2))
    core.acquire("a")
    core.feed(ev.SandboxStartFailed(1, NO_IMAGE))
    core.feed(ev.Tick(), after=5.0)
    core.granted("a")
    core.acquire("b")
    assert core.feed(ev.SandboxStartFailed(3, UNREACHABLE)) == []


def test_an_unreachable_engine_refuses_and_comes_back() -> None:
    core = Core(BARE)
    core.feed(ev.EngineDown(UNREACHABLE, 3.0))
    core.acquire("a")
    assert core.only(ev.Refuse).refusal == ev.Refusal(RefusalKind.ENGINE_UNAVAILABLE, UNREACHABLE.message, 3.0)
    core.feed(ev.EngineUp())
    assert core.granted("a")


def test_an_engine_that_is_not_installed_names_no_time_and_is_back_once_it_answers() -> None:
    core = Core(BARE)
    core.acquire("a")
    for _ in range(5):
        core.feed(ev.EngineDown(NOT_INSTALLED, 3.0))
    core.acquire("b")
    refused = ev.Refusal(RefusalKind.ENGINE_UNAVAILABLE, NOT_INSTALLED.message, permanent=True)
    assert core.only(ev.Refuse).refusal == refused
    assert not core.state.waiters
    assert not core.state.health.starts.failures
    core.feed(ev.EngineUp())
    assert core.granted("a")


def test_a_failed_bind_destroys_the_sandbox_and_refuses_its_waiter() -> None:
    core = Core(BARE)
    core.acquire("a")
    core.start_all()
    core.feed(ev.BindFailed(1, UNUSABLE))
    assert core.all(ev.StopSandbox) == [ev.StopSandbox(1, "bind_failed")]
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.POOL_UNUSABLE


def test_a_failed_bind_costs_one_standby_and_not_one_for_each_waiter() -> None:
    core = Core(Policy(min_standby=2, max_sandboxes=4, backoff_base=4.0))
    core.start_all()
    core.acquire("a")
    core.feed(ev.BindFailed(1, UNUSABLE))
    core.start_all()  # that starts succeed says nothing about the ledger
    for name in ("b", "c"):
        core.acquire(name)
        refusal = core.only(ev.Refuse).refusal
        assert (refusal.kind, refusal.message) == (RefusalKind.POOL_UNUSABLE, UNUSABLE.message)
        assert refusal.retry_after
        assert not core.all(ev.BindSandbox)
    core.stop_all()
    assert len(core.state.in_phase(Phase.STANDBY)) == 2
    assert core.state.health.fault == UNUSABLE


def test_after_a_failed_bind_one_is_tried_at_a_time_and_its_backoff_grows() -> None:
    core = Core(Policy(min_standby=2, max_sandboxes=4, max_starting=4, backoff_base=4.0))
    core.start_all()
    core.acquire("a")
    core.feed(ev.BindFailed(1, UNUSABLE))
    core.start_all()
    core.feed(ev.Tick(), after=2.0)
    core.acquire("b")
    tried = core.only(ev.BindSandbox).n
    core.acquire("c")
    assert core.effects == []  # it waits behind the trial, with a standby free
    core.feed(ev.BindFailed(tried, UNUSABLE))
    assert len(core.all(ev.Refuse)) == 2
    core.start_all()
    core.feed(ev.Tick(), after=3.9)
    core.acquire("d")
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.POOL_UNUSABLE
    core.feed(ev.Tick(), after=0.1)
    core.acquire("e")
    assert core.all(ev.BindSandbox)


def test_a_bind_that_succeeds_serves_everybody_who_waits() -> None:
    core = Core(Policy(min_standby=2, max_sandboxes=4, max_starting=4))
    core.start_all()
    core.acquire("a")
    core.feed(ev.BindFailed(1, UNUSABLE))
    core.start_all()
    core.feed(ev.Tick(), after=1.0)
    first = core.acquire("b")
    tried = core.only(ev.BindSandbox).n
    core.acquire("c")
    core.feed(ev.BindRecorded(tried))
    assert core.only(ev.Grant).waiter == first
    assert core.only(ev.BindSandbox).key == ("agent", "c")
    assert core.state.health.fault is None


def test_without_standbys_a_ledger_that_takes_no_bind_costs_one_start_for_each_backoff() -> None:
    core = Core(replace(BARE, backoff_base=1.0, backoff_cap=8.0))
    starts = 0
    while core.now < 100.0:
        core.acquire("a")
        starts += len(core.all(ev.StartSandbox))
        core.start_all()
        core.feed(*(ev.BindFailed(box.n, UNUSABLE) for box in core.state.in_phase(Phase.BOUND)))
        core.stop_all()
        core.feed(ev.Tick(), after=0.1)
    assert starts < 30


def test_a_dead_session_is_given_a_standby_at_the_moment_when_binds_are_tried_again() -> None:
    core = Core(Policy(min_standby=1, max_sandboxes=3, backoff_base=4.0))
    core.start_all()
    core.granted("a")
    core.start_all()
    core.acquire("b")
    core.feed(ev.BindFailed(2, UNUSABLE))
    core.stop_all()
    core.start_all()
    core.feed(ev.SandboxDied(1, "oom"))
    assert not core.all(ev.BindSandbox)
    assert ev.BindSandbox(3, A) in core.wake()
    assert core.now == 2.0


def test_an_engine_that_comes_back_does_not_mend_the_ledger() -> None:
    core = Core(Policy(min_standby=1, backoff_base=100.0, backoff_cap=100.0))
    core.start_all()
    core.acquire("a")
    core.feed(ev.BindFailed(1, UNUSABLE))
    core.feed(ev.EngineDown(UNREACHABLE, 1.0), ev.EngineUp())
    core.start_all()
    core.acquire("a")
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.POOL_UNUSABLE


def test_a_bind_that_is_recorded_already_cannot_fail_any_more() -> None:
    core = Core(BARE)
    grant = core.granted("a")
    assert core.feed(ev.BindFailed(grant.n, UNUSABLE)) == []


def test_hearing_again_of_an_engine_that_was_never_away_changes_nothing() -> None:
    core = Core(replace(BARE, backoff_base=4.0))
    core.acquire("a")
    core.feed(ev.SandboxStartFailed(1, NO_IMAGE))
    assert core.feed(ev.EngineUp()) == []
    core.acquire("a")
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.IMAGE_MISSING
    core.feed(ev.Tick(), after=2.0)
    core.acquire("a")
    core.feed(ev.SandboxStartFailed(2, NO_IMAGE), ev.EngineUp())
    core.feed(ev.Tick(), after=3.9)
    core.acquire("a")
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.IMAGE_MISSING, "the backoff has grown"


def test_an_engine_that_was_away_is_tried_anew_at_once() -> None:
    core = Core(replace(BARE, backoff_base=100.0, backoff_cap=100.0))
    core.acquire("a")
    core.feed(ev.SandboxStartFailed(1, NO_IMAGE))
    core.feed(ev.EngineDown(UNREACHABLE, 1.0), ev.EngineUp())
    core.acquire("a")
    assert core.effects == [ev.StartSandbox(2)]


def test_a_stop_that_failed_is_asked_for_again_after_its_backoff() -> None:
    core = Core(replace(BARE, backoff_base=4.0))
    grant = core.granted("a")
    core.feed(ev.SessionEnded(A, grant.epoch))
    assert core.feed(ev.SandboxStopFailed(1)) == []
    assert core.wake() == [ev.StopSandbox(1, "again")]
    assert core.now == 2.0


# --- the end ----------------------------------------------------------------------------------------------------------


def test_closing_refuses_waiters_and_lets_calls_run_until_the_drain_deadline() -> None:
    core = Core(replace(BARE, max_sandboxes=1, max_cold=1))
    grant = core.granted("a")
    call, cold, waiting = core.call(grant, "a"), core.cold(), core.acquire("b")
    core.feed(ev.CloseBegan(core.now + 5.0))
    assert core.only(ev.Refuse).waiter == waiting
    assert not core.all(ev.EndCall)
    core.wake()
    assert {end.waiter for end in core.all(ev.EndCall)} == {call, cold}
    assert core.only(ev.StopSandbox) == ev.StopSandbox(1, "closing")
    assert not core.state.drained
    assert core.feed(ev.CallEnded(call), ev.CallEnded(cold), ev.SandboxStopped(1)) == []
    assert core.state.drained


def test_a_call_is_told_to_end_only_once() -> None:
    core = Core(BARE)
    core.cold()
    core.feed(ev.CloseBegan(core.now))
    assert core.all(ev.EndCall)
    assert core.feed(ev.Tick(), after=1.0) == []


def test_nothing_starts_while_closing() -> None:
    core = Core(Policy(min_standby=1))
    core.feed(ev.CloseBegan(core.now + 5.0))
    core.start_all()
    assert core.stop_all() == []
    assert core.state.drained


def test_a_start_that_ends_while_closing_is_stopped() -> None:
    core = Core(BARE)
    core.acquire("a")
    core.feed(ev.CloseBegan(core.now + 5.0))
    assert core.start_all() == [ev.StopSandbox(1, "closing")]
