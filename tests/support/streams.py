"""A runner in memory for tests of streaming: it speaks the runner's frames, and writes what a test has it write."""

from __future__ import annotations

import math
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel

from executor.engine.events import EventHub
from executor.engine.protocol import Channel
from executor.sandbox import wire
from executor.sandbox.request import Call
from executor.sandbox.runner_client import RunnerConfig
from executor.sandbox.runners import RunnerContext, Runners
from tests.support.wire import call_header, report

HEADER = 9


class Exec:
    """One exec with a runner in it, as ``executor.engine.protocol.Channel``. ``tool`` is what its calls do."""

    def __init__(self, tool: Callable[[Exec], Awaitable[None]]) -> None:
        self.tool, self.seq = tool, 0
        self.request: dict[str, Any] = {}
        self.received: list[tuple[int, bytes]] = []
        self.credit = {wire.OUT: 0, wire.ERR: 0}
        self.written = {wire.OUT: 0, wire.ERR: 0}
        self.heard = anyio.Event()
        self.called = anyio.Event()
        self._inbox = bytearray()
        self._preamble = 2
        self._out, self._stdout = anyio.create_memory_object_stream[bytes](math.inf)
        self._silent, self._stderr = anyio.create_memory_object_stream[bytes](0)

    # --- the runner's side --------------------------------------------------------------------------------------------

    def arm(self) -> None:
        self.seq += 1
        self._send_frame(wire.ARMED)

    def emit(self, kind: int, data: bytes = b"") -> None:
        """Say something, whatever the credit."""
        if kind in self.written:
            self.written[kind] += len(data)
        self._send_frame(kind, data)

    async def write(self, kind: int, data: bytes) -> None:
        """Write as a tool does: held back while there is no credit."""
        while data:
            while self.credit[kind] <= 0:
                await self.hear()
            part = data[: min(self.credit[kind], 65_536)]
            self.credit[kind] -= len(part)
            self.emit(kind, part)
            data = data[len(part) :]
            await anyio.lowlevel.checkpoint()

    async def hear(self) -> None:
        """Wait until the host has said something more."""
        self.heard = anyio.Event()
        await self.heard.wait()

    async def until(self, kind: int) -> None:
        while kind not in [said for said, _ in self.received]:
            await self.hear()

    def done(self, **changes: Any) -> None:
        """Report the call, truthfully unless ``changes`` say otherwise, be clean and end, as after a last call."""
        totals = {"stdout_total": self.written[wire.OUT], "stderr_total": self.written[wire.ERR]}
        self.emit(wire.DONE, report(**{**totals, **changes}))
        self.emit(wire.CLEAN)
        self.end()

    def end(self) -> None:
        self._out.close()
        self._silent.close()

    def _send_frame(self, kind: int, data: bytes = b"") -> None:
        self._out.send_nowait(wire.encode(kind, 0 if kind == wire.HELLO else self.seq, data))

    async def run(self) -> None:
        await self.called.wait()
        await self.tool(self)

    # --- the host's side ----------------------------------------------------------------------------------------------

    def send_at_once(self, data: bytes) -> bool:
        return False

    async def send(self, data: bytes) -> None:
        if len(data) > select.PIPE_BUF:  # less is taken whole by a real pipe, so that no cancel can come between
            await anyio.lowlevel.checkpoint()
        self._inbox += data
        while self._preamble:
            size = int.from_bytes(self._inbox[:4], "big")
            if len(self._inbox) < 4 + size:
                return
            del self._inbox[: 4 + size]
            self._preamble -= 1
            if not self._preamble:
                self._send_frame(wire.HELLO, b"{}")
                self.arm()
        while len(self._inbox) >= HEADER:
            size = int.from_bytes(self._inbox[5:9], "big")
            if len(self._inbox) < HEADER + size:
                break
            self._hear(self._inbox[0], bytes(self._inbox[HEADER : HEADER + size]))
            del self._inbox[: HEADER + size]

    def _hear(self, kind: int, data: bytes) -> None:
        self.received.append((kind, data))
        if kind == wire.CALL:
            self.request = call_header(data)
            self.credit = dict.fromkeys(self.credit, self.request["credit"] or 0)
            self.called.set()
        elif kind == wire.CREDIT:
            self.credit[data[0]] += int.from_bytes(data[1:], "big")
        self.heard.set()

    async def close_stdin(self) -> None:
        raise AssertionError("a runner's stdin stays open")

    async def receive_stdout(self) -> bytes:
        try:
            return await self._stdout.receive()
        except anyio.EndOfStream:
            return b""

    async def receive_stderr(self) -> bytes:
        try:
            return await self._stderr.receive()
        except anyio.EndOfStream:
            return b""

    async def wait(self) -> int:
        return 0

    def kill(self) -> None:
        self.end()

    def close(self) -> None:
        for stream in (self._out, self._stdout, self._silent, self._stderr):
            stream.close()


class Room:
    """A sandbox's runners on such execs. ``execs`` are those made so far, ``killed`` why the container was killed."""

    def __init__(self, tool: Callable[[Exec], Awaitable[None]], grace: float) -> None:
        self.execs: list[Exec] = []
        self.killed: list[str] = []
        self._tool, hub = tool, EventHub()
        hub.connected = True
        self.watch = hub.watch("box")
        self.runners = Runners(
            RunnerContext(
                engine=self,  # type: ignore[arg-type]
                hub=hub, watch=self.watch, user="1:1", config=RunnerConfig(keeper="1", files=()),
                grace=grace, check=lambda facts: None, kill=self._kill,
            )
        )  # fmt: skip

    @property
    def now(self) -> Exec:
        return self.execs[-1]

    async def _kill(self, why: str) -> bool:
        self.killed.append(why)
        self.watch.exit_code = 137
        self.watch.died.set()
        return True

    @asynccontextmanager
    async def attach(self, args: Sequence[str]) -> AsyncIterator[Channel]:
        made = Exec(self._tool)
        self.execs.append(made)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            try:
                yield made
            finally:
                tasks.cancel_scope.cancel()
                made.close()

    async def ready(self) -> None:
        await self.runners.wait_armed(5.0)


@asynccontextmanager
async def room(tool: Callable[[Exec], Awaitable[None]], *, grace: float = 0.5) -> AsyncIterator[Room]:
    """Runners that are kept armed while the block lasts."""
    made = Room(tool, grace)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.runners.run)
        await made.ready()
        yield made
        made.runners.close()


def python(**changes: Any) -> Call:
    return Call(code="pass", **changes)
