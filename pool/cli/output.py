"""Write a command's own lines and what a call has written, so that on a terminal neither can be taken for the other.

On a terminal each row of a call's output begins with the name of its stream (``out| ``), and what a terminal would obey is
shown escaped. Nothing in a row can move the cursor then, and rows are cut here, so that the terminal breaks none and begins
no row by itself: what begins without a margin is the command's own. Elsewhere a call's bytes are written as they came.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Literal, TextIO

import typer

from executor.common.printable import printable

Stream = Literal["out", "err"]

_TAB = 8
_COLUMNS = 80
"""Where a terminal does not know its width."""


def say(text: str, *, err: bool = False) -> None:
    """Write one line of the command's own, whatever words of others it quotes; blanks that it begins with stay."""
    stream = sys.stderr if err else sys.stdout
    line = text[: len(text) - len(text.lstrip(" "))] + printable(text)
    if err and stream.isatty():
        line = hung(line, _columns(stream))
    typer.echo(_encoded(line, stream).decode(stream.encoding or "utf-8"), err=err)


def write_call(parts: Sequence[tuple[Stream, bytes]], own: Sequence[str] = (), *, raw: bool = False) -> None:
    """Write what a call has written to its streams, in this order, then ``own`` lines about it to stderr.

    ``raw`` writes bytes as they came to a terminal too: then they look like anything else.
    """
    last = b""
    for name, data in parts:
        stream = sys.stdout if name == "out" else sys.stderr
        shown = data
        if stream.isatty() and not raw:
            shown = _encoded(with_margin(data, name, _columns(stream)), stream)
        stream.flush()
        stream.buffer.write(shown)
        stream.flush()
        if shown and (stream is sys.stderr or (stream.isatty() and sys.stderr.isatty())):
            last = shown
    if own and last and not last.endswith(b"\n"):
        typer.echo(err=True)
    for line in own:
        say(line, err=True)


def with_margin(data: bytes, name: Stream, columns: int) -> str:
    """What a call wrote to a stream as whole lines of at most ``columns``: ``out| `` begins a line, ``out+ `` goes on with it.

    The margin begins with a letter of a script that is written from left to right: a terminal that asks a row's first letter
    for its direction must not turn the row round, margin and all.
    """
    room = max(1, columns - len(f"{name}| ") - 1)  # some terminals begin a new row as soon as one is full
    rows = []
    for line in printable(data, lines=True).removesuffix("\n").split("\n") if data else ():
        sign = "|"
        for row in _rows(line, room, len(f"{name}| ")):
            rows.append(f"{name}{sign} {row}".rstrip(" ") + "\n")
            sign = "+"
    return "".join(rows)


def hung(line: str, columns: int) -> str:
    """A line of the command's own in rows of at most ``columns``, all but the first indented.

    It may quote a file's name, say, and no row may look like a line of its own where the terminal happens to break it.
    """
    first = next(_rows(line, max(1, columns - 1), 0))
    rest = line[len(first) :]
    return "\n  ".join([first, *_rows(rest, max(1, columns - 3), 0)]) if rest else first


def _rows(line: str, room: int, begin: int) -> Iterator[str]:
    """Cut a line into rows of at most ``room`` columns; the first of them is column ``begin``.

    A character that is not ASCII counts as two, which none exceeds: how wide it really is, terminals do not agree.
    """
    if line.isascii() and "\t" not in line:
        for at in range(0, len(line) or 1, room):
            yield line[at : at + room]
        return
    start, used = 0, 0
    for at, char in enumerate(line):
        width = _width(char, begin + used)
        if used + width > room and at > start:
            yield line[start:at]
            start, used = at, 0
            width = _width(char, begin)
        used += width
    yield line[start:]


def _width(char: str, column: int) -> int:
    if char == "\t":
        return _TAB - column % _TAB
    return 1 if char.isascii() else 2


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS


def _encoded(text: str, stream: TextIO) -> bytes:
    # Never as UTF-8 where the terminal reads something else: bytes of a harmless letter are control characters there.
    return text.encode(stream.encoding or "utf-8", "backslashreplace")
