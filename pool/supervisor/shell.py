"""The shell around the pure core: feeds it events, carries its effects out, and keeps the places where callers wait.

Nothing is decided here. An event goes in (``Shell.feed``), effects come out and are carried out at once or by a task of
their own, whose outcome is the next event. Feeding is synchronous, so a caller's cancellation can never fall between the two.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import anyio.lowlevel

from executor.common.event_loop import Nursery
from executor.common.log import get_logger
from executor.common.notifier import Notifier
from executor.engine.cgroups import remove_parent
from executor.engine.events import EventHub
from executor.engine.protocol import NameTaken
from executor.errors import EmberpoolError, PoolClosed, PoolUnusable, SandboxDied
from executor.staging.threads import StagingThreads
from pool.config.load import Settings
from pool.config.policy import policy_of
from pool.core import events as ev
from pool.core.events import Effect, Event, Refusal, RefusalKind, SessionKey
from pool.core.handlers import Phase, StateMachine
from pool.ledger.ledger import StateDirectory
from pool.supervisor.containers import ContainerManager
from pool.supervisor.engine_link import EngineLink, FindEngine
from pool.supervisor.host_calls import HostCalls
from pool.supervisor.lifecycle import Lifecycle
from pool.supervisor.refusals import fault_of
from pool.supervisor.sessions import OnSessionEnded, SessionEnd
from pool.supervisor.startup import MakeImage

log = get_logger("emberpool.pool")


@dataclass(slots=True, eq=False)
class Waiting:
    """Where one caller waits. ``answer`` is the effect that ended its wait; ``ended`` a refusal that ends its call."""

    changed: Notifier = field(default_factory=Notifier)
    answer: Effect | None = None
    scope: anyio.CancelScope | None = None
    ended: Refusal | None = None

    async def answered(self) -> None:
        """Wait for the answer; at least a turn of the event loop."""
        if self.answer is not None:
            await anyio.lowlevel.checkpoint()
        while self.answer is None:
            await self.changed.wait()

    def reply(self, answer: Effect) -> None:
        """Answer, and wake the caller."""
        self.answer = answer
        self.changed.notify()

    def end(self, refusal: Refusal) -> None:
        """End the call that runs, or is about to, with a refusal; the first one holds."""
        self.ended = self.ended or refusal
        if self.scope is not None:
            self.scope.cancel()


class Shell:
    """One pool's supervisor. ``state`` is the core, ``containers`` makes and removes what it asks for, ``life`` says who may use it.

    ``directory``, ``containers`` and ``log`` exist from the start on.
    """

    def __init__(
        self, settings: Settings, find: FindEngine, make_image: MakeImage, on_session_ended: OnSessionEnded | None
    ) -> None:
        self.settings, self._find, self._make_image = settings, find, make_image
        self.hub, self.threads = EventHub(), StagingThreads()
        host = settings.host
        self.host_calls = HostCalls(host.max_calls, host.max_waiters, settings.pool.acquire_timeout)
        self.state = StateMachine(policy_of(settings))
        self.waiting: dict[int, Waiting] = {}
        self._waiters = 0
        self._queue: deque[Event] = deque()
        self._feeding = False
        self._lines: deque[tuple[Callable[..., None], str, dict[str, Any]]] = deque()
        self._random = random.Random()  # noqa: S311 - jitter, not a secret
        self._on_session_ended = on_session_ended
        self.stepped, self._left = Notifier(), list[str]()
        self.life = Lifecycle(self)
        self._dropped: deque[ev.HandleReleased] = deque()

    def __del__(self) -> None:
        # Not the caller's object: that may be forgotten while the pool runs and its sessions are used. Also of a pool whose making failed.
        if (life := getattr(self, "life", None)) is not None and life.abandoned():
            message = f"SandboxPool of {self.settings.pool.state_dir} was never closed: {life.error()}"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    # --- its start ----------------------------------------------------------------------------------------------------

    async def start(self, nursery: Nursery | None) -> None:
        """Lock the state directory and begin to supervise, as ``SandboxPool.start`` says."""
        self.life.enter_loop()
        try:
            self._open()
        except BaseException:
            self.life = Lifecycle(self)  # nothing has begun
            raise
        self._earlier, self._woken = anyio.Event(), float("inf")
        self._now = anyio.current_time()
        await self.life.start(nursery, self._link.run, self._clock)

    def _open(self) -> None:
        self.directory = StateDirectory.open(self.settings.pool.state_dir)
        self.log = log.bind(pool=self.directory.pool_id, name=self.settings.pool.name)
        self.containers = ContainerManager(self.settings, self.directory, self.hub, self.life.tasks, self.threads)
        self._link = EngineLink(
            self.settings, self._find, self.directory.pool_id, self.hub, self.containers, self, self._make_image
        )
        self._begin_log()

    def _begin_log(self) -> None:
        """Log the first lines, while there is nothing yet but the lock to give back."""
        try:
            self.log.info("pool.started", instance=self.containers.instance, state_dir=str(self.directory.path))
            if self.directory.repaired:
                self.log.warning("pool.state_repaired", files=self.directory.repaired)
            if self.directory.foreign:
                self.log.warning("pool.foreign_files", files=self.directory.foreign)
        except BaseException:
            self.directory.close()
            raise

    # --- callers' places ----------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise ``PoolUnusable`` or ``PoolClosed`` unless the pool accepts work from the caller."""
        self.life.require_open()
        if self.state.closing or self.life.draining:
            raise PoolClosed("the pool is closing")

    def enter(self) -> tuple[int, Waiting]:
        """Make a place for one caller: its number, and where it waits. ``leave`` takes it away."""
        self._waiters += 1
        place = self.waiting[self._waiters] = Waiting()
        return self._waiters, place

    def leave(self, waiter: int) -> None:
        """Take a caller's place away."""
        del self.waiting[waiter]
        self._settle()

    def drop(self, key: SessionKey, epoch: int) -> None:
        """Release a handle that was collected without having been released. This may come in any thread and at any moment, so
        it is noted here and taken in with the next event: before that event is judged."""
        self._dropped.append(ev.HandleReleased(key, epoch))

    def _settle(self) -> None:
        """A closing pool has ended once its containers are gone and each caller has gone on."""
        if self.state.drained and not self.waiting:
            self.life.gone.set()

    # --- the core -----------------------------------------------------------------------------------------------------

    def feed(self, event: Event, now: float | None = None) -> None:
        """Take an event in and carry out what follows. An event that arises meanwhile is taken next, in order. ``now`` is the
        time, for those who have just looked."""
        if self.life.ended:
            return  # a handle may be released after the pool's end
        while self._dropped:
            self._queue.append(self._dropped.popleft())
        self._queue.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._queue:
                self._now, now = anyio.current_time() if now is None else max(now, self._now), None
                for effect in self.state.step(self._queue.popleft(), self._now):
                    self._carry_out(effect)
        finally:
            self._feeding = False
        self._settle()
        self.stepped.notify()
        if self.state.next_wake < self._woken:
            self._earlier.set()
        # Whatever a sink does now (a cancel or KeyboardInterrupt in it, a call of the pool by a hook), all has been done.
        while self._lines:
            write, name, fields = self._lines.popleft()
            write(name, **fields)

    def log_later(self, write: Callable[..., None], name: str, **fields: Any) -> None:
        """Log a line at the end of the ``feed`` that follows or is under way, in order."""
        self._lines.append((write, name, fields))

    def jitter(self) -> float:
        """A random number from 0 to 1, which the core may not draw itself."""
        return self._random.random()

    def running(self) -> list[int]:
        """The sandboxes that should be running now."""
        return [box.n for phase in (Phase.STANDBY, Phase.BOUND) for box in self.state.in_phase(phase)]

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case ev.StartSandbox(n):
                self._spawn(self._start, n)
            case ev.StopSandbox(n, reason):
                self._spawn(self._stop, n, reason)
            case ev.BindSandbox(n, key):
                self._bind(n, key)
            case ev.Grant(waiter) | ev.RunCall(waiter) | ev.RunCold(waiter) | ev.Refuse(waiter):
                self.waiting[waiter].reply(effect)
            case ev.EndCall(waiter, refusal):
                self.waiting[waiter].end(refusal)
            case ev.SessionForgotten(key, _, reason, granted):
                self.log_later(
                    self.log.info, "session.forgotten", session=self.directory.session_id(*key), reason=reason
                )
                if granted:
                    self.log_later(self._report_end, reason, key=key)

    def _spawn(self, carry_out: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        # Once the supervisor has ended, what is left is the next start's.
        if not self.life.over:
            self.life.tasks.start_soon(carry_out, *args)

    def _report_end(self, reason: str, *, key: SessionKey) -> None:
        if self._on_session_ended is not None:
            session_id = self.directory.session_id(*key)
            try:
                self._on_session_ended(SessionEnd(*key, session_id, reason))
            except Exception as error:  # not ours, so nothing here may depend on it
                self.log.error(  # noqa: TRY400 - one line; a traceback may show what is the gateway's
                    "pool.callback_failed", callback="on_session_ended", session=session_id, error=repr(error)
                )

    # --- the life's owner ---------------------------------------------------------------------------------------------

    def begin_close(self, deadline: float) -> float:
        """Begin to close (``lifecycle.Owner`` describes this and the next three)."""
        self.host_calls.refuse()
        self.feed(ev.CloseBegan(deadline))
        return deadline if self.state.close_deadline is None else self.state.close_deadline

    def give_up(self, error: PoolUnusable) -> None:
        refusal = Refusal(RefusalKind.POOL_UNUSABLE, str(error))
        for waiter, place in self.waiting.items():
            if place.answer is None:
                place.reply(ev.Refuse(waiter, refusal))
            else:
                place.end(replace(refusal, started=True))
        self.stepped.notify()
        self.log.error("pool.failed", error=str(error))

    async def clear_away(self, *, everything: bool) -> None:
        deadline = self.state.close_deadline or 0.0
        await self.host_calls.close(max(0.0, deadline - anyio.current_time()))
        self._left = await self.containers.last_sweep(everything=everything)

    def release(self) -> None:
        self.directory.close()
        if self._left:
            hint = "the next start with this state_dir removes them"
            self.log.error("pool.left_behind", containers=self._left, hint=hint)
        if self.containers.connection is not None:
            remove_parent(self.containers.connection.profile.cgroup_parent)
        for session in self.state.sessions.values():
            if session.granted:
                self._report_end("pool_closed", key=session.key)
        self.log.info("pool.closed")

    async def _start(self, n: int) -> None:
        began = anyio.current_time()
        try:
            await self.containers.enter(n)
        except EmberpoolError as error:
            self.log_later(self.log.warning, "sandbox.start_refused", sandbox=n, reason=error.reason, error=str(error))
            self.feed(ev.SandboxStartFailed(n, fault_of(error), self.jitter()))
            return
        try:
            box = await self.containers.start(n)
            if box.watch.died.is_set():
                raise SandboxDied("the sandbox ended right after its start", cause=box.watch.cause)
        except NameTaken as error:
            # The name is another's container, which a stop would remove.
            self.log_later(self.log.error, "sandbox.name_taken", sandbox=self.containers.name(n), error=str(error))
            self.containers.abandon(n)
            self.feed(ev.SandboxStartFailed(n, fault_of(error), self.jitter()))
            return
        except EmberpoolError as error:
            self.log_later(self.log.warning, "sandbox.start_failed", sandbox=n, reason=error.reason, error=str(error))
            self.feed(ev.SandboxStartUnknown(n, fault_of(error), self.jitter()))
            return
        self.log_later(
            self.log.info, "sandbox.started", sandbox=box.name, seconds=round(anyio.current_time() - began, 3)
        )
        self.feed(ev.SandboxStarted(n, self.containers.age(n)))

    async def _stop(self, n: int, reason: str) -> None:
        began = anyio.current_time()
        try:
            await self.containers.stop(n)
        except EmberpoolError as error:
            self.log_later(
                self.log.warning, "sandbox.stop_failed", sandbox=n, why=reason, reason=error.reason, error=str(error)
            )
            self.feed(ev.SandboxStopFailed(n, self.jitter()))
            return
        seconds = round(anyio.current_time() - began, 3)
        self.log_later(self.log.info, "sandbox.stopped", sandbox=self.containers.name(n), why=reason, seconds=seconds)
        self.feed(ev.SandboxStopped(n))
        self.life.one_gone()

    def _bind(self, n: int, key: SessionKey) -> None:
        try:
            self.containers.bind(n)
        except PoolUnusable as error:
            self.feed(ev.BindFailed(n, fault_of(error), self.jitter()))
            return
        session_id = self.directory.session_id(*key)
        self.log_later(self.log.info, "session.bound", session=session_id, generation=f"{self.containers.instance}-{n}")
        self.feed(ev.BindRecorded(n))

    async def _clock(self) -> None:
        """Feed the core a tick whenever time alone changes something."""
        while True:
            # As the last step had it: between that and now, a moment could have passed unseen.
            self._earlier, self._woken = anyio.Event(), self.state.next_wake
            with anyio.CancelScope(deadline=self._woken):
                await self._earlier.wait()
            self._woken = float("-inf")
            self.feed(ev.Tick())
