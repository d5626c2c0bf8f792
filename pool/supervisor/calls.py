"""Acquires and calls from their request to their outcome: each waits for its turn, runs under its deadline, and is reported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import anyio

from executor.errors import EmberpoolError, InvalidCall, SandboxDied, SessionClosed, StateLost
from executor.result import CallResult
from executor.sandbox.request import Call
from executor.sandbox.sandbox import Sandbox
from executor.sandbox.stream import Sink
from pool.audit import AuditEntry
from pool.config.load import Settings
from pool.core import events as ev
from pool.core.events import SessionKey
from pool.supervisor.containers import ColdSetting
from pool.supervisor.refusals import error_of
from pool.supervisor.requests import yielding
from pool.supervisor.shell import Shell, Waiting

Prepare = Callable[[Sandbox, Call], AbstractAsyncContextManager[Call]]
"""Makes of a call the one that a certain sandbox is to run, for as long as it runs."""


class Calls:
    """What the caller's handles ask of a pool. Times are seconds; every method raises ``PoolUnusable`` on another event loop."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    @property
    def settings(self) -> Settings:
        """The pool's configuration."""
        return self._shell.settings

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def acquire(self, key: SessionKey, wait: float, generation: str | None = None) -> int:
        """Attach a handle to a session once it owns a live sandbox, and return the session's epoch. Waits ``wait`` seconds at most.

        Raises what ``SandboxPool.acquire`` does.
        """
        shell = self._shell
        shell.require_open()
        n = self._number(generation) if generation is not None else None
        waiter, place = shell.enter()
        try:
            shell.feed(ev.AcquireWanted(waiter, key, anyio.current_time() + wait, n))
            await place.answered()
        except BaseException:
            if isinstance(place.answer, ev.Grant):
                shell.feed(ev.GrantDeclined(key, place.answer.epoch))
            else:
                shell.feed(ev.WaiterGone(waiter))
            raise
        finally:
            shell.leave(waiter)
        if isinstance(place.answer, ev.Refuse):
            raise error_of(place.answer.refusal)
        assert isinstance(place.answer, ev.Grant)  # noqa: S101 - an acquire is granted or refused, nothing else
        return place.answer.epoch

    async def ready(self, key: SessionKey, epoch: int) -> None:
        """Wait until the session's sandbox has an armed runner, as ``Session.ready`` says."""
        shell = self._shell
        shell.require_open()
        session = shell.state.sessions.get(key)
        if session is None or session.epoch != epoch:
            raise SessionClosed("the session is closed; acquire it again")
        if session.sandbox is None:
            # What an acquire waits for is what is missing here; the handle that it takes goes back at once.
            self.detach(key, await self.acquire(key, self.settings.pool.acquire_timeout))
        box = shell.containers.sandboxes.get(session.sandbox) if session.sandbox is not None else None
        if box is None:
            message = "the session's sandbox has just ended; its next call gets another"
            raise SandboxDied(message, cause="unknown", started=False)
        await box.ready()

    def generation(self, key: SessionKey, epoch: int) -> str | None:
        """Return the session's generation, ``None`` where it has no sandbox."""
        session = self._shell.state.sessions.get(key)
        if session is None or session.epoch != epoch or session.sandbox is None:
            return None
        return f"{self._shell.containers.instance}-{session.sandbox}"

    def require_here(self) -> None:
        """Raise ``PoolUnusable`` unless the caller is on the pool's loop, or the pool has ended."""
        self._shell.life.require_here()

    def detach(self, key: SessionKey, epoch: int) -> None:
        """Release a handle."""
        self._shell.feed(ev.HandleReleased(key, epoch))

    def drop(self, key: SessionKey, epoch: int) -> None:
        """Release a handle that was collected; from any thread."""
        self._shell.drop(key, epoch)

    def end(self, key: SessionKey, epoch: int) -> None:
        """End a session for all its handles."""
        self._shell.feed(ev.SessionEnded(key, epoch))

    # --- calls --------------------------------------------------------------------------------------------------------

    @yielding
    async def cold(self, call: Call, setting: ColdSetting | None = None) -> CallResult:
        """Wait for a cold place and run the call in a container of its own, made as ``setting`` says."""
        shell = self._shell
        shell.require_open()
        waiter, place = shell.enter()
        began = anyio.current_time()
        deadline, entry = began + call.timeout, AuditEntry(call, began)
        try:
            shell.feed(ev.ColdWanted(waiter, deadline))
            await place.answered()
            if isinstance(place.answer, ev.Refuse):
                raise error_of(place.answer.refusal)
            entry.start(now := anyio.current_time())

            async def run(left: float) -> CallResult:
                return await shell.containers.cold(call.within(left), setting)

            return entry.ended(await _run(place, run, deadline - now))
        except EmberpoolError as error:
            entry.failed(error)
            raise
        finally:
            shell.leave(waiter)
            shell.feed(ev.CallEnded(waiter) if isinstance(place.answer, ev.RunCold) else ev.WaiterGone(waiter))
            shell.log.info("call.ended", **entry.fields(anyio.current_time(), shell.containers.image_id))

    @yielding
    async def run(
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
        shell = self._shell
        n = self._number(generation) if generation is not None else None
        shell.require_open()
        waiter, place = shell.enter()
        began = now = anyio.current_time()
        deadline, poisoned, entry = began + call.timeout, "", AuditEntry(call, began)
        try:
            shell.feed(ev.CallWanted(waiter, key, epoch, deadline, n), now)
            if place.answer is None:  # a call that has its turn at once checks for a cancel when it begins
                await place.answered()
                now = anyio.current_time()
            if isinstance(place.answer, ev.Refuse):
                raise error_of(place.answer.refusal)
            assert isinstance(place.answer, ev.RunCall)  # noqa: S101 - a call is run or refused, nothing else
            n = place.answer.n
            if (box := shell.containers.sandboxes.get(n)) is None:
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
                result = await _run(place, run, deadline - now)
            finally:
                poisoned = box.poisoned
            return entry.ended(result.ran_in(f"{shell.containers.instance}-{n}"))
        except EmberpoolError as error:
            entry.failed(error)
            raise
        finally:
            now = anyio.current_time()
            ran = isinstance(place.answer, ev.RunCall)
            shell.leave(waiter)
            jitter = shell.jitter() if poisoned else 0.0
            shell.feed(ev.CallEnded(waiter, poisoned, jitter) if ran else ev.WaiterGone(waiter), now)
            shell.log.info(
                "call.ended",
                session=shell.directory.session_id(*key),
                generation=f"{shell.containers.instance}-{n}" if n is not None else None,
                **entry.fields(now, shell.containers.image_id),
            )

    def _number(self, generation: str) -> int:
        """The number in a generation of this instance. Raises ``InvalidCall``, and ``StateLost`` for another instance's."""
        if not isinstance(generation, str):
            raise InvalidCall(f"generation must be a string, not {type(generation).__name__}")
        instance, _, number = generation.rpartition("-")
        if not instance or not number.isdecimal() or len(number) > 18:
            raise InvalidCall(f"generation {generation[:40]!r} must be one that a result or a session has returned")
        if instance != self._shell.containers.instance:
            raise StateLost(
                f"generation {generation[:40]} belongs to an earlier start of the pool; its sandbox is gone"
            )
        return int(number)


async def _run(place: Waiting, run: Callable[[float], Awaitable[CallResult]], left: float) -> CallResult:
    """Run a call, for which ``left`` seconds are left, under a scope of its own, so that the core can end it."""
    with anyio.CancelScope() as place.scope:
        if place.ended is None:
            return await run(max(0.001, left))
    if place.ended is not None:
        raise error_of(place.ended)
    raise AssertionError("a call's scope is cancelled only to end it")
