"""The host's end of one runner: a ``docker exec`` that is started ahead of its calls and waits for them.

``run`` keeps reading from the exec's first byte to its last, whatever happens (an exec that nobody reads blocks the
daemon's handling of its whole container), and takes each frame into one small state machine. A call only writes, and
waits for the frame that ends it. Only a valid frame is a result; an end of stream never is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import anyio
import anyio.lowlevel

from executor import inside
from executor.common.notifier import Notifier
from executor.common.printable import printable
from executor.engine.channel import keep
from executor.engine.process import Capped
from executor.engine.protocol import Channel, Engine
from executor.errors import EmberpoolError
from executor.sandbox import wire
from executor.sandbox.profile import CALL_ENV
from executor.sandbox.stream import WINDOW as CREDIT
from executor.sandbox.stream import Sink
from executor.sandbox.wire import Decoder, Frame, ProtocolError, Report

WINDOW = 262_144
"""Bytes of a call's stdin that may be under way: less than what fits into the pipes before the runner."""
AT_ONCE = 4_000
"""Bytes of a call that, with what frames them, a pipe takes whole or not at all."""
SEND_TIMEOUT = 10.0
"""Seconds in which a write to an exec must be taken; the runner reads at all times, so a write that hangs has lost it."""


class RunnerState(Enum):
    """Where a runner is in its life. ``CLEANING``: the call has its answer, what it left is being killed."""

    STARTING = "starting"
    HELLO = "hello"
    ARMED = "armed"
    BUSY = "busy"
    CLEANING = "cleaning"
    CLEAN = "clean"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """What a runner is told at its start. ``calls``: how many it serves, 0 for no limit. ``keeper`` is PID 1's uid.
    ``env`` is what every call's environment starts from, ``cwd`` where it begins, ``cpu_seconds`` what it may use;
    ``shared``: other runners serve calls beside it."""

    keeper: str
    files: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = CALL_ENV["HOME"]
    cpu_seconds: int | None = None
    preload: tuple[str, ...] = ()
    calls: int = 1
    shared: bool = False

    def payload(self) -> bytes:
        """The runner's program and its configuration, as the loader and the program read them from stdin."""
        config = {
            "keeper": self.keeper,
            "files": self.files,
            "env": dict(self.env),
            "cwd": self.cwd,
            "cpu_seconds": self.cpu_seconds,
            "preload": self.preload,
            "calls": self.calls,
            "shared": self.shared,
        }
        text = json.dumps(config).encode("ascii")
        program = _program()
        return len(program).to_bytes(4, "big") + program + len(text).to_bytes(4, "big") + text


@cache
def _program() -> bytes:
    return inside.source("runner").encode()


@dataclass(slots=True, eq=False)
class Running:
    """A call under way at the host's end. ``head`` is the frame that begins it, until that is sent; of its stdin, ``sent``
    bytes were sent (``told``: its end too) and the runner has passed on ``taken``.

    ``moved`` tells of more of that, of output that a stream's consumer has taken, and of the end (``over``). ``sink`` is
    where a streamed call's output goes. ``clean``: what it left is proven dead.
    """

    seq: int
    head: bytes
    stdin: bytes
    stdout: Capped
    stderr: Capped
    sink: Sink | None = None
    report: Report | None = None
    refused: str = ""
    clean: bool = False
    over: bool = False
    told: bool = False
    sent: int = 0
    taken: int = 0
    moved: Notifier = field(default_factory=Notifier)

    def finish(self) -> None:
        self.over = True
        self.moved.tell()

    async def end(self) -> None:
        """Wait until it is over."""
        while not self.over:
            await self.moved.wait()

    def due(self) -> bytes:
        """The frames that may be sent now, which then count as sent: the call, input that the runner has room for, and
        credit for what a stream's consumer has taken, once it is worth telling."""
        upto = min(len(self.stdin), self.taken + WINDOW)
        parts = [self.head, *_input(self.seq, self.stdin, self.sent, upto)]
        self.head, self.sent = b"", upto
        if upto == len(self.stdin) and not self.told:
            parts.append(wire.encode(wire.INPUT_END, self.seq))
            self.told = True
        if self.sink is not None:
            parts += _credit(self.seq, self.sink.stdout.due(), self.sink.stderr.due())
        return b"".join(parts)


class ArmedRunner:
    """One runner. ``run`` it in a task; ``problem`` names why its sandbox must go, and is empty while all is well.

    ``vouched`` and ``retired`` are its owner's to set: its hello was checked; it may end unasked, as the sweep of another
    runner ends it. ``sweeps`` says what a shared runner that is cleaning up was told (``finish``), ``None`` before that. ``signs`` counts its signs of life
    while it cleans up.
    """

    def __init__(self, engine: Engine, args: list[str], config: RunnerConfig, changed: Callable[[], None]) -> None:
        self.state = self.last = RunnerState.STARTING
        self.facts: dict[str, Any] = {}
        self.problem = ""
        self.stderr = Capped(4_096)
        self.vouched = self.retired = False
        self.sweeps: bool | None = None
        self.signs = 0
        self.scope = anyio.CancelScope()
        self._engine, self._args, self._config, self._changed = engine, args, config, changed
        self._decoder = Decoder()
        self._channel: Channel | None = None
        self._seq = 0
        self._running: Running | None = None
        self._answered: Running | None = None
        self._torn, self._writing = False, anyio.Lock(fast_acquire=True)

    async def run(self) -> None:
        """Attach, send the program, and read to the end. Returns once the exec's client is gone."""
        try:
            with self.scope:
                async with self._engine.attach(self._args) as channel, anyio.create_task_group() as tasks:
                    self._channel = channel
                    tasks.start_soon(keep, channel.receive_stderr, self.stderr)
                    tasks.start_soon(self._send, self._config.payload())
                    try:
                        while self.state is not RunnerState.ENDED and (data := await channel.receive_stdout()):
                            call, state = self._running, self.state
                            for frame in self._decoder.feed(data):
                                self._take(frame)
                            news = self.state is not state
                            if self._running is not call:
                                await anyio.lowlevel.checkpoint()  # whoever waits for the answer goes first
                            if news:
                                self._changed()
                    except ProtocolError as error:  # caught here: the task group would wrap it
                        self.problem = f"protocol: {error}"
                    tasks.cancel_scope.cancel()
        except (EmberpoolError, OSError) as error:  # no client could be started, so nothing inside knows of it
            self.stderr.add(printable(error).encode())
        finally:
            self._channel = None
            if self.state is not RunnerState.ENDED:
                self.last, self.state = self.state, RunnerState.ENDED
            if self._running is not None:
                self._running.finish()
            self._changed()

    async def _send(self, data: bytes) -> bool:
        """Write to the exec; ``False`` where it is gone, does not take it in time, or holds a torn frame."""
        with anyio.move_on_after(SEND_TIMEOUT):
            return await self._write(data)
        return False

    async def _write(self, data: bytes) -> bool:
        """``_send``, for as long as it takes; one after the other. A cancel that was due before tears nothing."""
        async with self._writing:
            if self._channel is None or self._torn:
                return False
            # Cancelled half-way, a write may have sent a part of its frame, and the next would be read as the rest of it.
            self._torn = True
            try:
                await self._channel.send(data)
            except (BrokenPipeError, ConnectionResetError):
                return False
            self._torn = False
            return True

    # --- frames -------------------------------------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        kind, state, call = frame.kind, self.state, self._running
        if frame.seq != self._seq and not (kind == wire.ARMED and frame.seq == self._seq + 1):
            raise ProtocolError(f"a frame of call {frame.seq} during call {self._seq}")
        if kind == wire.HELLO and state is RunnerState.STARTING:
            self.facts = wire.parse_object(frame.payload)
            self._become(RunnerState.HELLO)
        elif kind == wire.ARMED and state in (RunnerState.HELLO, RunnerState.CLEAN) and frame.seq == self._seq + 1:
            self._seq = frame.seq
            self._become(RunnerState.ARMED)
        elif kind in (wire.OUT, wire.ERR) and state is RunnerState.BUSY and call is not None:
            into = call.stdout if kind == wire.OUT else call.stderr
            if into.total + len(frame.payload) > into.cap:
                raise ProtocolError("more output than was asked for")
            into.add(frame.payload)
        elif kind == wire.TAKEN and state is RunnerState.BUSY and call is not None and len(frame.payload) == 8:
            call.taken += int.from_bytes(frame.payload, "big")
            if call.taken > call.sent:
                raise ProtocolError("more input was taken than was sent")
            call.moved.tell()
        elif kind == wire.DONE and state is RunnerState.BUSY and call is not None:
            report = wire.parse_report(frame.payload)
            for into, total in ((call.stdout, report.stdout_total), (call.stderr, report.stderr_total)):
                if into.total > total or (into.total < total and into.total < into.cap):
                    raise ProtocolError("a report of more or less output than has come")
            call.report = report
            self._running, self._answered = None, call
            call.finish()
            self._become(RunnerState.CLEANING)
        elif kind == wire.CLEAN and state is RunnerState.CLEANING and self._answered is not None:
            if self._config.shared and self.sweeps is None:
                raise ProtocolError("clean before it was told how to clean up")
            self._answered.clean = True
            self._become(RunnerState.CLEAN)
        elif kind == wire.CLEANING and state is RunnerState.CLEANING:
            if self._config.shared and self.sweeps is None:
                raise ProtocolError("cleaning up before it was told how to")
            self.signs += 1
            self._changed()
        elif kind == wire.DIRTY and state is RunnerState.CLEANING:
            self.problem = "what the call left could not be proven dead"
            self._become(RunnerState.ENDED)
        elif kind == wire.POISONED and state in (RunnerState.ARMED, RunnerState.BUSY):
            said = printable(frame.payload)
            self.problem = f"it is unfit: {said}"  # not its words alone, which might be those of a broken protocol
            if call is not None:
                call.refused = said
                call.finish()
            self._become(RunnerState.ENDED)
        else:
            raise ProtocolError(f"a frame of type {kind} while {state.value}")

    def _become(self, state: RunnerState) -> None:
        self.last, self.state = self.state, state

    # --- calls --------------------------------------------------------------------------------------------------------

    def begin(
        self, request: bytes, stdin: bytes, *, timeout: float, grace: float, max_output: int, sink: Sink | None = None
    ) -> Running:
        """Claim this armed runner for one call; synchronous, so that no two calls can."""
        if self.state is not RunnerState.ARMED:
            raise RuntimeError(f"a runner that is {self.state.value} takes no call")
        credit = None if sink is None else CREDIT
        header = wire.call_header(timeout=timeout, grace=grace, max_output=max_output, credit=credit)
        head = wire.encode(wire.CALL, self._seq, header + request)
        if sink is None:
            self._running = Running(self._seq, head, stdin, Capped(max_output), Capped(max_output))
        else:
            self._running = Running(self._seq, head, stdin, sink.stdout, sink.stderr, sink)
            sink.on_taken = self._running.moved.tell
        self.sweeps = None
        self._become(RunnerState.BUSY)
        if self._config.shared:
            self._changed()  # others may begin beside it; where it is alone nobody waits for this
        return self._running

    def ask_at_once(self, call: Running) -> None:
        """Send all of a small call now, if that needs no waiting; what is not sent is ``ask``'s."""
        if self._channel is None or self._torn:  # or something is being written now
            return
        if len(call.head) + len(call.stdin) <= AT_ONCE:
            data = call.due()
            if not self._channel.send_at_once(data):
                call.head = data

    async def ask(self, call: Running) -> None:
        """Send a call and its stdin, no faster than the runner takes it, and a stream's credit as its consumer takes.

        Returns when all is sent (where output is streamed: when the call has ended), or nobody reads.
        """
        while not call.over:
            if data := call.due():
                # Without a timeout of its own: the call has one, and what it would be told is the same.
                if not await self._write(data):
                    return
            elif call.told and call.sink is None:
                return
            else:
                await call.moved.wait()

    async def cancel(self, call: Running) -> bool:
        """Ask the runner to end the call: SIGTERM, its grace, SIGKILL; whether it could be asked.

        What the call still writes is not held back any more.
        """
        rest: list[bytes] = []
        if call.sink is not None:
            call.sink.discard()
            rest = _credit(call.seq, call.stdout.cap, call.stderr.cap)
        return await self._send(b"".join((wire.encode(wire.CANCEL, call.seq), *rest)))

    async def finish(self, *, sweep: bool) -> None:
        """Tell a runner that shares its sandbox how to clean up after its call: ``sweep`` everything of the calls' uid,
        the other runners included, or only what came of this call. What it was told is known at once."""
        self.sweeps = sweep
        self._changed()
        await self._send(wire.encode(wire.FINISH, self._seq, wire.FINISH_ALL if sweep else wire.FINISH_OWN))


def _credit(seq: int, stdout: int, stderr: int) -> list[bytes]:
    due = ((wire.OUT, stdout), (wire.ERR, stderr))
    return [wire.encode(wire.CREDIT, seq, bytes((stream,)) + more.to_bytes(8, "big")) for stream, more in due if more]


def _input(seq: int, data: bytes, start: int, end: int) -> list[bytes]:
    return [wire.encode(wire.INPUT, seq, data[at : min(at + 65_536, end)]) for at in range(start, end, 65_536)]
