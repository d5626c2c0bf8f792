"""One hardened container that was started and verified: run calls in it, kill it, destroy it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from executor.common.log import get_logger
from executor.common.threads import in_thread
from executor.engine.events import EventHub, Watch
from executor.engine.protocol import Engine, ImageInfo
from executor.errors import InvalidCall, StagingFailed
from executor.result import CallResult
from executor.sandbox.arming import ArmingLimit
from executor.sandbox.kill import kill_container
from executor.sandbox.plain import PlainExec
from executor.sandbox.profile import ContainerProfile, Identity
from executor.sandbox.request import Call, base_env, check_code
from executor.sandbox.runner_call import run_on_runner
from executor.sandbox.runner_client import RunnerConfig
from executor.sandbox.runners import RunnerContext, Runners
from executor.sandbox.stream import CallStream, Sink
from executor.sandbox.verify_inside import INSIDE_FILES, check_hello
from executor.staging.threads import StagingThreads
from executor.staging.versions import Fingerprints, StageLimits, Staging, remove_all

log = get_logger("emberpool.sandbox")

PROBE_TIMEOUT = 60.0
"""Seconds for each probe inside a container that was just started, as long as the start itself may take."""
READY_PATIENCE = 15.0
"""Seconds for which a caller waits until a runner is armed."""
TOOL_PLACE = "/tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """How a sandbox's runners behave: ``calls`` for each exec (0 for no limit), how many in ``parallel``, modules to
    ``preload``, and the seconds of ``grace`` between SIGTERM and SIGKILL."""

    calls: int = 1
    parallel: int = 1
    preload: tuple[str, ...] = ()
    grace: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is started from. ``profile.user`` is the keeper's ``uid:gid`` (PID 1), ``user`` the calls'.

    ``staging`` is a host directory that holds a file ``nonce`` with ``nonce`` in it, and gets copies of tool directories
    within ``stage_limits``. ``fingerprints``, ``threads`` and ``arming`` are shared by all sandboxes of a pool. ``lifetime``
    is seconds.
    """

    identity: Identity
    profile: ContainerProfile
    image: ImageInfo
    user: str
    staging: str
    nonce: str
    lifetime: float
    runner: RunnerOptions = RunnerOptions()
    stage_limits: StageLimits = field(default_factory=StageLimits)
    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    threads: StagingThreads = field(default_factory=StagingThreads)
    arming: ArmingLimit = field(default_factory=ArmingLimit)


class Sandbox:
    """A started and verified container. ``poisoned`` says why it must not serve another call; empty while it may.

    The owner destroys a poisoned sandbox; by the time a call has returned or raised, nothing of it runs any more. Where
    the image has Python and ``tasks`` are given, calls go to a runner that is kept armed by a task of that group.
    """

    def __init__(
        self,
        engine: Engine,
        hub: EventHub,
        spec: SandboxSpec,
        container: str,
        *,
        python: bool,
        tasks: TaskGroup | None = None,
    ) -> None:
        self.name, self.container, self.user, self.python = spec.identity.name, container, spec.user, python
        self.poisoned = ""
        self._engine, self._hub, self._spec = engine, hub, spec
        self._watch = hub.watch(self.name)
        limits, image_env = spec.profile.limits, (*spec.image.env, *spec.profile.env)
        self._plain = PlainExec(
            engine=engine,
            hub=hub,
            watch=self._watch,
            user=spec.user,
            python=python,
            image_env=image_env,
            witness=spec.profile.witness,
            cpu_seconds=limits.cpu_seconds if spec.profile.cpu_limit else None,
            cpus=spec.profile.cpus or 1.0,
            poison=self._poison,
            kill=self._kill,
        )
        self._staging = Staging(Path(spec.staging), spec.stage_limits, spec.fingerprints)
        self._runners: Runners | None = None
        if python and tasks is not None:
            options = spec.runner
            context = RunnerContext(
                engine=engine,
                hub=hub,
                watch=self._watch,
                user=spec.user,
                config=RunnerConfig(
                    keeper=spec.profile.user.partition(":")[0],
                    files=INSIDE_FILES,
                    env=base_env(image_env),
                    cpu_seconds=limits.cpu_seconds,
                    shared=options.parallel > 1,
                    preload=options.preload,
                    calls=options.calls,
                ),
                grace=options.grace,
                parallel=options.parallel,
                arming=spec.arming,
                check=self._check_hello,
                kill=self._kill,
            )
            self._runners = Runners(context)
            tasks.start_soon(self._runners.run)

    def __repr__(self) -> str:
        return f"<Sandbox {self.name} poisoned={self.poisoned!r}>"

    @property
    def watch(self) -> Watch:
        return self._watch

    async def ready(self) -> None:
        """Wait until the runner's hello is verified and it is armed. Raises what is wrong with either."""
        if self._runners is not None:
            await self._runners.wait_armed(READY_PATIENCE)

    async def ready_after_start(self) -> None:
        """Wait like ``ready`` in a sandbox that was just started, for as long as a start may take."""
        if self._runners is not None:
            await self._runners.wait_first_armed(PROBE_TIMEOUT)

    async def call(self, call: Call, sink: Sink | None = None, *, began: float | None = None) -> CallResult:
        """Run one call; with ``sink``, its output goes there (see ``stream``). ``began`` is the event loop's time now, where
        the caller has just read it.

        Raises ``SandboxDied``, ``EngineUnavailable`` or ``InvalidCall``; a timeout is a result.
        """
        check_code(call, self._spec.profile.limits.file_size_mb)
        if self._runners is not None:
            return await run_on_runner(self._runners, call, sink, began=began)
        if sink is not None:
            raise InvalidCall(
                "a streamed call needs a runner, and that needs a python3 in the image; make a call that is not streamed"
            )
        return await self._plain.call(call)

    def stream(self, call: Call) -> CallStream:
        """Return the call as a block to iterate over: its output as it comes, then its result."""
        return CallStream(lambda sink: self.call(call, sink), call.max_output)

    @asynccontextmanager
    async def tool_dir(
        self, source: Path, allowed: Sequence[Path], *, file: str = "", timeout: float = math.inf
    ) -> AsyncIterator[str]:
        """Copy a host directory into the sandbox, read-only, for as long as the block lasts; yield its path inside.

        It must lie inside one of ``allowed``, links followed, and hold ``file`` (a path in it), where one is named. Raises
        ``InvalidCall`` or ``StagingFailed``, the latter also where the directory was not copied within ``timeout`` seconds.
        """

        def stage() -> str:
            digest = self._staging.stage(source, allowed, hold=True)
            if file and not (Path(self._spec.staging) / digest / file).is_file():
                self._staging.release(digest)
                raise InvalidCall(no_file(source, file))
            return digest

        digest = ""
        with anyio.move_on_after(timeout):
            digest = await self._spec.threads.run(str(source), stage, undo=self._staging.release)
        if not digest:
            raise StagingFailed(
                f"{str(source)!r:.300} was not copied within the {timeout:.3g} s that the call had left; "
                "check its file system",
                retry_after=1.0,
            )
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            yield f"{TOOL_PLACE}/{digest}"
        finally:
            # The last call that uses an old version removes it.
            if aside := self._staging.forget(digest):
                with anyio.CancelScope(shield=True):
                    await in_thread(remove_all, aside)

    def _check_hello(self, facts: dict[str, object]) -> None:
        spec = self._spec
        check_hello(facts, spec.profile, user=spec.user, nonce=spec.nonce)

    def _poison(self, why: str) -> None:
        self.poisoned = self.poisoned or why

    async def _kill(self, why: str) -> bool:
        """Kill the container now and return whether that is certain; its owner removes it later. Never raises."""
        self._poison(why)
        # By its ID: its name may belong to another container by now.
        return await kill_container(self._engine, self._hub, self._watch, self.container, why=why)

    async def destroy(self) -> None:
        """Remove the container and return once it is confirmed absent; raises the engine's error while it is not."""
        self.close_runners()
        await self._engine.remove(self.container)
        self._hub.forget(self.name)

    def close_runners(self) -> None:
        """Arm no further runner and kill the exec clients: an exec that nobody reads holds up its container's removal."""
        if self._runners is not None:
            self._runners.close()


def no_file(directory: Path, file: str) -> str:
    """Return the message for a tool's file that is not in its directory."""
    return f"the tool directory {str(directory)!r:.300} has no file {file!r:.300}; add the file, or correct its path"
