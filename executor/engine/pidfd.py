"""Child processes whose end is waited for by a pidfd: no thread for each of them, and no signal handler.

asyncio's own way before Python 3.12 holds one operating-system thread for as long as a process runs, and every armed runner
is one. This works on every event loop that can wait for a descriptor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import IO

import anyio
import anyio.lowlevel
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

LOST = 255
"""The exit status of a process whose end other code of this program took, as asyncio has it."""


@cache
def supported() -> bool:
    """Whether this system has pidfds: Linux 5.4 or newer, and no filter that refuses them."""
    if not hasattr(os, "pidfd_open") or not hasattr(os, "P_PIDFD"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class PidfdProcess(Process):
    """A started process. ``stdin``, ``stdout`` and ``stderr`` are streams where a pipe was asked for."""

    def __init__(self, child: subprocess.Popen[bytes], pidfd: int) -> None:
        self._child, self._pidfd, self._waiting = child, pidfd, anyio.Lock()
        self._stdin = PipeSender(child.stdin) if child.stdin else None
        self._stdout = PipeReceiver(child.stdout) if child.stdout else None
        self._stderr = PipeReceiver(child.stderr) if child.stderr else None

    async def wait(self) -> int:
        async with self._waiting:
            while self._child.returncode is None:
                await anyio.wait_readable(self._pidfd)
                self._reap()
        return self._child.returncode

    def _reap(self) -> None:
        # Not by the Popen: where somebody else has taken the status, it would say 0.
        try:
            end = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            self._child.returncode = LOST
        else:
            if end is None:
                return
            self._child.returncode = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        os.close(self._pidfd)

    async def aclose(self) -> None:
        """Close the streams, kill the process where it still runs, and reap it."""
        with anyio.CancelScope(shield=True):
            for stream in (self._stdin, self._stdout, self._stderr):
                if stream is not None:
                    await stream.aclose()
            self.kill()
            await self.wait()

    def send_signal(self, signal: signal.Signals) -> None:
        if self._child.returncode is None:
            try:
                _send(self._pidfd, signal)
            except ProcessLookupError:
                return

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    @property
    def stdin(self) -> ByteSendStream | None:
        return self._stdin

    @property
    def stdout(self) -> ByteReceiveStream | None:
        return self._stdout

    @property
    def stderr(self) -> ByteReceiveStream | None:
        return self._stderr


def _send(pidfd: int, number: signal.Signals) -> None:
    if sys.platform == "linux":
        signal.pidfd_send_signal(pidfd, number)


def start(
    argv: Sequence[str], env: Mapping[str, str], *, stdin: int, stdout: int, stderr: int, cwd: str
) -> PidfdProcess:
    """Start a process in a session of its own. Raises ``OSError``; then nothing is left of it."""
    child = subprocess.Popen(
        list(argv), stdin=stdin, stdout=stdout, stderr=stderr, env=dict(env), cwd=cwd, bufsize=0, start_new_session=True
    )  # fmt: skip
    try:
        return PidfdProcess(child, os.pidfd_open(child.pid))
    except BaseException:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        raise


class _Pipe:
    """One end of a pipe, that does not block."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        os.set_blocking(file.fileno(), False)

    def _fileno(self) -> int:
        if self._file.closed:
            raise anyio.ClosedResourceError
        return self._file.fileno()

    async def aclose(self) -> None:
        if not self._file.closed:
            anyio.notify_closing(self._file.fileno())
            self._file.close()
        await anyio.lowlevel.cancel_shielded_checkpoint()


class PipeReceiver(_Pipe, ByteReceiveStream):
    """The end of a pipe that is read."""

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        while True:
            await anyio.wait_readable(self._fileno())
            try:
                data = os.read(self._fileno(), max_bytes)
            except BlockingIOError:
                continue
            except OSError as error:
                raise anyio.BrokenResourceError from error
            if not data:
                raise anyio.EndOfStream
            return data


class PipeSender(_Pipe, ByteSendStream):
    """The end of a pipe that is written."""

    async def send(self, item: bytes) -> None:
        left = memoryview(item)
        while left:
            await anyio.wait_writable(self._fileno())
            try:
                left = left[os.write(self._fileno(), left) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise anyio.BrokenResourceError from error
