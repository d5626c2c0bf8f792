"""The frames between host and runner over an exec's stdin and stdout. Pure; whatever bytes a runner sends are handled.

A frame is a type (1 byte), a sequence number (4), a length (4) and a payload. The sequence number is the call's, counted
by the runner from 1 (0 is its hello), so that a frame of another call is noticed. ``executor/inside/runner/`` holds the same
numbers: it runs where this package is not.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CALL, INPUT, INPUT_END, CREDIT, CANCEL, LEAVE, FINISH = 1, 2, 3, 4, 5, 6, 7
FINISH_ALL, FINISH_OWN = b"\x01", b"\x00"
HELLO, ARMED, OUT, ERR, TAKEN, DONE, CLEAN, DIRTY, POISONED, CLEANING = 17, 18, 19, 20, 21, 22, 23, 24, 25, 26

_HEADER = struct.Struct(">BII")
_CALL, _REPORT = struct.Struct(">QQQQ"), struct.Struct(">HBBQQQQQ")
_NO_LIMIT, _NO_CODE = 2**64 - 1, 0xFFFF
_LIMITS = {
    HELLO: 2_000_000, ARMED: 0, OUT: 65_536, ERR: 65_536, TAKEN: 8, DONE: _REPORT.size, CLEAN: 64, DIRTY: 64, POISONED: 256,
    CLEANING: 0,
}  # fmt: skip


class ProtocolError(Exception):
    """The runner broke the protocol; its sandbox is destroyed."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    seq: int
    payload: bytes


def encode(kind: int, seq: int, payload: bytes = b"") -> bytes:
    """Encode one frame for the runner."""
    return _HEADER.pack(kind, seq, len(payload)) + payload


class Decoder:
    """Turns the bytes of a runner into frames. Raises ``ProtocolError`` on an unknown type or a size beyond its type's."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The whole frames that ``data`` completes, in order."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, seq, size = _HEADER.unpack_from(self._buffer)
            limit = _LIMITS.get(kind)
            if limit is None:
                raise ProtocolError(f"a frame of unknown type {kind}")
            if size > limit:
                raise ProtocolError(f"a frame of type {kind} with {size} bytes; at most {limit} are allowed")
            if len(self._buffer) < _HEADER.size + size:
                return
            payload = bytes(self._buffer[_HEADER.size : _HEADER.size + size])
            del self._buffer[: _HEADER.size + size]
            yield Frame(kind, seq, payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A runner's report of a call that has ended. ``oom``: whether the container's counter of out-of-memory kills moved;
    ``None`` where it was not asked (the call was not killed) or could not be read."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    cancelled: bool
    oom: bool | None
    stdout_total: int
    stderr_total: int
    cpu_seconds: float
    max_rss: int
    duration: float


def parse_object(payload: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ``ProtocolError``."""
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a payload that is not JSON") from error
    if not isinstance(content, dict):
        raise ProtocolError("a payload that is not an object")
    return content


def parse_report(payload: bytes) -> Report:
    """Parse the report of a DONE frame. Raises ``ProtocolError``."""
    try:
        code, number, flags, stdout, stderr, cpu, rss, duration = _REPORT.unpack(payload)
    except struct.error as error:
        raise ProtocolError(f"a report of {len(payload)} bytes; it has {_REPORT.size}") from error
    ended = code <= 255 and not number if code != _NO_CODE else 0 < number <= 127
    if not ended or flags & ~15 or (flags & 12) == 8 or (stdout | stderr | cpu | rss | duration) >> 63:
        raise ProtocolError("a report that no call has")
    return Report(
        exit_code=None if code == _NO_CODE else code,
        signal=number or None,
        timed_out=bool(flags & 1),
        cancelled=bool(flags & 2),
        oom=bool(flags & 8) if flags & 4 else None,
        stdout_total=stdout,
        stderr_total=stderr,
        cpu_seconds=cpu / 1e6,
        max_rss=rss,
        duration=duration / 1e6,
    )


def call_header(*, timeout: float, grace: float, max_output: int, credit: int | None) -> bytes:
    """Encode the beginning of a CALL frame; seconds and bytes, ``credit`` of each stream or ``None`` for no limit but the cap's."""
    return _CALL.pack(int(timeout * 1e6), int(grace * 1e6), max_output, _NO_LIMIT if credit is None else credit)
