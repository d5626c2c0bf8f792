"""A tool that shows how two texts differ, as a unified diff."""

from __future__ import annotations

import difflib

MAX_LINES = 50_000


def text_diff(before: str, after: str, name: str = "text", context: int = 3) -> str:
    """The unified diff from ``before`` to ``after`` with ``context`` unchanged lines around each change.

    ``""`` where they are equal. Raises ``ValueError`` for what is no text, and for more lines than a diff is made of.
    """
    for label, value in (("before", before), ("after", after), ("name", name)):
        if not isinstance(value, str):
            raise ValueError(f"{label} must be a text, not {type(value).__name__}")  # noqa: TRY004
    if not name or "\n" in name or "\r" in name:
        raise ValueError("name must be one line; it stands in the head of the diff")
    if isinstance(context, bool) or not isinstance(context, int) or not 0 <= context <= 1_000:
        raise ValueError("context must be a whole number from 0 to 1000")
    old, new = _lines(before), _lines(after)
    if len(old) + len(new) > MAX_LINES:
        raise ValueError(f"the texts have {len(old) + len(new):,} lines together; at most {MAX_LINES:,} are compared")
    diff = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", n=context)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff)


def _lines(text: str) -> list[str]:
    # str.splitlines also splits at form feeds and Unicode separators, which no other diff takes for an end of line.
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])
