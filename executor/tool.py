"""A gateway's Python tool: what it is, the source of its call, and what the call's result means for the caller.

The contract. The arguments are one JSON object on stdin. The function named like the tool is called with them as keywords;
what it prints, by whatever means, goes to stderr, and what it returns is the result: a string as it is, nothing for
``None``, else JSON. Whatever awaitable it returns is awaited. ``sys.exit()`` with 0 or nothing is success with an empty
result, and with anything else a failure. Inline code runs as it is, and its stdout is the result. An empty result is
success. Pure.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from keyword import iskeyword
from pathlib import Path
from typing import Any

from executor import inside
from executor.common.printable import printable
from executor.errors import InvalidCall
from executor.result import CallResult

MAX_ERROR = 4_000
"""Characters of what a tool's caller reads when it failed."""

_TRACEBACK = "Traceback (most recent call last):"
_LINKS = (
    "\nDuring handling of the above exception, another exception occurred:\n\n",
    "\nThe above exception was the direct cause of the following exception:\n\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool's name, and its code: a Python ``file`` or ``inline`` source, exactly one of them.

    ``function`` is what is called in the file, by default the function named like the tool. ``directory`` holds the file
    and all that it may import: it is what a sandbox shows the tool, read-only; by default the file's own. Raises
    ``InvalidCall`` naming the field. Whether the file exists is found out where it runs.
    """

    name: str
    file: Path | None = None
    inline: str | None = None
    function: str = ""
    directory: Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not set("/\0").isdisjoint(self.name):
            raise InvalidCall(f"a tool's name must be a non-empty string without / and NUL, not {self.name!r:.60}")
        if (self.file is None) == (self.inline is None):
            raise InvalidCall(f"tool {self.name!r:.60}: give either file (a path) or inline (Python source), not both")
        if self.inline is not None:
            self._check_inline(self.inline)
        else:
            self._place()
            self._choose_function()

    def _check_inline(self, inline: str) -> None:
        if not isinstance(inline, str):
            raise InvalidCall(f"tool {self.name!r:.60}: inline must be a string, not {type(inline).__name__}")
        if self.function or self.directory is not None:
            raise InvalidCall(
                f"tool {self.name!r:.60}: function and directory belong to a file; leave them out for inline"
            )

    def _place(self) -> None:
        for field, value in (("file", self.file), ("directory", self.directory)):
            if value is not None and (not isinstance(value, Path) or "\0" in str(value)):
                raise InvalidCall(f"tool {self.name!r:.60}: {field} must be a path without NUL, not {value!r:.60}")
        assert self.file is not None  # noqa: S101 - one of the two is given
        file = self.file.absolute()
        directory = (self.directory or file.parent).absolute()
        if not file.is_relative_to(directory) or ".." in file.relative_to(directory).parts or file == directory:
            raise InvalidCall(
                f"tool {self.name!r:.60}: its file must stand in its directory, written without ..; {str(file)!r:.200}"
                f" is not below {str(directory)!r:.200}"
            )
        object.__setattr__(self, "file", file)
        object.__setattr__(self, "directory", directory)

    def _choose_function(self) -> None:
        function = self.function or self.name
        if not isinstance(function, str) or not function.isidentifier() or iskeyword(function):
            raise InvalidCall(
                f"tool {self.name!r:.60}: {function!r:.60} cannot be a function's name; give function, a Python identifier"
            )
        object.__setattr__(self, "function", function)

    @property
    def path(self) -> str:
        """Where the file is in its directory, with ``/`` between the names; ``""`` for inline code."""
        if self.file is None or self.directory is None:
            return ""
        return self.file.relative_to(self.directory).as_posix()


def encode_arguments(arguments: object, *, max_input: int) -> bytes:
    """A call's stdin: the arguments as one JSON object, at most ``max_input`` bytes of UTF-8.

    They come as a mapping, or as the JSON text of an object. Raises ``InvalidCall`` naming the argument for what JSON
    cannot say (other keys than strings, NaN and Infinity, lone surrogates) or should not (a key twice in one object).
    """
    if isinstance(arguments, str | bytes):
        arguments = _parsed(arguments, max_input)
    if not isinstance(arguments, Mapping):
        raise InvalidCall(f"arguments must be one JSON object, as a mapping or as text, not {type(arguments).__name__}")
    parts = []
    left = max_input - len("{}")
    for key, value in arguments.items():
        parts.append(_argument(key, value))
        left -= len(parts[-1]) + len(", ")
        if left + len(", ") < 0:
            raise InvalidCall(f"arguments are too large: at most {max_input} bytes are taken (call.max_input)")
    return b"{" + b", ".join(parts) + b"}"


def _parsed(text: str | bytes, max_input: int) -> object:
    if len(text) > max_input:
        raise InvalidCall(f"arguments are too large: at most {max_input} bytes are taken (call.max_input)")
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise InvalidCall(f"arguments are not UTF-8 at byte {error.start}; send JSON text in UTF-8") from error
    except json.JSONDecodeError as error:
        raise InvalidCall(f"arguments are not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise InvalidCall("arguments are nested too deeply; send them flatter") from error
    except ValueError as error:  # a number of more digits than Python takes
        raise InvalidCall(f"arguments are not usable: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidCall(f"argument {key!r:.60} stands twice in one object; send it once")
        found[key] = value
    return found


def _argument(key: object, value: object) -> bytes:
    """One argument, without the braces around it."""
    if not isinstance(key, str):
        raise InvalidCall(f"arguments: a name must be a string, not {type(key).__name__}")
    shown = f"argument {key!r:.60}"
    try:
        text = json.dumps({key: value}, ensure_ascii=False, allow_nan=False)
        data = text[1:-1].encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidCall(f"{shown} holds a lone surrogate; it must be valid Unicode") from error
    except RecursionError as error:
        raise InvalidCall(f"{shown} is nested too deeply; send it flatter") from error
    except (TypeError, ValueError) as error:
        raise InvalidCall(f"{shown} is not JSON: {error}") from error
    # JSON would quietly make strings of numbers that are keys. After `dumps`, which has found the circles.
    inner: list[object] = [value]
    while inner:
        one = inner.pop()
        if isinstance(one, dict):
            for name in one:
                if not isinstance(name, str):
                    raise InvalidCall(
                        f"{shown} has a key that is not a string but {type(name).__name__}; JSON has no such"
                    )
            inner += one.values()
        elif isinstance(one, list | tuple):
            inner += one
    return data


def tool_code(tool: Tool, root: str) -> str:
    """The source of the call; ``root`` is the absolute path at which the code finds the tool's directory.

    Inline code is its own, to the letter. A file's is loaded as a module (never as ``__main__``), with its own directory
    first on ``sys.path`` and ``root`` next; in a package, under its dotted name.
    """
    if tool.inline is not None:
        return tool.inline
    assert tool.directory is not None  # noqa: S101 - a file has one
    # `ascii` writes any string as a literal, a path's undecodable bytes too: none can end it and go on as code.
    words = (root, tool.path, tool.directory.name or "tool", tool.function)
    literals = ", ".join(ascii(word) for word in words)
    return f"{inside.source('tool')}\n\nstart(__name__, {literals}, {_literal('tool_errors')})\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool's caller gets: ``output`` where it is ``ok``, else what went wrong in ``error`` (and no output).

    ``error`` is ``verdict``, what is known here of the call's end, or else the tool's own words, which may claim anything;
    in those, all but line breaks and tabs that a terminal would obey is escaped. Bytes of ``output`` that are no UTF-8 are
    replaced. ``result`` has everything as it came.
    """

    ok: bool
    output: str
    error: str
    result: CallResult
    verdict: str = ""


def tool_result(tool: Tool, result: CallResult) -> ToolResult:
    """What the end of a tool's call means. A function's output that was cut off is an error: half a JSON is none."""
    cut = tool.inline is None and result.stdout_total > len(result.stdout) + result.stdout_streamed
    verdict = _verdict(result) or (_too_long(result) if cut and result.exit_code == 0 else "")
    error = verdict or (_said(result) if result.exit_code != 0 else "")
    output = "" if error else result.stdout.decode("utf-8", "replace")
    return ToolResult(ok=not error, output=output, error=error, result=result, verdict=verdict)


def _verdict(result: CallResult) -> str:
    """What is known here of a call that failed; ``""`` where nothing is besides the tool's own words."""
    if result.timed_out:
        return f"the tool timed out after {result.duration:.3g} s (its own timeout, else call.timeout)"
    if result.oom_killed:
        return "the tool was killed by its memory limit (sandbox.memory_mb)"
    if result.cpu_limit:
        return "the tool was killed by its CPU limit (sandbox.cpu_seconds)"
    if result.signal is not None:
        return f"the tool was killed by signal {result.signal}{_signal_name(result.signal)}"
    if result.exit_code == 0:
        return ""
    if result.stderr_total > len(result.stderr) + result.stderr_streamed:
        return (
            f"the tool ended with exit status {result.exit_code}; it printed {result.stderr_total} bytes, and of why it"
            " failed nothing was kept (call.max_output)"
        )
    return "" if _said(result) else f"the tool ended with exit status {result.exit_code} and said nothing"


def _too_long(result: CallResult) -> str:
    kept = len(result.stdout) + result.stdout_streamed
    return (
        f"the tool returned {result.stdout_total} bytes, and only {kept} are taken (call.max_output):"
        " let it return less, or raise call.max_output"
    )


def _said(result: CallResult) -> str:
    """The end of what a failed tool wrote to stderr: its traceback, with those of the causes, or its last words."""
    text = result.stderr.decode("utf-8", "replace").rstrip()
    begin = text.rfind(_TRACEBACK)
    while begin > 0 and text.endswith(_LINKS, 0, begin) and (cause := text.rfind(_TRACEBACK, 0, begin)) >= 0:
        begin = cause
    text = printable(text[max(begin, 0) :].lstrip("\n"), lines=True)
    return text if len(text) <= MAX_ERROR else "... " + text[4 - MAX_ERROR :]


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


@cache
def _literal(name: str) -> str:
    return ascii(inside.source(name))
