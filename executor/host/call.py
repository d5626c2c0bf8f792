"""Calls on the host itself, under resource limits: what ``python_tools = "limits"`` asks for, and nothing else ever does.

A guard against exhaustion and NOT a boundary. It caps CPU seconds, address space, open files and the size of a written
file, and it filters the environment. It isolates nothing. The code runs with this process's own user and rights: it reads
and writes every file that this process can, has the whole network, sees and may end every other process of its user (this
one too), and finds every credential that stands in a file. A process that leaves its session and its process group, and
whose parent ends before it is looked for, survives its call. The limits are each process's own, so many processes together
have many times as much. On macOS the address space is capped loosely. Whoever does not trust a tool needs ``python_tools = "container"``.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from executor import inside
from executor.common.log import get_logger
from executor.common.printable import printable
from executor.common.threads import in_thread
from executor.errors import EngineFailed, InvalidCall, ProfileMismatch
from executor.host.process import HostEnd, run_on_host
from executor.result import CallResult
from executor.sandbox.profile import CALL_ENV
from executor.sandbox.request import Call

log = get_logger("emberpool.host")

HOST = "host"
"""What a call on the host has for a generation."""
GRACE = 2.0
_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR")
_MIB = 1_048_576
_LENIENT = "set sandbox.limits_strict = false to run without what cannot be set"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """The limits of a call on the host, each at least 1: seconds, MiB, descriptors, MiB.

    A limit that this process is under itself and that is lower stays. ``strict`` refuses a call whose limits cannot all be
    set; without it the call goes on with a warning.
    """

    cpu_seconds: int = 30
    memory_mb: int = 512
    open_files: int = 256
    file_size_mb: int = 64
    strict: bool = True

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "memory_mb", "open_files", "file_size_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; it is {getattr(self, name)}")

    def words(self) -> list[str]:
        """The limits as the wrapper reads them. Soft below hard, so that SIGXCPU and SIGKILL are different ends."""
        return [
            f"cpu_seconds:RLIMIT_CPU:{self.cpu_seconds}:{self.cpu_seconds + 1}",
            f"memory_mb:RLIMIT_AS:{self.memory_mb * _MIB}:{self.memory_mb * _MIB}",
            f"open_files:RLIMIT_NOFILE:{self.open_files}:{self.open_files}",
            f"file_size_mb:RLIMIT_FSIZE:{self.file_size_mb * _MIB}:{self.file_size_mb * _MIB}",
            "core_dumps:RLIMIT_CORE:0:0",  # SIGXCPU writes one, as large as the memory was
        ]


async def host_call(call: Call, *, limits: HostLimits, env: Mapping[str, str], grace: float = GRACE) -> CallResult:
    """Run one call on this host within ``limits``; ``env`` is what the operator lets through of the environment.

    Besides it the call gets PATH, HOME, LANG and TMPDIR as they are here, and its own ``env`` over all. It works in its
    ``cwd`` or its TMPDIR where it has one, else in a private directory that is removed. At its deadline, or when this is
    cancelled, its group gets SIGTERM, and after ``grace`` seconds all that came of it SIGKILL. Raises ``ProfileMismatch``
    where a limit cannot be set and ``limits`` are strict, ``InvalidCall``, ``EngineFailed`` where nothing could be started.
    """
    environment = host_environment(call, env)
    async with _places(call) as (cwd, file):
        program = _program(call, environment, file)

        def argv(report: int) -> Sequence[str]:
            how = "strict" if limits.strict else "lenient"
            wrapper = str(inside.path("host_limits"))
            return [sys.executable, "-I", "-S", "-B", wrapper, str(report), how, *limits.words(), "--", *program]

        entries = b"\0".join(os.fsencode(f"{key}={value}") for key, value in environment.items())
        end = await run_on_host(
            argv, cwd=cwd, stdin=(struct.pack(">I", len(entries)), entries, call.stdin), timeout=call.timeout,
            grace=grace, max_output=call.max_output,
        )  # fmt: skip
    _require_limits(end, limits)
    return _result(end, limits)


def host_environment(call: Call, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a call: what a program needs of this process's own, what is let through, what the call has."""
    return {**{key: os.environ[key] for key in _INHERITED if key in os.environ}, **env, **call.env}


@asynccontextmanager
async def _places(call: Call) -> AsyncIterator[tuple[Path, Path]]:
    """Where a call works, and the file that its code stands in (so that nothing of it shows in ``ps``).

    A call that names no working directory means a sandbox's own, which a host does not have.
    """
    private: Path | None = None
    try:
        try:
            private = Path(tempfile.mkdtemp(prefix="emberpool-call-"))
            file, cwd = private / "call.py", private / "work"
            file.write_bytes((call.code or "").encode("utf-8"))
            cwd.mkdir()
        except OSError as error:
            raise EngineFailed(
                f"no private directory can be made for the call: {error}; look after the disk"
            ) from error
        name, own = ("env 'TMPDIR'", call.env.get("TMPDIR", "")) if call.cwd == CALL_ENV["HOME"] else ("cwd", call.cwd)
        if own:
            cwd = Path(own)
            if not cwd.is_absolute() or not cwd.is_dir():
                raise InvalidCall(f"{name} must be the absolute path of a directory on this host; make it first")
        yield cwd, file
    finally:
        if private is not None:
            with anyio.CancelScope(shield=True):
                await in_thread(_remove, private)


def _remove(private: Path) -> None:
    shutil.rmtree(private, ignore_errors=True)
    if private.exists():
        log.warning("host.left_behind", path=str(private))


def _program(call: Call, environment: Mapping[str, str], file: Path) -> Sequence[str]:
    if call.code is None:
        return call.argv
    # `PYTHON*` that someone asked for is meant for an interpreter that listens to it.
    isolated = [] if any(key.startswith("PYTHON") for key in environment) else ["-I"]
    return [sys.executable, *isolated, "-B", str(file)]


def _require_limits(end: HostEnd, limits: HostLimits) -> None:
    """Hold the wrapper to its word: without ``go`` the call's program never began."""
    failed = bytes(end.said.kept).decode("utf-8", "replace").splitlines()
    began = failed[-1:] == ["go"]
    if began:
        failed.pop()
    if failed and limits.strict:
        raise ProfileMismatch(f"the limits cannot be set: {'; '.join(failed)}; {_LENIENT}")
    for line in failed:
        name, _, why = line.partition(": ")
        log.warning("host.limit_not_set", limit=name, reason=why)
    if not began and not end.timed_out:
        said = printable(bytes(end.stderr.kept).rstrip().rpartition(b"\n")[2], limit=300)
        raise EngineFailed(
            f"the call did not begin: what sets its limits ended first, with wait status {end.status}{said and f': {said}'}"
        )


def _result(end: HostEnd, limits: HostLimits) -> CallResult:
    killed_by = os.WTERMSIG(end.status) if os.WIFSIGNALED(end.status) else None
    # One that ignores SIGXCPU has SIGKILL a second later, which says nothing of itself.
    spent = killed_by == signal.SIGKILL and end.cpu_seconds >= limits.cpu_seconds
    return CallResult(
        exit_code=os.WEXITSTATUS(end.status) if killed_by is None else None,
        signal=killed_by,
        timed_out=end.timed_out,
        cpu_limit=not end.timed_out and (killed_by == signal.SIGXCPU or spent),
        stdout=bytes(end.stdout.kept),
        stderr=bytes(end.stderr.kept),
        stdout_total=end.stdout.total,
        stderr_total=end.stderr.total,
        duration=end.duration,
        cpu_seconds=end.cpu_seconds,
        max_rss=end.max_rss,
        generation=HOST,
    )
