"""Terminals: a real one (a pty) that a command is run on, and an emulated one that tells which rows a person would see."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterator, Mapping

import pyte

from tests.support import ROOT

MARGINS = ("out| ", "out+ ", "err| ", "err+ ")


def on_terminal(
    argv: list[str], *, streams: str = "both", columns: int = 80, env: Mapping[str, str] | None = None
) -> tuple[bytes, bytes]:
    """What a terminal gets of a command, and what a pipe gets: ``streams`` are those that lead to the terminal."""
    import fcntl  # not on Windows
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if streams == "err" else theirs,
        stderr=subprocess.PIPE if streams == "out" else theirs,
        env={**os.environ, **(env or {})},
    ) as process:
        os.close(theirs)
        shown = b"".join(_read(ours))
        piped = b"".join(stream.read() for stream in (process.stdout, process.stderr) if stream is not None)
    os.close(ours)
    return shown, piped


def _read(fd: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(fd, 65_536)
        except OSError:  # nobody has its other end any more
            return
        if not data:
            return
        yield data


def rows(shown: str, columns: int) -> list[str]:
    """The rows that a terminal shows, without the blanks at their ends."""
    screen = pyte.Screen(columns, shown.count("\n") + 2 * len(shown) // columns + 5)
    pyte.Stream(screen).feed(shown.replace("\r\n", "\n").replace("\n", "\r\n"))
    assert screen.title == screen.icon_name == ""
    found = [row.rstrip() for row in screen.display]
    while found and not found[-1]:
        found.pop()
    return found


def begins_with_margin(row: str) -> bool:
    return f"{row} ".startswith(MARGINS)
