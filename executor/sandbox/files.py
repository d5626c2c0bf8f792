"""Write, read and list a sandbox's files by calls: the request to the program inside, and the meaning of its answer.

Pure. The places are those that calls themselves can write (``/tmp``, ``/dev/shm``), and for reading ``/tool`` too. A path
is resolved inside and must end inside one of them; a relative one begins at ``/tmp``, where calls begin.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from executor import inside
from executor.common.printable import printable
from executor.errors import FileFailed, InvalidCall
from executor.result import CallResult

MAX_PATH = 4_095
"""Bytes that Linux allows in a path (PATH_MAX less its NUL)."""
MAX_REPORT = 4_096
"""Bytes that the program inside may need to say why it refuses."""
REFUSED = 3
"""Exit status of the program inside when it says why on stderr."""

FileKind = Literal["file", "directory", "symlink", "other"]
_KINDS: tuple[FileKind, ...] = ("file", "directory", "symlink", "other")
_CODE = re.compile(r"(E[A-Z0-9]{1,20})?\Z", re.ASCII)
_ODD = frozenset("/\0")
_LIMIT = 2**63
"""Beyond what a kernel stores as a size in bytes, and as a time in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """One entry of a directory; links are not followed. ``size`` is bytes, ``modified`` seconds since the epoch: any that
    the kernel stores, since code gives a file the time that it likes.

    A ``name`` is one component of a path, and may hold any character besides ``/`` and NUL (``executor.common.printable`` makes
    it safe to show). Bytes of it that are not UTF-8 are lone surrogates, as ``os.fsdecode`` makes them; such a name can be
    given back in a path.
    """

    name: str
    kind: FileKind
    size: int
    modified: float


def program() -> str:
    """The Python source that runs inside."""
    return inside.source("files")


def write_request(path: str, data: bytes, *, parents: bool, max_input: int) -> bytes:
    """Return what the program's stdin must hold to write a file. Raises ``InvalidCall``; ``max_input`` is a call's."""
    if not isinstance(data, bytes):
        raise InvalidCall(f"data must be bytes, not {type(data).__name__}")
    if not isinstance(parents, bool):
        raise InvalidCall(f"parents must be True or False, not {type(parents).__name__}")
    head = _head("write", path, size=len(data), parents=parents)
    room = max(0, max_input - len(program().encode()) - len(head))
    if len(data) > room:
        raise InvalidCall(f"data is {len(data)} bytes; at most {room} are taken (call.max_input, less the request)")
    return head + data


def read_request(path: str, max_bytes: int | None, *, max_output: int) -> bytes:
    """Return what the program's stdin must hold to read a file of at most ``max_bytes``. Raises ``InvalidCall``."""
    wanted = max_output if max_bytes is None else max_bytes
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= max_output:
        raise InvalidCall(f"max_bytes must be 0 to {max_output} whole bytes (call.max_output); it is {max_bytes!r:.40}")
    return _head("read", path, max_bytes=wanted)


def list_request(path: str, *, max_output: int) -> bytes:
    """Return what the program's stdin must hold to list a directory. Raises ``InvalidCall``."""
    return _head("list", path, max_bytes=max_output)


def answer(result: CallResult, doing: str, *, most: int | None = None) -> bytes:
    """What the program printed, at most ``most`` bytes. Raises ``InvalidCall`` or ``FileFailed`` where it did not do it;
    ``doing`` begins both."""
    if result.ok:
        kept, total = len(result.stdout), result.stdout_total
        if total > kept:
            raise FileFailed(
                f"{doing}: the answer is {total} bytes; at most {kept} are read (call.max_output)", code="EFBIG"
            )
        if most is not None and kept > most:
            raise FileFailed(f"{doing}: the answer from inside has {kept} bytes; at most {most} were asked for")
        return result.stdout
    if result.timed_out:
        raise FileFailed(f"{doing}: not done within its timeout", code="ETIMEDOUT")
    if result.exit_code == REFUSED and (refusal := _refusal(result.stderr)) is not None:
        if refusal.invalid:
            raise InvalidCall(f"{doing}: {refusal.message}")
        raise FileFailed(f"{doing}: {refusal.message}", code=refusal.code)
    if result.oom_killed:
        raise FileFailed(f"{doing}: the sandbox ran out of memory", code="ENOMEM")
    how = f"exit status {result.exit_code}" if result.signal is None else f"signal {result.signal}"
    last = printable(result.stderr.rstrip().rpartition(b"\n")[2], limit=200)
    raise FileFailed(f"{doing}: the program that does it ended with {how}{f': {last}' if last else ''}")


@dataclass(frozen=True, slots=True)
class _Refusal:
    invalid: bool
    code: str
    message: str


def _refusal(stderr: bytes) -> _Refusal | None:
    """Return why the program did not do it; ``None`` where its answer does not have that form."""
    said = _object(stderr)
    kind, code, message = said.get("kind"), said.get("code"), said.get("message")
    if kind not in ("invalid", "failed") or not isinstance(code, str) or not _CODE.match(code):
        return None
    if not isinstance(message, str) or not message:
        return None
    return _Refusal(kind == "invalid", code, printable(message, limit=1_000))


def parse_listing(data: bytes, doing: str) -> list[FileInfo]:
    """Return the entries that the program printed, each field checked, sorted by name. Raises ``FileFailed``."""
    try:
        rows = json.loads(data)
        if not isinstance(rows, list):
            raise TypeError("a listing is a list")
        return sorted((_entry(*row) for row in rows), key=attrgetter("name"))
    except (ValueError, TypeError, RecursionError) as error:
        raise FileFailed(f"{doing}: the answer from inside is not a listing") from error


def _entry(name: object, kind: object, size: object, modified: object) -> FileInfo:
    known = next((one for one in _KINDS if one == kind), None)
    if not isinstance(name, str) or name in ("", ".", "..") or not _ODD.isdisjoint(name):
        raise ValueError("a name that no entry of a directory has")
    # Raises for a name that cannot be on a disk: lone surrogates, but for those that stand for a byte.
    if len(name.encode("utf-8", "surrogateescape")) > MAX_PATH:
        raise ValueError("a name that is longer than a path")
    if known is None:
        raise ValueError("a kind that no entry of a directory has")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < _LIMIT:
        raise ValueError("a size that no file has")
    # Comparing refuses NaN, and comes before the conversion, which fails for integers beyond a float's range.
    if not isinstance(modified, int | float) or isinstance(modified, bool) or not -_LIMIT <= modified <= _LIMIT:
        raise ValueError("a time that no file has")
    return FileInfo(name=name, kind=known, size=size, modified=float(modified))


def _head(do: str, path: str, **more: object) -> bytes:
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidCall(f"path must be a non-empty string without NUL, not {path!r:.60}")
    try:
        size = len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as error:
        raise InvalidCall(f"path holds a lone surrogate at {error.start}; it must be valid Unicode") from error
    if size > MAX_PATH:
        raise InvalidCall(f"path is {size} bytes; at most {MAX_PATH} are allowed")
    return json.dumps({"do": do, "path": path, **more}).encode("ascii") + b"\n"


def _object(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
