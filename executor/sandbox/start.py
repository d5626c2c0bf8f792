"""Start a container and verify its boundary before any call: the only way to get a ``Sandbox``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from executor.engine.attached import Attached, run_attached
from executor.engine.docker import classify
from executor.engine.events import EventHub, Watch
from executor.engine.protocol import ContainerGone, Engine
from executor.errors import EngineFailed, EngineUnavailable, ImageUnfit, ProfileMismatch, SandboxDied
from executor.sandbox import witness
from executor.sandbox.host_files import require_host_files
from executor.sandbox.outcome import CANNOT_RUN
from executor.sandbox.profile import exec_args
from executor.sandbox.sandbox import PROBE_TIMEOUT, TOOL_PLACE, Sandbox, SandboxSpec
from executor.sandbox.verify import check_inspect, require, require_no_volumes
from executor.sandbox.verify_inside import check_inside, probe_argv

WITNESS_FILE = "witness"
EVENT_PATIENCE = 0.3
"""Seconds to wait, once a start has failed, for the event that says that its container has ended."""


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

    With ``tasks``, calls go to runners that a task of that group keeps armed until the sandbox's runners are closed;
    without, and in an image without Python, they go by plain exec. ``created`` is called with the container's full ID as
    soon as it is known. On any error or cancel the container may exist: its owner removes it by name. Raises
    ``ImageMissing``, ``ImageUnfit``, ``ProfileMismatch``, ``EngineUnavailable``.
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
                "(127: not found, 126: cannot be run); put one on the image's PATH"
            ) from error
        raise


async def _ended_by_itself(watch: Watch) -> int | None:
    """Return the exit status of a container's PID 1 where it has just ended and nobody killed it."""
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
    inside = await _probe(engine, hub, spec, probe_argv())
    require(
        check_inside(
            bytes(inside.stdout.kept),
            spec.profile,
            user=spec.user,
            nonce=spec.nonce,
            witness=await _ask_witness(engine, hub, spec),
        )
    )
    if python is None:
        try:
            answer = await _probe(engine, hub, spec, ("python3", "-I", "-B", "-c", "print(1)"))
            python = bytes(answer.stdout.kept) == b"1\n"
        except ImageUnfit:
            python = False
    return Sandbox(engine, hub, spec, container, python=python)


async def take_over(engine: Engine, hub: EventHub, spec: SandboxSpec, container: str, tasks: TaskGroup) -> Sandbox:
    """Verify a container that runs already as ``start_sandbox`` verifies a new one, and arm a runner in it.

    ``container`` is the full ID that must have the name ``spec.identity.name``. Any process in it besides PID 1, such as a
    runner of its former owner, makes it unfit. Raises ``ProfileMismatch``, ``SandboxDied`` or the engine's error.
    """
    hub.watch(spec.identity.name)  # before the engine is asked, so that an end after its answer is seen
    await _check_record(engine, spec, container)
    return await _armed(engine, hub, spec, container, tasks)


async def _check_record(engine: Engine, spec: SandboxSpec, container: str) -> None:
    """Compare the engine's record of a container with the profile. Raises ``ProfileMismatch``."""
    facts = await engine.inspect(spec.identity.name)
    if facts.get("Id") != container:
        raise ProfileMismatch(f"the name {spec.identity.name} belongs to another container")
    require(check_inspect(facts, spec.profile, spec.image, staging=spec.staging, labels=spec.identity.labels))


async def _armed(engine: Engine, hub: EventHub, spec: SandboxSpec, container: str, tasks: TaskGroup) -> Sandbox:
    box = Sandbox(engine, hub, spec, container, python=True, tasks=tasks)
    try:
        await box.ready_after_start()
    except BaseException:
        box.close_runners()
        raise
    return box


async def _ask_witness(engine: Engine, hub: EventHub, spec: SandboxSpec) -> int | None:
    """Return the error number by which the strict seccomp profile is recognised, as a program of our own gets it inside;
    ``None`` where it cannot run, or need not."""
    if spec.profile.seccomp != "strict":
        return None
    if not witness.write(Path(spec.staging) / WITNESS_FILE, spec.image.architecture):
        return None
    end = await _probe(engine, hub, spec, (f"{TOOL_PLACE}/{WITNESS_FILE}",))
    # 126 and above: the engine could not run the program, or it was killed.
    return end.code if end.code is not None and end.code < CANNOT_RUN else None


async def _probe(engine: Engine, hub: EventHub, spec: SandboxSpec, argv: tuple[str, ...]) -> Attached:
    """Run a program inside as the calls' user and return its end. Raises the engine's error."""
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
        # A lost engine says nothing about the boundary; a program that is missing does.
        error = classify(bytes(end.stderr.kept), end.code, f"probing {spec.identity.name}")
        if isinstance(error, ContainerGone) or not isinstance(error, (EngineFailed, ProfileMismatch)):
            raise error
    return end
