"""Engine client processes: the only place where one is started (``executor.machine.daemon`` starts the private engine's daemon,
``executor.host.process`` the calls of the host path).

Every client runs in a session of its own (a Ctrl-C at the terminal must not end it before its container is dealt with),
with a chosen environment, and is killed and reaped whenever its block is left, cancelled or not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel
from anyio.abc import ByteReceiveStream, Process

from executor.common.log import get_logger
from executor.engine import pidfd
from executor.errors import EngineFailed, EngineUnavailable

log = get_logger("emberpool.engine")

READ_SIZE = 65_536

_FORWARDED = (
    "PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "SSH_AUTH_SOCK", "TMPDIR",
    "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "DOCKER_TLS", "DOCKER_API_VERSION", "DOCKER_CONFIG", "DOCKER_CONTEXT",
    "DOCKER_HOST", "CONTAINER_HOST", "CONTAINER_SSHKEY", "CONTAINERS_CONF", "SYSTEMROOT", "USERPROFILE", "APPDATA",
)  # fmt: skip


def client_environment(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine client: what it needs to find its engine, and nothing else of this process's own."""
    env = {key: os.environ[key] for key in _FORWARDED if key in os.environ}
    env.setdefault("PATH", os.defpath)
    env["LC_ALL"] = "C"
    env.update(overrides or {})
    return env


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended: its status and the beginning of what it printed."""

    code: int
    stdout: bytes
    stderr: bytes


@asynccontextmanager
async def client(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: int = subprocess.PIPE,
    stdout: int = subprocess.PIPE,
    stderr: bool = True,
) -> AsyncIterator[Process]:
    """Start a process with three pipes, or with descriptors of the caller's, or without stderr where nobody would read it; it
    is dead and reaped once the block is left."""
    # Starting is short and must not be torn: a cancel between fork and hand-over would leak the child.
    with anyio.CancelScope(shield=True):
        heed_children()
        errors = subprocess.PIPE if stderr else subprocess.DEVNULL
        process: Process
        try:
            if pidfd.supported():
                process = pidfd.start(argv, env, stdin=stdin, stdout=stdout, stderr=errors, cwd="/")
                await anyio.lowlevel.checkpoint()
            else:
                process = await anyio.open_process(
                    list(argv),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=errors,
                    env=dict(env),
                    start_new_session=True,
                    cwd="/",
                )
        except FileNotFoundError as error:
            raise EngineUnavailable(
                f"there is no {argv[0]!r} command on this machine; `emberpool engine up` helps"
            ) from error
        except OSError as error:
            raise not_started(argv[0], error) from error
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            kill(process)
            await process.wait()
            await process.aclose()


def heed_children() -> None:
    """Undo an ignored SIGCHLD, which a process inherits from the process that starts it: under it the kernel does not keep how a child
    ended, and every command of the engine would seem to fail.

    Only a program's main thread can; from another one this raises ``EngineUnavailable``.
    """
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        return
    if threading.current_thread() is not threading.main_thread():
        raise EngineUnavailable(
            "SIGCHLD is ignored in this process, so that nobody can know how a command ended; in its main thread call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) first"
        )
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log.warning("process.sigchld_was_ignored", now="default")


def not_started(command: str, error: OSError) -> EngineUnavailable:
    """The error of a client that the system did not start."""
    return EngineUnavailable(f"the command {command!r} cannot be started: {error}")


async def run(
    argv: Sequence[str], env: Mapping[str, str], *, timeout: float, max_output: int = 8_000_000, stdin: bytes = b""
) -> Finished:
    """Run a command to its end within ``timeout`` seconds; raises ``EngineUnavailable`` past it, ``EngineFailed`` on a flood.

    Of stderr only the first and the last 32 KiB are kept: a command may flood it, before or after it says what is wrong.
    """
    shown = " ".join(argv[:2])
    with anyio.move_on_after(timeout) as deadline:
        async with client(argv, env) as process:
            out, err = Capped(max_output), Ends(32_768)
            assert process.stdout is not None  # noqa: S101 - all three are pipes
            assert process.stderr is not None  # noqa: S101
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(drain, process.stdout, out)
                tasks.start_soon(drain, process.stderr, err)
                tasks.start_soon(feed, process, stdin)
            code = await process.wait()
            if out.total > max_output:
                raise EngineFailed(f"`{shown}` printed {out.total} bytes, more than the {max_output} that are read")
            return Finished(code, bytes(out.kept), err.kept)
    assert deadline.cancelled_caught  # noqa: S101 - the block above returns or raises otherwise
    raise EngineUnavailable(f"`{shown}` did not end within {timeout:g} s", retry_after=timeout)


class Capped:
    """Bytes of a stream up to a cap, and the count of them all. ``room`` is what may still be kept."""

    __slots__ = ("cap", "kept", "total")

    def __init__(self, cap: int) -> None:
        self.cap, self.total = cap, 0
        self.kept = bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.cap - len(self.kept)
        if room > 0:
            self.kept += data[:room]


class Ends:
    """The first and the last ``cap`` bytes of a stream; all of it where it is no longer than both."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._first, self._last = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        room = self._cap - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        del self._last[: -self._cap]

    @property
    def kept(self) -> bytes:
        return bytes(self._first + self._last)


async def receive(stream: ByteReceiveStream) -> bytes:
    """The next bytes of a stream, ``b""`` at its end, however it ended."""
    try:
        return await stream.receive(READ_SIZE)
    except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
        return b""


async def drain(stream: ByteReceiveStream, into: Capped | Ends) -> None:
    """Read a stream to its end, keeping what the cap allows."""
    while data := await receive(stream):
        into.add(data)


async def feed(process: Process, data: bytes) -> None:
    """Write ``data`` to a process's stdin and close it; a process that does not read it is no error."""
    assert process.stdin is not None  # noqa: S101 - all three are pipes
    try:
        if data:
            await process.stdin.send(data)
        await process.stdin.aclose()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, BrokenPipeError, ConnectionResetError):
        return


def kill(process: Process) -> None:
    """SIGKILL a client. Not by ``Process.kill`` where there is another way: that may reap the process behind the back of
    asyncio's own watcher, which then knows no exit status."""
    if process.returncode is not None:
        return
    if isinstance(process, pidfd.PidfdProcess):
        process.kill()
        return
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # no such call here: not Linux, or an old kernel
        process.kill()
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)
