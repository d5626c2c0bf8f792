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
from executor.errors import DeathCause, EmberpoolError, EngineUnavailable, ImageUnfit, SandboxDied, SessionBusy
from executor.result import CallResult
from executor.sandbox.arming import ArmingLimit, Slot
from executor.sandbox.kill import not_confirmed
from executor.sandbox.profile import CALL_ENV, exec_args
from executor.sandbox.request import LOADER, Call, new_token
from executor.sandbox.runner_client import ArmedRunner, RunnerConfig, RunnerState, Running
from executor.sandbox.stream import Sink
from executor.sandbox.wire import Report

log = get_logger("emberpool.runner")

START_TIMEOUT = 60.0
"""Seconds that an exec may take until its hello, and from there until it is armed, as long as a container's start may:
nothing of a call runs there, and giving up would cost an idle session its state."""
ARM_TIMEOUT = 15.0
"""Seconds that a runner may take for each step that it does by itself later (arming again, its end); beyond it the sandbox is
not worth waiting for."""
CLEAN_PATIENCE = 1.0
"""Seconds without a sign of life of a runner that cleans up: what a call left may have stopped it, and runs on meanwhile.
One that is alive says so several times in them (``SIGN_SECONDS`` of ``executor/inside/runner.py``), however much it has to do."""
CLEAN_TIMEOUT = 5.0
"""Seconds for a whole clean-up: a runner gives up after less (``REAP_SECONDS``) and says so."""
ANSWER_PATIENCE = 1.0
"""Seconds beyond deadline and grace in which a runner may still answer; silence after that is not life."""
EVENT_PATIENCE = 2.0
RETRY = 0.5
MAX_FRUITLESS = 10
"""Execs in a row that a reachable engine did not make, after which the sandbox is not worth waiting for."""
KILLED_PATIENCE = 0.3
SIGXCPU, SIGKILL = 24, 9
USED_UP = 0.75
"""How much of its CPU limit a process has used at least that was ended by it. The kernel compares the limit with what it
samples at its ticks; what it reports at the end is exact, and was seen to be 12 % less on a busy machine."""
KILL_CODE = 128 + SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the runners are: the sandbox's container, the users in it, and what to do when it must go.

    ``check`` compares a hello with the profile and raises what is wrong with it; ``kill`` ends everything in the container,
    and says whether that is certain. ``arming`` is shared by all sandboxes of a pool.
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
    """Keeps runners armed while ``keep`` runs, one for each call that may run at a time, and lends them to calls.

    With more than one they share the sandbox. They are armed while no tool code runs in it, and no call begins before all
    of them are; a call that ends beside others is cleaned up after by a walk of its own tree, and the last one by a sweep
    of everything, the other runners included, which are then armed anew. All of this is decided from the runners' states,
    without an ``await`` between a decision and what makes it known.
    """

    def __init__(self, place: Place) -> None:
        self.over = False
        self.problem: EmberpoolError | None = None
        self._place = place
        self._lanes: list[ArmedRunner | None] = [None] * place.parallel
        self._killed, self._fruitless, self._untrusted = "", 0, False
        self._greeted = False  # whether any runner has come as far as its hello
        self._pauses: set[anyio.CancelScope] = set()
        self._queued = 0
        self._changed = Notifier()

    def close(self) -> None:
        """Let go: no further exec is armed, and the current one's client is killed."""
        self.over = True
        for runner in self._lanes:
            if runner is not None:
                runner.scope.cancel()
        for pause in self._pauses:
            pause.cancel()
        self._changed.tell()

    # --- keeping one armed --------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Arm one exec after the other, in each lane, until the sandbox is closed or lost."""
        async with anyio.create_task_group() as tasks:
            for lane in range(len(self._lanes)):
                tasks.start_soon(self._keep_lane, lane)

    async def _keep_lane(self, lane: int) -> None:
        place = self._place
        while not (self.over or self._untrusted or self.problem is not None or place.watch.died.is_set()):
            if await self._full(lane):
                continue
            slot = await self._turn()
            if slot is None or self._busy(besides=self._lanes[lane]) or place.watch.died.is_set():
                if slot is not None:
                    slot.end()
                continue
            argv = ("python3", "-I", "-B", "-c", LOADER, new_token())
            expected = place.watch.expect(argv)
            # An interpreter takes its encodings from the locale that it starts in: the calls' own.
            args = exec_args(place.watch.name, argv, user=place.user, lang=CALL_ENV["LANG"])
            runner = self._lanes[lane] = ArmedRunner(place.engine, args, place.config, self._changed.tell)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch_over, runner)
                    tasks.start_soon(self._keep_slot, runner, slot)
                    tasks.start_soon(self._end_with, runner, place.watch.died)
                    await runner.run()
                    tasks.cancel_scope.cancel()
                slot.end()
                await self._judge(runner, expected)
            finally:
                slot.end()
                place.watch.dismiss(expected)
        self._changed.tell()

    async def _turn(self) -> Slot | None:
        """Wait until an exec can be had: the engine is there, and not too many are being armed. ``None`` once closed.

        Without its events an exec would not be known, and an engine that is away is not to be asked by every sandbox.
        """
        slot = None
        with anyio.CancelScope() as pause:
            self._pauses.add(pause)
            try:
                if self.over:
                    return None
                await self._place.hub.linked()
                self._queued += 1
                self._changed.tell()
                try:
                    slot = await self._place.arming.slot()
                finally:
                    self._queued -= 1
                    self._changed.tell()
            finally:
                self._pauses.discard(pause)
        return slot

    async def _keep_slot(self, runner: ArmedRunner, slot: Slot) -> None:
        """Hold a slot until the runner is armed, but not for long where that takes long."""
        with anyio.move_on_at(slot.until):
            await self._leaves(runner, RunnerState.STARTING, RunnerState.HELLO)
        slot.release()
        await self._leaves(runner, RunnerState.STARTING, RunnerState.HELLO)
        slot.end()

    async def _leaves(self, runner: ArmedRunner, *states: RunnerState) -> None:
        while runner.state in states:
            await self._changed.wait()

    async def _watch_over(self, runner: ArmedRunner) -> None:
        """What a runner does by itself it does in time, and its hello is the profile's: on every exec."""
        while (state := runner.state) is not RunnerState.ENDED:
            if state is not RunnerState.STARTING and not runner.vouched:
                try:
                    self._place.check(runner.facts)
                except EmberpoolError as error:
                    self.problem = error
                    if isinstance(error, ImageUnfit) and self._greeted:  # it was fit before the session's code ran
                        self.problem = SandboxDied(str(error), cause="runner", started=False)
                    runner.scope.cancel()
                    return
                runner.vouched = self._greeted = True
                self._fruitless = 0
                self._changed.tell()
            if state is RunnerState.CLEANING and self._place.config.shared and runner.sweeps is None:
                await self._clean_up(runner)
            waits, cleans = state in (RunnerState.ARMED, RunnerState.BUSY), state is RunnerState.CLEANING
            usual = START_TIMEOUT if state in (RunnerState.STARTING, RunnerState.HELLO) else ARM_TIMEOUT
            patience = math.inf if waits else CLEAN_PATIENCE if cleans else self._place.arming.patience(usual)
            until = anyio.current_time() + (CLEAN_TIMEOUT if cleans else math.inf)
            while runner.state is state:
                links = self._place.hub.links
                silent = await self._silent(runner, state, patience)
                if runner.retired and not self._sweeping():
                    runner.scope.cancel()  # the sweep has ended it, and only its client may not know yet
                    return
                if silent and not cleans and not (self._place.hub.connected and self._place.hub.links == links):
                    continue  # the engine was away meanwhile, and may have been what was silent
                if silent or (runner.state is state and anyio.current_time() > until):
                    runner.problem = f"nothing new within {patience:g} s while {state.value}"
                    if not silent:
                        runner.problem = f"not clean within {CLEAN_TIMEOUT:g} s"
                    runner.scope.cancel()
                    return

    async def _silent(self, runner: ArmedRunner, state: RunnerState, seconds: float) -> bool:
        """Whether a runner has neither got on nor given a sign of life for ``seconds``."""
        signs = runner.signs
        # A gateway that has stood still itself finds the first half over, and hears what was said meanwhile in the second.
        for _ in range(2):
            with anyio.move_on_after(seconds / 2):
                while runner.state is state and runner.signs == signs:
                    if runner.retired and not self._sweeping():
                        return False
                    await self._changed.wait()
                return False
        return True

    async def _full(self, lane: int) -> bool:
        """Whether there was tool code to wait for: nothing is armed beside it, since it could get at what is new."""
        if not self._busy(besides=self._lanes[lane]):
            return False
        await self._changed.wait()
        return True

    def _others(self, besides: ArmedRunner | None) -> list[ArmedRunner]:
        return [one for one in self._lanes if one is not None and one is not besides]

    def _busy(self, besides: ArmedRunner | None = None) -> bool:
        return any(one.state in (RunnerState.BUSY, RunnerState.CLEANING) for one in self._others(besides))

    def _sweeping(self) -> bool:
        return any(one.state is RunnerState.CLEANING and one.sweeps for one in self._others(None))

    async def _clean_up(self, runner: ArmedRunner) -> None:
        """Tell a runner whose call has ended how to clean up after it: beside others, or as the last.

        One that was told to clean up beside others needs nobody any more but its own time: the last one waits for it, as a
        sweep would end it half-way, and of two that end at once one must sweep.
        """
        while self._busy(besides=runner):
            others = [one for one in self._others(runner) if one.state in (RunnerState.BUSY, RunnerState.CLEANING)]
            if any(one.state is RunnerState.BUSY or one.sweeps is None for one in others):
                await runner.finish(sweep=False)
                return
            await self._changed.wait()
        for other in self._others(runner):
            other.retired = True
        await runner.finish(sweep=True)

    def _free(self) -> ArmedRunner | None:
        """A runner for a call to claim now, if there is one.

        Where nothing is at work, all have to be armed first: one that is half-way would start beside the call's code. In a
        sweep all but the one that sweeps are retired, so that there is none. Nor is there one beside what a runner left that
        did not end clean.
        """
        if self._untrusted:
            return None
        ready = [one for one in self._lanes if one and one.vouched and one.state is RunnerState.ARMED]
        ready = [one for one in ready if not one.retired]
        return ready[0] if ready and (len(ready) == len(self._lanes) or self._busy()) else None

    def _ready(self) -> ArmedRunner | None:
        """``_free``; raises what is wrong where there will be none."""
        if self.problem is not None:
            raise self.problem
        if self.over or self._place.watch.died.is_set():
            raise SandboxDied("the sandbox ended before the call began", cause=self._place.watch.cause, started=False)
        return self._free()

    async def _end_with(self, runner: ArmedRunner, died: anyio.Event) -> None:
        await died.wait()
        runner.scope.cancel()

    async def _judge(self, runner: ArmedRunner, expected: ExecWatch) -> None:
        """An exec has ended: go on to the next one, or say why there is none.

        Once a runner has said hello, any end but a clean one costs the sandbox, whatever the engine's events say or do not
        say: what its call left may live on, and would get at the next runner before that one can protect itself. So nothing
        is armed and no call begins from here on; what is waited for only tells whose end it was.
        """
        place = self._place
        if self.over or place.watch.died.is_set() or runner.retired:
            return  # whatever a retired one said at its end, the sweep has the proof
        if self.problem is None and not runner.problem and runner.last is RunnerState.CLEAN:
            return  # it has served its calls
        self._untrusted = runner.last is not RunnerState.STARTING
        if self.problem is None and await self._container_ended(runner, expected):
            return
        if self.problem is None and not runner.problem and not self._untrusted and expected.exit_code is None:
            # It never said hello, and the one before it ended clean, so nothing of a call is in there: the engine was lost,
            # or never made the exec. The container may live on, and arms again once it can.
            self._fruitless += place.hub.connected
            if self._fruitless < MAX_FRUITLESS:
                log.info(
                    "runner.not_armed",
                    sandbox=place.watch.name,
                    said=printable(bytes(runner.stderr.kept), limit=200),
                )
                await anyio.sleep(RETRY)
                return
        self._untrusted = True
        cause, reason = cause_of(runner), runner.problem or f"the runner ended while {runner.last.value}"
        if not runner.problem and (place.watch.engine_lost or not place.hub.connected):
            cause, reason = "engine", f"{reason}, and the engine's events with it"
        if (
            self.problem is None
            and not runner.problem
            and not self._greeted
            and expected.exit_code not in (None, KILL_CODE)
        ):
            # Nobody's code but the image's own has run here yet.
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
        log.warning("runner.lost", sandbox=place.watch.name, reason=reason)

    async def _container_ended(self, runner: ArmedRunner, expected: ExecWatch) -> bool:
        """Whether the container's own end took the runner along, as far as events tell in a moment."""
        watch = self._place.watch
        if runner.problem:
            # An engine writes what it has to say of a container that has just ended where the runner would say hello.
            patience = KILLED_PATIENCE if runner.last is RunnerState.STARTING else 0.0
        else:
            if self._place.hub.connected:
                with anyio.move_on_after(EVENT_PATIENCE):
                    await expected.ended.wait()
            # A container's end kills its execs, and theirs may be the first to be told.
            patience = KILLED_PATIENCE if expected.exit_code == KILL_CODE else 0.0
        with anyio.move_on_after(patience):
            await watch.died.wait()
        return watch.died.is_set()

    async def _kill(self, why: str) -> bool:
        if not self._place.watch.died.is_set():
            self._killed = self._killed or why
        return await self._place.kill(why)

    async def _kill_unasked(self, why: str) -> None:
        """Kill a sandbox in which nobody waits for an answer: as soon as there is an engine to do it."""
        while not await self._kill(why):
            with anyio.CancelScope() as pause:
                self._pauses.add(pause)
                try:
                    if not self.over:
                        await anyio.sleep(RETRY)
                        await self._place.hub.linked()
                finally:
                    self._pauses.discard(pause)
            if self.over:
                return

    async def armed(self, timeout: float) -> ArmedRunner:
        """A runner that waits for a call, to be claimed before anything else is awaited.

        Raises the sandbox's problem, or ``EngineUnavailable`` after ``timeout``.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()  # as below
        if (runner := self._ready()) is not None:
            return runner
        with anyio.move_on_after(timeout):
            while True:
                await self._changed.wait()
                if (runner := self._ready()) is not None:
                    return runner
        raise EngineUnavailable(f"no runner was armed within {timeout:g} s; the call never started", retry_after=1.0)

    async def first(self, timeout: float) -> None:
        """``armed`` for a sandbox that was just started: ``timeout`` is for each step, and what waits its turn is none."""
        with anyio.CancelScope() as patience:
            while self._ready() is None:
                patience.deadline = math.inf if self._queued else anyio.current_time() + timeout
                await self._changed.wait()
            return
        raise EngineUnavailable(f"no runner was armed within {timeout:g} s", retry_after=1.0)

    # --- calls --------------------------------------------------------------------------------------------------------

    async def call(self, call: Call, sink: Sink | None = None, *, began: float | None = None) -> CallResult:
        """Carry one call out on the armed runner, its output into ``sink`` where there is one; ``began`` as in ``Sandbox.call``.

        Raises ``SandboxDied``, or ``SessionBusy`` or ``EngineUnavailable`` where it never began; a timeout is a result, but
        where the engine does not confirm that what had to be killed for it is dead (``SandboxDied``).
        """
        place = self._place
        # A cancel that is due already finds the runner unclaimed; later it has to end a call.
        await anyio.lowlevel.checkpoint_if_cancelled()
        began, left = anyio.current_time() if began is None else began, call.timeout
        if (runner := self._ready()) is None:
            runner = await self._armed_for(call)
            left = max(0.001, left - (anyio.current_time() - began))
        ooms = place.watch.ooms
        running = runner.begin(
            call.request(), call.stdin, timeout=left, grace=place.grace, max_output=call.max_output, sink=sink
        )
        try:
            runner.ask_at_once(running)
            with anyio.move_on_after(left + place.grace + ANSWER_PATIENCE):
                await runner.ask(running)
                await running.end()
        except anyio.get_cancelled_exc_class():
            await self._abandon(runner, running)
            raise
        duration = anyio.current_time() - began
        if running.report is not None:
            oom = place.watch.ooms > ooms if running.report.oom is None else running.report.oom
            return result_of(running, running.report, duration, oom=oom, cpu_seconds=place.config.cpu_seconds)
        if running.over:
            raise await self._lost(runner, running, ooms)
        if not await self._kill("timeout"):
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

    async def _armed_for(self, call: Call) -> ArmedRunner:
        try:
            return await self.armed(call.timeout)
        except EngineUnavailable:
            if not self._place.hub.connected or self._fruitless:
                raise
            # The engine is there, and execs can be had: what took the time is what follows the session's last call.
            raise SessionBusy(
                f"the sandbox was not ready again within the {call.timeout:g} s of the call; give it a longer timeout",
                retry_after=1.0,
            ) from None

    async def _abandon(self, runner: ArmedRunner, running: Running) -> None:
        """The caller was cancelled: the call's whole tree ends before its caller goes on, or the sandbox does."""
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(self._place.grace + ANSWER_PATIENCE):
                if await runner.cancel(running):
                    await running.end()
                    while runner.state is RunnerState.CLEANING and not running.clean:
                        await self._changed.wait()
            if not running.clean:
                await self._kill("cancelled")

    async def _lost(self, runner: ArmedRunner, running: Running, ooms: int) -> SandboxDied:
        """The error of a call whose runner ended without a report."""
        place = self._place
        if not runner.problem:
            with anyio.move_on_after(EVENT_PATIENCE):
                while not place.watch.died.is_set() and self.problem is None:
                    await self._changed.wait()
        cause: DeathCause = "oom" if place.watch.ooms > ooms else cause_of(runner)
        why = runner.problem or "its runner ended without an answer"
        if place.watch.died.is_set() and not self._killed:
            cause = place.watch.cause
        elif place.watch.engine_lost or not place.hub.connected:
            cause = "engine"
        elif self._killed in ("timeout", "cancelled") and not runner.problem:
            cause, why = "killed", "another call in it could only be ended together with all of it"
        if not await self._kill(cause) and not running.refused and cause != "engine":
            return not_confirmed()
        if running.refused:
            return SandboxDied(f"the sandbox was unfit for the call: {running.refused}", cause=cause, started=False)
        return SandboxDied(f"the sandbox was lost under the call ({cause}): {why}", cause=cause, started=True)


def cause_of(runner: ArmedRunner) -> DeathCause:
    """How a lost runner is told: what it said broke the protocol, or it is simply gone."""
    return "protocol" if runner.problem.startswith("protocol") else "runner"


def result_of(running: Running, report: Report, duration: float, *, oom: bool, cpu_seconds: int | None) -> CallResult:
    """A runner's report as a call's result. ``oom``: the container's out-of-memory counter moved during the call."""
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
