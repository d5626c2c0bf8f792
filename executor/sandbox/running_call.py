"""One call under way, at the host's end of its runner: what was sent of it, what has come back, and what may be sent next."""

from __future__ import annotations

from dataclasses import dataclass, field

from executor.common.notifier import Notifier
from executor.engine.process import Capped
from executor.sandbox import wire
from executor.sandbox.stream import Sink
from executor.sandbox.wire import Report

WINDOW = 262_144
"""Bytes of a call's stdin that may be under way: less than what fits into the pipes before the runner."""
CHUNK = 65_536
"""Bytes of stdin in one frame at most."""


@dataclass(slots=True, eq=False)
class RunningCall:
    """A call that a runner was claimed for.

    ``frame`` begins the call, and is empty once it was sent. Of ``stdin``, ``sent`` bytes were sent (``input_ended``: its
    end too) and the runner has passed on ``taken``. ``sink`` is where a streamed call's output goes. ``report`` is the
    runner's; ``refused`` is why a runner did not take the call. ``ended``: nothing more comes; ``clean``: what the call left
    is proven dead. ``changed`` notifies of ``taken``, of ``ended``, and of output that a stream's consumer has taken.
    """

    seq: int
    frame: bytes
    stdin: bytes
    stdout: Capped
    stderr: Capped
    sink: Sink | None = None
    report: Report | None = None
    refused: str = ""
    clean: bool = False
    ended: bool = False
    input_ended: bool = False
    sent: int = 0
    taken: int = 0
    changed: Notifier = field(default_factory=Notifier)

    def end(self) -> None:
        """Note that nothing more comes."""
        self.ended = True
        self.changed.notify()

    async def wait_ended(self) -> None:
        """Wait until nothing more comes."""
        while not self.ended:
            await self.changed.wait()

    def next_frames(self) -> bytes:
        """Return the frames that may be sent now, which then count as sent: the call, input that the runner has room for,
        and credit for what a stream's consumer has taken, once there is enough of it."""
        upto = min(len(self.stdin), self.taken + WINDOW)
        parts = [self.frame, *_input(self.seq, self.stdin, self.sent, upto)]
        self.frame, self.sent = b"", upto
        if upto == len(self.stdin) and not self.input_ended:
            parts.append(wire.encode(wire.INPUT_END, self.seq))
            self.input_ended = True
        if self.sink is not None:
            parts += _credit(self.seq, self.sink.stdout.due(), self.sink.stderr.due())
        return b"".join(parts)

    def cancel_frames(self) -> bytes:
        """Return the frames that cancel the call; what a streamed call still writes is not held back any more."""
        parts = [wire.encode(wire.CANCEL, self.seq)]
        if self.sink is not None:
            self.sink.discard()
            parts += _credit(self.seq, self.stdout.cap, self.stderr.cap)
        return b"".join(parts)


def _credit(seq: int, stdout: int, stderr: int) -> list[bytes]:
    due = ((wire.OUT, stdout), (wire.ERR, stderr))
    return [wire.encode(wire.CREDIT, seq, bytes((stream,)) + more.to_bytes(8, "big")) for stream, more in due if more]


def _input(seq: int, data: bytes, start: int, end: int) -> list[bytes]:
    return [wire.encode(wire.INPUT, seq, data[at : min(at + CHUNK, end)]) for at in range(start, end, CHUNK)]
