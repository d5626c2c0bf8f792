"""Supervise one runner from its exec's start to its end: its hello is checked, and each of its steps has a deadline.

Deadlines are the host's: a runner that is starved or stopped cannot keep its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from executor.sandbox.arming import Slot
from executor.sandbox.runner_client import ArmedRunner, RunnerState

if TYPE_CHECKING:
    from executor.sandbox.runners import Runners

START_TIMEOUT = 60.0
"""Seconds that an exec may take until its hello, and from there until it is armed, as long as a container's start may:
nothing of a call runs there, and giving up would cost an idle session its state."""
ARM_TIMEOUT = 15.0
"""Seconds that a runner may take for each step that it does by itself later (arming again, its end); beyond it the sandbox is
not worth waiting for."""
CLEAN_PATIENCE = 1.0
"""Seconds without a heartbeat of a runner that cleans up: what a call left may have stopped it, and runs on meanwhile. A
live one sends several in them (``HEARTBEAT_SECONDS`` of ``executor/inside/runner/process.py``), however much it has to do."""
CLEAN_TIMEOUT = 5.0
"""Seconds for a whole clean-up: a runner gives up after less (``REAP_SECONDS``) and says so."""


async def supervise(runners: Runners, runner: ArmedRunner) -> None:
    """Check the runner's hello, have it clean up, and cancel its ``scope`` where a step takes too long.

    Returns when the runner has ended, or when it was cancelled for ``runner.problem`` or ``runners.problem``.
    """
    context, lanes = runners.context, runners.lanes
    while (state := runner.state) is not RunnerState.ENDED:
        if state is not RunnerState.STARTING and not runner.verified and not runners.check_hello(runner):
            runner.scope.cancel()
            return
        if state is RunnerState.CLEANING and context.config.shared and runner.sweeps is None:
            await _clean_up(runners, runner)
        waits, cleans = state in (RunnerState.ARMED, RunnerState.BUSY), state is RunnerState.CLEANING
        usual = START_TIMEOUT if state in (RunnerState.STARTING, RunnerState.HELLO) else ARM_TIMEOUT
        patience = math.inf if waits else CLEAN_PATIENCE if cleans else context.arming.patience(usual)
        until = anyio.current_time() + (CLEAN_TIMEOUT if cleans else math.inf)
        while runner.state is state:
            links = context.hub.links
            silent = await _silent(runners, runner, state, patience)
            if runner.retired and not lanes.sweeping():
                runner.scope.cancel()  # the sweep has ended it, and only its client may not know yet
                return
            if silent and not cleans and not (context.hub.connected and context.hub.links == links):
                continue  # the engine was away meanwhile, and may have been what was silent
            if silent or (runner.state is state and anyio.current_time() > until):
                runner.problem = f"no heartbeat or progress within {patience:g} s while {state.value}"
                if not silent:
                    runner.problem = f"not clean within {CLEAN_TIMEOUT:g} s"
                runner.scope.cancel()
                return


async def hold_slot(runners: Runners, runner: ArmedRunner, slot: Slot) -> None:
    """Hold an arming slot until the runner is armed; once ``slot.until`` is past, let the next exec begin meanwhile."""
    with anyio.CancelScope(deadline=slot.until):
        await _started(runners, runner)
    slot.release()
    await _started(runners, runner)
    slot.end()


async def _started(runners: Runners, runner: ArmedRunner) -> None:
    while runner.state in (RunnerState.STARTING, RunnerState.HELLO):
        await runners.changed.wait()


async def _silent(runners: Runners, runner: ArmedRunner, state: RunnerState, seconds: float) -> bool:
    """Whether a runner has neither left ``state`` nor sent a heartbeat for ``seconds``."""
    heartbeats = runner.heartbeats
    # Two halves: a gateway that stood still itself finds the first one over, and reads in the second what came meanwhile.
    for _ in range(2):
        with anyio.move_on_after(seconds / 2):
            while runner.state is state and runner.heartbeats == heartbeats:
                if runner.retired and not runners.lanes.sweeping():
                    return False
                await runners.changed.wait()
            return False
    return True


async def _clean_up(runners: Runners, runner: ArmedRunner) -> None:
    """Have a shared runner whose call has ended clean up after it: beside others, or by a sweep as the last."""
    while (sweep := runners.lanes.should_sweep(runner)) is None:
        await runners.changed.wait()
    if sweep:
        for other in runners.lanes.others(runner):
            other.retired = True
    await runner.clean_up(sweep=sweep)
