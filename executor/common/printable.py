"""Make words of unknown origin safe to show: the one function that every log, error message and terminal gets them from.

A program writes what it likes: a file's name, an error text or an engine's message may hold escape sequences that a
terminal obeys, line breaks that begin a line which looks like our own, and characters that reverse the order of a row. Pure.
"""

from __future__ import annotations

import re

# Runs of white space with anything but blanks in it: line breaks, tabs, and blanks that are not ASCII's.
_BREAKS = re.compile(r"[^\S ]+")
# What a text of several lines keeps: its breaks, its tabs, and blanks of other widths.
_KEPT = re.compile(r"([\n\t\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]+)")


def printable(said: object, *, limit: int | None = None, lines: bool = False, name: bool = False) -> str:
    """Return ``said`` as text without anything that a terminal would obey: each such character is written as ``\\x1b``.

    What is escaped is what ``str.isprintable`` refuses: control characters (C1 too), bidirectional overrides and other
    format characters, lone surrogates; bytes that are no UTF-8 too. The result is one line, where line breaks and tabs have
    become a blank and none is left at the ends. With ``lines`` they stay as they are; with ``name`` they are escaped too,
    and a backslash is doubled, so that two names stay different. A text of more than ``limit`` characters is cut there and ends in ``...``.
    """
    if name:  # before anything is escaped by backslashes
        said = said.replace(b"\\", b"\\\\") if isinstance(said, bytes) else str(said).replace("\\", "\\\\")
    text = said.decode("utf-8", "backslashreplace") if isinstance(said, bytes) else str(said)
    if lines:
        parts = _KEPT.split(text)
        parts[::2] = map(_escaped, parts[::2])
        text = "".join(parts)
    elif name:
        text = _escaped(text)
    else:
        words = (part.strip(" ") for part in _BREAKS.split(text))
        text = _escaped(" ".join(part for part in words if part))
    return text if limit is None or len(text) <= limit else text[: max(0, limit - 3)] + "..."


def has_control(text: str) -> bool:
    """Whether ``text`` holds an ASCII control character, such as a line break or NUL."""
    return any(ord(char) < 32 or ord(char) == 127 for char in text)


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
