"""The standard streams of a command: closed ones opened, full or broken ones survived, and stdin read within a limit.

What a command does never depends on whether anybody can read what it says: output that cannot be written is dropped while
the work goes on, and reported at the end by a line on stderr and exit status 1.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

from executor.errors import InvalidCall

LOST = 1
_CHUNK = 1 << 16
_CLOSED = ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY))
"""How the null device stands in for a stream that was closed: stdin is empty, stdout fails, stderr goes nowhere."""


class _Output(io.FileIO):
    """An output that never raises. ``lost`` is the error by which it failed first; from then on all is dropped."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        while self.lost is None:
            try:
                written = super().write(data)
            except OSError as error:
                self.lost = error
                break
            if written is not None:
                return written
            select.select([], [self], [])  # the parent process has made it non-blocking
        return len(memoryview(data).cast("B"))


def install() -> None:
    """Make the standard streams usable, before anything else opens a file: it would get the number of a closed one."""
    for fd, flags in _CLOSED:
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)  # the lowest free number, which is this one
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stdout, sys.stderr = _output(1, sys.stdout), _output(2, sys.stderr)


def finish() -> None:
    """Write out what is left to be written. Ends the process with status 1 where some of stdout was lost."""
    if not isinstance(raw := getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Output):
        return
    sys.stdout.flush()
    if raw.lost is None:
        return
    if raw.lost.errno != errno.EPIPE:  # a reader that closes a pipe has read enough
        sys.stderr.write(f"error: stdout cannot be written: {raw.lost.strerror}; what was to be said there is lost\n")
        sys.stderr.flush()
    raise SystemExit(LOST)


def read_stdin(most: int) -> bytes:
    """All of stdin. Raises ``InvalidCall`` as soon as it is more than ``most`` bytes, or where it cannot be read."""
    data = bytearray()
    try:
        # Below the buffer, which takes a pipe that is empty for the moment and does not block for one that has ended.
        raw: Any = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)
        while (chunk := raw.read(_CHUNK)) != b"":
            if chunk is None:
                select.select([sys.stdin], [], [])  # the parent process has made it non-blocking
                continue
            data += chunk
            if len(data) > most:
                raise InvalidCall(f"stdin is more than {most} bytes; send less, or raise call.max_input")
    except OSError as error:
        raise InvalidCall(
            f"stdin cannot be read: {error.strerror or error}; redirect it from a file or a pipe"
        ) from error
    return bytes(data)


def _output(fd: int, before: TextIO | None) -> TextIO:
    buffer = io.BufferedWriter(_Output(fd, "wb", closefd=False))
    encoding, errors = ("utf-8", "backslashreplace") if before is None else (before.encoding, before.errors)
    at_once = fd == 2 or os.isatty(fd)
    return io.TextIOWrapper(buffer, encoding=encoding, errors=errors, line_buffering=at_once)
