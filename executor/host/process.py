"""One program on this host, from its start to the end of what it started: fed, drained and capped, held to its deadline.

POSIX. It is waited for by its own descriptor and reaped here, not by a library: only ``wait4`` returns what it used, and as
long as it is not reaped its process ID, which is its group's and its session's too, is nobody else's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from executor.common.log import get_logger
from executor.engine.process import READ_SIZE, Capped, heed_children
from executor.errors import EngineFailed
from executor.host.process_tree import ProcessTree

log = get_logger("emberpool.host")

MAX_SAID = 4_096
"""Bytes that the program may say on its private descriptor."""
KILL_PATIENCE = 5.0
"""Seconds after which processes that will not go are given up (and logged); SIGKILL takes milliseconds."""
_LEFT = 1_024
"""Reads of what a pipe still holds when its program has ended, at most: a process that lives on might fill it for ever."""
_POLL = 0.01


@dataclass(slots=True)
class HostEnd:
    """How a program ended. ``status`` is as ``wait4`` returns it; ``cpu_seconds`` counts its reaped children too;
    ``max_rss`` is bytes, ``None`` where it cannot be separated from what started the program. ``said`` is what came on the
    private descriptor."""

    stdout: Capped
    stderr: Capped
    said: Capped = field(default_factory=lambda: Capped(MAX_SAID))
    status: int = 0
    ended: bool = False
    timed_out: bool = False
    duration: float = 0.0
    cpu_seconds: float = 0.0
    max_rss: int | None = None


async def run_on_host(
    argv: Callable[[int], Sequence[str]],
    *,
    cwd: Path,
    stdin: Sequence[bytes],
    timeout: float,
    grace: float,
    max_output: int,
) -> HostEnd:
    """Run a program in a session of its own for at most ``timeout`` seconds, then SIGTERM, ``grace`` seconds, SIGKILL.

    It begins with this process's own environment. ``argv`` is given the number of the descriptor that the program may speak on. Whatever ended it, and also when this is
    cancelled, the program, its session, its process group and on Linux its descendants are gone on return; the answer
    does not wait for them to close their streams. Raises ``EngineFailed`` where it cannot be started.
    """
    began = anyio.current_time()
    end = HostEnd(Capped(max_output), Capped(max_output))
    pipes = _Pipes()
    try:
        try:
            child = _Child(pipes.start(argv, cwd))
        except OSError as error:
            raise EngineFailed(f"the call could not be started on this host: {error}") from error
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pipes.feed, stdin)
                for fd, into in pipes.sources(end):
                    tasks.start_soon(_drain, fd, into)
                with anyio.move_on_after(timeout) as deadline:
                    await child.ended()
                if deadline.cancelled_caught:
                    end.timed_out = True
                    await child.stop(grace)
                end.ended = True
                tasks.cancel_scope.cancel()
            for fd, into in pipes.sources(end):
                _pull(fd, into, _LEFT)
        finally:
            with anyio.CancelScope(shield=True):
                await child.finish(end, grace)
    finally:
        pipes.close()
    if child.lost:
        raise EngineFailed(
            "other code of this process waits for any child, and took the call's end: what it did is unknown",
            started=True,
        )
    end.duration = anyio.current_time() - began
    return end


class _Pipes:
    """The four pipes of a program, from this side."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self.stdin, self.stdout, self.stderr, self.said = -1, -1, -1, -1

    def start(self, argv: Callable[[int], Sequence[str]], cwd: Path) -> subprocess.Popen[bytes]:
        inner_in, self.stdin = self._pair()
        (self.stdout, out), (self.stderr, err), (self.said, report) = self._pair(), self._pair(), self._pair()
        for fd in (self.stdin, self.stdout, self.stderr, self.said):
            os.set_blocking(fd, False)
        heed_children()
        child = subprocess.Popen(
            list(argv(report)), stdin=inner_in, stdout=out, stderr=err, pass_fds=(report,), cwd=cwd,
            start_new_session=True,
        )  # fmt: skip
        for fd in (inner_in, out, err, report):
            self._close(fd)
        return child

    def sources(self, end: HostEnd) -> list[tuple[int, Capped]]:
        return [(self.stdout, end.stdout), (self.stderr, end.stderr), (self.said, end.said)]

    async def feed(self, parts: Sequence[bytes]) -> None:
        """Write and close the program's stdin; one that does not read it is no error."""
        with contextlib.suppress(BrokenPipeError):
            for part in parts:
                left = memoryview(part)
                while left:
                    await anyio.wait_writable(self.stdin)
                    left = left[os.write(self.stdin, left[:READ_SIZE]) :]
        self._close(self.stdin)

    def close(self) -> None:
        for fd in list(self._open):
            self._close(fd)

    def _pair(self) -> tuple[int, int]:
        pair = os.pipe()
        self._open.update(pair)
        return pair

    def _close(self, fd: int) -> None:
        self._open.discard(fd)
        os.close(fd)


async def _drain(fd: int, into: Capped) -> None:
    while True:
        await anyio.wait_readable(fd)
        if _pull(fd, into, 1):
            return


def _pull(fd: int, into: Capped, times: int) -> bool:
    """Take what a pipe holds now, in at most so many reads; whether it has come to its end."""
    for _ in range(times):
        try:
            data = os.read(fd, READ_SIZE)
        except BlockingIOError:
            return False
        if not data:
            return True
        into.add(data)
    return False


class _Child:
    """A program that was started: its end, and the end of whatever came of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._family = process, ProcessTree(process.pid)
        self._over: tuple[int, resource.struct_rusage] | None = None
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):  # not Linux, or an old kernel
            self._pidfd = -1

    async def ended(self) -> None:
        """Wait for the program's end. It is left unreaped, where the system lets one wait so."""
        if self._pidfd >= 0:
            await anyio.wait_readable(self._pidfd)
            return
        while self._reap(os.WNOHANG):  # noqa: ASYNC110 - here its end is no event
            await anyio.sleep(_POLL)

    async def stop(self, grace: float) -> None:
        """End the program: SIGTERM to its group, ``grace`` seconds, SIGKILL to all that came of it."""
        # Looked at while the program lives: the children of one that has ended are nobody's.
        await self._family.look()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with anyio.move_on_after(grace):
            await self.ended()
            return
        await self._kill()
        await self.ended()

    async def finish(self, end: HostEnd, grace: float) -> None:
        """Whatever happened: nothing of the program is left, it is reaped, and what it used is noted."""
        if not end.ended:
            await self.stop(grace)
        await self._kill()
        self._reap(0)
        if self._pidfd >= 0:
            os.close(self._pidfd)
        if self._over is None:
            return
        end.status, used = self._over
        end.cpu_seconds = used.ru_utime + used.ru_stime
        # The kernel counts memory from before the `exec`: this process's own peak is the least that it reports.
        if used.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss:
            end.max_rss = used.ru_maxrss * (1 if sys.platform == "darwin" else 1_024)

    @property
    def lost(self) -> bool:
        """Whether somebody else has reaped it."""
        return self._over is None

    async def _kill(self) -> None:
        if not await self._family.kill(KILL_PATIENCE):
            log.warning("host.survivors", pid=self._process.pid, patience=KILL_PATIENCE)

    def _reap(self, options: int) -> bool:
        """Take the program's status; whether it still runs."""
        if self._process.returncode is not None:
            return False
        try:
            pid, status, used = os.wait4(self._process.pid, options)
        except ChildProcessError:
            self._process.returncode = 255
            return False
        if pid:
            self._over = status, used
            self._process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for it too
        return not pid
