"""The runner's end of the wire, in Python and apart from ``executor/inside/runner/``: what it reads of a call and how it reports."""

from __future__ import annotations

import json
import struct
from typing import Any

_REPORT, _CALL = struct.Struct(">HBBQQQQQ"), struct.Struct(">QQQQ")
_NO_LIMIT, _NO_CODE = 2**64 - 1, 0xFFFF


def report(**changes: Any) -> bytes:
    """The report of a call that ended well; ``changes`` are other values of ``executor.sandbox.wire.Report``'s fields."""
    fields: dict[str, Any] = {
        "exit_code": 0, "signal": None, "timed_out": False, "cancelled": False, "oom": False, "stdout_total": 0,
        "stderr_total": 0, "cpu_seconds": 0.0, "max_rss": 0, "duration": 0.0,
    }  # fmt: skip
    assert changes.keys() <= fields.keys()
    fields |= changes
    code, number = fields["exit_code"], fields["signal"]
    flags = fields["timed_out"] | fields["cancelled"] << 1
    if fields["oom"] is not None:
        flags |= 4 | fields["oom"] << 3
    return _REPORT.pack(
        _NO_CODE if code is None else code,
        number or 0,
        flags,
        fields["stdout_total"],
        fields["stderr_total"],
        round(fields["cpu_seconds"] * 1e6),
        fields["max_rss"],
        round(fields["duration"] * 1e6),
    )


def call_header(payload: bytes) -> dict[str, Any]:
    """What a CALL frame says of its call: seconds, bytes, and the credit or ``None``."""
    timeout, grace, max_output, credit = _CALL.unpack_from(payload)
    return {
        "timeout": timeout / 1e6,
        "grace": grace / 1e6,
        "max_output": max_output,
        "credit": None if credit == _NO_LIMIT else credit,
    }


def call_request(payload: bytes) -> dict[str, Any]:
    """What a CALL frame asks for: ``env``, and ``argv`` or ``code``."""
    return request(payload[_CALL.size :])


def request(data: bytes) -> dict[str, Any]:
    """A call's request as its process reads it."""
    more, size = struct.unpack_from(">II", data)
    assert len(data) == 8 + more + size
    asked: dict[str, Any] = json.loads(data[8 : 8 + more]) if more else {}
    code = data[8 + more :].decode("utf-8")
    assert not code or "argv" not in asked
    return {"env": {}, **asked} if "argv" in asked else {"env": {}, **asked, "code": code}
