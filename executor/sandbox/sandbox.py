"""One hardened container: start it, verify it, run calls in it, kill it, destroy it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from executor.common.log import get_logger
from executor.common.printable import printable
from executor.common.threads import in_thread
from executor.engine.attached import Attached, run_attached
from executor.engine.docker import classify
from executor.engine.events import EventHub, Watch
from executor.engine.protocol import ContainerGone, Engine, ImageInfo
from executor.errors import (
    EngineFailed,
    EngineUnavailable,
    ImageUnfit,
    InvalidCall,
    ProfileMismatch,
    SandboxDied,
    StagingFailed,
)
from executor.result import CallResult
from executor.sandbox import witness
from executor.sandbox.arming import ArmingLimit
from executor.sandbox.host_files import require_host_files
from executor.sandbox.kill import kill_container
from executor.sandbox.outcome import CANNOT_RUN
from executor.sandbox.plain import PlainExec
from executor.sandbox.profile import ContainerProfile, Identity, exec_args
from executor.sandbox.request import Call, base_env, check_code
from executor.sandbox.runner_client import RunnerConfig
from executor.sandbox.runners import Place, Runners
from executor.sandbox.stream import CallStream, Sink
from executor.sandbox.verify import (
    INSIDE_FILES,
    Finding,
    check_files,
    check_inside,
    check_inspect,
    probe_argv,
    require,
    require_no_volumes,
)
from executor.staging.threads import StagingThreads
from executor.staging.versions import Fingerprints, StageLimits, Staging, remove_all

log = get_logger("emberpool.sandbox")

PROBE_TIMEOUT = 60.0
"""Seconds for what a start asks inside its container, as long as the start itself may take."""
READY_PATIENCE = 15.0
TOOL_PLACE = "/tool"
WITNESS_FILE = "witness"
EVENT_PATIENCE = 0.3
"""Seconds to wait, once a start has failed, for the event that says that its container has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """How a sandbox's runners behave: ``calls`` for each exec (0 for no limit), how many in ``parallel``, modules to ``preload``, and the seconds of
    ``grace`` between SIGTERM and SIGKILL."""

    calls: int = 1
    parallel: int = 1
    preload: tuple[str, ...] = ()
    grace: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is started from. ``profile.user`` is the keeper's ``uid:gid`` (PID 1), ``user`` the calls'.
    ``staging`` is a host directory that holds a file ``nonce`` with ``nonce`` in it, and gets copies of tool directories
    within ``stage_limits``; ``fingerprints``, ``threads`` and ``arming`` are shared by all sandboxes of a pool. ``lifetime`` is
    seconds."""

    identity: Identity
    profile: ContainerProfile
    image: ImageInfo
    user: str
    staging: str
    nonce: str
    lifetime: float
    seccomp: bool = True
    runner: RunnerOptions = RunnerOptions()
    stage_limits: StageLimits = field(default_factory=StageLimits)
    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    threads: StagingThreads = field(default_factory=StagingThreads)
    arming: ArmingLimit = field(default_factory=ArmingLimit)


class Sandbox:
    """A started and verified container. ``poisoned`` names why it must not serve another call; empty while it may.

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
            witness=spec.profile.witness if spec.seccomp else "",
            cpu_seconds=limits.cpu_seconds if spec.profile.cpu_limit else None,
            cpus=spec.profile.cpus or 1.0,
            poison=self._poison,
            kill=self._kill,
        )
        self._staging = Staging(Path(spec.staging), spec.stage_limits, spec.fingerprints)
        self._runners: Runners | None = None
        if python and tasks is not None:
            options = spec.runner
            place = Place(
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
            self._runners = Runners(place)
            tasks.start_soon(self._runners.keep)

    def __repr__(self) -> str:
        return f"<Sandbox {self.name} poisoned={self.poisoned!r}>"

    @property
    def watch(self) -> Watch:
        return self._watch

    async def ready(self) -> None:
        """Wait until the runner has shown the boundary from inside and is armed. Raises what is wrong with either."""
        if self._runners is not None:
            await self._runners.armed(READY_PATIENCE)

    async def verified(self) -> None:
        """``ready`` for a sandbox that was just started, with the patience of a start."""
        if self._runners is not None:
            await self._runners.first(PROBE_TIMEOUT)

    async def call(self, call: Call, sink: Sink | None = None, *, began: float | None = None) -> CallResult:
        """Run one call, its output into ``sink`` where there is one (see ``stream``). ``began`` is the event loop's time, for
        those who have just looked.

        Raises ``SandboxDied``, ``EngineUnavailable`` or ``InvalidCall``; a timeout is a result.
        """
        check_code(call, self._spec.profile.limits.file_size_mb)
        if self._runners is not None:
            return await self._runners.call(call, sink, began=began)
        if sink is not None:
            raise InvalidCall(
                "output is streamed by a runner, which needs a python3 in the image; make an ordinary call of it"
            )
        return await self._plain.call(call)

    def stream(self, call: Call) -> CallStream:
        """The call as a block to iterate over: its output as it comes, then its result."""
        return CallStream(lambda sink: self.call(call, sink), call.max_output)

    @asynccontextmanager
    async def tool_dir(
        self, source: Path, allowed: Sequence[Path], *, file: str = "", timeout: float = math.inf
    ) -> AsyncIterator[str]:
        """Show the code of this sandbox a host directory as it is now, read-only, while the block lasts; its path inside.

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
                "look after its file system",
                retry_after=1.0,
            )
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            yield f"{TOOL_PLACE}/{digest}"
        finally:
            # The last one to let go of an old version has it to remove.
            if aside := self._staging.let_go(digest):
                with anyio.CancelScope(shield=True):
                    await in_thread(remove_all, aside)

    def _check_hello(self, facts: dict[str, object]) -> None:
        spec, files = self._spec, facts.get("files")
        # First, and before any call of the session: without what it lacks, a runner cannot protect itself either.
        if isinstance(problem := facts.get("problem"), str) and problem:
            raise ImageUnfit(f"no call can be given to this image as it is configured: {printable(problem, limit=600)}")
        if isinstance(parent := facts.get("parent"), str) and parent:
            raise ImageUnfit(
                f"the image's python3 is a wrapper that stays beside the interpreter ({printable(parent, limit=200)}); "
                "let it exec the interpreter, or put the interpreter itself on the PATH"
            )
        own = [
            Finding(point, wanted, found, "equal" if type(found) is type(wanted) and found == wanted else "weaker")
            for point, key, wanted in (
                ("nonce in /tool", "nonce", spec.nonce),
                ("runner protected from tool code", "undumpable", True),
                ("orphans come home to the runner", "subreaper", True),
                ("runner's own problem", "problem", ""),
            )
            for found in (facts.get(key),)
        ]
        if not isinstance(facts.get("alone"), bool):
            own.append(Finding("what else runs", "known", facts.get("alone"), "unreadable"))
        texts = (
            {key: value for key, value in files.items() if isinstance(value, str)} if isinstance(files, dict) else {}
        )
        inside = check_files(texts, spec.profile, user=spec.user, seccomp=spec.seccomp, witness=facts.get("witness"))
        require([*own, *inside])
        if facts["alone"] is not True:
            # Somebody's exec by hand, or what an earlier call left: the boundary stands, but this sandbox is not fit.
            raise SandboxDied("a process of unknown origin was found in the sandbox", cause="runner", started=False)

    def _poison(self, why: str) -> None:
        self.poisoned = self.poisoned or why

    async def _kill(self, why: str) -> bool:
        """End everything in the container now, and say whether that is certain; its owner removes it later. Never raises."""
        self._poison(why)
        # By its ID: its name may be another's by now.
        return await kill_container(self._engine, self._hub, self._watch, self.container, why=why)

    async def destroy(self) -> None:
        """Remove the container and return once it is confirmed absent; raises the engine's error while it is not."""
        self.let_go()
        await self._engine.remove(self.container)
        self._hub.forget(self.name)

    def let_go(self) -> None:
        """Kill the exec clients first: an exec that nobody reads holds up the engine's removal of its container."""
        if self._runners is not None:
            self._runners.close()


def no_file(directory: Path, file: str) -> str:
    """What to say of a tool's file that is not in its directory."""
    return f"the tool directory {str(directory)!r:.300} has no file {file!r:.300}; bring the file, or correct its path"


async def start_sandbox(
    engine: Engine,
    hub: EventHub,
    spec: SandboxSpec,
    *,
    python: bool | None = None,
    tasks: TaskGroup | None = None,
    created: Callable[[str], None] = lambda container: None,
) -> Sandbox:
    """Start a container and verify its boundary; ``python`` says whether its image is known to have an interpreter.

    With ``tasks``, calls go to runners that a task of that group keeps armed until the sandbox is let go; without, and in
    an image without Python, they go by plain exec. ``created`` is told the container's full ID as soon as it is known.
    On any error or cancel the container may exist: its owner removes it by name. Raises ``ImageMissing``, ``ImageUnfit``,
    ``ProfileMismatch``, ``EngineUnavailable``.
    """
    require_no_volumes(spec.image)
    require_host_files(spec.profile)
    hub.watch(spec.identity.name)
    args = spec.profile.sandbox_args(
        spec.image.id, identity=spec.identity, staging=spec.staging, lifetime=spec.lifetime, calls=spec.user
    )
    container = await engine.start(args)
    created(container)
    try:
        return await _verified(engine, hub, spec, container, python, tasks)
    except (EngineUnavailable, SandboxDied) as error:
        if (status := await _ended_by_itself(hub.watch(spec.identity.name))) is not None:
            raise ImageUnfit(
                f"the image's `sleep`, which keeps a sandbox running, ended at once with exit status {status} "
                "(127: there is none, 126: it cannot be run); put one on the image's PATH"
            ) from error
        raise


async def _ended_by_itself(watch: Watch) -> int | None:
    """The exit status of a container's PID 1 where it has just ended and nobody killed it."""
    with anyio.move_on_after(EVENT_PATIENCE):
        await watch.died.wait()
    killed = watch.killed or watch.ooms or watch.exit_code in (137, 143)
    return None if killed else watch.exit_code


async def _verified(
    engine: Engine, hub: EventHub, spec: SandboxSpec, container: str, python: bool | None, tasks: TaskGroup | None
) -> Sandbox:
    await _check_record(engine, spec, container)
    if python and tasks is not None:
        return await _armed(engine, hub, spec, container, tasks)
    inside = await _ask_inside(engine, hub, spec, probe_argv())
    require(
        check_inside(
            bytes(inside.stdout.kept), spec.profile, user=spec.user, nonce=spec.nonce, seccomp=spec.seccomp,
            witness=await _ask_witness(engine, hub, spec),
        )
    )  # fmt: skip
    if python is None:
        try:
            answer = await _ask_inside(engine, hub, spec, ("python3", "-I", "-B", "-c", "print(1)"))
            python = bytes(answer.stdout.kept) == b"1\n"
        except ImageUnfit:
            python = False
    return Sandbox(engine, hub, spec, container, python=python)


async def take_over(engine: Engine, hub: EventHub, spec: SandboxSpec, container: str, tasks: TaskGroup) -> Sandbox:
    """Verify a container that runs already as ``start_sandbox`` verifies a new one, and arm a runner in it.

    ``container`` is the full ID that must have the name ``spec.identity.name``. A runner that its former owner left in
    there, or anything else, makes it unfit. Raises ``ProfileMismatch``, ``SandboxDied`` or the engine's error.
    """
    hub.watch(spec.identity.name)  # before the engine is asked, so that an end after its answer is seen
    await _check_record(engine, spec, container)
    return await _armed(engine, hub, spec, container, tasks)


async def _check_record(engine: Engine, spec: SandboxSpec, container: str) -> None:
    """Compare what the engine says of a container with the profile. Raises ``ProfileMismatch``."""
    facts = await engine.inspect(spec.identity.name)
    if facts.get("Id") != container:
        raise ProfileMismatch(f"the name {spec.identity.name} is another container's")
    require(check_inspect(facts, spec.profile, spec.image, staging=spec.staging, labels=spec.identity.labels))


async def _armed(engine: Engine, hub: EventHub, spec: SandboxSpec, container: str, tasks: TaskGroup) -> Sandbox:
    box = Sandbox(engine, hub, spec, container, python=True, tasks=tasks)
    try:
        await box.verified()
    except BaseException:
        box.let_go()
        raise
    return box


async def _ask_witness(engine: Engine, hub: EventHub, spec: SandboxSpec) -> int | None:
    """The error number by which the strict seccomp profile is recognised, asked by a program of our own; ``None`` where it
    could not be run, or need not be."""
    asked = spec.seccomp and spec.profile.seccomp == "strict"
    if not asked or not witness.write(Path(spec.staging) / WITNESS_FILE, spec.image.architecture):
        return None
    end = await _ask_inside(engine, hub, spec, (f"{TOOL_PLACE}/{WITNESS_FILE}",))
    # 126 and above are what an engine says of a program that it could not run, or that was killed.
    return end.code if end.code is not None and end.code < CANNOT_RUN else None


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
