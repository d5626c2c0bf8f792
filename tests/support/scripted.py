"""An engine in memory: containers, execs, events and every way in which a real engine fails.

It fills ``executor.engine.protocol.Engine`` and waits only by ``anyio.sleep``, so under trio's mock clock hours pass at once. Enter
it with ``async with ScriptedEngine() as engine``: what runs in its containers runs in the engine's own tasks, as on a
real one, where killing a client kills nothing inside.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

from executor.engine.attached import PROVED, REFUSED
from executor.engine.protocol import Channel, ContainerGone, EngineEvent, EngineInfo, ImageInfo, Listed, NameTaken
from executor.errors import EmberpoolError, EngineFailed, EngineUnavailable, ImageMissing
from executor.sandbox.cold import PYTHON_MARK, PYTHON_PROBE
from executor.sandbox.request import LOADER
from executor.sandbox.seccomp import WITNESS_ERRNO
from tests.support.scripted_box import (
    Asked,
    Pipe,
    RunWords,
    ScriptedChannel,
    Special,
    hello_of,
    inspect_record,
    probe_output,
    read_field,
    read_request,
    run_steps,
)
from tests.support.scripted_runner import Misdeed, ProgramEnded, ScriptedRunner, runner_program

EPOCH = 1_700_000_000
IMAGE = ImageInfo(id="sha256:" + "a" * 64, env=("PATH=/usr/bin",), architecture="amd64")
DEADLINES = defaultdict(lambda: 15.0, start=60.0)
"""Seconds after which an operation that hangs is given up, as a real engine's client is."""
UNREACHABLE = "Cannot connect to the Docker daemon at unix:///scripted. Is the docker daemon running?"


@dataclass(slots=True, eq=False)
class Box:
    """One container. ``execs`` holds the scope of each process that runs in it, by its exec's ID; ``left`` those of
    processes that ended while something else still holds their streams. ``busy`` counts the calls that run in it."""

    id: str
    words: RunWords
    image: ImageInfo
    running: bool = True
    execs: dict[str, anyio.CancelScope] = field(default_factory=dict)
    main: anyio.CancelScope | None = None
    left: list[anyio.CancelScope] = field(default_factory=list)
    busy: int = 0

    @property
    def name(self) -> str:
        return self.words.name


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one operation. ``error``: raised, and nothing was done. ``late``: the operation is done, but
    its client has given up. ``hang``: nothing happens until the deadline. ``slow``: seconds more. ``garbage``: the
    answer is of no known form, though the operation was done."""

    error: EmberpoolError | None = None
    hang: bool = False
    late: bool = False
    slow: float = 0.0
    garbage: bool = False


class ScriptedEngine:
    """See the module. ``latency`` is seconds by operation (``info image start attach inspect kill remove list``).

    ``faults[operation]`` is used up from its front; ``always[operation]`` holds for as long as it stands.
    ``lose`` are event actions that are never sent; ``repeat`` sends each event twice; ``event_delay`` sends them late.
    ``patch`` changes an inspect record; ``inside`` changes the files that a probe or a hello reads, ``hello`` a hello's
    facts. ``misdeeds`` are what runners do wrong, by place (``tests.support.scripted_runner``); ``runners`` are all that there
    were. ``gates`` are the names that a call's step ``gate NAME`` waits for. Without ``python`` the image has none.
    ``unanswered`` are the starts whose container's ID was never returned. ``before`` is called with each operation;
    ``asked`` counts them; ``sent`` are all events.
    """

    def __init__(self, *, latency: dict[str, float] | None = None) -> None:
        self.latency = defaultdict(float, latency or {})
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.always: dict[str, Fault] = {}
        self.lose: set[str] = set()
        self.repeat, self.event_delay = False, 0.0
        self.patch: Callable[[dict[str, Any]], None] = lambda record: None
        self.inside: Callable[[bytes], bytes] = lambda output: output
        self.hello: Callable[[dict[str, Any]], None] = lambda facts: None
        self.proof, self.witness = PROVED, WITNESS_ERRNO
        self.misdeeds: defaultdict[str, list[Misdeed]] = defaultdict(list)
        self.runners: list[ScriptedRunner] = []
        self.gates: set[str] = set()
        self.before: Callable[[str], None] = lambda operation: None
        self.images = {"default": IMAGE}
        self.up_now = True
        self.python = True
        self.boxes: dict[str, Box] = {}
        self.asked: Counter[str] = Counter()
        self.started: list[RunWords] = []
        self.unanswered: dict[str, RunWords] = {}
        self.most = 0
        self.sent: list[EngineEvent] = []
        self._late: deque[EngineEvent] = deque()
        self._listeners: list[MemoryObjectSendStream[EngineEvent]] = []
        self._clients: set[ScriptedChannel] = set()
        self._ids = self._clock = 0
        self._tasks: TaskGroup

    async def __aenter__(self) -> ScriptedEngine:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def find(self) -> tuple[ScriptedEngine, EngineInfo]:
        """The engine and its description, as a pool's ``find`` returns them."""
        return self, await self.info()

    # --- what a test does to it ---------------------------------------------------------------------------------------

    def down(self) -> None:
        """The daemon is killed: every client and event stream ends, containers live on."""
        self.up_now = False
        for channel in list(self._clients):
            channel.end(255, "error during connect: EOF")
        self._cut()

    def up(self) -> None:
        """The next daemon comes up, and ends what the last one left."""
        self.up_now = True
        for box in list(self.boxes.values()):
            self.die(box, 143)

    def kill_clients(self) -> None:
        """Every attached client is killed, and nothing that runs inside."""
        for channel in list(self._clients):
            channel.kill()

    def carry_out_late(self, name: str) -> Box:
        """The daemon carries out a start that its client gave up."""
        return self._run_detached(self.unanswered[name])

    def cut_events(self) -> None:
        """Only the event streams end."""
        self._cut()

    def _cut(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def die(self, box: Box, code: int) -> None:
        """A container's PID 1 ends: its execs are killed, and the engine removes it."""
        if not box.running:
            return
        box.running = False
        for exec_id in list(box.execs):
            self._end_exec(box, exec_id)
        for scope in (box.main, *box.left):
            if scope is not None:
                scope.cancel()
        self._event("die", box, exit_code=code)
        if self.boxes.pop(box.name, None) is not None:
            self._event("destroy", box)

    def foreign(self, name: str, labels: dict[str, str] | None = None) -> Box:
        """Somebody else's container."""
        words = ["run", "--rm", "--name", name, "--memory", "1m"]
        for key, value in (labels or {}).items():
            words += ["--label", f"{key}={value}"]
        box = self.boxes[name] = Box(self._new_id(), RunWords.parse([*words, "other", "sleep"]), IMAGE)
        return box

    def the_box(self) -> Box:
        """The only container there is."""
        (box,) = self.boxes.values()
        return box

    # --- the seam -----------------------------------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        await self._ask("info")
        return EngineInfo(kind="docker", version="scripted", endpoint="scripted", time=f"{self._now() / 1e9:.9f}")

    async def image(self, reference: str) -> ImageInfo:
        await self._ask("image")
        if "default" not in self.images:
            raise ImageMissing(f"looking up image {reference}: No such image")
        return self.images["default"]

    async def start(self, args: Sequence[str]) -> str:
        words = RunWords.parse(args)
        self.unanswered[words.name] = words
        async with self._doing("start"):
            box = self._run_detached(words)
        del self.unanswered[words.name]
        return box.id

    def _run_detached(self, words: RunWords) -> Box:
        box = self._create(words)
        self._tasks.start_soon(self._sleep_out, box)
        return box

    async def inspect(self, name: str) -> dict[str, Any]:
        await self._ask("inspect")
        box = self._box(name)
        if box is None:
            raise ContainerGone(f"inspecting {name}: No such container")
        record = inspect_record(box.words, box.image, box.id, running=box.running)
        self.patch(record)
        return record

    async def kill(self, name: str) -> None:
        async with self._doing("kill"):
            box = self._box(name)
            if box is None:
                raise ContainerGone(f"killing {name}: No such container")
            self.die(box, 137)

    async def remove(self, name: str) -> None:
        async with self._doing("remove"):
            box = self._box(name)
            if box is not None:
                self.die(box, 137)

    async def list(self, label: str, value: str) -> list[Listed]:
        await self._ask("list")
        found = [box for box in self.boxes.values() if box.words.labels.get(label) == value]
        return [Listed(id=box.id, name=box.name, running=box.running) for box in found]

    def attach(self, args: Sequence[str]) -> AbstractAsyncContextManager[Channel]:
        return self._attach(args)

    @asynccontextmanager
    async def _attach(self, args: Sequence[str]) -> AsyncIterator[Channel]:
        channel = ScriptedChannel()
        self._clients.add(channel)
        self._tasks.start_soon(self._serve, channel, tuple(args))
        try:
            yield channel
        finally:
            channel.kill()
            self._clients.discard(channel)

    def events(self, label: str, value: str, since: str) -> AbstractAsyncContextManager[AsyncIterator[EngineEvent]]:
        return self._events(label, value, since)

    @asynccontextmanager
    async def _events(self, label: str, value: str, since: str) -> AsyncIterator[AsyncIterator[EngineEvent]]:
        send, receive = anyio.create_memory_object_stream[EngineEvent](100_000)
        seconds, _, nanos = since.partition(".")
        begin = int(seconds) * 1_000_000_000 + int(nanos.ljust(9, "0"))
        with send, receive:
            if self.up_now:
                for event in self.sent:
                    if event.time >= begin:
                        send.send_nowait(event)
                self._listeners.append(send)
            else:
                send.close()
            try:
                yield receive
            finally:
                if send in self._listeners:
                    self._listeners.remove(send)

    # --- inside -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _doing(self, operation: str) -> AsyncIterator[None]:
        """Around what an operation does: what goes wrong before it, and what goes wrong with its answer."""
        fault = await self._ask(operation, done_elsewhere=True)
        yield
        await self._answer(operation, fault)

    async def _ask(self, operation: str, *, done_elsewhere: bool = False) -> Fault:
        self.asked[operation] += 1
        self.before(operation)
        fault = self.always.get(operation) or Fault()
        if self.faults[operation]:
            fault = self.faults[operation].pop(0)
        await anyio.sleep(self.latency[operation] + fault.slow)
        if not self.up_now:
            raise EngineUnavailable(UNREACHABLE, retry_after=1.0)
        if fault.error is not None:
            raise fault.error
        if fault.hang:
            await self._give_up(operation)
        if not done_elsewhere:
            await self._answer(operation, fault)
        return fault

    async def _answer(self, operation: str, fault: Fault) -> None:
        if fault.late:
            await self._give_up(operation)
        if fault.garbage:
            raise EngineFailed(f"the engine's answer to {operation} has an unknown form", retry_after=1.0)

    async def _give_up(self, operation: str) -> None:
        await anyio.sleep(DEADLINES[operation])
        raise EngineUnavailable(f"`scripted {operation}` did not end in time", retry_after=DEADLINES[operation])

    def _box(self, name: str) -> Box | None:
        return self.boxes.get(name) or next((box for box in self.boxes.values() if box.id == name), None)

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self._ids:064x}"

    def _create(self, words: RunWords) -> Box:
        if words.image not in [image.id for image in self.images.values()]:
            raise ImageMissing("starting a container: No such image")
        if words.name in self.boxes:
            raise NameTaken(f"starting a container: the name {words.name} is already in use by container")
        box = self.boxes[words.name] = Box(self._new_id(), words, IMAGE)
        self.started.append(words)
        self.most = max(self.most, len(self.boxes))
        self._event("create", box)
        self._event("start", box)
        return box

    async def _sleep_out(self, box: Box) -> None:
        """PID 1 of a session sandbox."""
        with anyio.CancelScope() as box.main:
            if box.running:
                await anyio.sleep(float(box.words.argv[1]))
        self.die(box, 0)

    async def _serve(self, channel: ScriptedChannel, args: tuple[str, ...]) -> None:
        """One attached client: a disposable container or an exec, to its end."""
        try:
            if args[0] == "run":
                await self._run_cold(channel, RunWords.parse(args))
            else:
                user = args[args.index("-u") + 1] if "-u" in args else ""
                at = next(i for i in range(2, len(args)) if args[i] in self.boxes or args[i].startswith("emberpool-"))
                await self._run_exec(channel, args[at], args[at + 1 :], user)
        except ContainerGone as error:
            channel.end(1, f"Error response from daemon: {error}")
        except (EmberpoolError, anyio.ClosedResourceError) as error:
            channel.end(125, str(error))

    async def _run_cold(self, channel: ScriptedChannel, words: RunWords) -> None:
        await self._ask("attach")
        if channel.ended:
            return
        box, code = self._create(words), 0
        with anyio.CancelScope() as box.main:
            code = await self._program(channel, box, words.argv, words.one("--user"), "")
        if box.running:
            self.die(box, code)
        channel.end(code if box.main is not None and not box.main.cancelled_caught else 137)

    async def _run_exec(self, channel: ScriptedChannel, name: str, argv: tuple[str, ...], user: str) -> None:
        await self._ask("attach")
        if channel.ended:
            return
        box = self.boxes.get(name)
        if box is None:
            raise ContainerGone(f"No such container: {name}")
        exec_id, code = self._new_id(), 0
        self._event("exec_create", box, detail=" ".join(argv), exec_id=exec_id)
        with anyio.CancelScope() as scope:
            box.execs[exec_id] = scope
            code = await self._program(channel, box, argv, user, exec_id)
        if box.execs.pop(exec_id, None) is not None:
            self._event("exec_die", box, exec_id=exec_id, exit_code=code)
        channel.end(137 if scope.cancelled_caught else code)

    def _end_exec(self, box: Box, exec_id: str) -> None:
        self._event("exec_die", box, exec_id=exec_id, exit_code=137)
        box.execs.pop(exec_id).cancel()

    async def _program(self, channel: ScriptedChannel, box: Box, argv: tuple[str, ...], user: str, exec_id: str) -> int:
        async def special(word: str, rest: str) -> None:
            if word == "die":
                self.die(box, int(rest))
                await anyio.sleep_forever()
            elif word == "oom":
                self._event("oom", box)
                if exec_id in box.execs:
                    self._end_exec(box, exec_id)
                elif not exec_id:
                    self.die(box, 137)
                await anyio.sleep_forever()
            elif word == "lose":
                channel.end(255, "error during connect: EOF")
            elif word == "gate":
                while rest not in self.gates:  # noqa: ASYNC110 - a set has no event
                    await anyio.sleep(0.001)
            elif word == "linger":
                # The process ends, and something that it started keeps its streams open.
                if exec_id in box.execs:
                    box.left.append(box.execs.pop(exec_id))
                    self._event("exec_die", box, exec_id=exec_id, exit_code=int(rest))
                    await anyio.sleep_forever()
            elif word == "kill":
                raise ProgramEnded(signal=int(rest))
            elif word not in ("stubborn", "dirty"):  # nothing asks such a process to end, and nothing cleans after it
                raise AssertionError(f"no such step: {word}")

        if argv[0] == "cat" and len(argv) > 2:
            channel.stdout.write(self.inside(probe_output(box.words, user, argv)))
            return 1
        if argv[0] == "/tool/witness":
            return self.witness
        if argv[0] == "python3" and argv[-1] in (PYTHON_PROBE, "print(1)"):
            answer = "1\n" if argv[-1] == "print(1)" else f"{PYTHON_MARK}3 11\n"
            channel.stdout.write(answer.encode() if self.python else b"")
            return 0 if self.python else 127
        asked = Asked(" ".join(argv))
        if LOADER in argv:
            program = await read_field(channel.stdin)
            if program == runner_program():
                return await self._runner(channel, box, user, special, exec_id)
            asked = Asked("exit 125") if program is None else await read_request(channel.stdin)
            channel.stdout.write(self.proof if program is not None else b"")
            if self.proof == REFUSED:
                return 126
        box.busy += 1
        try:
            return await run_steps(asked, channel, special)
        except ProgramEnded as end:
            return 128 + (end.signal or 0)
        finally:
            box.busy -= 1

    async def _runner(self, channel: ScriptedChannel, box: Box, user: str, special: Special, exec_id: str) -> int:
        def sweep() -> None:
            for other in [one for one in box.execs if one != exec_id]:
                self._end_exec(box, other)

        def busy(more: int) -> None:
            box.busy += more

        facts = hello_of(box.words, user, self.inside)
        facts["alone"] = box.busy == 0
        self.hello(facts)
        send_oom = partial(self._event, "oom", box)
        runner = ScriptedRunner(self, channel, facts, special=special, send_oom=send_oom, busy=busy, sweep=sweep)
        self.runners.append(runner)
        return await runner.run()

    def _now(self) -> int:
        """Nanoseconds of the engine's own clock; no two events have the same."""
        self._clock = max(self._clock + 1, int((EPOCH + anyio.current_time()) * 1e9))
        return self._clock

    def _event(
        self, action: str, box: Box, *, detail: str = "", exec_id: str = "", exit_code: int | None = None
    ) -> None:
        if action in self.lose:
            return
        event = EngineEvent(
            action=action, container=box.id, name=box.name, time=self._now(), detail=detail, exec_id=exec_id,
            exit_code=exit_code,
        )  # fmt: skip
        for _ in range(2 if self.repeat else 1):
            if self.event_delay:
                self._late.append(event)
                self._tasks.start_soon(self._send_late)
            else:
                self._send(event)

    async def _send_late(self) -> None:
        await anyio.sleep(self.event_delay)
        # Late, but in order: tasks that wake at one moment may run in any.
        self._send(self._late.popleft())

    def _send(self, event: EngineEvent) -> None:
        self.sent.append(event)
        for listener in self._listeners:
            listener.send_nowait(event)


__all__ = ["Asked", "Box", "Fault", "Pipe", "ScriptedEngine"]
