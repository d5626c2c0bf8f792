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
from executor.common.printable import printable
from executor.engine.channel import keep
from executor.engine.process import Capped
from executor.engine.protocol import Channel, Engine
from executor.errors import EmberpoolError
from executor.sandbox import wire
from executor.sandbox.profile import CALL_ENV
from executor.sandbox.running_call import RunningCall
from executor.sandbox.stream import WINDOW as CREDIT
from executor.sandbox.stream import Sink
from executor.sandbox.wire import Decoder, Frame, ProtocolError

AT_ONCE = 4_000
"""Bytes of a call that, with their frame, a pipe takes whole or not at all."""
SEND_TIMEOUT = 10.0
"""Seconds that a write to an exec may take; the runner reads at all times, so one that hangs for longer has lost it."""


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
    """What a runner is sent at its start. ``calls``: how many it serves, 0 for no limit. ``keeper`` is PID 1's uid.
    ``files`` are the paths whose content its hello holds. ``env`` is what every call's environment starts from, ``cwd``
    where a call begins, ``cpu_seconds`` what it may use; ``shared``: other runners serve calls beside it."""

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


class ArmedRunner:
    """One runner. ``run`` it in a task; ``problem`` says why its sandbox must go, and is empty while all is well.

    Its owner sets ``verified`` (its hello was checked) and ``retired`` (the sweep of another runner ends it, so it may end
    unasked). ``sweeps`` is how a shared runner cleans up after its call (``clean_up``), ``None`` before that is known.
    ``heartbeats`` counts those that it sends while it cleans up. ``last`` is the state before the present one.
    """

    def __init__(self, engine: Engine, args: list[str], config: RunnerConfig, changed: Callable[[], None]) -> None:
        self.state = self.last = RunnerState.STARTING
        self.facts: dict[str, Any] = {}
        self.problem = ""
        self.stderr = Capped(4_096)
        self.verified = self.retired = False
        self.sweeps: bool | None = None
        self.heartbeats = 0
        self.scope = anyio.CancelScope()
        self._engine, self._args, self._config, self._changed = engine, args, config, changed
        self._decoder = Decoder()
        self._channel: Channel | None = None
        self._seq = 0
        self._running: RunningCall | None = None
        self._answered: RunningCall | None = None
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
                            moved = self.state is not state
                            if self._running is not call:
                                await anyio.lowlevel.checkpoint()  # the caller that waits for the answer goes first
                            if moved:
                                self._changed()
                    except ProtocolError as error:  # caught here: the task group would wrap it
                        self.problem = f"protocol: {error}"
                    tasks.cancel_scope.cancel()
        except (EmberpoolError, OSError) as error:  # no client could be started, so nothing runs inside
            self.stderr.add(printable(error).encode())
        finally:
            self._channel = None
            if self.state is not RunnerState.ENDED:
                self.last, self.state = self.state, RunnerState.ENDED
            if self._running is not None:
                self._running.end()
            self._changed()

    async def _send(self, data: bytes) -> bool:
        """Write to the exec; return ``False`` where it is gone, does not take the data in time, or holds a torn frame."""
        with anyio.move_on_after(SEND_TIMEOUT):
            return await self._write(data)
        return False

    async def _write(self, data: bytes) -> bool:
        """Write like ``_send`` for as long as it takes, one write after the other. A cancel that was due before tears nothing."""
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
            call.changed.notify()
        elif kind == wire.DONE and state is RunnerState.BUSY and call is not None:
            report = wire.parse_report(frame.payload)
            for into, total in ((call.stdout, report.stdout_total), (call.stderr, report.stderr_total)):
                if into.total > total or (into.total < total and into.total < into.cap):
                    raise ProtocolError("a report of more or less output than has come")
            call.report = report
            self._running, self._answered = None, call
            call.end()
            self._become(RunnerState.CLEANING)
        elif kind == wire.CLEAN and state is RunnerState.CLEANING and self._answered is not None:
            if self._config.shared and self.sweeps is None:
                raise ProtocolError("clean before it was asked to clean up")
            self._answered.clean = True
            self._become(RunnerState.CLEAN)
        elif kind == wire.CLEANING and state is RunnerState.CLEANING:
            if self._config.shared and self.sweeps is None:
                raise ProtocolError("cleaning up before it was asked to")
            self.heartbeats += 1
            self._changed()
        elif kind == wire.DIRTY and state is RunnerState.CLEANING:
            self.problem = "what the call left could not be proven dead"
            self._become(RunnerState.ENDED)
        elif kind == wire.POISONED and state in (RunnerState.ARMED, RunnerState.BUSY):
            said = printable(frame.payload)
            self.problem = f"it is unfit: {said}"  # never its words alone: they could begin with "protocol"
            if call is not None:
                call.refused = said
                call.end()
            self._become(RunnerState.ENDED)
        else:
            raise ProtocolError(f"a frame of type {kind} while {state.value}")

    def _become(self, state: RunnerState) -> None:
        self.last, self.state = self.state, state

    # --- calls --------------------------------------------------------------------------------------------------------

    def begin(
        self, request: bytes, stdin: bytes, *, timeout: float, grace: float, max_output: int, sink: Sink | None = None
    ) -> RunningCall:
        """Claim this armed runner for one call; synchronous, so that no two calls can."""
        if self.state is not RunnerState.ARMED:
            raise RuntimeError(f"a runner that is {self.state.value} takes no call")
        credit = None if sink is None else CREDIT
        header = wire.call_header(timeout=timeout, grace=grace, max_output=max_output, credit=credit)
        frame = wire.encode(wire.CALL, self._seq, header + request)
        if sink is None:
            self._running = RunningCall(self._seq, frame, stdin, Capped(max_output), Capped(max_output))
        else:
            self._running = RunningCall(self._seq, frame, stdin, sink.stdout, sink.stderr, sink)
            sink.on_taken = self._running.changed.notify
        self.sweeps = None
        self._become(RunnerState.BUSY)
        if self._config.shared:
            self._changed()  # others may begin beside it; where it is alone nobody waits for this
        return self._running

    def feed_at_once(self, call: RunningCall) -> None:
        """Send all of a small call now, if that needs no waiting; ``feed`` sends what is left."""
        if self._channel is None or self._torn:  # or something is being written now
            return
        if len(call.frame) + len(call.stdin) <= AT_ONCE:
            data = call.next_frames()
            if not self._channel.send_at_once(data):
                call.frame = data

    async def feed(self, call: RunningCall) -> None:
        """Send a call and its stdin, no faster than the runner takes it, and a stream's credit as its consumer takes.

        Returns when all is sent (where output is streamed: when the call has ended), or nobody reads.
        """
        while not call.ended:
            if data := call.next_frames():
                # Without a timeout of its own: the call has one, and its outcome would be the same.
                if not await self._write(data):
                    return
            elif call.input_ended and call.sink is None:
                return
            else:
                await call.changed.wait()

    async def cancel(self, call: RunningCall) -> bool:
        """Ask the runner to end the call (SIGTERM, its grace, SIGKILL) and return whether it could be asked."""
        return await self._send(call.cancel_frames())

    async def clean_up(self, *, sweep: bool) -> None:
        """Ask a runner that shares its sandbox to clean up after its call: ``sweep`` everything of the calls' uid, the other
        runners included, or only what came of this call. ``sweeps`` is set before anything is awaited."""
        self.sweeps = sweep
        self._changed()
        await self._send(wire.encode(wire.FINISH, self._seq, wire.FINISH_ALL if sweep else wire.FINISH_OWN))
