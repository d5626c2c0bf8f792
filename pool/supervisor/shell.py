"""SandboxPool: feeds the pure core, carries its effects out, and lends each caller a place to wait.

Nothing is decided here. An event goes in (``feed``), effects come out and are carried out at once or by a task of their
own, whose outcome is the next event. Feeding is synchronous, so a caller's cancellation can never fall between the two.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import anyio
import anyio.lowlevel

from executor.common.event_loop import Nursery
from executor.common.log import get_logger, lost_lines
from executor.common.notifier import Notifier
from executor.engine.cgroups import remove_parent
from executor.engine.events import EventHub
from executor.engine.locate import find_engine
from executor.engine.protocol import Engine, EngineInfo, NameTaken
from executor.errors import (
    EmberpoolError,
    InvalidCall,
    PoolClosed,
    PoolUnusable,
    SandboxDied,
    SessionClosed,
    StateLost,
)
from executor.result import CallResult
from executor.sandbox.request import Call
from executor.sandbox.stream import Sink
from executor.staging.threads import StagingThreads
from executor.tool import ToolResult
from pool.audit import AuditEntry
from pool.config.descriptors import raise_limit, shortage
from pool.config.errors import ConfigError, Problem
from pool.config.host import host_memory, memory_problem, require_memory
from pool.config.load import Settings
from pool.config.policy import policy_of
from pool.core import events as ev
from pool.core.events import Effect, Event, Fault, Refusal, RefusalKind, SessionKey
from pool.core.handlers import Phase, StateMachine
from pool.ledger.ledger import StateDirectory
from pool.privileged import Privileged
from pool.session import Prepare, Session
from pool.supervisor.calls import checked_call, key_part, positive_seconds, yielding
from pool.supervisor.containers import ColdSetting, ContainerManager
from pool.supervisor.engine_link import EngineLink, FindEngine
from pool.supervisor.host_calls import HostCalls
from pool.supervisor.lifecycle import Lifecycle
from pool.supervisor.refusals import error_of, fault_of
from pool.supervisor.sessions import OnSessionEnded, SessionEnd, SessionInfo, info_of
from pool.supervisor.startup import MakeImage, make_image
from pool.tools import ToolPlan, environment, run_on_host, with_retries

log = get_logger("emberpool.pool")

MAX_SANDBOXES = 10_000
_MAY_PASS = (RefusalKind.ENGINE_UNAVAILABLE, RefusalKind.POOL_UNUSABLE)
"""Faults that ``ready`` waits out: an engine comes back, and a disk is emptied."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where one caller waits. ``answer`` is the effect that ended its wait; ``ended`` a refusal that ends its call."""

    news: Notifier = field(default_factory=Notifier)
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

    Entering the block is ``start``, leaving it ``aclose``: where a framework starts and stops things in tasks of its own, call
    these. Only the event loop that it was started on may use a pool; all others get ``PoolUnusable`` from every method.
    A start does not wait for an engine: while none is there, everything is refused with the reason, and heals by itself once it is.
    ``find`` returns the engine to use (by default the first that answers, see ``executor.engine.locate``). Where the image is
    missing on it at the start, ``make_image`` brings it (by default it is pulled or built), and callers are refused meanwhile.
    Raises ``ConfigError`` where all containers together may use more memory than this host has (``pool.overcommit``).
    ``on_session_ended`` is called with a ``SessionEnd`` once a session that somebody had a handle on is no more.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        find: FindEngine | None = None,
        make_image: MakeImage = make_image,
        on_session_ended: OnSessionEnded | None = None,
    ) -> None:
        self.settings, self._make_image = settings or Settings(), make_image
        require_memory(self.settings)
        self._find = find or self._find_engine
        self._hub, self._threads = EventHub(), StagingThreads()
        host, pool = self.settings.host, self.settings.pool
        self._host_calls = HostCalls(host.max_calls, host.max_waiters, pool.acquire_timeout)
        self._state = StateMachine(policy_of(self.settings))
        self._places: dict[int, _Place] = {}
        self._waiters = 0
        self._queue: deque[Event] = deque()
        self._feeding = False
        self._lines: deque[tuple[Callable[..., None], str, dict[str, Any]]] = deque()
        self._random = random.Random()  # noqa: S311 - jitter, not a secret
        self._on_session_ended = on_session_ended
        self._stepping, self._left = Notifier(), list[str]()
        self._life = Lifecycle(self)
        self._dropped: deque[ev.HandleReleased] = deque()

    async def __aenter__(self) -> SandboxPool:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._life.close(self.settings.pool.drain_timeout if kind is None else 0.0)
        except PoolUnusable as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    async def start(self, *, nursery: Nursery | None = None) -> SandboxPool:
        """Lock the state directory and start the supervisor, which lives until ``aclose`` and is not bound to this task.

        It runs in a task of its own (on trio a system task), or in ``nursery``, a ``trio.Nursery`` or an AnyIO task group: one
        that is cancelled closes the pool. Raises ``PoolUnusable``, ``ConfigError`` where this host lacks file descriptors for it,
        and ``PoolClosed`` the second time.
        """
        raise_limit()
        if text := shortage(self.settings):
            raise ConfigError([Problem("pool.max_sandboxes", text)])
        self._life.enter_loop()
        try:
            self._open()
        except BaseException:
            self._life = Lifecycle(self)  # nothing has begun
            raise
        self._earlier, self._woken = anyio.Event(), float("inf")
        self._stepped = anyio.current_time()
        await self._life.start(nursery, self._link.run, self._clock)
        return self

    def _open(self) -> None:
        self._directory = StateDirectory.open(self.settings.pool.state_dir)
        self._log = log.bind(pool=self._directory.pool_id, name=self.settings.pool.name)
        self._containers = ContainerManager(self.settings, self._directory, self._hub, self._life.tasks, self._threads)
        self._link = EngineLink(
            self.settings, self._find, self._directory.pool_id, self._hub, self._containers, self, self._make_image
        )
        self._begin_log()

    async def aclose(self) -> None:
        """Close the pool: refuse new work, let what runs finish for ``pool.drain_timeout``, then end it, and remove every
        container. From any task of the pool's loop; twice is harmless. Raises ``PoolUnusable`` where the supervisor failed."""
        await self._life.close(self.settings.pool.drain_timeout)

    def drain(self, timeout: float | None = None) -> None:
        """Begin to close as ``aclose`` does and return at once; running calls get ``timeout`` seconds (default
        ``pool.drain_timeout``). From any thread, and from a signal handler. ``aclose`` waits for the end."""
        self._life.close_soon(self.settings.pool.drain_timeout if timeout is None else positive_seconds(timeout))

    def __del__(self) -> None:
        # Also for a pool whose making failed.
        if (life := getattr(self, "_life", None)) is not None and life.abandoned():
            message = f"{type(self).__name__} of {self.settings.pool.state_dir} was never closed: {life.error()}"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    # --- for callers --------------------------------------------------------------------------------------------------

    @yielding
    async def ready(self, *, timeout: float | None = None) -> None:
        """Wait until the engine is there and every standby that is wanted stands: a first ``acquire`` waits for nothing then.

        Waits at most ``timeout`` seconds (default ``pool.acquire_timeout``); then, and at once where waiting does not help, it
        raises why: ``EngineUnavailable``, ``ImageMissing``, ``ProfileMismatch``, ``PoolUnusable``, ``PoolExhausted``, ``PoolClosed``.
        """
        wait = self.settings.pool.acquire_timeout if timeout is None else positive_seconds(timeout)
        health = self._state.health
        with anyio.move_on_after(wait):
            while True:
                await anyio.lowlevel.checkpoint()
                self._require_open()
                if self._state.stocked:
                    return
                health = self._state.health
                if health.fault is not None and health.fault.kind not in _MAY_PASS:
                    break
                await self._stepping.wait()
        kind = RefusalKind.POOL_EXHAUSTED if health.reachable else RefusalKind.ENGINE_UNAVAILABLE
        fault = health.fault or Fault(kind, f"the pool was not ready within {wait:g} s")
        raise error_of(Refusal(fault.kind, fault.message, 1.0 if fault.kind in (*_MAY_PASS, kind) else None))

    @yielding
    async def acquire(
        self, agent: str, session: str, *, timeout: float | None = None, generation: str | None = None
    ) -> Session:
        """A handle on the session ``(agent, session)``, once it owns a live sandbox: its own, or a standby, or a new one.

        Waits at most ``timeout`` seconds (default ``pool.acquire_timeout``), first come first served. With ``generation`` the
        session has to have that very sandbox already: else it is ``StateLost``, and none is started. Raises ``InvalidCall``,
        ``PoolExhausted``, ``QuotaExceeded``, ``EngineUnavailable``, ``ImageMissing``, ``ImageUnfit``, ``ProfileMismatch``, ``SandboxDied``
        (the session keeps dying), ``SessionClosed`` (it was closed while this waited) or ``PoolClosed``. Nothing ever runs anywhere weaker instead.
        """
        key = (key_part("agent", agent), key_part("session", session))
        wait = self.settings.pool.acquire_timeout if timeout is None else positive_seconds(timeout)
        self._require_open()
        n = self._parse_generation(generation) if generation is not None else None
        waiter, place = self._wait()
        try:
            self.feed(ev.AcquireWanted(waiter, key, anyio.current_time() + wait, n))
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
        unbuffered: bool | None = None,
    ) -> CallResult:
        """One call in a disposable container of its own, as ``Session.call``; at most ``pool.max_cold`` run at once."""
        return await self.run_cold(
            checked_call(self.settings, "", argv, code, stdin, env, timeout, max_output, unbuffered)
        )

    @yielding
    async def run_tool(self, plan: ToolPlan, arguments: object, *, session: str) -> ToolResult:
        """Call a tool (see ``pool.tools.plan_tool``) for a session of its agent, where the plan says that it runs.

        In a container it runs in the sandbox of ``(plan.agent, session)``, which is acquired for it; on the host only where
        the configuration says ``limits``. What never started is tried again, up to ``plan.retries`` times. A tool that
        fails is a result. Raises ``InvalidCall``, and what ``acquire`` and ``Session.call`` raise; on the host ``PoolExhausted``
        where ``host.max_calls`` run and no place was free within ``pool.acquire_timeout``.
        """
        self._require_open()
        if plan.python_tools == "limits":
            session_id = self._directory.session_id(key_part("agent", plan.agent), key_part("session", session))
            return await run_on_host(
                plan, arguments, self.settings, session=session_id, calls=self._host_calls, threads=self._threads
            )

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
        return Privileged(self.settings, self.run_cold, self._threads)

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
        grows = most > policy.max_sandboxes  # what shrinks never asks for more memory than there was
        if grows and (memory := host_memory()) and (text := memory_problem(self.settings, memory, max_sandboxes=most)):
            raise InvalidCall(f"max_sandboxes: {text}")
        if text := shortage(self.settings, most):
            raise InvalidCall(text)
        self._say(self._log.info, "pool.resized", min_standby=standby, max_sandboxes=most)
        self.feed(ev.PolicyChanged(replace(policy, min_standby=standby, max_sandboxes=most)))

    def sessions(self) -> list[SessionInfo]:
        """The sessions that somebody has a handle on, waits for, or that have a sandbox. Acquires nothing."""
        self._require_open()
        state, now = self._state, anyio.current_time()
        return [
            info_of(state, session, self._directory.session_id(*session.key), self._containers.instance, now)
            for session in state.sessions.values()
            if state.counts(session)
        ]

    async def close_session(self, agent: str, session: str) -> bool:
        """End a session as ``Session.close`` does, without a handle on it; whether there was one. Starts nothing."""
        self._require_open()
        state = self._state.sessions.get((key_part("agent", agent), key_part("session", session)))
        if state is None or not self._state.counts(state):
            return False
        self.end(state.key, state.epoch)
        return True

    def snapshot(self) -> dict[str, Any]:
        """Counts derived from the core's state, for operators and tests: sandboxes by phase, sessions, waiters, health."""
        self._life.require_thread()
        state = self._state
        return {
            "pool": self._directory.pool_id,
            "instance": self._containers.instance,
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
                await self._run(place, lambda left: self._containers.cold(call.within(left), setting), deadline - now)
            )
        except EmberpoolError as error:
            entry.failed(error)
            raise
        finally:
            self._leave(waiter)
            self.feed(ev.CallEnded(waiter) if isinstance(place.answer, ev.RunCold) else ev.WaiterGone(waiter))
            self._log.info("call.ended", **entry.fields(anyio.current_time(), self._containers.image_id))

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
            if (box := self._containers.sandboxes.get(n)) is None:
                # It was lost, and is being removed, between the turn that was given and this task's own.
                if place.ended is not None:
                    raise error_of(place.ended)
                raise SandboxDied("the sandbox ended before the call began", cause="unknown", started=False)

            async def run(left: float) -> CallResult:
                if prepare is None:
                    return await box.call(call.within(left), sink, began=now)
                async with prepare(box, call.within(left)) as prepared:
                    entry.call = prepared
                    return await box.call(prepared.within(max(0.001, deadline - anyio.current_time())), sink)

            entry.start(now)
            try:
                result = await self._run(place, run, deadline - now)
            finally:
                poisoned = box.poisoned
            return entry.told(result.ran_in(f"{self._containers.instance}-{n}"))
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
                generation=f"{self._containers.instance}-{n}" if n is not None else None,
                **entry.fields(now, self._containers.image_id),
            )

    async def session_ready(self, key: SessionKey, epoch: int) -> None:
        """Wait until the session's sandbox has an armed runner, as ``Session.ready`` tells it."""
        self._require_open()
        session = self._state.sessions.get(key)
        if session is None or session.epoch != epoch:
            raise SessionClosed("the session is closed; acquire it again")
        if session.sandbox is None:
            # What an acquire waits for is what is missing here; the handle that it takes goes back at once.
            await (await self.acquire(*key)).release()
        box = self._containers.sandboxes.get(session.sandbox) if session.sandbox is not None else None
        if box is None:
            message = "the session's sandbox has just ended; its next call gets another"
            raise SandboxDied(message, cause="unknown", started=False)
        await box.ready()

    def generation(self, key: SessionKey, epoch: int) -> str | None:
        """The generation of a session, as ``Session.generation`` tells it."""
        session = self._state.sessions.get(key)
        if session is None or session.epoch != epoch or session.sandbox is None:
            return None
        return f"{self._containers.instance}-{session.sandbox}"

    def require_here(self) -> None:
        """Raise ``PoolUnusable`` unless the caller is on the pool's loop, or the pool has ended."""
        self._life.require_here()

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
        if self._life.ended:
            return  # a handle may be released after the pool's end
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
        self._stepping.tell()
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
            self._log.info("pool.started", instance=self._containers.instance, state_dir=str(self._directory.path))
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
            case ev.SessionForgotten(key, _, reason, granted):
                self._say(self._log.info, "session.forgotten", session=self._directory.session_id(*key), reason=reason)
                if granted:
                    self._say(self._tell_ended, reason, key=key)

    def _spawn(self, carry_out: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        # Once the supervisor has ended, what is left is the next start's.
        if not self._life.over:
            self._life.tasks.start_soon(carry_out, *args)

    def _tell_ended(self, reason: str, *, key: SessionKey) -> None:
        if self._on_session_ended is not None:
            session_id = self._directory.session_id(*key)
            try:
                self._on_session_ended(SessionEnd(*key, session_id, reason))
            except Exception as error:  # not ours, so nothing here may depend on it
                self._log.error(
                    "pool.callback_failed", callback="on_session_ended", session=session_id, error=repr(error)
                )

    # --- the life's owner ---------------------------------------------------------------------------------------------

    def begin_close(self, deadline: float) -> float:
        self._host_calls.refuse()
        self.feed(ev.CloseBegan(deadline))
        return deadline if self._state.close_deadline is None else self._state.close_deadline

    def give_up(self, error: PoolUnusable) -> None:
        refusal = Refusal(RefusalKind.POOL_UNUSABLE, str(error))
        for waiter, place in self._places.items():
            if place.answer is None:
                place.answer = ev.Refuse(waiter, refusal)
                place.news.tell()
            else:
                place.ended = place.ended or replace(refusal, started=True)
                if place.scope is not None:
                    place.scope.cancel()
        self._stepping.tell()
        self._log.error("pool.failed", error=str(error))

    async def clear_away(self, *, everything: bool) -> None:
        deadline = self._state.close_deadline or 0.0
        await self._host_calls.close(max(0.0, deadline - anyio.current_time()))
        self._left = await self._containers.last_sweep(everything=everything)

    def let_go(self) -> None:
        self._directory.close()
        if self._left:
            hint = "the next start with this state_dir removes them"
            self._log.error("pool.left_behind", containers=self._left, hint=hint)
        if self._containers.connection is not None:
            remove_parent(self._containers.connection.profile.cgroup_parent)
        for session in self._state.sessions.values():
            if session.granted:
                self._tell_ended("pool_closed", key=session.key)
        self._log.info("pool.closed")

    async def _start(self, n: int) -> None:
        began = anyio.current_time()
        try:
            await self._containers.enter(n)
        except EmberpoolError as error:
            self._say(self._log.warning, "sandbox.start_refused", sandbox=n, reason=error.reason, error=str(error))
            self.feed(ev.SandboxStartFailed(n, fault_of(error), self.jitter()))
            return
        try:
            box = await self._containers.start(n)
            if box.watch.died.is_set():
                raise SandboxDied("the sandbox ended right after its start", cause=box.watch.cause)
        except NameTaken as error:
            # The name is another's container, which a stop would remove.
            self._say(self._log.error, "sandbox.name_taken", sandbox=self._containers.name(n), error=str(error))
            self._containers.abandon(n)
            self.feed(ev.SandboxStartFailed(n, fault_of(error), self.jitter()))
            return
        except EmberpoolError as error:
            self._say(self._log.warning, "sandbox.start_failed", sandbox=n, reason=error.reason, error=str(error))
            self.feed(ev.SandboxStartUnknown(n, fault_of(error), self.jitter()))
            return
        self._say(self._log.info, "sandbox.started", sandbox=box.name, seconds=round(anyio.current_time() - began, 3))
        self.feed(ev.SandboxStarted(n, self._containers.age(n)))

    async def _stop(self, n: int, reason: str) -> None:
        began = anyio.current_time()
        try:
            await self._containers.stop(n)
        except EmberpoolError as error:
            self._say(
                self._log.warning, "sandbox.stop_failed", sandbox=n, why=reason, reason=error.reason, error=str(error)
            )
            self.feed(ev.SandboxStopFailed(n, self.jitter()))
            return
        seconds = round(anyio.current_time() - began, 3)
        self._say(self._log.info, "sandbox.stopped", sandbox=self._containers.name(n), why=reason, seconds=seconds)
        self.feed(ev.SandboxStopped(n))
        self._life.one_gone()

    def _bind(self, n: int, key: SessionKey) -> None:
        try:
            self._containers.bind(n)
        except PoolUnusable as error:
            self.feed(ev.BindFailed(n, fault_of(error), self.jitter()))
            return
        session_id = self._directory.session_id(*key)
        self._say(self._log.info, "session.bound", session=session_id, generation=f"{self._containers.instance}-{n}")
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
            self._life.gone.set()

    def _require_open(self) -> None:
        self._life.require_open()
        if self._state.closing or self._life.draining:
            raise PoolClosed("the pool is closing")

    def _parse_generation(self, generation: str) -> int:
        if not isinstance(generation, str):
            raise InvalidCall(f"generation must be a string, not {type(generation).__name__}")
        instance, _, number = generation.rpartition("-")
        if not instance or not number.isdecimal() or len(number) > 18:
            raise InvalidCall(f"generation {generation[:40]!r} must be one that a result or a session told")
        if instance != self._containers.instance:
            raise StateLost(
                f"generation {generation[:40]} belongs to an earlier start of the pool; its sandbox is gone"
            )
        return int(number)

    async def _find_engine(self) -> tuple[Engine, EngineInfo]:
        return await find_engine(self.settings.sandbox.binary)
