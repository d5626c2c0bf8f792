"""A runner in memory: what ``executor/inside/runner/`` is on a real engine, with every way in which one could misbehave.

A misdeed is a coroutine function that is run once at one place of a runner's life (``ScriptedEngine.misdeeds``): before
its ``hello``, before it is ``armed``, once it rests armed (``idle``), when a ``call`` has come, and before ``done``,
before it reads how to clean up (``finish``, where it shares its sandbox) and before ``clean``. Where it returns true, the
frame that the runner would have sent there is left out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio

from executor import inside
from executor.sandbox import wire
from tests.support.scripted_box import Asked, Pipe, ScriptedChannel, Special, run_steps
from tests.support.wire import call_header, call_request, report

Misdeed = Callable[["ScriptedRunner"], Awaitable[bool]]
PIPE = 65_536
"""Bytes that the pipe of a call's stdin holds."""
SIGTERM, SIGKILL, SIGXCPU = 15, 9, 24


def runner_program() -> bytes:
    """The program that the host sends first to start a runner."""
    return inside.source("runner").encode()


class RunnerEnded(Exception):
    """The runner's own process ends here."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class ProgramEnded(Exception):
    """A call's main process ends here, in another way than by its last step."""

    def __init__(self, *, code: int | None = None, signal: int | None = None, oom: bool = False) -> None:
        super().__init__(code, signal)
        self.code, self.signal, self.oom = code, signal, oom


# --- misdeeds -----------------------------------------------------------------------------------------------------------


def says(data: bytes | Callable[[ScriptedRunner], bytes], *, instead: bool = True) -> Misdeed:
    """Write ``data`` (or what it makes of the runner)."""

    async def misdeed(runner: ScriptedRunner) -> bool:
        runner.channel.stdout.write(data if isinstance(data, bytes) else data(runner))
        return instead

    return misdeed


async def falls_silent(runner: ScriptedRunner) -> bool:
    """Say and do nothing any more."""
    await anyio.sleep_forever()
    return True


async def dies(runner: ScriptedRunner) -> bool:
    """Be killed."""
    raise RunnerEnded(137)


async def loses_its_client(runner: ScriptedRunner) -> bool:
    """The exec's client is killed from outside; what runs inside sees the end of its stdin."""
    runner.channel.end(-9)
    return False


def takes(seconds: float) -> Misdeed:
    """Be late."""

    async def misdeed(runner: ScriptedRunner) -> bool:
        await anyio.sleep(seconds)
        return False

    return misdeed


def cleans_for(seconds: float) -> Misdeed:
    """Have much to clean up, and send heartbeats meanwhile."""

    async def misdeed(runner: ScriptedRunner) -> bool:
        until = anyio.current_time() + seconds
        while anyio.current_time() < until:
            await anyio.sleep(0.25)
            runner.say(wire.CLEANING)
        return False

    return misdeed


def poisoned(why: bytes) -> Misdeed:
    """Find the sandbox unfit."""

    async def misdeed(runner: ScriptedRunner) -> bool:
        runner.say(wire.POISONED, why)
        raise RunnerEnded(0)

    return misdeed


# --- the runner ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Program:
    """A call's process. ``stopping`` is set once it is to end; ``end`` is how it ended."""

    runner: ScriptedRunner
    header: dict[str, Any]
    request: dict[str, Any]
    stdin: Pipe = field(default_factory=Pipe)
    inbox: Pipe = field(default_factory=Pipe)
    stubborn: bool = False
    timed_out: bool = False
    cancelled: bool = False
    host_gone: bool = False
    stopping: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    end: ProgramEnded = field(default_factory=lambda: ProgramEnded(signal=SIGKILL))
    dirty: bool = False
    cpu_seconds: float = 0.001

    def __post_init__(self) -> None:
        self.began = anyio.current_time()
        self.stdout, self.stderr = Stream(self, wire.OUT), Stream(self, wire.ERR)

    stdout: Stream = field(init=False)
    stderr: Stream = field(init=False)
    began: float = field(init=False)

    async def special(self, word: str, rest: str) -> None:
        match word:
            case "linger":
                raise ProgramEnded(code=int(rest))
            case "kill":
                raise ProgramEnded(signal=int(rest))
            case "oom":
                self.runner.send_oom()
                raise ProgramEnded(signal=SIGKILL, oom=True)
            case "burn":
                self.cpu_seconds = float(self.runner.config["cpu_seconds"])
                raise ProgramEnded(signal=SIGXCPU)
            case "stubborn":
                self.stubborn = True
            case "dirty":
                self.dirty = True
            case _:
                await self.runner.special(word, rest)

    def report(self) -> bytes:
        return report(
            exit_code=self.end.code, signal=self.end.signal, timed_out=self.timed_out, cancelled=self.cancelled,
            oom=self.end.oom, stdout_total=self.stdout.total, stderr_total=self.stderr.total,
            cpu_seconds=self.cpu_seconds, max_rss=9_000_000, duration=anyio.current_time() - self.began,
        )  # fmt: skip


class Stream:
    """One output of a program: frames under the call's cap and credit, the rest counted."""

    def __init__(self, program: Program, kind: int) -> None:
        self.total = 0
        self.credit: int | None = program.header["credit"]
        self.given = anyio.Event()
        self._program, self._kind, self._cap = program, kind, int(program.header["max_output"])

    def give(self, more: int) -> None:
        if self.credit is not None:
            self.credit += more
            self.given.set()

    async def put(self, data: bytes) -> None:
        """Write; a program without credit stands still."""
        while data:
            while self.credit == 0 and self.total < self._cap:
                self.given = anyio.Event()
                await self.given.wait()
            most = PIPE if self.credit is None or self.total >= self._cap else min(PIPE, self.credit)
            chunk, data = data[:most], data[most:]
            kept = chunk[: max(0, self._cap - self.total)]
            self.total += len(chunk)
            if kept:
                if self.credit is not None:
                    self.credit -= len(kept)
                self._program.runner.say(self._kind, kept)


class Engine(Protocol):
    """What a runner needs of its engine."""

    misdeeds: defaultdict[str, list[Misdeed]]
    latency: defaultdict[str, float]


class ScriptedRunner:
    """One runner, from its loader to its end. ``hello`` are its facts; ``most_input`` the most stdin that ever waited;
    ``served`` the code of its calls; ``sweeps`` whether each FINISH asked for a sweep, which ``sweep`` does to the other
    execs."""

    def __init__(
        self,
        engine: Engine,
        channel: ScriptedChannel,
        hello: dict[str, Any],
        *,
        special: Special,
        send_oom: Callable[[], None],
        busy: Callable[[int], None],
        sweep: Callable[[], None],
    ) -> None:
        self.channel, self.hello = channel, hello
        self.special, self.send_oom, self._busy, self.sweep = special, send_oom, busy, sweep
        self.seq = self.most_input = 0
        self.heard: list[int] = []
        self.served: list[str] = []
        self.sweeps: list[bool] = []
        self._inbox = bytearray()
        self.config: dict[str, Any] = {}
        self._engine = engine

    def say(self, kind: int, payload: bytes = b"") -> None:
        self.channel.stdout.write(wire.encode(kind, self.seq, payload))

    async def _place(self, name: str) -> bool:
        """Do what was planned for this place; whether that stands for what the runner would say."""
        await anyio.sleep(self._engine.latency[name])
        planned = self._engine.misdeeds[name]
        return bool(planned) and await planned.pop(0)(self)

    async def run(self) -> int:
        """Live, and return the exit status."""
        stdin = self.channel.stdin
        size = int.from_bytes(await stdin.exactly(4), "big")
        text = await stdin.exactly(size)
        if not size or len(text) < size:
            return 125
        self.config = json.loads(text)
        try:
            await self._live()
        except RunnerEnded as ended:
            return ended.code
        return 0

    async def _live(self) -> None:
        if not await self._place("hello"):
            self.say(wire.HELLO, json.dumps(self.hello).encode("ascii"))
        left = int(self.config["calls"])
        while True:
            self.seq += 1
            if not await self._place("armed"):
                self.say(wire.ARMED)
            await self._place("idle")
            payload = await self._next_call()
            if payload is None:
                return
            if await self._place("call"):
                continue
            program = await self._serve(payload)
            if not await self._place("done"):
                self.say(wire.DONE, program.report())
            beside = self.config["shared"] and not await self._asked_to_sweep()
            if not await self._place("clean"):
                self.say(wire.DIRTY if program.dirty else wire.CLEAN, b"0.001")
            left -= not beside
            if program.dirty or program.host_gone or (not beside and (program.cancelled or left == 0)):
                return

    async def _asked_to_sweep(self) -> bool:
        if await self._place("finish"):
            return False
        while (frame := await self._frame()) is not None:
            kind, seq, payload = frame
            if kind == wire.FINISH and seq == self.seq:
                self.sweeps.append(payload == wire.FINISH_ALL)
                if self.sweeps[-1]:
                    self.sweep()
                return self.sweeps[-1]
        return True

    async def _frame(self) -> tuple[int, int, bytes] | None:
        # Taken whole or not at all: who listens during a call is cancelled at its end.
        inbox = self._inbox
        while len(inbox) < 9 or len(inbox) < 9 + int.from_bytes(inbox[5:9], "big"):
            data = await self.channel.stdin.read()
            if not data:
                return None
            inbox += data
        size = int.from_bytes(inbox[5:9], "big")
        kind, seq, payload = inbox[0], int.from_bytes(inbox[1:5], "big"), bytes(inbox[9 : 9 + size])
        del inbox[: 9 + size]
        self.heard.append(kind)
        return kind, seq, payload

    async def _next_call(self) -> bytes | None:
        while (frame := await self._frame()) is not None:
            kind, seq, payload = frame
            if kind == wire.CALL and seq == self.seq:
                return payload
            if kind == wire.LEAVE:
                return None
        return None

    async def _serve(self, payload: bytes) -> Program:
        program = Program(self, call_header(payload), call_request(payload))
        self._busy(1)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen, program)
                tasks.start_soon(self._pump, program)
                tasks.start_soon(self._pursue, program)
                with program.scope:
                    await self._program(program)
                tasks.cancel_scope.cancel()
        finally:
            self._busy(-1)
        return program

    async def _program(self, program: Program) -> None:
        request = program.request
        steps = request["code"] if "code" in request else " ".join(request["argv"])
        self.served.append(steps)
        try:
            program.end = ProgramEnded(code=await run_steps(Asked(steps, request["env"]), program, program.special))
        except ProgramEnded as end:
            program.end = end

    async def _listen(self, program: Program) -> None:
        while (frame := await self._frame()) is not None:
            kind, seq, payload = frame
            if seq != self.seq:
                continue
            if kind == wire.INPUT:
                program.inbox.write(payload)
                self.most_input = max(self.most_input, len(program.inbox.buffer))
            elif kind == wire.INPUT_END:
                program.inbox.close()
            elif kind == wire.CREDIT:
                stream = program.stdout if payload[0] == wire.OUT else program.stderr
                stream.give(int.from_bytes(payload[1:9], "big"))
            elif kind == wire.CANCEL:
                program.cancelled = True
                program.stopping.set()
        program.host_gone = True
        program.stopping.set()

    async def _pump(self, program: Program) -> None:
        """Move stdin into the pipe of the process as that reads, and report to the host how much was moved."""
        while True:
            while len(program.stdin.buffer) >= PIPE:
                await program.stdin.drained()
            data = await program.inbox.read(PIPE)
            if not data:
                program.stdin.close()
                return
            program.stdin.write(data)
            self.say(wire.TAKEN, len(data).to_bytes(8, "big"))

    async def _pursue(self, program: Program) -> None:
        """SIGTERM at the deadline, at a cancel and at the end of the host; SIGKILL after the grace."""
        with anyio.move_on_after(program.header["timeout"]):
            await program.stopping.wait()
        program.timed_out = not program.stopping.is_set()
        program.end = ProgramEnded(signal=SIGTERM)
        if program.stubborn:
            program.end = ProgramEnded(signal=SIGKILL)
            await anyio.sleep(program.header["grace"])
        program.scope.cancel()
