"""The docker and podman command lines, behind the engine seam.

Arguments of ``run`` and ``exec`` come ready from ``executor.sandbox.profile``; this file adds only the words that ask an engine a
question (``inspect``, ``rm``, ``ps``, ``events``) and turns an engine's stderr into a typed error, in one place.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteReceiveStream

from executor.common.log import get_logger
from executor.common.printable import printable
from executor.engine import process
from executor.engine.channel import attached, keep
from executor.engine.daemon_log import keep_small
from executor.engine.paths import engine_paths
from executor.engine.process import Finished
from executor.engine.protocol import Channel, ContainerGone, EngineEvent, EngineInfo, ImageInfo, Listed, NameTaken
from executor.errors import (
    EmberpoolError,
    EngineFailed,
    EngineUnavailable,
    ImageMissing,
    ImageUnfit,
    ProfileMismatch,
)

log = get_logger("emberpool.engine")

_MAX_EVENT_LINE = 4_000_000
_REMOVE_ATTEMPTS = 40

_NO_RUNTIME = ("unknown or invalid runtime name", "unknown runtime specified", "default oci runtime", "invalid runtime")
# Matched in this order against lower-cased stderr. The texts are docker's (20.10 to 28) and podman's (4, 5).
_SIGNS: tuple[tuple[type[EmberpoolError], tuple[str, ...]], ...] = (
    (
        EngineUnavailable,
        (
            "cannot connect to the docker daemon",
            "error during connect",
            "is the docker daemon running",
            "permission denied while trying to connect",
            "unable to connect to podman",
            "cannot connect to podman",
            "connection refused",
            "unexpected eof",
            "context deadline exceeded",
            "transport is closing",
        ),
    ),
    (NameTaken, ("is already in use by container", "the container name is already in use", "that name is already in use")),
    (ImageMissing, ("no such image", "unable to find image", "image not known", "not found: does not exist or no pull access")),
    (ContainerGone, ("no such container", "no container with name or id", "is not running", "can only kill running containers", "can only create exec sessions on running")),
    (ImageUnfit, ("executable file not found in $path", "exec format error", "unable to start container process: exec:", "starting container process caused: exec:", "unsatisfiable platform")),
    (ProfileMismatch, (*_NO_RUNTIME, "unknown flag", "does not support")),
)  # fmt: skip


def _pull_failed(stderr: bytes, code: int, doing: str) -> EmberpoolError:
    """The error of a pull. A daemon that says so itself was reached: what could not be is the registry."""
    error = classify(stderr, code, doing)
    said = shortened(printable(stderr))
    if isinstance(error, EngineUnavailable) and b"Error response from daemon" in stderr:
        return EngineFailed(f"{doing}: its registry cannot be reached ({said}); check the image's name and the network")
    return error


def shortened(text: str, ends: int = 1_000) -> str:
    """``text`` without its middle where it is long: engines name the operation first and the cause last."""
    return text if len(text) <= 2 * ends else f"{text[:ends]} [...] {text[-ends:]}"


def classify(stderr: bytes, code: int, doing: str) -> EmberpoolError:
    """Turn what an engine client printed on failure into one typed error. Total: every input gets one."""
    text = printable(stderr)
    short = shortened(text) or f"exit status {code} and no message"
    lowered = text.lower()
    for kind, signs in _SIGNS:
        if any(sign in lowered for sign in signs):
            if kind is EngineUnavailable:
                return EngineUnavailable(f"the engine cannot be reached while {doing}: {short}", retry_after=1.0)
            if kind is ProfileMismatch and any(sign in lowered for sign in _NO_RUNTIME):
                return ProfileMismatch(
                    f"{doing}: the engine does not have the container runtime that sandbox.runtime names; `docker info` (or "
                    f"`podman info`) lists those that it has. The engine's message: {short}"
                )
            remedy = "; run: emberpool image build" if kind is ImageMissing else ""
            return kind(f"{doing}: {short}{remedy}")
    return EngineFailed(f"the engine failed while {doing}: {short}", retry_after=1.0)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine is: the command, words that always follow it, and what its environment must hold besides.

    ``found`` says in a few words how it was found; ``private`` is true for the engine of ``emberpool engine up``.
    """

    binary: str
    kind: str = "docker"
    words: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    found: str = ""
    private: bool = False

    @property
    def argv(self) -> list[str]:
        return [self.binary, *self.words]


class CommandLineEngine:
    """An engine driven by its command line. ``timeout`` bounds each question, ``start_timeout`` each start, in seconds;
    at most ``concurrency`` questions are asked at once, and besides them as many kills: an answer waits for each of those."""

    def __init__(
        self, endpoint: Endpoint, *, timeout: float = 15.0, start_timeout: float = 60.0, concurrency: int = 8
    ) -> None:
        self.endpoint = endpoint
        self._timeout, self._start_timeout = timeout, start_timeout
        self._env = process.client_environment(dict(endpoint.env))
        self._limit = anyio.Semaphore(concurrency, fast_acquire=True)
        self._kills = anyio.Semaphore(concurrency, fast_acquire=True)

    def __repr__(self) -> str:
        return f"<CommandLineEngine {self.endpoint.kind} found={self.endpoint.found!r}>"

    async def _ask(
        self, *words: str, doing: str, timeout: float | None = None, lane: anyio.Semaphore | None = None
    ) -> Finished:
        async with lane or self._limit:
            done = await process.run([*self.endpoint.argv, *words], self._env, timeout=timeout or self._timeout)
        if done.code != 0:
            raise classify(done.stderr, done.code, doing)
        return done

    async def _json(self, *words: str, doing: str) -> Any:
        done = await self._ask(*words, doing=doing)
        try:
            return json.loads(done.stdout)
        except ValueError as error:
            raise EngineFailed(f"the engine's answer while {doing} is not JSON") from error

    async def info(self) -> EngineInfo:
        raw = await self._json("info", "--format", "{{json .}}", doing="asking the engine what it is")
        if not isinstance(raw, dict):
            raise EngineFailed("the engine's own description is not an object")
        # `docker info` exits 0 although no daemon answered; the errors then stand in its answer.
        if errors := raw.get("ServerErrors"):
            raise classify(str(errors[0]).encode(), 1, "asking the engine what it is")
        info = _podman_info(raw) if self.endpoint.kind == "podman" else _docker_info(raw)
        return EngineInfo(kind=self.endpoint.kind, endpoint=self.endpoint.found, private=self.endpoint.private, **info)

    async def image(self, reference: str) -> ImageInfo:
        raw = await self._json("image", "inspect", "--", reference, doing=f"looking up image {reference[:200]}")
        try:
            first = raw[0]
            config = first.get("Config") or {}
            identity = first["Id"]
            return ImageInfo(
                id=identity if ":" in identity else f"sha256:{identity}",
                digests=tuple(first.get("RepoDigests") or ()),
                user=config.get("User") or "",
                env=tuple(config.get("Env") or ()),
                volumes=tuple(config.get("Volumes") or ()),
                size=int(first.get("Size") or 0),
                architecture=str(first.get("Architecture") or ""),
            )
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise EngineFailed(f"the engine's record of image {reference[:200]} has an unknown form") from error

    async def start(self, args: Sequence[str]) -> str:
        if self.endpoint.private:
            await keep_small(engine_paths().log_file)
        done = await self._ask(*args, doing="starting a container", timeout=self._start_timeout)
        container = done.stdout.decode("ascii", "replace").strip().rpartition("\n")[2]
        if len(container) != 64:
            raise EngineFailed("the engine started a container without naming its ID")
        return container

    def attach(self, args: Sequence[str]) -> AbstractAsyncContextManager[Channel]:
        return self._attach(args)

    @asynccontextmanager
    async def _attach(self, args: Sequence[str]) -> AsyncIterator[Channel]:
        async with attached([*self.endpoint.argv, *args], self._env) as channel:
            yield channel

    async def inspect(self, name: str) -> dict[str, Any]:
        raw = await self._json("container", "inspect", "--", name, doing=f"inspecting {name}")
        if not isinstance(raw, list) or len(raw) != 1 or not isinstance(raw[0], dict):
            raise EngineFailed(f"the engine's record of {name} has an unknown form")
        return raw[0]

    async def kill(self, name: str) -> None:
        await self._ask("kill", "--", name, doing=f"killing {name}", lane=self._kills)
        if self.endpoint.kind == "podman":  # docker waits for the end itself
            await self._ask("wait", "--", name, doing=f"waiting for the end of {name}", lane=self._kills)

    async def remove(self, name: str) -> None:
        # `rm -f` races with the engine's own removal of a --rm container ("already in progress"), so absence is what
        # counts: remove, look, and look again.
        for attempt in range(_REMOVE_ATTEMPTS):
            try:
                await self._ask("rm", "-f", "-v", "--", name, doing=f"removing {name}")
            except ContainerGone:
                return
            except EngineFailed as error:
                if attempt == _REMOVE_ATTEMPTS - 1:
                    raise
                log.debug("engine.remove_again", container=name, error=str(error))
            try:
                await self.inspect(name)
            except ContainerGone:
                return
            await anyio.sleep(0.05 * (attempt + 1))
        raise EngineFailed(f"{name} is still there after {_REMOVE_ATTEMPTS} removals", retry_after=5.0)

    async def list(self, label: str, value: str) -> list[Listed]:
        done = await self._ask(
            "ps",
            "-a",
            "--no-trunc",
            "--filter",
            f"label={label}={value}",
            "--format",
            _PS_FORMAT,
            doing="listing containers",
        )
        rows: list[Listed] = []
        for line in done.stdout.decode("utf-8", "replace").splitlines():
            try:
                raw = json.loads(line)
                status = raw["s"].lower()
                running = status.startswith("up") and "(paused)" not in status
                rows.append(Listed(id=raw["i"], name=raw["n"].split(",")[0], running=running))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise EngineFailed("the engine's listing of containers has an unknown form") from error
        return rows

    def events(self, label: str, value: str, since: str) -> AbstractAsyncContextManager[AsyncIterator[EngineEvent]]:
        return self._events(label, value, since)

    @asynccontextmanager
    async def _events(self, label: str, value: str, since: str) -> AsyncIterator[AsyncIterator[EngineEvent]]:
        words = ["events", "--since", since, "--filter", "type=container", "--filter", f"label={label}={value}"]
        argv = [*self.endpoint.argv, *words, "--format", "{{json .}}"]
        async with process.client(argv, self._env, stderr=False) as client:
            assert client.stdout is not None  # noqa: S101 - it is a pipe
            yield _read_events(client.stdout)

    # Images are made ready before any pool starts (`executor.machine.image`); no call ever comes here.

    async def pull(self, reference: str, *, answer: float, timeout: float, seen: Callable[[str], None]) -> None:
        """Pull an image within ``timeout`` seconds, its first line within ``answer``; ``seen`` gets each line."""
        doing, errors = f"pulling image {reference[:200]}", process.Capped(65_536)
        code: int | None = None
        patience = anyio.CancelScope()
        with anyio.move_on_after(timeout):
            async with attached([*self.endpoint.argv, "pull", "--", reference], self._env) as channel:
                await channel.close_stdin()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(keep, channel.receive_stderr, errors)
                    data, rest = b"", b""
                    patience.deadline = anyio.current_time() + answer
                    with patience:
                        data = await channel.receive_stdout()
                    if patience.cancelled_caught:
                        channel.kill()
                    while data:
                        *lines, rest = (rest + data).split(b"\n")
                        for line in lines:
                            seen(printable(line))
                        data = await channel.receive_stdout()
                if not patience.cancelled_caught:
                    code = await channel.wait()
        if patience.cancelled_caught:
            raise EngineUnavailable(f"{doing}: no answer in time ({answer:g} s) from the registry", retry_after=60.0)
        if code is None:
            raise EngineUnavailable(f"{doing}: did not end within {timeout:g} s", retry_after=60.0)
        if code != 0:
            raise _pull_failed(bytes(errors.kept), code, doing)

    async def import_tar(self, path: Path, reference: str, changes: Sequence[str]) -> None:
        """Make an image of a root filesystem in a tar file and name it; ``changes`` are Dockerfile instructions."""
        words = [word for change in changes for word in ("--change", change)]
        await self._ask("import", *words, "--", str(path), reference, doing=f"importing {reference}", timeout=600.0)

    async def tag(self, source: str, reference: str) -> None:
        """Give the image ``source`` the name ``reference`` too. Raises ``ImageMissing``."""
        await self._ask("tag", "--", source, reference, doing=f"naming image {source[:200]}")


_PS_FORMAT = '{"i":{{json .ID}},"n":{{json .Names}},"s":{{json .Status}}}'


async def _read_events(stdout: ByteReceiveStream) -> AsyncIterator[EngineEvent]:
    buffer = bytearray()
    while data := await process.receive(stdout):
        buffer += data
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in lines:
            event = parse_event(bytes(line))
            if event is not None:
                yield event
        if len(buffer) > _MAX_EVENT_LINE:
            raise EngineFailed("the engine's event stream holds a line without end")


def parse_event(line: bytes) -> EngineEvent | None:
    """One line of ``docker events`` or ``podman events``; ``None`` for what is not a container event of a known form."""
    try:
        raw = json.loads(line)
        if "Actor" in raw:
            actor, attributes = raw["Actor"], raw["Actor"].get("Attributes") or {}
            identity, name, when = actor["ID"], attributes.get("name", ""), int(raw["timeNano"])
            action, _, detail = raw["Action"].partition(": ")
        else:
            attributes = raw.get("Attributes") or {}
            identity, name = raw["ID"], raw.get("Name", "")
            when = int(raw.get("timeNano") or 0)
            action, detail = _PODMAN_ACTIONS.get(raw["Status"], raw["Status"]), ""
        code = attributes.get("exitCode", raw.get("ContainerExitCode"))
        return EngineEvent(
            action=str(action),
            container=str(identity),
            name=str(name),
            time=when,
            detail=str(detail),
            exec_id=str(attributes.get("execID", "")),
            exit_code=None if code is None else int(code),
        )
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


_PODMAN_ACTIONS = {"died": "die", "remove": "destroy", "exec_died": "exec_die"}


def _docker_info(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": printable(raw.get("ServerVersion") or ""),
        "cgroup_driver": str(raw.get("CgroupDriver") or ""),
        "cgroup_version": str(raw.get("CgroupVersion") or ""),
        "memory": int(raw.get("MemTotal") or 0),
        "cpus": int(raw.get("NCPU") or 0),
        "rootless": any("rootless" in option for option in raw.get("SecurityOptions") or ()),
        "runtimes": tuple(raw.get("Runtimes") or ()),
        "default_runtime": str(raw.get("DefaultRuntime") or ""),
        "runtime_version": printable((raw.get("RuncCommit") or {}).get("ID") or ""),
        "data_root": str(raw.get("DockerRootDir") or ""),
        "time": str(raw.get("SystemTime") or ""),
        "warnings": tuple(printable(warning) for warning in raw.get("Warnings") or ()),
    }


def _podman_info(raw: dict[str, Any]) -> dict[str, Any]:
    host = raw.get("host") or {}
    runtime = host.get("ociRuntime") or {}
    return {
        "version": printable((raw.get("version") or {}).get("Version") or ""),
        "cgroup_driver": str(host.get("cgroupManager") or ""),
        "cgroup_version": str(host.get("cgroupVersion") or "").removeprefix("v"),
        "memory": int(host.get("memTotal") or 0),
        "cpus": int(host.get("cpus") or 0),
        "rootless": bool((host.get("security") or {}).get("rootless")),
        "runtimes": (str(runtime.get("name") or ""),),
        "default_runtime": str(runtime.get("name") or ""),
        "runtime_version": printable(runtime.get("version") or ""),
        "data_root": str((raw.get("store") or {}).get("graphRoot") or ""),
        "time": "",
        "warnings": (),
    }
