"""Carry one call out on an armed runner, and turn how it ended into a result or an error."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from executor.errors import DeathCause, EngineUnavailable, SandboxDied, SessionBusy
from executor.result import CallResult
from executor.sandbox.kill import not_confirmed
from executor.sandbox.request import Call
from executor.sandbox.runner_client import ArmedRunner, RunnerState
from executor.sandbox.runners import EVENT_PATIENCE, SIGKILL, Runners, cause_of
from executor.sandbox.running_call import RunningCall
from executor.sandbox.stream import Sink
from executor.sandbox.wire import Report

ANSWER_PATIENCE = 1.0
"""Seconds beyond deadline and grace in which a runner may still answer; silence after that is not life."""
SIGXCPU = 24
USED_UP = 0.75
"""How much of its CPU limit a process has used at least that was ended by it. The kernel compares the limit with what it
samples at its ticks; what it reports at the end is exact, and was seen to be 12 % less on a busy machine."""


async def run_on_runner(
    runners: Runners, call: Call, sink: Sink | None = None, *, began: float | None = None
) -> CallResult:
    """Run one call on a sandbox's armed runner; ``sink`` and ``began`` as in ``Sandbox.call``.

    Raises ``SandboxDied``, or ``SessionBusy`` or ``EngineUnavailable`` where the call never began. A timeout is a result,
    unless the engine does not confirm that what had to be killed for it is dead (``SandboxDied``).
    """
    context = runners.context
    # A cancel that is due already finds the runner unclaimed; later it has to end a call.
    await anyio.lowlevel.checkpoint_if_cancelled()
    began, left = anyio.current_time() if began is None else began, call.timeout
    if (runner := runners.ready()) is None:
        runner = await _wait_armed(runners, call)
        left = max(0.001, left - (anyio.current_time() - began))
    ooms = context.watch.ooms
    running = runner.begin(
        call.request(), call.stdin, timeout=left, grace=context.grace, max_output=call.max_output, sink=sink
    )
    try:
        runner.feed_at_once(running)
        with anyio.move_on_after(left + context.grace + ANSWER_PATIENCE):
            await runner.feed(running)
            await running.wait_ended()
    except anyio.get_cancelled_exc_class():
        await _end_cancelled(runners, runner, running)
        raise
    duration = anyio.current_time() - began
    if running.report is not None:
        oom = context.watch.ooms > ooms if running.report.oom is None else running.report.oom
        return result_of(running, running.report, duration, oom=oom, cpu_seconds=context.config.cpu_seconds)
    if running.ended:
        raise await _lost_error(runners, runner, running, ooms)
    if not await runners.kill("timeout"):
        raise not_confirmed()
    return CallResult(
        exit_code=None,
        timed_out=True,
        stdout=bytes(running.stdout.kept),
        stderr=bytes(running.stderr.kept),
        stdout_total=running.stdout.total,
        stderr_total=running.stderr.total,
        duration=duration,
    )


async def _wait_armed(runners: Runners, call: Call) -> ArmedRunner:
    try:
        return await runners.wait_armed(call.timeout)
    except EngineUnavailable:
        if not runners.context.hub.connected or runners.failed_execs:
            raise
        # The engine is there and makes execs: cleaning up after the session's last call took the time.
        raise SessionBusy(
            f"the sandbox was not ready again within the {call.timeout:g} s of the call; give it a longer timeout",
            retry_after=1.0,
        ) from None


async def _end_cancelled(runners: Runners, runner: ArmedRunner, running: RunningCall) -> None:
    """End a cancelled call's whole tree, or the sandbox, before its caller goes on."""
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(runners.context.grace + ANSWER_PATIENCE):
            if await runner.cancel(running):
                await running.wait_ended()
                while runner.state is RunnerState.CLEANING and not running.clean:
                    await runners.changed.wait()
        if not running.clean:
            await runners.kill("cancelled")


async def _lost_error(runners: Runners, runner: ArmedRunner, running: RunningCall, ooms: int) -> SandboxDied:
    """Kill the sandbox of a call whose runner ended without a report, and return the call's error."""
    context = runners.context
    if not runner.problem:
        with anyio.move_on_after(EVENT_PATIENCE):
            while not context.watch.died.is_set() and runners.problem is None:
                await runners.changed.wait()
    cause: DeathCause = "oom" if context.watch.ooms > ooms else cause_of(runner)
    why = runner.problem or "its runner ended without an answer"
    if context.watch.died.is_set() and not runners.killed:
        cause = context.watch.cause
    elif context.watch.engine_lost or not context.hub.connected:
        cause = "engine"
    elif runners.killed in ("timeout", "cancelled") and not runner.problem:
        cause, why = "killed", "another call in it could only be ended by killing all of it"
    if not await runners.kill(cause) and not running.refused and cause != "engine":
        return not_confirmed()
    if running.refused:
        return SandboxDied(f"the sandbox was unfit for the call: {running.refused}", cause=cause, started=False)
    return SandboxDied(f"the sandbox was lost under the call ({cause}): {why}", cause=cause, started=True)


def result_of(
    running: RunningCall, report: Report, duration: float, *, oom: bool, cpu_seconds: int | None
) -> CallResult:
    """Turn a runner's report into a call's result. ``oom``: the container's out-of-memory counter moved during the call."""
    oom_killed = oom and report.signal == SIGKILL and not report.timed_out
    used_up = cpu_seconds is not None and report.cpu_seconds >= cpu_seconds * USED_UP
    return CallResult(
        exit_code=report.exit_code,
        signal=report.signal,
        timed_out=report.timed_out,
        oom_killed=oom_killed,
        cpu_limit=used_up and report.signal in (SIGXCPU, SIGKILL) and not oom_killed,
        stdout=bytes(running.stdout.kept),
        stderr=bytes(running.stderr.kept),
        stdout_total=report.stdout_total,
        stderr_total=report.stderr_total,
        duration=duration,
        cpu_seconds=report.cpu_seconds,
        max_rss=report.max_rss,
    )
