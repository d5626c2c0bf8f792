"""The pure core, scenario by scenario: what callers and their sandboxes do, and what is decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pool.core import events as ev
from pool.core.events import Policy, RefusalKind
from pool.core.handlers import Phase
from tests.support.core import NO_IMAGE, UNREACHABLE, Core

A, B = ("agent", "a"), ("agent", "b")
BARE = Policy(min_standby=0, max_sandboxes=2)


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


def test_many_callers_of_one_session_that_waits_are_one_that_waits() -> None:
    core = Core(replace(BARE, max_sandboxes=1, max_waiters=1))
    waiters = [core.acquire("a") for _ in range(5)]
    assert core.state.waiters.keys() == set(waiters)
    other = core.acquire("b")
    assert core.only(ev.Refuse).waiter == other
    assert "1 sessions wait already (pool.max_waiters)" in core.only(ev.Refuse).refusal.message
    core.start_all()
    core.feed(ev.BindRecorded(1))
    assert [grant.waiter for grant in core.all(ev.Grant)] == waiters


@pytest.mark.parametrize("has_sandbox", [True, False])
def test_calls_that_wait_in_one_session_are_bounded_whether_or_not_it_has_a_sandbox(has_sandbox: bool) -> None:
    core = Core(replace(BARE, max_sandboxes=1, max_waiters=2))
    grant = core.granted("a")
    if has_sandbox:
        core.call(grant, "a")
    else:
        core.feed(ev.SandboxDied(grant.n, "killed"))
    core.call(grant, "a")
    core.acquire("a")
    core.call(grant, "a")
    assert not core.all(ev.Refuse)
    core.call(grant, "a")
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.SESSION_BUSY
    assert "2 calls of this session wait already (pool.max_waiters)" in core.only(ev.Refuse).refusal.message


def test_quota_refuses_at_once_and_says_when_to_retry() -> None:
    core = Core(replace(BARE, max_sessions_per_agent=1))
    core.granted("a")
    core.acquire("b")
    refusal = core.only(ev.Refuse).refusal
    assert refusal.kind is RefusalKind.QUOTA_EXCEEDED
    assert refusal.retry_after


@pytest.mark.parametrize(("own", "refused"), [(1, True), (3, False), (0, False)])
def test_an_agents_own_quota_replaces_the_general_one_and_0_is_no_limit(own: int, refused: bool) -> None:
    core = Core(replace(BARE, max_sandboxes=9, max_sessions_per_agent=2, agent_quotas={"agent": own}))
    core.granted("a")
    if own != 1:
        core.granted("b")
    core.acquire("c")
    assert [refuse.refusal.kind for refuse in core.all(ev.Refuse)] == [RefusalKind.QUOTA_EXCEEDED] * refused
    if refused:
        assert "max_sessions in the agent's own table" in core.only(ev.Refuse).refusal.message


def test_an_agent_without_a_quota_of_its_own_has_the_general_one() -> None:
    core = Core(replace(BARE, max_sessions_per_agent=1, agent_quotas={"other": 5}))
    core.granted("a")
    core.acquire("b")
    assert "pool.max_sessions_per_agent" in core.only(ev.Refuse).refusal.message


def test_quotas_are_copied_and_cannot_be_changed() -> None:
    quotas = {"agent": 1}
    policy = Policy(agent_quotas=quotas)
    quotas["agent"] = 2
    assert policy.agent_quotas == {"agent": 1}
    assert policy == replace(policy)
    assert hash(policy) == hash(replace(policy))
    with pytest.raises(TypeError):
        policy.agent_quotas["agent"] = 3  # type: ignore[index]


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


# --- a call that nobody else is concerned by is settled without a plan, which must not be missed -------------------------


def settled(core: Core) -> bool:
    """Whether a plan would find nothing to do now."""
    return core.feed(ev.Tick()) == []


def test_the_last_call_that_a_sandbox_may_have_ends_it_although_nobody_waits() -> None:
    core = Core(replace(BARE, max_calls=1))
    waiter = core.call(core.granted("a"), "a")
    assert core.feed(ev.CallEnded(waiter)) == [ev.StopSandbox(1, "recycled")]


def test_a_call_that_ends_in_a_closing_pool_is_the_last_that_its_sandbox_waits_for() -> None:
    core = Core(BARE)
    waiter = core.call(core.granted("a"), "a")
    core.feed(ev.CloseBegan(core.now + 100.0))
    assert core.feed(ev.CallEnded(waiter)) == [ev.StopSandbox(1, "closing")]


def test_a_call_of_a_closing_pool_is_refused() -> None:
    core = Core(replace(BARE, parallel=2))
    grant = core.granted("a")
    running = core.call(grant, "a")
    core.feed(ev.CloseBegan(core.now + 100.0))
    core.call(grant, "a")
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.POOL_CLOSED
    core.feed(ev.CallEnded(running))
    assert settled(core)


def test_a_call_whose_time_is_up_when_it_comes_does_not_begin() -> None:
    core = Core(BARE)
    core.call(core.granted("a"), "a", wait=0.0)
    assert not core.all(ev.RunCall)
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.SESSION_BUSY
    assert settled(core)


def test_what_time_has_made_due_is_done_with_a_call_that_comes_then() -> None:
    core = Core(replace(BARE, min_standby=1, standby_max_age=60.0, idle_timeout=1000.0))
    core.start_all()
    grant = core.granted("a")
    core.start_all()
    core.now += 60.0
    waiter = core.call(grant, "a")
    assert core.all(ev.RunCall)
    assert core.all(ev.StopSandbox)
    core.feed(ev.CallEnded(waiter))
    assert settled(core)


def test_a_session_whose_call_ends_gives_way_in_time_to_one_that_restarts() -> None:
    core = Core(replace(BARE, reclaim_idle_after=5.0))
    core.granted("a")
    waiter = core.call(core.granted("b"), "b")
    core.feed(ev.PolicyChanged(replace(core.state.policy, max_sandboxes=1)))
    core.feed(ev.SandboxDied(1, "killed"), ev.SandboxStopped(1))
    core.feed(ev.Tick(), after=20.0)
    core.feed(ev.CallEnded(waiter))
    assert core.state.next_wake <= core.now + 5.0
    core.feed(ev.Tick(), after=5.0)
    assert ev.StopSandbox(2, "reclaimed") in core.effects


def test_what_could_not_be_stopped_is_tried_again_once_the_engine_is_back_or_the_pool_closes() -> None:
    core = Core(BARE)
    core.granted("a")
    core.feed(ev.SessionEnded(A, 1))
    core.feed(ev.EngineDown(UNREACHABLE, 1.0), *[ev.SandboxStopFailed(1, 0.5)] * 5)
    assert core.feed(ev.EngineUp(), after=0.1) == [ev.StopSandbox(1, "again")]
    core.feed(*[ev.SandboxStopFailed(1, 0.5)] * 5)
    assert core.feed(ev.EngineUp(), after=0.1) == []  # it was not away
    assert core.feed(ev.CloseBegan(core.now + 10.0)) == [ev.StopSandbox(1, "again")]


def test_a_session_idles_from_the_end_of_a_call_that_was_longer_than_its_idle_time() -> None:
    core = Core(replace(BARE, idle_timeout=10.0))
    waiter = core.call(core.granted("a"), "a")
    core.feed(ev.Tick(), after=50.0)
    core.feed(ev.CallEnded(waiter))
    assert core.state.next_wake == core.now + 10.0
    assert core.wake() == [ev.StopSandbox(1, "idle")]


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


def test_a_call_that_ran_longer_than_idle_timeout_and_lost_its_sandbox_is_restarted() -> None:
    core = Core(replace(BARE, idle_timeout=10.0))
    grant = core.granted("a")
    core.call(grant, "a")
    core.feed(ev.SandboxDied(grant.n, "oom"), after=50.0)
    assert core.all(ev.StartSandbox)


def test_closing_and_acquiring_anew_does_not_reset_a_sessions_deaths() -> None:
    core = Core(replace(BARE, max_sandboxes=3, restart_limit=1, restart_window=60.0, backoff_base=0.1))
    for _ in range(2):
        grant = core.granted("a")
        core.feed(ev.SandboxDied(grant.n, "oom"), ev.SessionEnded(A, grant.epoch))
        core.start_all()
        core.stop_all()
        core.feed(ev.Tick(), after=10.0)
    core.acquire("a")
    refusal = core.only(ev.Refuse).refusal
    assert refusal.kind is RefusalKind.SANDBOX_DIED
    assert refusal.retry_after == 40.0


def test_closing_and_acquiring_anew_does_not_end_a_sessions_backoff() -> None:
    core = Core(replace(BARE, max_sandboxes=3, backoff_base=4.0, reclaim_idle_after=None))
    for _ in range(2):
        grant = core.granted("a")
        core.feed(ev.SandboxDied(grant.n, "oom"), ev.SessionEnded(A, grant.epoch))
        core.start_all()
        core.stop_all()
    core.acquire("a")
    assert core.effects == []
    core.acquire("b")
    core.start_all()
    assert core.only(ev.BindSandbox).key == B
    assert core.wake() == [ev.StartSandbox(5)]
    assert core.now == 2.0


def test_a_closed_session_is_remembered_only_for_as_long_as_its_deaths_are_recent() -> None:
    core = Core(replace(BARE, restart_window=60.0, max_sessions_per_agent=1))
    grant = core.granted("a")
    core.feed(ev.SandboxDied(grant.n, "oom"), ev.SessionEnded(A, grant.epoch))
    assert core.all(ev.SessionForgotten) == [ev.SessionForgotten(A, grant.epoch, "closed", granted=True)]
    core.start_all()
    core.stop_all()
    core.granted("b")  # what is remembered is no session that counts
    core.feed(ev.Tick(), after=60.0)
    assert A not in core.state.sessions
    assert grant.epoch != core.only(ev.SessionForgotten).epoch


def test_what_a_closed_sessions_call_leaves_is_no_death_of_whoever_acquires_it_anew() -> None:
    core = Core(replace(BARE, restart_limit=0))
    grant = core.granted("a")
    call = core.call(grant, "a")
    core.feed(ev.SessionEnded(A, grant.epoch))
    core.granted("a")
    core.feed(ev.CallEnded(call, "drained"), ev.SandboxDied(grant.n, "killed"), ev.SandboxStopped(grant.n))
    assert core.state.sessions[A].deaths == []
    assert core.state.sandboxes[2].phase is Phase.BOUND


def test_a_closed_sessions_call_does_not_keep_its_successor_from_being_idle() -> None:
    core = Core(replace(BARE, idle_timeout=10.0, reclaim_idle_after=None))
    grant = core.granted("a")
    call = core.call(grant, "a")
    core.feed(ev.SessionEnded(A, grant.epoch))
    core.granted("a")
    core.feed(ev.CallEnded(call), after=5.0)
    assert core.feed(ev.Tick(), after=5.0) == [ev.StopSandbox(2, "idle")]


def test_calls_that_a_closing_pool_ended_are_no_deaths() -> None:
    core = Core(replace(BARE, restart_limit=0))
    grant = core.granted("a")
    call = core.call(grant, "a")
    core.feed(ev.CloseBegan(core.now))
    assert core.all(ev.StopSandbox) == [ev.StopSandbox(grant.n, "closing")]
    assert core.feed(ev.CallEnded(call, "drained")) == []
    assert core.stop_all() == []
    assert core.state.drained


# --- hostile sessions -------------------------------------------------------------------------------------------------


def _dies(core: Core, n: int) -> None:
    core.feed(ev.SandboxDied(n, "oom"))
    core.stop_all()


def test_while_a_session_is_backed_off_whoever_waits_is_served_first() -> None:
    core = Core(replace(BARE, max_sandboxes=1, backoff_base=4.0, reclaim_idle_after=None))
    hostile = core.granted("hostile")
    core.acquire("b")
    _dies(core, hostile.n)
    core.start_all()  # its first death is healed ahead of everybody
    assert core.only(ev.BindSandbox).key == ("agent", "hostile")
    _dies(core, core.only(ev.BindSandbox).n)
    core.start_all()
    assert core.only(ev.BindSandbox).key == B


def test_a_session_whose_sandboxes_die_at_once_has_one_start_at_a_time_and_few_in_all() -> None:
    policy = replace(BARE, max_sandboxes=9, max_starting=9, restart_limit=3, restart_window=60.0, backoff_base=0.1)
    core = Core(policy)
    grant, starts = core.granted("a"), 1
    for _ in range(5):
        core.call(grant, "a")
        core.call(grant, "a")
    while core.now < 59.0:
        for box in core.state.in_phase(Phase.BOUND):
            core.feed(ev.SandboxDied(box.n, "oom"))
        assert len(core.state.in_phase(Phase.STARTING)) <= 1
        starts += len(core.state.in_phase(Phase.STARTING))
        core.start_all()
        core.stop_all()
        core.feed(ev.Tick(), after=1.0)
    assert starts == 1 + policy.restart_limit


def test_many_sessions_of_one_agent_that_die_do_not_close_the_pool_for_others() -> None:
    core = Core(replace(BARE, max_sandboxes=5, max_starting=5, failures_to_open=1, reclaim_idle_after=None))
    for name in "abcd":
        core.granted(name)
    for _ in range(8):
        core.feed(*(ev.SandboxDied(box.n, "oom") for box in core.state.in_phase(Phase.BOUND)))
        core.start_all()
        core.stop_all()
        assert core.state.health.fault is None
        core.feed(ev.Tick(), after=1.0)
    waiter = core.acquire("b", agent="other")
    core.start_all()
    core.feed(*(ev.BindRecorded(bind.n) for bind in core.all(ev.BindSandbox)))
    assert waiter in [grant.waiter for grant in core.all(ev.Grant)]


def test_restarts_count_as_claims_so_that_starts_stay_within_what_is_wanted() -> None:
    core = Core(Policy(min_standby=2, max_sandboxes=8, max_starting=8))
    core.start_all()
    core.granted("a")
    core.start_all()
    core.feed(ev.SandboxDied(1, "oom"))
    assert core.all(ev.BindSandbox) == [ev.BindSandbox(2, A)]
    assert len(core.all(ev.StartSandbox)) == 1


# --- what an embedder asks --------------------------------------------------------------------------------------------


def test_an_acquire_that_names_a_generation_starts_nothing_and_waits_for_nothing() -> None:
    core = Core(BARE)
    core.feed(ev.AcquireWanted(901, A, 100.0, generation=1))
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.STATE_LOST
    assert core.all(ev.StartSandbox) == []
    assert core.state.sessions == {}
    grant = core.granted("a")
    core.feed(ev.AcquireWanted(902, A, 100.0, generation=grant.n))
    assert core.only(ev.Grant).n == grant.n
    core.feed(ev.AcquireWanted(903, A, 100.0, generation=grant.n + 1))
    assert core.only(ev.Refuse).refusal.kind is RefusalKind.STATE_LOST


def test_of_two_closes_the_earlier_deadline_holds() -> None:
    for first, second in ((5.0, 50.0), (50.0, 5.0), (0.0, 5.0)):
        core = Core(BARE)
        core.feed(ev.CloseBegan(first), ev.CloseBegan(second))
        assert core.state.close_deadline == min(first, second)


def test_a_pool_is_stocked_once_the_standbys_that_find_a_place_stand() -> None:
    core = Core(replace(BARE, min_standby=2, max_sandboxes=3))
    seen = [core.state.has_standbys]
    core.start_all()
    seen.append(core.state.has_standbys)
    core.granted("a")
    core.granted("b")  # so there is room for one only
    core.start_all()
    seen.append(core.state.has_standbys)
    core.feed(ev.EngineDown(UNREACHABLE, 1.0))
    assert [*seen, core.state.has_standbys] == [False, True, True, False]
