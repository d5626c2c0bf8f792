"""Run calls by plain exec: in images without Python, and for callers that use no runner.

Killing an exec's client kills nothing inside, so a call that ends by its deadline, a cancel or a lost client takes its
container with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from executor.common.log import get_logger
from executor.engine.attached import PROVED, Attached, run_attached
from executor.engine.events import EventHub, ExecWatch, Watch
from executor.engine.protocol import Engine
from executor.errors import EmberpoolError, SandboxDied
from executor.result import CallResult
from executor.sandbox.kill import not_confirmed
from executor.sandbox.outcome import (
    CANNOT_RUN,
    KILL_CODE,
    LIMIT_SIGNAL_CODE,
    NOT_FOUND,
    client_lost,
    exec_result,
    missing_proof,
    not_started,
)
from executor.sandbox.profile import exec_args
from executor.sandbox.request import Call, call_input, new_token

log = get_logger("emberpool.sandbox")

KILLED_PATIENCE = 0.3
EVENT_PATIENCE = 2.0
"""Seconds to wait, after an exec's client has ended, for the event that says how the exec ended (it comes within ms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainExec:
    """Runs a container's calls by plain exec. ``poison`` marks the sandbox unfit, ``kill`` kills it and returns whether that is
    certain."""

    engine: Engine
    hub: EventHub
    watch: Watch
    user: str
    python: bool
    image_env: tuple[str, ...]
    witness: str
    cpu_seconds: int | None
    cpus: float
    poison: Callable[[str], None]
    kill: Callable[[str], Awaitable[bool]]

    async def call(self, call: Call) -> CallResult:
        """Run one call. Raises ``SandboxDied`` or ``EngineUnavailable``; a timeout is a result."""
        token = new_token()
        argv = call.client_argv(token) if self.python else call.argv
        if self.watch.died.is_set():
            raise self._died(started=False)
        watch, ooms = self.watch.expect(argv), self.watch.ooms
        try:
            with call_input(call, python=self.python, image_env=self.image_env, witness=self.witness) as (
                stdin,
                env_file,
            ):
                args = exec_args(self.watch.name, argv, user=self.user, env_file=env_file)
                end = await run_attached(
                    self.engine, args, stdin=stdin, timeout=call.timeout, max_output=call.max_output,
                    over=watch.ended, died=self.watch.died, proof=self.python,
                )  # fmt: skip
            return await self._outcome(end, watch, ooms)
        except anyio.get_cancelled_exc_class():
            await self.kill("cancelled")
            raise
        finally:
            self.watch.dismiss(watch)

    async def _outcome(self, end: Attached, watch: ExecWatch, ooms: int) -> CallResult:
        if end.ended_by == "deadline":
            if not await self.kill("timeout"):
                raise not_confirmed()
            return exec_result(end, timed_out=True, oom=self.watch.ooms > ooms)
        if end.ended_by == "client":
            await self._first_of(watch.ended, self.watch.died)
        if watch.exit_code == KILL_CODE and not await self._survived():
            raise self._died(started=True)
        if watch.exit_code is None and await self._never_began(end, watch):
            return not_started(end)
        if watch.exit_code is None:
            raise await self._no_exit(end, watch)
        if client_lost(end, watch.exit_code):
            raise await self._lost()
        if self.watch.ooms == ooms and (error := missing_proof(end)):
            raise error if await self.kill("runner") else not_confirmed()
        # The call's own process has ended; what still holds its streams was left running and must not live on.
        if end.ended_by == "over" and not await self.kill("lingering"):
            raise not_confirmed()
        cpu = self.cpu_seconds is not None and end.duration * max(1.0, self.cpus) >= self.cpu_seconds
        return exec_result(
            end,
            exit_code=watch.exit_code,
            oom=self.watch.ooms > ooms,
            cpu=cpu and watch.exit_code == LIMIT_SIGNAL_CODE,
        )

    async def _never_began(self, end: Attached, watch: ExecWatch) -> bool:
        """Whether the engine made the exec and then could not start its program: that end has no event."""
        refused = end.ended_by == "client" and end.code in (CANNOT_RUN, NOT_FOUND) and watch.created
        return refused and not self.python and self.hub.connected and await self._survived()

    async def _no_exit(self, end: Attached, watch: ExecWatch) -> EmberpoolError:
        """Return the error of an exec for which no event with an exit status came."""
        if self.watch.died.is_set():
            self.poison(self.watch.cause)
            # Events come in order, so an exec without one before the container's end was never made.
            return self._died(started=watch.created or self.watch.engine_lost)
        if not watch.created and not await self._survived():
            # Here the events may only be late. In an image with Python a call without the proof of its start has not run,
            # since its code comes after that proof; in another image every call counts as begun.
            began = end.proof == PROVED
            return SandboxDied("the sandbox was lost under the call, or before it", cause="unknown", started=began)
        # What the client printed proves nothing here: the call's own code may have printed it.
        return await self._lost()

    async def _lost(self) -> SandboxDied:
        """End the sandbox of a call whose client was lost, and return the call's error."""
        if not await self.kill("engine"):
            return not_confirmed()
        message = "the engine was lost while the call ran; what the code did is unknown"
        return SandboxDied(message, cause="unknown" if self.hub.connected else "engine", started=True)

    async def _survived(self) -> bool:
        """Whether the container outlived an exec that ended by SIGKILL.

        A container's end kills its execs, and their events may come first: the call must not report that as the death of
        its own code.
        """
        with anyio.move_on_after(KILLED_PATIENCE):
            await self.watch.died.wait()
        if not self.watch.died.is_set():
            try:
                if (await self.engine.inspect(self.watch.name))["State"]["Running"] is True:
                    return True
            except (EmberpoolError, LookupError, TypeError) as error:
                log.warning("sandbox.unknown_state", sandbox=self.watch.name, error=str(error))
        self.poison(self.watch.cause)
        return False

    def _died(self, *, started: bool) -> SandboxDied:
        cause = self.watch.cause
        when = "while the call ran" if started else "before the call began"
        return SandboxDied(
            f"the sandbox ended {when} ({cause}); what the session kept in it is gone", cause=cause, started=started
        )

    async def _first_of(self, *events: anyio.Event) -> None:
        with anyio.move_on_after(EVENT_PATIENCE):
            async with anyio.create_task_group() as tasks:

                async def wait(event: anyio.Event) -> None:
                    await event.wait()
                    tasks.cancel_scope.cancel()

                for event in events:
                    tasks.start_soon(wait, event)
