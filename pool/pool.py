"""SandboxPool: feeds the pure core, carries its effects out, and lends each caller a place to wait.

Nothing is decided here. An event goes in (``feed``), effects come out and are carried out at once or by a task of their
own, whose outcome is the next event. Feeding is synchronous, so a caller's cancellation can never fall between the two.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus

from executor.call import Call
from executor.cgroups import remove_parent
from executor.engine import Engine, EngineInfo, NameTaken
from executor.locate import find_engine
from executor.log import get_logger, lost_lines
from executor.news import News
from executor.result import (
    CallResult,
    EmberpoolError,
    InvalidCall,
    PoolClosed,
    PoolUnusable,
    SandboxDied,
    SessionClosed,
    StateLost,
)
from executor.stream import Sink
from executor.tool import ToolResult
from executor.watch import EventHub
from pool import events as ev
from pool.audit import AuditEntry
from pool.calls import checked_call, key_part, positive_seconds, yielding
from pool.config import Settings
from pool.events import Effect, Event, Refusal, SessionKey
from pool.ledger import StateDirectory
from pool.link import EngineLink, FindEngine
from pool.policy import policy_of
from pool.privileged import Privileged
from pool.refusals import error_of, fault_of
from pool.session import Prepare, Session
from pool.startup import MakeImage, make_image
from pool.state import Phase, PoolState
from pool.tools import ToolPlan, environment, run_on_host, with_retries
from pool.workshop import ColdSetting, Workshop

log = get_logger("emberpool.pool")

MAX_SANDBOXES = 10_000
STOP_PATIENCE = 30.0
"""Seconds beyond the drain, and from there beyond each container that is confirmed gone, for which a closing pool waits for
the next one: however many there are, it goes on for as long as they go."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where one caller waits. ``answer`` is the effect that ended its wait; ``ended`` a refusal that ends its call."""

    news: News = field(default_factory=News)
    answer: Effect | None = None
    scope: anyio.CancelScope | None = None
    ended: Refusal | None = None

    async def answered(self) -> None:
        """Wait for the answer; at least a turn of the event loop."""
        if self.answer is not None:
            await anyio.lowlevel.checkpoint()
        while self.answer is None:
            await self.news.wait()


class SandboxPool:
    """The warm pool. ``async with SandboxPool(settings) as pool: session = await pool.acquire("agent", "chat-42")``.

    Entering the block opens and locks the state directory (``PoolUnusable``) and starts the supervisor. It does not wait
    for an engine: while none is there, everything is refused with the reason, and heals by itself once it is.
    ``find`` returns the engine to use (by default the first that answers, see ``executor.locate``). Where the image is
    missing on it at the start, ``make_image`` brings it (by default it is pulled or built), and callers are refused meanwhile.
    """

    def __init__(
        self, settings: Settings | None = None, *, find: FindEngine | None = None, make_image: MakeImage = make_image
    ) -> None:
        self.settings, self._make_image = settings or Settings(), make_image
        self._find = find or self._find_engine
        self._hub = EventHub()
        self._state = PoolState(policy_of(self.settings))
        self._places: dict[int, _Place] = {}
        self._waiters = 0
        self._queue: deque[Event] = deque()
        self._feeding = False
        self._lines: deque[tuple[Callable[..., None], str, dict[str, Any]]] = deque()
        self._random = random.Random()  # noqa: S311 - jitter, not a secret
        self._entered = self._running = self._over = False
        self._patience: anyio.CancelScope | None = None
        self._dropped: deque[ev.HandleReleased] = deque()

    async def __aenter__(self) -> SandboxPool:
        if self._entered:
            raise PoolClosed("a SandboxPool is used once; make a new one")
        self._entered = True
        self._directory = StateDirectory.open(self.settings.pool.state_dir)
        self._log = log.bind(pool=self._directory.pool_id, name=self.settings.pool.name)
        self._tasks: TaskGroup = anyio.create_task_group()
        self._shop = Workshop(self.settings, self._directory, self._hub, self._tasks)
        self._link = EngineLink(
            self.settings, self._find, self._directory.pool_id, self._hub, self._shop, self, self._make_image
        )
        self._begin_log()
        self._earlier, self._woken = anyio.Event(), float("inf")
        self._stepped = anyio.current_time()
        self._gone = anyio.Event()
        self._caller: TaskGroup = anyio.create_task_group()
        await self._caller.__aenter__()
        # A cancel that comes now is seen at the caller's next checkpoint; torn here, it would keep the lock.
        with anyio.CancelScope(shield=True):
            await self._caller.start(self._supervise)
        self._running = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        pool = self.settings.pool
        drain = pool.drain_timeout if kind is None else 0.0
        with anyio.CancelScope(shield=True):
            self.feed(ev.CloseBegan(anyio.current_time() + drain))
            with anyio.move_on_after(drain + STOP_PATIENCE) as self._patience:
                await self._gone.wait()
            left = await self._shop.last_sweep()
        self._tasks.cancel_scope.cancel()
        cancelled = error is not None and isinstance(error, anyio.get_cancelled_exc_class())
        try:
            if cancelled:
                return await self._caller.__aexit__(kind, error, trace)
            await self._caller.__aexit__(None, None, None)
        finally:
            if self._shop.connection is not None:
                remove_parent(self._shop.connection.profile.cgroup_parent)
            self._directory.close()
            if left:
                self._log.error(
                    "pool.left_behind", containers=left, hint="the next start with this state_dir removes them"
                )
            self._log.info("pool.closed")
        return None

    # --- for callers --------------------------------------------------------------------------------------------------

    @yielding
    async def acquire(self, agent: str, session: str, *, timeout: float | None = None) -> Session:
        """A handle on the session ``(agent, session)``, once it owns a live sandbox: its own, or a standby, or a new one.

        Waits at most ``timeout`` seconds (default ``pool.acquire_timeout``), first come first served. Raises ``InvalidCall``,
        ``PoolExhausted``, ``QuotaExceeded``, ``EngineUnavailable``, ``ImageMissing``, ``ProfileMismatch``, ``SandboxDied``
        (the session keeps dying), ``SessionClosed`` (it was closed while this waited) or ``PoolClosed``. Nothing ever runs anywhere weaker instead.
        """
        key = (key_part("agent", agent), key_part("session", session))
        wait = self.settings.pool.acquire_timeout if timeout is None else positive_seconds(timeout)
        self._require_open()
        waiter, place = self._wait()
        try:
            self.feed(ev.AcquireWanted(waiter, key, anyio.current_time() + wait))
            await place.answered()
        except BaseException:
            if isinstance(place.answer, ev.Grant):
                self.feed(ev.GrantDeclined(key, place.answer.epoch))
            else:
                self.feed(ev.WaiterGone(waiter))
            raise
        finally:
            self._leave(waiter)
        grant = place.answer
        if isinstance(grant, ev.Refuse):
            raise error_of(grant.refusal)
        assert isinstance(grant, ev.Grant)  # noqa: S101 - an acquire is granted or refused, nothing else
        return Session(self, key, grant.epoch, self._directory.session_id(*key))

    @yielding
    async def call_cold(
        self,
        argv: Sequence[str] | None = None,
        *,
        code: str | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_output: int | None = None,
    ) -> CallResult:
        """One call in a disposable container of its own, as ``Session.call``; at most ``pool.max_cold`` run at once."""
        return await self.run_cold(checked_call(self.settings, "", argv, code, stdin, env, timeout, max_output))

    @yielding
    async def run_tool(self, plan: ToolPlan, arguments: object, *, session: str) -> ToolResult:
        """Call a tool (see ``pool.tools.plan_tool``) for a session of its agent, where the plan says that it runs.

        In a container it runs in the sandbox of ``(plan.agent, session)``, which is acquired for it; on the host only where
        the configuration says ``limits``. What never started is tried again, up to ``plan.retries`` times. A tool that
        fails is a result. Raises ``InvalidCall``, and what ``acquire`` and ``Session.call`` raise.
        """
        if plan.python_tools == "limits":
            session_id = self._directory.session_id(key_part("agent", plan.agent), key_part("session", session))
            return await run_on_host(plan, arguments, self.settings, session=session_id)

        async def once() -> ToolResult:
            # The tool's own time begins once it has a sandbox.
            async with await self.acquire(plan.agent, session) as handle:
                return await handle.tool(
                    plan.tool,
                    arguments,
                    allowed=plan.allowed,
                    env=environment(plan.env),
                    timeout=plan.timeout,
                    max_output=plan.max_output,
                )

        return await with_retries(once, plan)

    @property
    def privileged(self) -> Privileged:
        """The privileged commands, each call in a disposable container with the workspace's ``data/sandbox``."""
        return Privileged(self.settings, self.run_cold)

    def resize(self, *, min_standby: int | None = None, max_sandboxes: int | None = None) -> None:
        """Change the pool's size while it runs; what is not given stays.

        Growth starts at once. For a shrink nothing that has a session is stopped: standbys go first, and the pool falls to
        its size as sessions end. Raises ``InvalidCall`` or ``PoolClosed``.
        """
        self._require_open()
        policy = self._state.policy
        standby = policy.min_standby if min_standby is None else min_standby
        most = policy.max_sandboxes if max_sandboxes is None else max_sandboxes
        for name, count, least in (("min_standby", standby, 0), ("max_sandboxes", most, 1)):
            if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= MAX_SANDBOXES:
                raise InvalidCall(f"{name} must be a whole number from {least} to {MAX_SANDBOXES}; it is {count!r:.40}")
        if standby > most:
            raise InvalidCall(f"min_standby ({standby}) is above max_sandboxes ({most}); lower one or raise the other")
        uids = self.settings.sandbox.uid_range
        if most + policy.max_cold + 1 > uids.count:
            raise InvalidCall(f"max_sandboxes ({most}) is more than sandbox.uid_range ({uids}) has uids for")
        self._say(self._log.info, "pool.resized", min_standby=standby, max_sandboxes=most)
        self.feed(ev.PolicyChanged(replace(policy, min_standby=standby, max_sandboxes=most)))

    def snapshot(self) -> dict[str, Any]:
        """Counts derived from the core's state, for operators and tests: sandboxes by phase, sessions, waiters, health."""
        state = self._state
        return {
            "pool": self._directory.pool_id,
            "instance": self._shop.instance,
            "sandboxes": {phase.value: len(state.in_phase(phase)) for phase in Phase},
            "sessions": len(state.sessions),
            "waiting": len(state.waiters),
            "running": sum(len(box.running) for box in state.sandboxes.values()),
            "cold": len(state.cold),
            "engine": "up" if state.health.reachable else "down",
            "fault": state.health.fault.kind.value if state.health.fault else None,
            "lost_log_lines": lost_lines(),
        }

    # --- for Session --------------------------------------------------------------------------------------------------

    @yielding
    async def run_cold(self, call: Call, setting: ColdSetting | None = None) -> CallResult:
        """Wait for a cold place and run the call in a container of its own, made as ``setting`` says."""
        self._require_open()
        waiter, place = self._wait()
        began = anyio.current_time()
        deadline, entry = began + call.timeout, AuditEntry(call, began)
        try:
            self.feed(ev.ColdWanted(waiter, deadline))
            await place.answered()
            if isinstance(place.answer, ev.Refuse):
                raise error_of(place.answer.refusal)
            entry.start(now := anyio.current_time())
            return entry.told(
                await self._run(place, lambda left: self._shop.cold(call.within(left), setting), deadline - now)
            )
        except EmberpoolError as error:
            entry.failed(error)
            raise
        finally:
            self._leave(waiter)
            self.feed(ev.CallEnded(waiter) if isinstance(place.answer, ev.RunCold) else ev.WaiterGone(waiter))
            self._log.info("call.ended", **entry.fields(anyio.current_time(), self._shop.image_id))

    @yielding
    async def run_call(
        self,
        key: SessionKey,
        epoch: int,
        call: Call,
        generation: str | None,
        sink: Sink | None = None,
        prepare: Prepare | None = None,
    ) -> CallResult:
        """Wait for the session's turn and run the call in its sandbox, its output into ``sink`` where there is one.

        ``prepare`` makes of it what this very sandbox is to run, within the same deadline.
        """
        n = self._parse_generation(generation) if generation is not None else None
        self._require_open()
        waiter, place = self._wait()
        began = now = anyio.current_time()
        deadline, poisoned, entry = began + call.timeout, "", AuditEntry(call, began)
        try:
            self.feed(ev.CallWanted(waiter, key, epoch, deadline, n), now)
            if place.answer is None:  # whoever has its turn at once looks for a cancel when it begins
                await place.answered()
                now = anyio.current_time()
            if isinstance(place.answer, ev.Refuse):
                raise error_of(place.answer.refusal)
            assert isinstance(place.answer, ev.RunCall)  # noqa: S101 - a call is run or refused, nothing else
            n = place.answer.n
            if (box := self._shop.sandboxes.get(n)) is None:
                # It was lost, and is being removed, between the turn that was given and this task's own.
                if place.ended is not None:
                    raise error_of(place.ended)
                raise SandboxDied("the sandbox ended before the call began", cause="unknown", started=False)

            async def run(left: float) -> CallResult:
                if prepare is None:
                    return await box.call(call.within(left), sink, began=now)
                async with prepare(box, call) as prepared:
                    entry.call = prepared
                    return await box.call(prepared.within(max(0.001, deadline - anyio.current_time())), sink)

            entry.start(now)
            try:
                result = await self._run(place, run, deadline - now)
            finally:
                poisoned = box.poisoned
            return entry.told(result.ran_in(f"{self._shop.instance}-{n}"))
        except EmberpoolError as error:
            entry.failed(error)
            raise
        finally:
            now = anyio.current_time()
            ran = isinstance(place.answer, ev.RunCall)
            self._leave(waiter)
            self.feed(
                ev.CallEnded(waiter, poisoned, self.jitter() if poisoned else 0.0) if ran else ev.WaiterGone(waiter),
                now,
            )
            self._log.info(
                "call.ended",
                session=self._directory.session_id(*key),
                generation=f"{self._shop.instance}-{n}" if n is not None else None,
                **entry.fields(now, self._shop.image_id),
            )

    async def ready(self, key: SessionKey, epoch: int) -> None:
        """Wait until the session's sandbox has an armed runner, as ``Session.ready`` tells it."""
        self._require_open()
        session = self._state.sessions.get(key)
        if session is None or session.epoch != epoch:
            raise SessionClosed("the session is closed; acquire it again")
        if session.sandbox is None:
            # What an acquire waits for is what is missing here; the handle that it takes goes back at once.
            await (await self.acquire(*key)).release()
        box = self._shop.sandboxes.get(session.sandbox) if session.sandbox is not None else None
        if box is None:
            message = "the session's sandbox has just ended; its next call gets another"
            raise SandboxDied(message, cause="unknown", started=False)
        await box.ready()

    def generation(self, key: SessionKey, epoch: int) -> str | None:
        """The generation of a session, as ``Session.generation`` tells it."""
        session = self._state.sessions.get(key)
        if session is None or session.epoch != epoch or session.sandbox is None:
            return None
        return f"{self._shop.instance}-{session.sandbox}"

    def detach(self, key: SessionKey, epoch: int) -> None:
        self.feed(ev.HandleReleased(key, epoch))

    def drop(self, key: SessionKey, epoch: int) -> None:
        """Detach a handle that was collected without having been released. This may come in any thread and at any moment, so
        it is noted here and taken in with the next event: before anybody else's wish is judged."""
        self._dropped.append(ev.HandleReleased(key, epoch))

    def end(self, key: SessionKey, epoch: int) -> None:
        self.feed(ev.SessionEnded(key, epoch))

    # --- the shell ----------------------------------------------------------------------------------------------------

    def feed(self, event: Event, now: float | None = None) -> None:
        """Take an event in and carry out what follows. An event that arises meanwhile is taken next, in order. ``now`` is the
        time, for those who have just looked."""
        while self._dropped:
            self._queue.append(self._dropped.popleft())
        self._queue.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._queue:
                self._stepped, now = anyio.current_time() if now is None else max(now, self._stepped), None
                for effect in self._state.step(self._queue.popleft(), self._stepped):
                    self._carry_out(effect)
        finally:
            self._feeding = False
        self._settle()
        if self._state.next_wake < self._woken:
            self._earlier.set()
        # Whatever a sink does now (a cancel or KeyboardInterrupt in it, a call of the pool by a hook), all has been done.
        while self._lines:
            write, name, fields = self._lines.popleft()
            write(name, **fields)

    def _say(self, write: Callable[..., None], name: str, **fields: Any) -> None:
        """Log a line at the end of the ``feed`` that follows or is under way, in order."""
        self._lines.append((write, name, fields))

    def _begin_log(self) -> None:
        """Log the first lines, while there is nothing yet but the lock to give back."""
        try:
            self._log.info("pool.started", instance=self._shop.instance, state_dir=str(self._directory.path))
            if self._directory.repaired:
                self._log.warning("pool.state_repaired", files=self._directory.repaired)
            if self._directory.foreign:
                self._log.warning("pool.foreign_files", files=self._directory.foreign)
        except BaseException:
            self._directory.close()
            raise

    def jitter(self) -> float:
        return self._random.random()

    def living(self) -> list[int]:
        """The sandboxes that should be running now."""
        return [box.n for phase in (Phase.STANDBY, Phase.BOUND) for box in self._state.in_phase(phase)]

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case ev.StartSandbox(n):
                self._spawn(self._start, n)
            case ev.StopSandbox(n, reason):
                self._spawn(self._stop, n, reason)
            case ev.BindSandbox(n, key):
                self._bind(n, key)
            case ev.Grant(waiter) | ev.RunCall(waiter) | ev.RunCold(waiter) | ev.Refuse(waiter):
                place = self._places[waiter]
                place.answer = effect
                place.news.tell()
            case ev.EndCall(waiter, refusal):
                place = self._places[waiter]
                place.ended = place.ended or refusal
                if place.scope is not None:
                    place.scope.cancel()
            case ev.SessionForgotten(key, _, reason):
                self._say(self._log.info, "session.forgotten", session=self._directory.session_id(*key), reason=reason)

    def _spawn(self, carry_out: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        # A handle may be released after the pool's end; what is left then is the next start's.
        if not self._over:
            self._tasks.start_soon(carry_out, *args)

    async def _supervise(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run all that the pool does by itself. Shielded from the caller's cancel, since its containers have to be
        removed then too; ``__aexit__`` ends it."""
        try:
            async with self._tasks:
                self._tasks.cancel_scope.shield = True
                self._tasks.start_soon(self._link.run)
                self._tasks.start_soon(self._clock)
                task_status.started()
        finally:
            self._over = True
            self._gone.set()

    async def _start(self, n: int) -> None:
        began = anyio.current_time()
        try:
            await self._shop.enter(n)
        except EmberpoolError as error:
            self._say(self._log.warning, "sandbox.start_refused", sandbox=n, reason=error.reason, error=str(error))
            self.feed(ev.SandboxStartFailed(n, fault_of(error), self.jitter()))
            return
        try:
            box = await self._shop.start(n)
            if box.watch.died.is_set():
                raise SandboxDied("the sandbox ended right after its start", cause=box.watch.cause)
        except NameTaken as error:
            # The name is another's container, which a stop would remove.
            self._say(self._log.error, "sandbox.name_taken", sandbox=self._shop.name(n), error=str(error))
            self._shop.abandon(n)
            self.feed(ev.SandboxStartFailed(n, fault_of(error), self.jitter()))
            return
        except EmberpoolError as error:
            self._say(self._log.warning, "sandbox.start_failed", sandbox=n, reason=error.reason, error=str(error))
            self.feed(ev.SandboxStartUnknown(n, fault_of(error), self.jitter()))
            return
        self._say(self._log.info, "sandbox.started", sandbox=box.name, seconds=round(anyio.current_time() - began, 3))
        self.feed(ev.SandboxStarted(n, self._shop.age(n)))

    async def _stop(self, n: int, reason: str) -> None:
        began = anyio.current_time()
        try:
            await self._shop.stop(n)
        except EmberpoolError as error:
            self._say(
                self._log.warning, "sandbox.stop_failed", sandbox=n, why=reason, reason=error.reason, error=str(error)
            )
            self.feed(ev.SandboxStopFailed(n, self.jitter()))
            return
        seconds = round(anyio.current_time() - began, 3)
        self._say(self._log.info, "sandbox.stopped", sandbox=self._shop.name(n), why=reason, seconds=seconds)
        self.feed(ev.SandboxStopped(n))
        if self._patience is not None:
            self._patience.deadline = max(self._patience.deadline, anyio.current_time() + STOP_PATIENCE)

    def _bind(self, n: int, key: SessionKey) -> None:
        try:
            self._shop.bind(n)
        except PoolUnusable as error:
            self.feed(ev.BindFailed(n, fault_of(error), self.jitter()))
            return
        session_id = self._directory.session_id(*key)
        self._say(self._log.info, "session.bound", session=session_id, generation=f"{self._shop.instance}-{n}")
        self.feed(ev.BindRecorded(n))

    async def _clock(self) -> None:
        """Tell the core when time alone changes something."""
        while True:
            # As the last step had it: between that and now, a moment could have passed unseen.
            self._earlier, self._woken = anyio.Event(), self._state.next_wake
            with anyio.move_on_at(self._woken):
                await self._earlier.wait()
            self._woken = float("-inf")
            self.feed(ev.Tick())

    async def _run(self, place: _Place, run: Any, left: float) -> CallResult:
        """Run a call, for which ``left`` seconds are left, under a scope of its own, so that the core can end it."""
        with anyio.CancelScope() as place.scope:
            if place.ended is None:
                result: CallResult = await run(max(0.001, left))
                return result
        if place.ended is not None:
            raise error_of(place.ended)
        raise AssertionError("a call's scope is cancelled only to end it")

    def _wait(self) -> tuple[int, _Place]:
        self._waiters += 1
        place = self._places[self._waiters] = _Place()
        return self._waiters, place

    def _leave(self, waiter: int) -> None:
        del self._places[waiter]
        self._settle()

    def _settle(self) -> None:
        """A closing pool has ended once its containers are gone and each caller has gone on."""
        if self._state.drained and not self._places:
            self._gone.set()

    def _require_open(self) -> None:
        if not self._running:
            raise PoolClosed("the pool is not running; use it inside `async with SandboxPool(...)`")
        if self._state.closing:
            raise PoolClosed("the pool is closed")

    def _parse_generation(self, generation: str) -> int:
        if not isinstance(generation, str):
            raise InvalidCall(f"generation must be a string, not {type(generation).__name__}")
        instance, _, number = generation.rpartition("-")
        if not instance or not number.isdecimal() or len(number) > 18:
            raise InvalidCall(f"generation {generation[:40]!r} must be one that a result or a session told")
        if instance != self._shop.instance:
            raise StateLost(
                f"generation {generation[:40]} belongs to an earlier start of the pool; its sandbox is gone"
            )
        return int(number)

    async def _find_engine(self) -> tuple[Engine, EngineInfo]:
        return await find_engine(self.settings.sandbox.binary)
