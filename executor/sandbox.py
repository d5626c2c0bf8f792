"""One hardened container: start it, verify it, run calls in it by plain exec, kill it, destroy it."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import structlog

from executor.attached import Attached, run_attached
from executor.call import Call, carried, new_token
from executor.docker import classify
from executor.engine import ContainerGone, Engine, ImageInfo
from executor.outcome import CANNOT_RUN, KILL_CODE, LIMIT_SIGNAL_CODE, NOT_FOUND, exec_result, never_began
from executor.profile import ContainerProfile, Identity, exec_args
from executor.result import CallResult, EmberpoolError, EngineFailed, EngineUnavailable, ProfileMismatch, SandboxDied
from executor.verify import check_inside, check_inspect, probe_argv, require
from executor.watch import EventHub, ExecWatch, Watch

log = structlog.get_logger("emberpool.sandbox")

PROBE_TIMEOUT = 15.0
KILL_TIMEOUT = 5.0
KILLED_PATIENCE = 0.3
EVENT_PATIENCE = 2.0
"""Seconds to wait, after an exec's client has ended, for the event that says how the exec ended (it comes within ms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is started from. ``profile.user`` is the keeper's ``uid:gid`` (PID 1), ``user`` the calls'.
    ``staging`` is a host directory that holds a file ``nonce`` with ``nonce`` in it; ``lifetime`` is seconds."""

    identity: Identity
    profile: ContainerProfile
    image: ImageInfo
    user: str
    staging: str
    nonce: str
    lifetime: float
    seccomp: bool = True


class Sandbox:
    """A started and verified container. ``poisoned`` names why it must not serve another call; empty while it may.

    The owner destroys a poisoned sandbox; by the time a call has returned or raised, nothing of it runs any more.
    """

    def __init__(self, engine: Engine, hub: EventHub, spec: SandboxSpec, container: str, *, python: bool) -> None:
        self.name, self.container, self.user, self.python = spec.identity.name, container, spec.user, python
        self.poisoned = ""
        self._engine, self._hub = engine, hub
        self._watch = hub.watch(self.name)
        self._cpu_seconds = spec.profile.limits.cpu_seconds if spec.profile.cpu_limit else None
        self._cpus = spec.profile.cpus or 1.0
        self._image_env = (*spec.image.env, *spec.profile.env)

    def __repr__(self) -> str:
        return f"<Sandbox {self.name} poisoned={self.poisoned!r}>"

    @property
    def watch(self) -> Watch:
        return self._watch

    async def call(self, call: Call) -> CallResult:
        """Run one call by plain exec. Raises ``SandboxDied`` or ``EngineUnavailable``; a timeout is a result.

        Killing an exec's client kills nothing inside, so a call that ends by its deadline, a cancel or a lost client
        takes the container with it.
        """
        token = new_token()
        argv = call.client_argv(token) if self.python else call.argv
        if self._watch.died.is_set():
            raise self._died(started=False)
        watch, ooms = self._watch.expect(argv), self._watch.ooms
        try:
            with carried(call, python=self.python, image_env=self._image_env) as (stdin, env_file):
                args = exec_args(self.name, argv, user=self.user, env_file=env_file)
                end = await run_attached(
                    self._engine, args, stdin=stdin, timeout=call.timeout, max_output=call.max_output,
                    over=watch.ended, died=self._watch.died,
                )  # fmt: skip
            return await self._outcome(end, watch, ooms)
        except anyio.get_cancelled_exc_class():
            await self._kill("cancelled")
            raise
        finally:
            self._watch.dismiss(watch)

    async def _outcome(self, end: Attached, watch: ExecWatch, ooms: int) -> CallResult:
        if end.ended_by == "deadline":
            await self._kill("timeout")
            return exec_result(end, timed_out=True, oom=self._watch.ooms > ooms)
        if end.ended_by == "client":
            await self._first_of(watch.ended, self._watch.died)
        if watch.exit_code == KILL_CODE and not await self._survived():
            raise self._died(started=True)
        if watch.exit_code is None and await self._never_began(end, watch):
            return never_began(end)
        if watch.exit_code is None:
            raise await self._no_exit(end, watch)
        if end.ended_by == "over":
            # The call's own process has ended; what still holds its streams was left running and must not live on.
            await self._kill("lingering")
        cpu = self._cpu_seconds is not None and end.duration * max(1.0, self._cpus) >= self._cpu_seconds
        return exec_result(
            end,
            exit_code=watch.exit_code,
            oom=self._watch.ooms > ooms,
            cpu=cpu and watch.exit_code == LIMIT_SIGNAL_CODE,
        )

    async def _never_began(self, end: Attached, watch: ExecWatch) -> bool:
        """Whether the engine made the exec and then could not start its program: no event tells of that one."""
        refused = end.ended_by == "client" and end.code in (CANNOT_RUN, NOT_FOUND) and watch.created
        return refused and not self.python and self._hub.connected and await self._survived()

    async def _no_exit(self, end: Attached, watch: ExecWatch) -> EmberpoolError:
        """The error of an exec of which no event told an exit status."""
        if self._watch.died.is_set():
            self.poisoned = self._watch.cause
            return self._died(started=watch.created)
        if not watch.created and self._hub.connected:
            error = classify(bytes(end.stderr.kept), end.code or 0, f"starting a call in {self.name}")
            if isinstance(error, ContainerGone):
                self.poisoned = "unknown"
                return SandboxDied(
                    f"the sandbox was gone before the call began: {error}", cause="unknown", started=False
                )
            self.poisoned = "" if isinstance(error, EngineUnavailable) else "unknown"
            return error
        await self._kill("engine")
        message = "the engine was lost while the call ran; what the code did is unknown"
        return SandboxDied(message, cause="unknown" if self._hub.connected else "engine", started=True)

    async def _survived(self) -> bool:
        """Whether the container outlived an exec that ended by SIGKILL.

        A container's end kills its execs, and theirs may be the first to be told: the call must not report that as its
        own code's death.
        """
        with anyio.move_on_after(KILLED_PATIENCE):
            await self._watch.died.wait()
        if not self._watch.died.is_set():
            try:
                if (await self._engine.inspect(self.name))["State"]["Running"] is True:
                    return True
            except (EmberpoolError, LookupError, TypeError) as error:
                log.warning("sandbox.unknown_state", sandbox=self.name, error=str(error))
        self.poisoned = self._watch.cause
        return False

    def _died(self, *, started: bool) -> SandboxDied:
        cause = self._watch.cause
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

    async def _kill(self, why: str) -> None:
        """End everything in the container now; its owner removes it later. Never raises and never hangs."""
        self.poisoned = self.poisoned or why
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_TIMEOUT):
            try:
                await self._engine.kill(self.name)
            except EmberpoolError as error:
                log.warning("sandbox.kill_failed", sandbox=self.name, why=why, error=str(error))

    async def destroy(self) -> None:
        """Remove the container and return once it is confirmed absent; raises the engine's error while it is not."""
        await self._engine.remove(self.name)
        self._hub.forget(self.name)


async def start_sandbox(engine: Engine, hub: EventHub, spec: SandboxSpec, *, python: bool | None = None) -> Sandbox:
    """Start a container and verify its boundary; ``python`` says whether its image is known to have an interpreter.

    On any error or cancel the container may exist: its owner removes it by name. Raises ``ImageMissing``,
    ``ProfileMismatch``, ``EngineUnavailable``.
    """
    if spec.image.volumes:
        places = ", ".join(spec.image.volumes)
        raise ProfileMismatch(
            f"the image declares VOLUME {places}: a writable place on the host's disk; rebuild it without"
        )
    hub.watch(spec.identity.name)
    args = spec.profile.sandbox_args(
        spec.image.id, identity=spec.identity, staging=spec.staging, lifetime=spec.lifetime
    )
    container = await engine.start(args)
    facts = await engine.inspect(spec.identity.name)
    require(check_inspect(facts, spec.profile, spec.image, staging=spec.staging, labels=spec.identity.labels))
    inside = await _ask_inside(engine, hub, spec, probe_argv())
    require(
        check_inside(bytes(inside.stdout.kept), spec.profile, user=spec.user, nonce=spec.nonce, seccomp=spec.seccomp)
    )
    if python is None:
        answer = await _ask_inside(engine, hub, spec, ("python3", "-I", "-B", "-c", "print(1)"))
        python = bytes(answer.stdout.kept) == b"1\n"
    return Sandbox(engine, hub, spec, container, python=python)


async def _ask_inside(engine: Engine, hub: EventHub, spec: SandboxSpec, argv: tuple[str, ...]) -> Attached:
    args = exec_args(spec.identity.name, argv, user=spec.user)
    watch = hub.watch(spec.identity.name)
    end = await run_attached(
        engine, args, stdin=(), timeout=PROBE_TIMEOUT, max_output=1_000_000, over=anyio.Event(), died=watch.died
    )
    if end.ended_by == "deadline":
        raise EngineUnavailable(f"a probe of {spec.identity.name} did not answer within {PROBE_TIMEOUT:g} s")
    if end.ended_by == "death":
        raise EngineFailed(f"{spec.identity.name} ended while it was probed (exit status {watch.exit_code})")
    if end.code and not end.stdout.total:
        # An engine that was lost meanwhile says nothing of the boundary; a program that is missing does.
        error = classify(bytes(end.stderr.kept), end.code, f"probing {spec.identity.name}")
        if isinstance(error, ContainerGone) or not isinstance(error, (EngineFailed, ProfileMismatch)):
            raise error
    return end
