"""The audit line of each call: one structured log line, which never holds code, arguments, environment or output."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from executor.errors import EmberpoolError
from executor.result import CallResult
from executor.sandbox.request import Call


@dataclass(slots=True)
class AuditEntry:
    """One call under way; ``fields`` are its line. Times are the event loop's, in seconds."""

    call: Call
    asked: float
    began: float | None = None
    outcome: str = "cancelled"
    result: CallResult | None = None

    def start(self, now: float) -> None:
        """Note that its turn has come."""
        self.began = now

    def ended(self, result: CallResult) -> CallResult:
        """Note the result, and return it."""
        self.result = result
        self.outcome = "timed_out" if result.timed_out else "ok" if result.ok else "failed"
        return result

    def failed(self, error: EmberpoolError) -> None:
        """Note an error."""
        self.outcome = error.reason

    def fields(self, now: float, image: str) -> dict[str, Any]:
        """``code`` is the SHA-256 (16 hex digits) of the source or of the argv; ``waited`` is the wait for a turn, ``seconds``
        the whole, both in seconds."""
        call, result = self.call, self.result
        body = call.code if call.code is not None else "\0".join(call.argv)
        more = {} if result is None else {"exit_code": result.exit_code, "signal": result.signal}
        return {
            "kind": call.kind,
            "code": hashlib.sha256(body.encode("utf-8")).hexdigest()[:16],
            "image": image,
            "outcome": self.outcome,
            "waited": round((self.began if self.began is not None else now) - self.asked, 6),
            "seconds": round(now - self.asked, 6),
            **more,
        }
