"""A log sink that fails, at any line that a pool logs: nothing of what the pool does depends on it."""

from __future__ import annotations

import ast
import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

import executor
import pool as pool_package
from executor.common.log import lost_lines
from executor.engine.protocol import Engine, ImageInfo
from executor.errors import EngineFailed, PoolUnusable
from executor.sandbox.profile import LABEL_POOL
from pool.ledger import private_files
from pool.ledger.ledger import Entry, StateDirectory
from pool.pool import SandboxPool
from pool.session import Session
from pool.supervisor.sessions import SessionEnd
from pool.supervisor.startup import MakeImage, make_image
from tests.pool.supervisor.test_adoption import change_entry, left_by
from tests.support.pools import (
    LATENCY,
    assert_balanced,
    assert_closed,
    count,
    outcome,
    settings_of,
    until,
    virtual_backend,
    wall_clock_follows,
)
from tests.support.scripted import IMAGE, Fault, ScriptedEngine
from tests.support.scripted_runner import dies

pytestmark = pytest.mark.anyio

PACKAGES = [Path(str(package.__file__)).parent for package in (executor, pool_package)]
BROKEN = Fault(error=EngineFailed("broken"))


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return virtual_backend()


@pytest.fixture(autouse=True)
def _virtual_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_clock_follows(monkeypatch)


class Sink:
    """Raises ``error`` at each line whose event is in ``bad``; with ``once`` at the first one only. ``seen`` are all events."""

    def __init__(self) -> None:
        self.bad: set[str] | None = set()
        self.once = False
        self.error: BaseException = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.seen: list[str] = []
        self.raised = 0

    def __call__(self, logger: Any, method: str, line: MutableMapping[str, Any]) -> str:
        self.seen.append(line["event"])
        if (self.bad is None or line["event"] in self.bad) and not (self.once and self.raised):
            self.raised += 1
            raise self.error
        return str(line)


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()
    structlog.configure(
        processors=[sink],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    yield sink
    structlog.reset_defaults()


# --- what is logged, and how it is brought about ----------------------------------------------------------------------


def _is_event(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value


@cache
def logged() -> frozenset[str]:
    """Every event name in the library's source."""
    found = set()
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    levels = {"debug", "info", "warning", "error"}
                    at = 0 if node.func.attr in levels else 1 if node.func.attr == "log_later" else None
                    if at is not None and len(node.args) > at and _is_event(node.args[at]):
                        found.add(ast.literal_eval(node.args[at]))
    return frozenset(found)


Scene = Callable[["Stage"], Awaitable[None]]


class Stage:
    """An engine and a state directory, and the pool that a scene enters."""

    def __init__(self, engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.state_dir, self.monkeypatch = engine, state_dir, monkeypatch

    @asynccontextmanager
    async def pool(self, make: MakeImage = make_image, **keys: Any) -> AsyncIterator[SandboxPool]:
        """A pool that still answers after whatever was done in it, closes, and leaves nothing."""
        settings = settings_of(self.state_dir, resync_interval=10, **keys)
        async with SandboxPool(settings, find=self.engine.find, make_image=make) as pool:
            await until(lambda: pool.snapshot().engine == "up")
            yield pool
            await self.answers(pool)
        assert_closed(pool, self.engine)

    async def acquired(self, pool: SandboxPool, name: str) -> Session:
        """A session, asked for until there is one."""
        with anyio.fail_after(600):
            while True:
                session = await outcome(lambda: pool.acquire("agent", name))
                if isinstance(session, Session):
                    return session
                await anyio.sleep(1)

    async def answers(self, pool: SandboxPool) -> None:
        session = await self.acquired(pool, "after")
        for _ in range(2):
            assert (await session.call(code="echo x", timeout=30)).ok
        for _ in range(pool.settings.pool.max_cold + 1):
            assert (await pool.call_cold(code="echo x", timeout=30)).ok
        await anyio.sleep(30)
        assert_balanced(pool)


def _disk_is_full(*args: Any, **words: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def plain(stage: Stage) -> None:
    async with stage.pool() as pool:
        session = await pool.acquire("agent", "session")
        assert (await session.call(code="echo x")).ok
        assert (await session.call(code="exit 3")).exit_code == 3
        assert (await pool.call_cold(code="echo x")).ok
        pool.resize(max_sandboxes=3)
        await session.close()
        await anyio.sleep(10)


async def engine_trouble(stage: Stage) -> None:
    engine = stage.engine
    async with stage.pool(min_standby=2) as pool:
        await until(lambda: count(pool, "standby") == 2)
        engine.down()
        await anyio.sleep(20)
        engine.up()
        await until(lambda: count(pool, "standby") == 2)
        engine.faults["start"] = [BROKEN]
        engine.faults["remove"] = [BROKEN, BROKEN]
        session = await stage.acquired(pool, "session")
        engine.faults["attach"] = [BROKEN]
        await outcome(lambda: session.call(code="echo x"))
        await anyio.sleep(5)
        engine.misdeeds["call"] = [dies]
        await outcome(lambda: session.call(code="echo x"))
        engine.always["remove"], engine.lose = BROKEN, {"destroy"}  # killed, and not known to be removed
        await outcome(lambda: pool.call_cold(code="hang", timeout=5))
        del engine.always["remove"]
        engine.lose = set()
        engine.faults["kill"] = [BROKEN]
        engine.misdeeds["call"] = [dies]
        await outcome(lambda: session.call(code="echo x"))
        await anyio.sleep(60)


async def name_taken(stage: Stage) -> None:
    async with stage.pool() as pool:
        stage.engine.foreign(pool._shell.containers.name(1))
        session = await pool.acquire("agent", "session")
        del stage.engine.boxes[pool._shell.containers.name(1)]
        await session.close()


async def leftovers(stage: Stage) -> None:
    engine, place = stage.engine, stage.state_dir
    boxes = await left_by(engine, settings_of(place, min_standby=3))
    change_entry(place, boxes[0].name, boot="other")  # not fit by what is known
    (place / "staging" / boxes[1].name / "nonce").write_text("another\n")  # not fit as it is looked at
    state = StateDirectory.open(place)
    for name in ("mine", "stuck", "theirs"):
        state.enter(Entry(name, "bound", "" if name == "mine" else "c" * 64))
    state.stage("stray")
    state.close()
    engine.foreign("mine", {LABEL_POOL: state.pool_id})
    engine.foreign("theirs")
    engine.faults["remove"] = [BROKEN]
    remove = StateDirectory.remove_stray
    tries: list[Path] = []

    def once(state: StateDirectory, path: Path) -> None:
        tries.append(path)
        _disk_is_full() if len(tries) == 1 else remove(state, path)

    stage.monkeypatch.setattr(StateDirectory, "remove_stray", lambda state, path: _unusable(once, state, path))
    async with stage.pool(min_standby=3) as pool:
        await until(lambda: count(pool, "standby") == 3)
        await anyio.sleep(300)
        engine.boxes.pop("theirs", None)
        StateDirectory.remove_stray(pool._shell.directory, place / "staging" / "stray")


def _unusable(work: Callable[..., None], state: StateDirectory, path: Path) -> None:
    with state._writing():
        work(state, path)


async def damaged(stage: Stage) -> None:
    place = stage.state_dir
    StateDirectory.open(place).close()
    (place / "ledger" / "notes.txt").touch()
    (place / "ledger" / "cut.bound").touch()
    async with stage.pool():
        await anyio.sleep(300)
        (place / "ledger" / "notes.txt").unlink()


async def full_disk(stage: Stage) -> None:
    async with stage.pool() as pool:
        with stage.monkeypatch.context() as patched:
            patched.setattr(private_files, "write_private", _disk_is_full)
            await outcome(lambda: pool.acquire("agent", "session"))
        await anyio.sleep(60)
        with stage.monkeypatch.context() as patched:
            stage.engine.before = lambda what: (
                patched.setattr(private_files, "write_private", _disk_is_full) if what == "attach" else None
            )
            assert (await pool.call_cold(code="echo x")).ok
            stage.engine.before = lambda what: None
        with stage.monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", _disk_is_full)
            assert (await pool.call_cold(code="echo x")).ok
        with stage.monkeypatch.context() as patched:
            patched.setattr(Path, "rename", _disk_is_full)
            await outcome(lambda: pool.acquire("agent", "session"))
        await anyio.sleep(60)


async def no_image(stage: Stage) -> None:
    engine = stage.engine
    del engine.images["default"]

    async def make(asked: Engine, reference: str, report: Callable[[str], None]) -> ImageInfo:
        report("pulling")
        await anyio.sleep(5)
        engine.images["default"] = replace(IMAGE, id="sha256:" + "b" * 64)
        return engine.images["default"]

    async with stage.pool(make) as pool:
        engine.images["default"] = IMAGE
        await (await stage.acquired(pool, "session")).close()


async def no_python(stage: Stage) -> None:
    stage.engine.python = False
    async with stage.pool() as pool:
        session = await pool.acquire("agent", "session")
        stage.engine.faults["inspect"] = [BROKEN]
        await outcome(lambda: session.call(["kill 9"]))
        await anyio.sleep(10)
        stage.engine.python = True
        pool._shell.containers._python.clear()
        await session.close()


async def nothing_goes(stage: Stage) -> None:
    async with SandboxPool(settings_of(stage.state_dir), find=stage.engine.find) as pool:
        await pool.acquire("agent", "session")
        stage.engine.always["remove"] = BROKEN
        stage.engine.always["inspect"] = BROKEN
    assert_balanced(pool)
    assert len(stage.engine.boxes) == 1


async def callback_fails(stage: Stage) -> None:
    def callback(end: SessionEnd) -> None:
        raise ZeroDivisionError

    settings = settings_of(stage.state_dir)
    async with SandboxPool(settings, find=stage.engine.find, on_session_ended=callback) as pool:
        await (await stage.acquired(pool, "agent")).close()
        await stage.answers(pool)
    assert_closed(pool, stage.engine)


async def supervisor_fails(stage: Stage) -> None:
    async def bug() -> None:
        raise ZeroDivisionError

    pool = await SandboxPool(settings_of(stage.state_dir), find=stage.engine.find).start()
    await stage.acquired(pool, "agent")
    pool._shell.life.tasks.start_soon(bug)
    assert isinstance(await outcome(pool.aclose), PoolUnusable)
    assert stage.engine.boxes == {}
    async with stage.pool():
        pass  # its lock was given back


SCENES: dict[str, tuple[Scene, list[str]]] = {
    "callback fails": (callback_fails, ["pool.callback_failed"]),
    "supervisor fails": (supervisor_fails, ["pool.failed"]),
    "plain": (plain, [
        "pool.started", "pool.engine_up", "sandbox.started", "session.bound", "call.ended", "pool.resized",
        "session.forgotten", "sandbox.stopped", "pool.closed",
    ]),
    "engine trouble": (engine_trouble, [
        "pool.engine_down", "runner.not_armed", "runner.lost", "sandbox.start_failed", "sandbox.stop_failed",
        "sandbox.kill_failed", "cold.remove_failed",
    ]),
    "name taken": (name_taken, ["sandbox.name_taken"]),
    "leftovers": (leftovers, [
        "pool.foreign_container", "pool.swept", "pool.not_swept", "pool.staging_stays", "sandbox.adopted",
        "sandbox.not_adopted",
    ]),
    "damaged": (damaged, ["pool.state_repaired", "pool.foreign_files"]),
    "full disk": (full_disk, ["sandbox.start_refused", "pool.id_not_noted", "pool.entry_stays"]),
    "no image": (no_image, ["pool.image", "pool.image_changed"]),
    "no python": (no_python, ["sandbox.unknown_state"]),
    "nothing goes": (nothing_goes, ["pool.left_behind"]),
}  # fmt: skip

OF_COMMANDS = frozenset({
    "process.sigchld_was_ignored", "engine.log_not_rotated",
    "doctor.events_lost", "doctor.remove_failed", "doctor.unexpected", "engine.apt", "engine.killed", "engine.no_answer",
    "engine.not_yet", "engine.remove_again", "engine.started", "engine.stopped", "engine.units_disabled",
    "engine.unmounted", "host.left_behind", "host.limit_not_set", "host.survivors",
    "image.leftovers", "image.no_pull", "tool.retried",
})  # fmt: skip
"""What is logged by the doctor, the private engine, the image's making, the host's calls and the start of processes: no core
waits there."""


def test_every_event_is_in_a_scene_or_no_pools() -> None:
    staged = [event for _, events in SCENES.values() for event in events]
    assert sorted([*staged, *OF_COMMANDS]) == sorted(logged())


def _imported(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_nothing_logs_but_by_the_loggers_that_cannot_raise() -> None:
    logging_themselves = [
        str(file.relative_to(package.parent))
        for package in PACKAGES
        for file in sorted(package.rglob("*.py"))
        if _imported(file) & {"structlog", "logging"}
    ]
    assert logging_themselves == ["executor/common/log.py", "pool/logs.py"]


@pytest.fixture
async def stage(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    async with ScriptedEngine(latency=LATENCY) as engine:
        yield Stage(engine, state_dir, monkeypatch)


@pytest.mark.drawn(cases=15)  # each event by itself; that of all at once is in the quick set
@pytest.mark.parametrize("once", [True, False], ids=["once", "always"])
@pytest.mark.parametrize(("scene", "event"), [(key, event) for key, (_, events) in SCENES.items() for event in events])
async def test_a_sink_that_raises_at_an_event_changes_nothing(
    stage: Stage, sink: Sink, scene: str, event: str, once: bool
) -> None:
    sink.bad, sink.once = {event}, once
    before = lost_lines()
    await SCENES[scene][0](stage)
    assert event in sink.seen
    assert lost_lines() - before == sink.raised > 0


@pytest.mark.parametrize("scene", SCENES)
async def test_a_sink_that_raises_at_everything_changes_nothing(stage: Stage, sink: Sink, scene: str) -> None:
    sink.bad, sink.error = None, BrokenPipeError()
    await SCENES[scene][0](stage)
    assert set(SCENES[scene][1]) <= set(sink.seen)


async def test_the_snapshot_tells_how_many_lines_were_lost(stage: Stage, sink: Sink) -> None:
    async with stage.pool() as pool:
        session = await pool.acquire("agent", "session")
        before = pool.snapshot().lost_log_lines
        sink.bad, sink.error = {"call.ended"}, ValueError()
        for _ in range(3):
            await session.call(code="echo x")
        await pool.call_cold(code="echo x")
        sink.bad = set()
        assert pool.snapshot().lost_log_lines == before + 4


# --- what is no failure of a sink -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["session", "cold"])
async def test_an_interrupt_in_a_sink_comes_out_after_everything_was_done(stage: Stage, sink: Sink, how: str) -> None:
    async with stage.pool(max_cold=1, max_sandboxes=2) as pool:
        session = await pool.acquire("agent", "after")
        sink.bad, sink.error, before = {"call.ended"}, KeyboardInterrupt(), lost_lines()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                await (session.call if how == "session" else pool.call_cold)(code="echo x")
        sink.bad = set()
        assert_balanced(pool)
        assert lost_lines() == before


@pytest.mark.parametrize("event", ["session.bound", "session.forgotten", "pool.resized"])
async def test_an_interrupt_in_a_sink_loses_no_effect_and_no_other_line(stage: Stage, sink: Sink, event: str) -> None:
    async with stage.pool(min_standby=1, max_sandboxes=2) as pool:
        await until(lambda: count(pool, "standby") == 1)
        sink.bad, sink.error, sink.once = {event}, KeyboardInterrupt(), True

        async def use() -> None:
            session = await pool.acquire("agent", "session")
            pool.resize(max_sandboxes=3)
            await session.close()

        with pytest.raises(KeyboardInterrupt):
            await use()
        await anyio.sleep(5)
        assert pool.snapshot().sandboxes.stopping == pool.snapshot().waiting == 0
        assert_balanced(pool)
        assert sink.raised == 1


async def test_an_interrupt_in_the_first_line_of_a_pool_leaves_it_closed(stage: Stage, sink: Sink) -> None:
    sink.bad, sink.error, sink.once = {"pool.started"}, KeyboardInterrupt(), True
    with pytest.raises(KeyboardInterrupt):
        await SandboxPool(settings_of(stage.state_dir), find=stage.engine.find).__aenter__()
    assert stage.engine.asked == {}
    async with stage.pool():
        pass  # its lock was given back


async def test_a_hook_that_uses_the_pool_finds_everything_done(stage: Stage, sink: Sink) -> None:
    async with stage.pool() as pool:
        told: list[tuple[str, int]] = []

        def hook(logger: Any, method: str, line: MutableMapping[str, Any]) -> str:
            told.append((line["event"], count(pool, "bound")))
            if line["event"] == "session.bound":
                pool.resize(max_sandboxes=3)
            return ""

        structlog.configure(processors=[hook])
        await (await pool.acquire("agent", "session")).close()
        await until(lambda: count(pool, "stopping") == 0)
        assert told[:4] == [("sandbox.started", 1), ("session.bound", 1), ("pool.resized", 1), ("session.forgotten", 0)]


async def test_an_interrupt_in_a_line_of_the_pools_own_tasks_ends_the_pool(stage: Stage, sink: Sink) -> None:
    sink.bad, sink.error, sink.once = {"sandbox.started"}, KeyboardInterrupt(), True
    settings = settings_of(stage.state_dir)

    async def use() -> None:
        async with SandboxPool(settings, find=stage.engine.find) as pool:
            await pool.acquire("agent", "session")
            await anyio.sleep(100)

    with pytest.raises(BaseExceptionGroup) as raised:
        await use()
    assert raised.group_contains(KeyboardInterrupt)
    assert not raised.group_contains(Exception)
    async with stage.pool():
        await anyio.sleep(20)  # what was left is removed
        assert stage.engine.boxes == {}


async def test_an_interrupt_in_the_last_line_of_a_pool_comes_out_of_its_close(stage: Stage, sink: Sink) -> None:
    sink.bad, sink.error, sink.once = {"pool.closed"}, KeyboardInterrupt(), True
    pool = await SandboxPool(settings_of(stage.state_dir), find=stage.engine.find).start()
    await stage.acquired(pool, "agent")
    with pytest.raises(KeyboardInterrupt):
        await pool.aclose()
    assert_closed(pool, stage.engine)
    async with stage.pool():
        pass  # its lock was given back
