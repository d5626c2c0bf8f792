"""What the host and the runner say to each other over an exec's stdin and stdout; pure, and hostile-proof on this side.

A frame is a type (1 byte), a sequence number (4), a length (4) and a payload. The sequence number is the call's, counted
by the runner from 1 (0 is its hello), so that a frame of another call is noticed. ``executor/runner.py`` holds the same
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
HELLO, ARMED, OUT, ERR, TAKEN, DONE, CLEAN, DIRTY, POISONED = 17, 18, 19, 20, 21, 22, 23, 24, 25

_HEADER = struct.Struct(">BII")
_LIMITS = {
    HELLO: 2_000_000, ARMED: 0, OUT: 65_536, ERR: 65_536, TAKEN: 8, DONE: 4_096, CLEAN: 64, DIRTY: 64, POISONED: 256,
}  # fmt: skip


class ProtocolError(Exception):
    """The runner said something that no runner says; its sandbox is destroyed."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    seq: int
    payload: bytes


def encode(kind: int, seq: int, payload: bytes = b"") -> bytes:
    """One frame for the runner."""
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

    @property
    def partial(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the runner says of a call that has ended. ``oom`` is ``None`` where no counter could be read."""

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


_REPORT_FIELDS: dict[str, tuple[type, ...]] = {
    "exit_code": (int, type(None)), "signal": (int, type(None)), "timed_out": (bool,), "cancelled": (bool,),
    "oom": (bool, type(None)), "stdout_total": (int,), "stderr_total": (int,), "cpu_seconds": (int, float),
    "max_rss": (int,), "duration": (int, float),
}  # fmt: skip


def parse_object(payload: bytes) -> dict[str, Any]:
    """A JSON object, or ``ProtocolError``."""
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a payload that is not JSON") from error
    if not isinstance(content, dict):
        raise ProtocolError("a payload that is not an object")
    return content


def parse_report(payload: bytes) -> Report:
    """The report of a DONE frame, every field checked, or ``ProtocolError``."""
    content = parse_object(payload)
    if content.keys() != _REPORT_FIELDS.keys():
        raise ProtocolError("a report with other fields than a report has")
    for name, kinds in _REPORT_FIELDS.items():
        value = content[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ProtocolError(f"a report whose {name} is a {type(value).__name__}")
        if isinstance(value, int | float) and not 0 <= value < 2**63:
            raise ProtocolError(f"a report whose {name} is out of range")
    code, number = content["exit_code"], content["signal"]
    if (code is None) == (number is None) or (code or 0) > 255 or (number or 0) > 127:
        raise ProtocolError("a report that does not say how the process ended")
    return Report(**content)
