"""A pool on the daemon that may be harmed, behind a docker command that a test steers; its sessions are struck at one
moment of their lives, and looked at afterwards."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from executor.engine.docker import CommandLineEngine
from executor.engine.protocol import EngineInfo
from executor.errors import EmberpoolError, SandboxDied
from executor.result import CallResult
from pool.config.load import Settings
from pool.core.handlers import Phase
from pool.pool import SandboxPool
from pool.session import Session
from tests.engine.faulty import IMAGE, LIMIT, Daemon, Recovery, until
from tests.engine.steered import Steered, processes
from tests.support.pools import outcome

MOMENTS = ("idle", "starting", "busy")
HAS_STATE = "import os; print(os.path.exists('/tmp/began'))"
NONE_LEFT = {phase.value: 0 for phase in Phase}


def pool_settings(state_dir: Path, *, sandbox: dict[str, Any] | None = None, **pool: Any) -> Settings:
    """Settings of a small pool without standbys that looks at its engine every second."""
    keys: dict[str, Any] = {
        "min_standby": 0,
        "max_sandboxes": 4,
        "overcommit": True,
        "drain_timeout": 0.1,
        "resync_interval": 1.0,
    }
    keys |= {"state_dir": state_dir, "acquire_timeout": 30.0, **pool}
    return Settings(sandbox={"image": IMAGE, **(sandbox or {})}, pool=keys, call={"grace": 0.2})


@dataclass
class Hit:
    """A session at the moment at which it is struck. ``outcome`` is what its caller got in the end (nobody, while idle),
    ``after`` the answer to its next call."""

    moment: str
    key: str
    container: str
    session: Session | None = None
    generation: str | None = None
    tool: int = 0
    outcome: Session | CallResult | EmberpoolError | None = None
    after: CallResult | None = None
    began: float = field(default_factory=anyio.current_time)
    done: anyio.Event = field(default_factory=anyio.Event)

    def refused(self, *kinds: type[EmberpoolError], started: bool = False) -> EmberpoolError:
        """The outcome, which must be an error of one of these kinds, told as it should be."""
        error = self.outcome
        assert isinstance(error, EmberpoolError), f"{self.moment}: {error!r}"
        assert type(error) in kinds, f"{self.moment}: {error!r}"
        assert error.started is started, f"{self.moment}: {error!r}"
        assert error.retry_after is None or 0 < error.retry_after <= LIMIT, f"{self.moment}: {error.retry_after}"
        return error

    def died(self, *causes: str) -> None:
        """The outcome must be the death of the sandbox under the call, of one of these causes."""
        error = self.refused(SandboxDied, started=True)
        assert isinstance(error, SandboxDied)
        assert error.retryable
        assert error.cause in causes, f"{self.moment}: {error.cause}: {error}"

    @property
    def result(self) -> CallResult:
        assert isinstance(self.outcome, CallResult), f"{self.moment}: {self.outcome!r}"
        return self.outcome

    @property
    def told(self) -> str:
        """The outcome in a word."""
        match self.outcome:
            case SandboxDied(cause=cause, started=started):
                return f"SandboxDied({cause}{'' if started else ', not started'})"
            case EmberpoolError() as error:
                return type(error).__name__
            case CallResult() as result:
                return "timed out" if result.timed_out else "the result"
            case None:
                return "-"
        return "granted"


@dataclass
class Scene:
    """A pool with a session ``other`` that no fault is aimed at, and the record that recoveries go to."""

    fault: str
    daemon: Daemon
    docker: Steered
    pool: SandboxPool
    record: list[Recovery]
    tasks: TaskGroup
    other: Session
    kept: str | None
    hits: int = 0

    def name(self, generation: str | None) -> str:
        assert generation is not None
        return self.pool._shell.containers.name(int(generation.rpartition("-")[2]))

    @asynccontextmanager
    async def at(
        self, moment: str, *, seconds: float = 31.0, then: str = "", timeout: float = LIMIT
    ) -> AsyncIterator[Hit]:
        """A session that is idle, whose sandbox is starting (held where its container is there and looked at), or whose
        call runs. The block strikes it; after the block its caller has had the outcome.

        The call is a shell that waits for ``seconds``, or until its ``sleep`` is killed (``Hit.tool``), and goes on to
        ``then``.
        """
        self.hits += 1
        hit = Hit(moment, f"{moment}-{self.hits}", "")
        if moment == "starting":
            with self.docker.holding("container-inspect"):
                self.tasks.start_soon(self._acquire, hit)
                await until(lambda: hit.done.is_set() or self._started())
                hit.container = self._started()
                hit.began = anyio.current_time()
                yield hit
            await self.outcome(hit)
            return
        session = hit.session = await self.pool.acquire("agent", hit.key)
        hit.generation, hit.container = session.generation, self.name(session.generation)
        if moment == "idle":
            assert (await session.call(["touch", "/tmp/began"])).ok
            await session.ready()
            hit.began = anyio.current_time()
            yield hit
            return
        # A number that no other process of this machine sleeps for.
        mark = f"{seconds + self.hits / 1e4 + os.getpid() / 1e12:.12f}"
        script = f"touch /tmp/began; sleep {mark}; {then}" if then else f"touch /tmp/began; exec sleep {mark}"
        self.tasks.start_soon(self._call, hit, ["sh", "-c", script], timeout)
        await until(lambda: hit.done.is_set() or processes("sleep", mark))
        hit.tool, hit.began = next(iter(processes("sleep", mark)), 0), anyio.current_time()
        assert hit.tool, (
            f"the call ended before it was struck: {hit.outcome!r}"
        )  # a signal to 0 would be one to the tests
        yield hit
        await self.outcome(hit)

    def _started(self) -> str:
        """The container that a start has made, ``""`` while there is none."""
        starting = [self.pool._shell.containers.name(box.n) for box in self.pool._shell.state.in_phase(Phase.STARTING)]
        held = processes(self.docker.binary, "container", "inspect")
        return next((name for name in starting if held), "")

    async def outcome(self, hit: Hit) -> None:
        """Wait until the caller has got it."""
        with anyio.fail_after(LIMIT):
            await hit.done.wait()

    async def _acquire(self, hit: Hit) -> None:
        try:
            hit.outcome = hit.session = await self.pool.acquire("agent", hit.key)
        except EmberpoolError as error:
            hit.outcome = error
        hit.done.set()

    async def _call(self, hit: Hit, argv: list[str], timeout: float) -> None:
        assert hit.session is not None
        try:
            hit.outcome = await hit.session.call(argv, timeout=timeout)
        except EmberpoolError as error:
            hit.outcome = error
        hit.done.set()

    async def answered(self, hit: Hit, *, lost: bool, lifted: float | None = None) -> None:
        """The session's next call is answered; how long that took, from the strike or from ``lifted``, is recorded."""
        with anyio.fail_after(LIMIT):
            if hit.moment == "idle" and lost:
                # A call that comes before the pool has heard of the loss may be told that it had begun.
                await until(lambda: hit.session is None or hit.session.generation != hit.generation)
            while not isinstance(answer := await outcome(lambda: self._next(hit)), CallResult):
                assert isinstance(answer, EmberpoolError), f"{hit.moment}: {answer!r}"
                # Before the next trial is due, whoever asks is told what the last one was.
                assert answer.retryable or type(answer) is type(hit.outcome), f"{hit.moment}: {answer!r}"
                assert not answer.started, f"{hit.moment}: {answer!r}"
                await anyio.sleep(0.05)
        hit.after = answer
        seconds = anyio.current_time() - (lifted or hit.began)
        self.record.append(Recovery(self.fault, hit.moment, hit.told, seconds))

    async def _next(self, hit: Hit) -> CallResult:
        hit.session = hit.session or await self.pool.acquire("agent", hit.key)
        return await hit.session.call(code=HAS_STATE)

    async def recovered(
        self, hit: Hit, *, lost: bool, all_lost: bool = False, lifted: float | None = None, beside: int = 0
    ) -> None:
        """The session's next call works, in another generation where its state was ``lost``; the other session has its
        own as before, or lost it too where ``all_lost``; the books balance, and the engine holds what they say.

        The session is closed then. ``beside`` counts the sessions that have a sandbox besides these two.
        """
        if hit.after is None:
            await self.answered(hit, lost=lost, lifted=lifted)
        assert hit.after is not None
        assert hit.session is not None
        fresh = lost or hit.moment == "starting"
        assert hit.after.stdout == (b"False\n" if fresh else b"True\n"), f"{hit.moment}: {hit.after}"
        assert (hit.after.generation != hit.generation) is fresh
        state = (await self.other.call(code=HAS_STATE)).stdout
        assert state == (b"False\n" if all_lost else b"True\n"), f"{hit.moment}: the other session"
        assert (self.other.generation != self.kept) is all_lost
        if all_lost:
            assert (await self.other.call(["touch", "/tmp/began"])).ok
            self.kept = self.other.generation
        await self.at_rest(bound=2 + beside)
        await hit.session.close()
        await self.at_rest(bound=1 + beside)

    async def at_rest(self, *, bound: int, standby: int = 0) -> None:
        """Nothing is under way any more, and what the engine and the ledger hold is what the snapshot says."""
        wanted = {
            "sandboxes": {**NONE_LEFT, "bound": bound, "standby": standby},
            "waiting": 0, "running": 0, "cold": 0, "engine": "up", "fault": None,
        }  # fmt: skip

        def facts() -> dict[str, object]:
            now = self.pool.snapshot().as_dict()
            return {key: now[key] for key in wanted}

        with suppress(TimeoutError):  # what is wrong then is told by an assertion
            await until(lambda: facts() == wanted)
        assert facts() == wanted
        names = {self.pool._shell.containers.name(n) for n in self.pool._shell.running()}
        assert len(names) == bound + standby
        with suppress(TimeoutError), anyio.fail_after(20.0):
            # What a start that was given up has left is removed by a resync.
            while await self._held() != (names, names):  # noqa: ASYNC110
                await anyio.sleep(0.1)
        assert await self._held() == (names, names)

    async def _held(self) -> tuple[set[str], set[str]]:
        """The containers on the engine, and those that the ledger names (a cold one's entry may outlive it a while)."""
        there = set((await self.daemon.ask("ps", "-a", "--format", "{{.Names}}")).split())
        ledger = (self.pool.settings.pool.state_dir / "ledger").iterdir()
        return there, {file.stem for file in ledger if file.suffix in (".standby", ".bound")}


@asynccontextmanager
async def staged(
    fault: str,
    daemon: Daemon,
    record: list[Recovery],
    settings: Settings,
    *,
    filtered: bool = False,
    patience: float = 15.0,
    place: Path | None = None,
) -> AsyncIterator[Scene]:
    """A scene: the pool is up and its ``other`` session has state. ``patience`` bounds each question to the engine; the steered
    docker is at ``place``, by default beside the state directory."""
    docker = Steered.made(place or settings.pool.state_dir.parent)
    if filtered:
        docker.rule("events", "filter")

    async def find() -> tuple[CommandLineEngine, EngineInfo]:
        return await daemon.found(docker.binary, timeout=patience)

    async with anyio.create_task_group() as tasks, SandboxPool(settings, find=find) as pool:
        await until(lambda: pool.snapshot().engine == "up")
        other = await pool.acquire("agent", "other")
        assert (await other.call(["touch", "/tmp/began"])).ok
        scene = Scene(fault, daemon, docker, pool, record, tasks, other, other.generation)
        yield scene
        tasks.cancel_scope.cancel()
