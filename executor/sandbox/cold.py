"""Run one call in a disposable container, which is confirmed absent before the call has an outcome."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import anyio

from executor.common.log import get_logger
from executor.common.printable import printable
from executor.engine.attached import PROVED, REFUSED, Attached, run_attached
from executor.engine.docker import classify
from executor.engine.events import EventHub, Watch
from executor.engine.protocol import Engine, ImageInfo, NameTaken
from executor.errors import EmberpoolError, EngineUnavailable, ImageUnfit, ProfileMismatch, SandboxDied
from executor.result import CallResult
from executor.sandbox.host_files import require_host_files
from executor.sandbox.kill import kill_container, not_confirmed
from executor.sandbox.outcome import (
    CANNOT_RUN,
    KILL_CODE,
    LIMIT_SIGNAL_CODE,
    NOT_FOUND,
    TERM_CODE,
    client_lost,
    exec_result,
    missing_proof,
    not_started,
)
from executor.sandbox.profile import ContainerProfile, Identity
from executor.sandbox.request import Call, call_input, check_code, new_token
from executor.sandbox.verify import require_no_volumes

log = get_logger("emberpool.cold")

REMOVE_TIMEOUT = 10.0
PROBE_TIMEOUT = 30.0
GONE_PATIENCE = 2.0
RUN_FAILED = 125
"""Exit status of an engine's `run` that made no container, or could not start it."""


PYTHON_NEEDS = ("ctypes", "fcntl", "json", "resource", "select", "signal")
"""Modules that the runner needs and that a small image can lack."""
OLDEST_PYTHON = (3, 8)
PYTHON_MARK = "emberpool: python "
PYTHON_PROBE = f"import sys, {', '.join(PYTHON_NEEDS)}\nprint('{PYTHON_MARK}%d %d' % sys.version_info[:2])"
"""The program that tries an image's python3; older versions than 3.8 can read it too."""
_PYTHON_ANSWER = re.compile(b"(.*)" + PYTHON_MARK.encode() + rb"(\d{1,4}) (\d{1,4})\n(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSpec:
    """What a cold container is started from; ``profile.user`` is the calls' ``uid:gid``."""

    identity: Identity
    profile: ContainerProfile
    image: ImageInfo
    python: bool = True


async def has_python(engine: Engine, hub: EventHub, spec: ColdSpec) -> bool:
    """Whether the image has a ``python3``, found out in a disposable container.

    Raises ``ImageUnfit`` where it has one that cannot run calls, and what ``cold_call`` raises.
    """
    probe = replace(spec, python=False)
    call = Call(argv=("python3", "-I", "-B", "-c", PYTHON_PROBE), timeout=PROBE_TIMEOUT, max_output=65_536)
    return judge_python(await cold_call(engine, hub, probe, call))


def judge_python(done: CallResult) -> bool:
    """Judge an image by the end of a container that ran ``PYTHON_PROBE``: what ``has_python`` returns or raises."""
    if done.timed_out:
        raise EngineUnavailable(f"the image's python3 did not answer within {PROBE_TIMEOUT:g} s")
    if done.exit_code == NOT_FOUND:
        return False
    if done.exit_code == 0 and (answer := _PYTHON_ANSWER.fullmatch(done.stdout)):
        said, found = answer[1] + answer[4], (int(answer[2]), int(answer[3]))
        if found < OLDEST_PYTHON:
            wanted = ".".join(map(str, OLDEST_PYTHON))
            raise ImageUnfit(f"the image's python3 is {'.'.join(map(str, found))}; calls need {wanted} or newer")
        if said:
            text = printable(said)[:200]
            raise ImageUnfit(
                f"the image's python3 prints text of its own, which would be taken for a call's output: {text!r}; remove it "
                "from python3's wrapper or its site-packages"
            )
        return True
    how = "out of memory (sandbox.memory_mb)" if done.oom_killed else f"exit status {done.exit_code}"
    text = printable(done.stderr)[-400:] or printable(done.stdout)[-400:]
    raise ImageUnfit(f"the image's python3 cannot run calls, {how}: {text}")


async def cold_call(engine: Engine, hub: EventHub, spec: ColdSpec, call: Call) -> CallResult:
    """Run one call in a container of its own; the container is confirmed gone when this returns or raises.

    Raises ``InvalidCall``, ``ImageMissing``, ``ProfileMismatch``, ``EngineUnavailable`` (nothing was started) or
    ``SandboxDied``.
    """
    require_no_volumes(spec.image)
    require_host_files(spec.profile)
    check_code(call, spec.profile.limits.file_size_mb)
    watch = hub.watch(spec.identity.name)
    argv = call.client_argv(new_token()) if spec.python else call.argv
    ours, tried = True, False
    try:
        image_env, witness = (*spec.image.env, *spec.profile.env), spec.profile.witness
        with call_input(call, python=spec.python, image_env=image_env, witness=witness) as (stdin, env_file):
            args = spec.profile.run_args(spec.image.id, *argv, identity=spec.identity, env_file=env_file)
            end = await run_attached(
                engine, args, stdin=stdin, timeout=call.timeout, max_output=call.max_output,
                over=anyio.Event(), died=watch.died, proof=spec.python,
            )  # fmt: skip
        # Where the name belongs to another container, none was made, and a removal by name would end that other one.
        ours = watch.created or end.code != RUN_FAILED or not isinstance(_start_error(end), NameTaken)
        if ours:
            tried = True
            if not await _remove(engine, hub, watch, patient=end.ended_by != "deadline") and end.ended_by == "deadline":
                raise not_confirmed()
        if not spec.python and not watch.started and hub.connected:
            with anyio.move_on_after(GONE_PATIENCE):  # the event may only be late
                await watch.start_seen.wait()
        return _outcome(end, watch, spec, connected=hub.connected)
    finally:
        # Where the engine did not remove it a moment ago, do not ask again: the caller would wait for that.
        if ours and not tried:
            await _remove(engine, hub, watch, patient=False)
        hub.forget(spec.identity.name)


def _outcome(end: Attached, watch: Watch, spec: ColdSpec, *, connected: bool) -> CallResult:
    oom = bool(watch.ooms)
    if end.ended_by == "deadline":
        return exec_result(end, timed_out=True, oom=oom)
    # An engine that is shut down, or an operator, sends SIGTERM first: the code did not end by itself then either.
    if watch.killed and watch.exit_code in (KILL_CODE, TERM_CODE):
        raise SandboxDied("the container was killed under the cold call", cause="killed")
    if watch.exit_code is not None and watch.started:
        if client_lost(end, watch.exit_code):
            raise SandboxDied(
                "the engine's client was lost while the cold call ran; what the code did is unknown",
                cause="unknown" if connected else "engine",
            )
        if not oom and (error := missing_proof(end)):
            # Only the image's own programs have run in this container, so another try would end the same way.
            raise error if isinstance(error, ProfileMismatch) else ImageUnfit(str(error))
        limits, cpus = spec.profile.limits, max(1.0, spec.profile.cpus or 1.0)
        cpu = limits.cpu_seconds is not None and end.duration * cpus >= limits.cpu_seconds
        return exec_result(end, exit_code=watch.exit_code, oom=oom, cpu=cpu and watch.exit_code == LIMIT_SIGNAL_CODE)
    if _never_started(end, watch, spec, connected=connected):
        if not spec.python and end.code in (CANNOT_RUN, NOT_FOUND):
            return not_started(end)
        error = missing_proof(end) if end.proof == REFUSED else None
        raise error or _start_error(end)
    raise SandboxDied("the engine was lost while the cold call ran; what the code did is unknown", cause="engine")


def _never_started(end: Attached, watch: Watch, spec: ColdSpec, *, connected: bool) -> bool:
    """Whether nothing of the call can have run, so that it may be tried again.

    A missing start event proves nothing by itself. In an image with Python the call's own code comes after the proof on its
    stdout, so without that proof these exit statuses are the engine's own. In another image a program may exit with them
    itself; there the engine's events must be connected, and hold no start.
    """
    if end.code not in (RUN_FAILED, CANNOT_RUN, NOT_FOUND):
        return False
    return end.proof != PROVED if spec.python else connected and not watch.started


def _start_error(end: Attached) -> EmberpoolError:
    return classify(bytes(end.stderr.kept), end.code or 0, "starting a disposable container")


async def _remove(engine: Engine, hub: EventHub, watch: Watch, *, patient: bool) -> bool:
    """Make sure that the container is absent, and return whether nothing of it runs any more.

    The engine removes it by itself when it ends. Otherwise it is killed, which waits for no other question, and removed.
    """
    with anyio.CancelScope(shield=True):
        if patient:
            await _wait_removed(watch)
        # A container that was not seen to start may be starting now: only its absence proves anything.
        seen = watch.started and bool(watch.container)
        if seen and not watch.destroyed.is_set():
            if not await kill_container(engine, hub, watch, watch.container, why="cold call"):
                return False
            await _wait_removed(watch)
        with anyio.move_on_after(REMOVE_TIMEOUT):
            if not watch.destroyed.is_set():
                try:
                    # By its ID: another user of the engine can have renamed it, and made another one of that name.
                    await engine.remove(watch.container or watch.name)
                    watch.destroyed.set()
                except EmberpoolError as error:
                    log.warning("cold.remove_failed", sandbox=watch.name, error=str(error))
    return seen or watch.destroyed.is_set()


async def _wait_removed(watch: Watch) -> None:
    with anyio.move_on_after(GONE_PATIENCE):
        await watch.destroyed.wait()
