"""The pure core, scenario by scenario: what a session, a waiter, the engine or time does, and what is decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pool import events as ev
from pool.events import Policy, RefusalKind
from pool.state import Phase
from tests.core import NO_IMAGE, UNREACHABLE, UNUSABLE, Core

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


# --- acquiring --------------------------------------------------------------------------------------------------------


def test_acquire_is_granted_only_after_the_bind_is_recorded() -> None:
    core = Core(Policy(min_standby=1))
    core.start_all()
    waiter = core.acquire("a")
    assert core.effects[0] == ev.BindSandbox(1, A)
    assert not core.all(ev.Grant)
    assert core.feed(ev.BindRecorded(1))[0] == ev.Grant(waiter, 1, 1)


def test_a_second_acquire_attaches_to_the_same_sandbox() -> None:
    core = Core(BARE)
    first = core.granted("a")
    core.acquire("a")
    second = core.only(ev.Grant)
    assert (second.n, second.epoch) == (first.n, first.epoch)


def test_two_acquires_at_once_are_granted_by_one_sandbox() -> None:
    core = Core(BARE)
    first, second = core.acquire("a"), core.acquire("a")
    core.start_all()
    core.feed(ev.BindRecorded(1))
    assert [grant.waiter for grant in core.all(ev.Grant)] == [first, second]


def test_sessions_are_served_first_come_first_served() -> None:
    core = Core(replace(BARE, max_sandboxes=1))
    for name in ("a", "b", "c"):
        core.acquire(name)
    assert core.start_all() == [ev.BindSandbox(1, A)]
    grant = core.only(ev.BindSandbox)
    core.feed(ev.BindRecorded(grant.n), ev.SessionEnded(A, 1))
    core.stop_all()
    assert core.start_all() == [ev.BindSandbox(2, B)]


def test_acquire_past_its_deadline_is_refused_with_a_time_to_retry() -> None:
    core = Core(BARE)
    waiter = core.acquire("a", wait=3.0)
    core.wake()
    refusal = core.only(ev.Refuse)
    assert refusal.waiter == waiter
    assert refusal.refusal.kind is RefusalKind.POOL_EXHAUSTED
    assert refusal.refusal.retry_after


def test_a_full_queue_refuses_at_once() -> None:
    core = Core(replace(BARE, max_sandboxes=1, max_waiters=1))
    core.acquire("a")
    waiter = core.acquire("b")
    assert core.only(ev.Refuse).waiter == waiter
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.POOL_EXHAUSTED


def test_quota_refuses_at_once_and_says_when_to_retry() -> None:
    core = Core(replace(BARE, max_sessions_per_agent=1))
    core.granted("a")
    core.acquire("b")
    refusal = core.only(ev.Refuse).refusal
    assert refusal.kind is RefusalKind.QUOTA_EXCEEDED
    assert refusal.retry_after


def test_a_waiter_cancelled_between_bind_and_grant_gives_its_sandbox_back() -> None:
    core = Core(Policy(min_standby=1))
    core.start_all()
    waiter = core.acquire("a")
    core.feed(ev.WaiterGone(waiter))
    assert core.all(ev.StopSandbox) == [ev.StopSandbox(1, "declined")]
    assert A not in core.state.sessions
    assert core.feed(ev.BindRecorded(1)) == []


def test_a_waiter_whose_deadline_ends_between_bind_and_grant_gives_its_sandbox_back() -> None:
    core = Core(BARE)
    core.acquire("a", wait=3.0)
    core.start_all()
    core.feed(ev.Tick(), after=3.0)
    assert core.all(ev.StopSandbox) == [ev.StopSandbox(1, "declined")]


def test_a_declined_grant_gives_its_sandbox_back() -> None:
    core = Core(BARE)
    grant = core.granted("a")
    core.feed(ev.GrantDeclined(A, grant.epoch))
    assert core.all(ev.StopSandbox) == [ev.StopSandbox(1, "declined")]


def test_a_declined_grant_keeps_the_sandbox_of_another_handle() -> None:
    core = Core(BARE)
    grant = core.granted("a")
    core.acquire("a")
    assert core.feed(ev.GrantDeclined(A, grant.epoch)) == []


def test_a_declined_grant_keeps_what_an_earlier_call_of_the_session_left_behind() -> None:
    core = Core(BARE)
    grant = core.granted("a")
    call = core.call(grant, "a")
    core.feed(ev.CallEnded(call), ev.HandleReleased(A, grant.epoch))
    core.acquire("a")
    assert core.feed(ev.GrantDeclined(A, grant.epoch)) == []


def test_a_declined_grant_of_an_ended_session_leaves_its_successor_alone() -> None:
    core = Core(BARE)
    old = core.granted("a")
    core.feed(ev.SessionEnded(A, old.epoch))
    new = core.granted("a")
    core.feed(ev.HandleReleased(A, new.epoch))
    assert core.feed(ev.GrantDeclined(A, old.epoch)) == []


def test_a_declined_grant_does_not_forget_the_sessions_deaths() -> None:
    core = Core(replace(BARE, restart_limit=0, restart_window=60.0, reclaim_idle_after=None))
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "oom"), ev.SandboxStopped(grant.n), ev.GrantDeclined(A, grant.epoch))
    core.acquire("a")
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.SANDBOX_DIED


# --- calls ------------------------------------------------------------------------------------------------------------


def test_calls_of_a_session_wait_first_in_first_out_for_parallel() -> None:
    core = Core(BARE)
    grant = core.granted("a")
    first, second, third = (core.call(grant, "a") for _ in range(3))
    assert core.feed(ev.CallEnded(first)) == [ev.RunCall(second, 1)]
    assert core.feed(ev.WaiterGone(second)) == [ev.RunCall(third, 1)]


def test_a_call_that_waits_past_its_deadline_behind_its_own_session_is_busy() -> None:
    core = Core(BARE)
    grant = core.granted("a")
    core.call(grant, "a")
    core.call(grant, "a", wait=2.0)
    core.feed(ev.Tick(), after=2.0)
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.SESSION_BUSY


def test_a_sandbox_due_for_recycling_goes_when_its_last_call_ends_and_the_next_call_gets_a_new_one() -> None:
    core = Core(replace(BARE, max_calls=1))
    grant = core.granted("a")
    first, second = core.call(grant, "a"), core.call(grant, "a")
    assert core.feed(ev.CallEnded(first)) == [ev.StopSandbox(1, "recycled"), ev.StartSandbox(2)]
    core.start_all()
    assert core.feed(ev.BindRecorded(2)) == [ev.RunCall(second, 2)]


def test_a_call_for_a_generation_that_is_gone_is_refused_also_while_it_waits() -> None:
    core = Core(replace(BARE, max_calls=1))
    grant = core.granted("a")
    core.call(grant, "a", generation=7)
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.STATE_LOST
    running = core.call(grant, "a", generation=1)
    waiting = core.call(grant, "a", generation=1)
    core.feed(ev.CallEnded(running))
    assert core.only(ev.Refuse).waiter == waiting
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.STATE_LOST


def test_closing_a_session_ends_its_calls_and_refuses_its_waiters_once() -> None:
    core = Core(BARE)
    grant = core.granted("a")
    running, waiting = core.call(grant, "a"), core.call(grant, "a")
    core.feed(ev.SessionEnded(A, grant.epoch))
    assert [end.waiter for end in core.all(ev.EndCall)] == [running]
    assert core.only(ev.Refuse).waiter == waiting
    assert core.only(ev.StopSandbox).n == grant.n
    core.call(grant, "a")
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.SESSION_CLOSED


def test_cold_calls_are_bounded_and_do_not_crowd_a_session_whose_key_is_empty() -> None:
    core = Core(replace(BARE, max_cold=1, max_cold_waiters=2, max_waiters=2))
    first, second = core.cold(), core.cold()
    core.cold()
    core.cold()
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.POOL_EXHAUSTED
    core.feed(ev.AcquireWanted(100, ("", ""), 1000.0))
    core.start_all()
    core.feed(ev.BindRecorded(1))
    grant = core.only(ev.Grant)
    core.feed(ev.CallWanted(101, ("", ""), grant.epoch, 1000.0))
    assert core.only(ev.RunCall).waiter == 101
    assert core.feed(ev.CallEnded(first)) == [ev.RunCold(second)]


# --- deaths -----------------------------------------------------------------------------------------------------------


def test_a_dead_session_is_restarted_ahead_of_new_waiters() -> None:
    core = Core(replace(BARE, max_sandboxes=1))
    grant = core.granted("a")
    core.acquire("b")
    core.feed(ev.SandboxDied(grant.n, "oom"))
    core.stop_all()
    assert core.start_all() == [ev.BindSandbox(2, A)]


def test_a_poisoned_sandbox_is_counted_as_one_death() -> None:
    core = Core(BARE)
    grant = core.granted("a")
    call = core.call(grant, "a")
    core.feed(ev.CallEnded(call, "protocol"), ev.SandboxDied(grant.n, "killed"))
    assert core.state.sessions[A].deaths == [core.now]
    assert core.state.sandboxes[grant.n].phase is Phase.STOPPING


def test_the_second_death_in_the_window_waits_out_its_backoff() -> None:
    core = Core(replace(BARE, backoff_base=4.0, reclaim_idle_after=None))
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "oom"))
    assert core.all(ev.StartSandbox)
    core.start_all()
    core.feed(ev.SandboxStopped(1), ev.SandboxDied(2, "oom"))
    assert not core.all(ev.StartSandbox)
    assert core.wake() == [ev.StartSandbox(3)]
    assert core.now == 2.0


def test_a_session_past_its_restart_intensity_is_refused_and_others_go_on() -> None:
    core = Core(replace(BARE, restart_limit=1, restart_window=60.0, backoff_base=0.1))
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "oom"))
    core.start_all()
    core.feed(ev.SandboxDied(2, "oom"), after=10.0)
    core.call(grant, "a")
    refusal = core.only(ev.Refuse).refusal
    assert refusal.kind is RefusalKind.SANDBOX_DIED
    assert refusal.retry_after == 50.0
    core.stop_all()
    assert core.granted("b")


def test_deaths_by_an_engine_restart_do_not_count() -> None:
    core = Core(replace(BARE, restart_limit=0))
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "engine"))
    assert core.all(ev.StartSandbox)


def test_an_engine_that_goes_down_in_order_is_forgiven_the_deaths_just_before() -> None:
    core = Core(replace(BARE, restart_limit=0, engine_grace=15.0))
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "killed"))
    core.stop_all()
    core.feed(ev.EngineDown(UNREACHABLE, 1.0), after=5.0)
    core.feed(ev.EngineUp(), after=1.0)
    assert core.all(ev.StartSandbox)


def test_an_engine_that_is_down_already_forgives_nothing_more() -> None:
    core = Core(replace(BARE, restart_limit=0, engine_grace=15.0))
    grant = core.granted("a")
    core.feed(ev.EngineDown(UNREACHABLE, 1.0))
    core.feed(ev.SandboxDied(grant.n, "killed"), after=1.0)
    core.stop_all()
    core.feed(ev.EngineDown(UNREACHABLE, 1.0), after=1.0)
    core.feed(ev.EngineUp(), after=1.0)
    assert not core.all(ev.StartSandbox)


def test_a_start_that_the_engines_loss_cut_off_does_not_hide_that_loss() -> None:
    core = Core(BARE)
    core.acquire("a")
    started = core.only(ev.StartSandbox)
    core.feed(ev.EngineDown(UNREACHABLE, 1.0))
    core.feed(ev.SandboxStartUnknown(started.n, NO_IMAGE))
    core.acquire("b")
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.ENGINE_UNAVAILABLE


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
    assert core.wake() == [ev.StopSandbox(1, "reclaimed"), ev.SessionForgotten(A, grant.epoch, "unused")]


def test_a_dead_session_that_nobody_used_for_idle_timeout_is_not_restarted_any_more() -> None:
    core = Core(replace(BARE, max_sandboxes=1, idle_timeout=10.0, reclaim_idle_after=None))
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "oom"))
    core.feed(ev.Tick(), after=10.0)
    assert core.stop_all() == []


def test_a_dead_session_that_everybody_left_returns_as_a_newcomer() -> None:
    core = Core(replace(BARE, max_sandboxes=1))
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "oom"), ev.HandleReleased(A, grant.epoch))
    core.acquire("b")
    core.acquire("a")
    core.stop_all()
    assert core.start_all() == [ev.BindSandbox(2, B)]


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


def test_a_failed_bind_destroys_the_sandbox_and_refuses_its_waiter() -> None:
    core = Core(BARE)
    core.acquire("a")
    core.start_all()
    core.feed(ev.BindFailed(1, UNUSABLE))
    assert core.all(ev.StopSandbox) == [ev.StopSandbox(1, "bind_failed")]
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.POOL_UNUSABLE


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
