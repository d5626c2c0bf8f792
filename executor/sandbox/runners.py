"""The runners of one sandbox: one is kept armed ahead of its call, and the sandbox goes when one cannot be trusted."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from executor.common.log import get_logger
from executor.common.notifier import Notifier
from executor.common.printable import printable
from executor.engine.events import EventHub, ExecWatch, Watch
from executor.engine.protocol import Engine
from executor.errors import DeathCause, EmberpoolError, EngineUnavailable, ImageUnfit, SandboxDied
from executor.sandbox.arming import ArmingLimit, Slot
from executor.sandbox.lanes import Lanes
from executor.sandbox.profile import CALL_ENV, exec_args
from executor.sandbox.request import LOADER, new_token
from executor.sandbox.runner_client import ArmedRunner, RunnerConfig, RunnerState
from executor.sandbox.runner_supervision import hold_slot, supervise

log = get_logger("emberpool.runner")

EVENT_PATIENCE = 2.0
"""Seconds to wait, after a runner's end, for the event that says whose end it was."""
KILLED_PATIENCE = 0.3
"""Seconds in which the event of a container's end follows those of its execs."""
RETRY = 0.5
MAX_FAILED_EXECS = 10
"""Execs in a row that a reachable engine did not make, after which the sandbox is not worth waiting for."""
SIGKILL = 9
KILL_CODE = 128 + SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerContext:
    """What a sandbox's runners need of it: its container, the calls' ``user``, and how it is checked and killed.

    ``check`` compares a hello with the profile and raises what is wrong with it; ``kill`` kills the container and returns
    whether that is certain. ``arming`` is shared by all sandboxes of a pool.
    """

    engine: Engine
    hub: EventHub
    watch: Watch
    user: str
    config: RunnerConfig
    grace: float
    check: Callable[[dict[str, object]], None]
    kill: Callable[[str], Awaitable[bool]]
    parallel: int = 1
    arming: ArmingLimit = field(default_factory=ArmingLimit)


class Runners:
    """Keeps runners armed while ``run`` runs, one for each call that may run at a time, and lends them to calls.

    ``problem`` is what is wrong with the sandbox, ``killed`` why it was killed, ``failed_execs`` how many execs in a row the
    engine did not make. ``changed`` notifies of everything that a waiter may depend on.

    With more than one they share the sandbox. They are armed while no tool code runs in it, and no call begins before all
    of them are. A call that ends beside others is cleaned up after by a walk of its own tree, and the last one by a sweep
    of everything, the other runners included, which are then armed anew.
    """

    def __init__(self, context: RunnerContext) -> None:
        self.context = context
        self.closed = False
        self.problem: EmberpoolError | None = None
        self.lanes = Lanes(context.parallel)
        self.changed = Notifier()
        self.killed, self.failed_execs = "", 0
        self._untrusted = False  # a runner ended in a way that proves nothing about what its call left
        self._had_hello = False
        self._pauses: set[anyio.CancelScope] = set()
        self._queued = 0

    def close(self) -> None:
        """Arm no further exec, and kill the clients of those that run."""
        self.closed = True
        for runner in self.lanes.others(None):
            runner.scope.cancel()
        for pause in self._pauses:
            pause.cancel()
        self.changed.notify()

    # --- keeping one armed --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Arm one exec after the other, in each lane, until the sandbox is closed or lost."""
        async with anyio.create_task_group() as tasks:
            for lane in range(self.context.parallel):
                tasks.start_soon(self._run_lane, lane)

    async def _run_lane(self, lane: int) -> None:
        context = self.context
        while not (self.closed or self._untrusted or self.problem is not None or context.watch.died.is_set()):
            # Nothing is armed beside tool code, which could get at a runner that does not protect itself yet.
            if self.lanes.working(besides=self.lanes.runners[lane]):
                await self.changed.wait()
                continue
            slot = await self._wait_for_slot()
            if slot is None or self.lanes.working(besides=self.lanes.runners[lane]) or context.watch.died.is_set():
                if slot is not None:
                    slot.end()
                continue
            argv = ("python3", "-I", "-B", "-c", LOADER, new_token())
            expected = context.watch.expect(argv)
            # An interpreter takes its encodings from the locale that it starts in: the calls' own.
            args = exec_args(context.watch.name, argv, user=context.user, lang=CALL_ENV["LANG"])
            runner = ArmedRunner(context.engine, args, context.config, self.changed.notify)
            self.lanes.runners[lane] = runner
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(supervise, self, runner)
                    tasks.start_soon(hold_slot, self, runner, slot)
                    tasks.start_soon(self._end_with, runner, context.watch.died)
                    await runner.run()
                    tasks.cancel_scope.cancel()
                slot.end()
                await self._after_exec(runner, expected)
            finally:
                slot.end()
                context.watch.dismiss(expected)
        self.changed.notify()

    async def _wait_for_slot(self) -> Slot | None:
        """Wait until an exec can be made: the engine is there, and not too many are being armed. ``None`` once closed.

        Without the engine's events an exec could not be followed, and not every sandbox has to ask an engine that is away.
        """
        slot = None
        with anyio.CancelScope() as pause:
            self._pauses.add(pause)
            try:
                if self.closed:
                    return None
                await self.context.hub.linked()
                self._queued += 1
                self.changed.notify()
                try:
                    slot = await self.context.arming.slot()
                finally:
                    self._queued -= 1
                    self.changed.notify()
            finally:
                self._pauses.discard(pause)
        return slot

    def check_hello(self, runner: ArmedRunner) -> bool:
        """Check a runner's hello against the profile, as every exec's is; where it does not fit, set ``problem``."""
        try:
            self.context.check(runner.facts)
        except EmberpoolError as error:
            self.problem = error
            if isinstance(error, ImageUnfit) and self._had_hello:  # it was fit before the session's code ran
                self.problem = SandboxDied(str(error), cause="runner", started=False)
            return False
        runner.verified = self._had_hello = True
        self.failed_execs = 0
        self.changed.notify()
        return True

    async def _end_with(self, runner: ArmedRunner, died: anyio.Event) -> None:
        await died.wait()
        runner.scope.cancel()

    # --- the end of an exec -------------------------------------------------------------------------------------------

    async def _after_exec(self, runner: ArmedRunner, expected: ExecWatch) -> None:
        """Decide, after an exec has ended, whether to arm the next one; otherwise set ``problem`` and kill the sandbox.

        Once a runner has said hello, any end but a clean one costs the sandbox, whatever events came or did not come: what
        its call left may live on, and would get at the next runner before that one can protect itself. So nothing is armed
        and no call begins from here on; the waits below only find out whose end it was.
        """
        context = self.context
        if self.closed or context.watch.died.is_set() or runner.retired:
            return  # whatever a retired runner said at its end, the sweep has the proof
        if self.problem is None and not runner.problem and runner.last is RunnerState.CLEAN:
            return  # it has served its calls
        self._untrusted = runner.last is not RunnerState.STARTING
        if self.problem is None and await self._container_ended(runner, expected):
            return
        if self.problem is None and not runner.problem and not self._untrusted and expected.exit_code is None:
            # It never said hello, and the one before it ended clean, so nothing of a call is in there: the engine was lost,
            # or never made the exec. The container may live on, and can arm a runner later.
            self.failed_execs += context.hub.connected
            if self.failed_execs < MAX_FAILED_EXECS:
                log.info(
                    "runner.not_armed",
                    sandbox=context.watch.name,
                    said=printable(bytes(runner.stderr.kept), limit=200),
                )
                await anyio.sleep(RETRY)
                return
        self._untrusted = True
        cause, reason = cause_of(runner), runner.problem or f"the runner ended while {runner.last.value}"
        if not runner.problem and (context.watch.engine_lost or not context.hub.connected):
            cause, reason = "engine", f"{reason}, and the engine's events with it"
        no_problem = self.problem is None and not runner.problem
        if no_problem and not self._had_hello and expected.exit_code not in (None, KILL_CODE):
            # Only the image's own code has run here yet.
            said = printable(bytes(runner.stderr.kept))[-400:]
            self.problem = ImageUnfit(
                f"the runner ended before its first call (exit status {expected.exit_code}): the image's python3, or a "
                f"module of sandbox.preload, ends by itself{f'; it said: {said}' if said else ''}"
            )
        if self.problem is None:
            self.problem = SandboxDied(
                f"the sandbox's runner cannot be trusted any more: {reason}", cause=cause, started=False
            )
        await self._kill_unasked(cause)
        log.warning("runner.lost", sandbox=context.watch.name, reason=reason)

    async def _container_ended(self, runner: ArmedRunner, expected: ExecWatch) -> bool:
        """Whether the container's own end took the runner along, as far as events show in a moment."""
        watch = self.context.watch
        if runner.problem:
            # An engine's message about a container that has just ended comes where the runner's hello would.
            patience = KILLED_PATIENCE if runner.last is RunnerState.STARTING else 0.0
        else:
            if self.context.hub.connected:
                with anyio.move_on_after(EVENT_PATIENCE):
                    await expected.ended.wait()
            # A container's end kills its execs, and the events of their ends may come first.
            patience = KILLED_PATIENCE if expected.exit_code == KILL_CODE else 0.0
        with anyio.move_on_after(patience):
            await watch.died.wait()
        return watch.died.is_set()

    async def kill(self, why: str) -> bool:
        """Kill the sandbox and return whether that is certain; the first reason stays in ``killed``."""
        if not self.context.watch.died.is_set():
            self.killed = self.killed or why
        return await self.context.kill(why)

    async def _kill_unasked(self, why: str) -> None:
        """Kill a sandbox in which nobody waits for an answer: as soon as there is an engine to do it."""
        while not await self.kill(why):
            with anyio.CancelScope() as pause:
                self._pauses.add(pause)
                try:
                    if not self.closed:
                        await anyio.sleep(RETRY)
                        await self.context.hub.linked()
                finally:
                    self._pauses.discard(pause)
            if self.closed:
                return

    # --- lending ------------------------------------------------------------------------------------------------------

    def ready(self) -> ArmedRunner | None:
        """A runner that a call can claim now, if there is one. Raises what is wrong where there will be none."""
        if self.problem is not None:
            raise self.problem
        if self.closed or self.context.watch.died.is_set():
            raise SandboxDied("the sandbox ended before the call began", cause=self.context.watch.cause, started=False)
        # No call begins beside what a runner left that did not end clean.
        return None if self._untrusted else self.lanes.free()

    async def wait_armed(self, timeout: float) -> ArmedRunner:
        """Wait for a runner that a call can claim, and claim it before anything else is awaited.

        Raises the sandbox's problem, or ``EngineUnavailable`` after ``timeout``.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        if (runner := self.ready()) is not None:
            return runner
        with anyio.move_on_after(timeout):
            while True:
                await self.changed.wait()
                if (runner := self.ready()) is not None:
                    return runner
        raise EngineUnavailable(f"no runner was armed within {timeout:g} s; the call never started", retry_after=1.0)

    async def wait_first_armed(self, timeout: float) -> None:
        """``wait_armed`` for a sandbox that was just started: ``timeout`` is for each step, without the waits for a slot."""
        with anyio.CancelScope() as patience:
            while self.ready() is None:
                patience.deadline = math.inf if self._queued else anyio.current_time() + timeout
                await self.changed.wait()
            return
        raise EngineUnavailable(f"no runner was armed within {timeout:g} s", retry_after=1.0)


def cause_of(runner: ArmedRunner) -> DeathCause:
    """Why a lost runner ended: what it sent broke the protocol, or it is simply gone."""
    return "protocol" if runner.problem.startswith("protocol") else "runner"
