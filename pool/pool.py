"""The warm pool, as its callers use it: sessions, cold calls, tools, its size and its state.

The work is done by ``pool.supervisor``: this file checks what it is asked, and says in its docstrings what callers may rely on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import anyio
import anyio.lowlevel

from executor.common.event_loop import Nursery
from executor.engine.locate import find_engine
from executor.engine.protocol import Engine, EngineInfo
from executor.errors import PoolUnusable
from executor.result import CallResult
from executor.tool import ToolResult
from pool.config.descriptors import raise_limit, shortage
from pool.config.errors import ConfigError, Problem
from pool.config.host import require_memory
from pool.config.load import Settings
from pool.core import events as ev
from pool.core.events import Fault, Refusal, RefusalKind
from pool.privileged import Privileged
from pool.session import Session
from pool.supervisor.calls import Calls
from pool.supervisor.engine_link import FindEngine
from pool.supervisor.refusals import error_of
from pool.supervisor.requests import checked_call, key_part, positive_seconds, resized, yielding
from pool.supervisor.sessions import OnSessionEnded, SessionInfo, info_of
from pool.supervisor.shell import Shell
from pool.supervisor.snapshot import PoolSnapshot, take_snapshot
from pool.supervisor.startup import MakeImage, make_image
from pool.tools import ToolPlan, environment, run_on_host, with_retries


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
        self.settings = settings or Settings()
        require_memory(self.settings)
        self._shell = Shell(self.settings, find or self._find_engine, make_image, on_session_ended)
        self._calls = Calls(self._shell)

    async def __aenter__(self) -> SandboxPool:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._shell.life.close(self.settings.pool.drain_timeout if kind is None else 0.0)
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
        await self._shell.start(nursery)
        return self

    async def aclose(self) -> None:
        """Close the pool: refuse new work, let what runs finish for ``pool.drain_timeout``, then end it, and remove every
        container. From any task of the pool's loop; twice is harmless. Raises ``PoolUnusable`` where the supervisor failed."""
        await self._shell.life.close(self.settings.pool.drain_timeout)

    def drain(self, timeout: float | None = None) -> None:
        """Begin to close as ``aclose`` does and return at once; running calls get ``timeout`` seconds (default
        ``pool.drain_timeout``). From any thread, and from a signal handler. ``aclose`` waits for the end."""
        self._shell.life.close_soon(self.settings.pool.drain_timeout if timeout is None else positive_seconds(timeout))

    # --- for callers --------------------------------------------------------------------------------------------------

    @yielding
    async def ready(self, *, timeout: float | None = None) -> None:
        """Wait until the engine is there and every standby that is wanted stands: a first ``acquire`` waits for nothing then.

        Waits at most ``timeout`` seconds (default ``pool.acquire_timeout``); then, and at once where waiting does not help, it
        raises why: ``EngineUnavailable``, ``ImageMissing``, ``ProfileMismatch``, ``PoolUnusable``, ``PoolExhausted``, ``PoolClosed``.
        """
        wait = self.settings.pool.acquire_timeout if timeout is None else positive_seconds(timeout)
        health = self._shell.state.health
        with anyio.move_on_after(wait):
            while True:
                await anyio.lowlevel.checkpoint()
                self._shell.require_open()
                if self._shell.state.has_standbys:
                    return
                health = self._shell.state.health
                if health.fault is not None and not health.fault.may_pass:
                    break
                await self._shell.stepped.wait()
        kind = RefusalKind.POOL_EXHAUSTED if health.reachable else RefusalKind.ENGINE_UNAVAILABLE
        fault = health.fault or Fault(kind, f"the pool was not ready within {wait:g} s")
        again = 1.0 if health.fault is None or fault.may_pass else None
        raise error_of(Refusal(fault.kind, fault.message, again, permanent=fault.permanent))

    @yielding
    async def acquire(
        self, agent: str, session: str, *, timeout: float | None = None, generation: str | None = None
    ) -> Session:
        """Return a handle on the session ``(agent, session)``, once it owns a live sandbox: its own, or a standby, or a new one.

        Waits at most ``timeout`` seconds (default ``pool.acquire_timeout``), first come first served. With ``generation`` the
        session has to have that very sandbox already: else it is ``StateLost``, and none is started. Raises ``InvalidCall``,
        ``PoolExhausted``, ``QuotaExceeded``, ``EngineUnavailable``, ``ImageMissing``, ``ImageUnfit``, ``ProfileMismatch``, ``SandboxDied``
        (the session keeps dying), ``SessionClosed`` (it was closed while this waited) or ``PoolClosed``. Nothing ever runs anywhere weaker instead.
        """
        key = (key_part("agent", agent), key_part("session", session))
        wait = self.settings.pool.acquire_timeout if timeout is None else positive_seconds(timeout)
        epoch = await self._calls.acquire(key, wait, generation)
        return Session(self._calls, key, epoch, self._shell.directory.session_id(*key))

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
        """Make one call in a disposable container of its own; at most ``pool.max_cold`` run at once.

        Parameters and errors as ``Session.call``; ``timeout`` in seconds, ``max_output`` in bytes of each stream.
        """
        return await self._calls.cold(
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
        self._shell.require_open()
        if plan.python_tools == "limits":
            session_id = self._shell.directory.session_id(key_part("agent", plan.agent), key_part("session", session))
            return await run_on_host(
                plan,
                arguments,
                self.settings,
                session=session_id,
                calls=self._shell.host_calls,
                threads=self._shell.threads,
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
        return Privileged(self.settings, self._calls.cold, self._shell.threads)

    def resize(self, *, min_standby: int | None = None, max_sandboxes: int | None = None) -> None:
        """Change the pool's size while it runs; what is not given stays.

        Growth starts at once. For a shrink nothing that has a session is stopped: standbys go first, and the pool falls to
        its size as sessions end. Raises ``InvalidCall`` or ``PoolClosed``.
        """
        self._shell.require_open()
        policy = resized(self.settings, self._shell.state.policy, min_standby, max_sandboxes)
        shell = self._shell
        sizes = {"min_standby": policy.min_standby, "max_sandboxes": policy.max_sandboxes}
        shell.log_later(shell.log.info, "pool.resized", **sizes)
        shell.feed(ev.PolicyChanged(policy))

    def sessions(self) -> list[SessionInfo]:
        """Return the sessions that have a handle, a waiter or a sandbox. Acquires nothing. Raises ``PoolClosed``."""
        self._shell.require_open()
        state, now = self._shell.state, anyio.current_time()
        return [
            info_of(
                state, session, self._shell.directory.session_id(*session.key), self._shell.containers.instance, now
            )
            for session in state.sessions.values()
            if state.is_active(session)
        ]

    async def close_session(self, agent: str, session: str) -> bool:
        """End a session as ``Session.close`` does, without a handle on it, and return whether there was one. Starts nothing.

        Raises ``InvalidCall`` or ``PoolClosed``.
        """
        self._shell.require_open()
        state = self._shell.state.sessions.get((key_part("agent", agent), key_part("session", session)))
        if state is None or not self._shell.state.is_active(state):
            return False
        self._calls.end(state.key, state.epoch)
        return True

    def snapshot(self) -> PoolSnapshot:
        """Return the pool's state and counts at this moment, before its start, while it runs and after its end.

        Raises ``PoolUnusable`` in a forked process, and in another thread while the pool lives.
        """
        return take_snapshot(self._shell)

    async def _find_engine(self) -> tuple[Engine, EngineInfo]:
        return await find_engine(self.settings.sandbox.binary)
