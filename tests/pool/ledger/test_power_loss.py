"""A state directory after a loss of power or a fault of the disk: any file may be cut at any length, or hold anything."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from executor.common.proc import boot_id
from executor.errors import PoolUnusable
from executor.sandbox.profile import LABEL_POOL
from pool.config.load import Settings
from pool.ledger import identity, ledger, private_files
from pool.ledger.ledger import Entry, StateDirectory
from pool.pool import SandboxPool
from tests.pool.supervisor.test_adoption import change_entry, full, killed, left_by
from tests.support.pools import count, running, settings_of, until
from tests.support.scripted import Box, ScriptedEngine

ID = "0123456789ab"
NAMES = {"standby": f"emberpool-{ID}-0badcafe-1", "bound": f"emberpool-{ID}-0badcafe-2"}
FILES = ["pool.json", f"ledger/{NAMES['standby']}.standby", f"ledger/{NAMES['bound']}.bound"]
GARBAGE = {
    "nothing": b"",
    "zeros": b"\0" * 150,
    "noise": random.Random(7).randbytes(150),
    "not UTF-8": b"\xff",
    "deep": b"[" * 100_000,
    "a number": b"7",
    "null": b"null",
    "a list": b"[]",
    "an object": b"{}",
    "version alone": b'{"version": 1}',
    "too short": b'{"version": 1, "pool_id": "a", "secret": "00"}',
    "a path": b'{"version": 1, "pool_id": "../../../../", "secret": "' + b"00" * 32 + b'"}',
    "wrong types": b'{"version": 1, "pool_id": 123456789012, "secret": 7, "name": 7, "container": 7}',
    "another's entry": json.dumps({"name": "other", "container": "c" * 64, "user": "1:2", "created": 3.5}).encode(),
}


def _made(path: Path) -> dict[str, bytes]:
    """A pool's directory with a standby and a bound sandbox; its files' contents."""
    StateDirectory.open(path).close()
    facts = json.loads((path / "pool.json").read_text())
    (path / "pool.json").write_text(json.dumps({**facts, "pool_id": ID}))
    state = StateDirectory.open(path)
    assert state.pool_id == ID
    state.enter(Entry(NAMES["standby"], "standby", "a" * 64, "1:1", 1_000.0))
    state.enter(Entry(NAMES["bound"], "bound", "b" * 64, "2:2", 1_000.0))
    state.close()
    return {name: (path / name).read_bytes() for name in FILES}


def _hold(path: Path, damaged: str) -> None:
    """The directory opens although the file ``damaged`` is, and lacks nothing but what stood in that file alone."""
    state = StateDirectory.open(path)
    found = {entry.state: entry for entry in state.entries()}
    state.close()
    assert {key: entry.name for key, entry in found.items()} == NAMES
    assert state.pool_id == ID
    assert state.repaired == [damaged]
    assert state.boot == ""
    assert found["standby"].container == ("" if damaged.endswith(".standby") else "a" * 64)
    assert found["bound"].container == ("" if damaged.endswith(".bound") else "b" * 64)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_at_any_length_loses_only_what_it_held(state_dir: Path, name: str) -> None:
    whole = _made(state_dir)
    for length in range(len(whole[name])):
        (state_dir / name).write_bytes(whole[name][:length])
        _hold(state_dir, name)
        for file, content in whole.items():
            (state_dir / file).write_bytes(content)
    state = StateDirectory.open(state_dir)
    assert (state.repaired, state.boot) == ([], boot_id())
    state.close()


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_holds_anything_else_loses_only_what_it_held(state_dir: Path, name: str, kind: str) -> None:
    _made(state_dir)
    (state_dir / name).write_bytes(GARBAGE[kind])
    _hold(state_dir, name)
    if name == "pool.json":  # it is whole again, and there for good
        state = StateDirectory.open(state_dir)
        assert (state.pool_id, state.repaired) == (ID, [])
        state.close()


@pytest.mark.parametrize("code", sorted(identity.UNREADABLE))
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_the_disk_cannot_give_back_loses_only_what_it_held(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    _made(state_dir)

    def read(path: Path) -> str:
        if path == state_dir / name:
            raise OSError(code, os.strerror(code))
        return private_files.read_private(path)

    monkeypatch.setattr(identity, "read_private", read)
    monkeypatch.setattr(ledger, "read_private", read)
    _hold(state_dir, name)


def test_a_want_of_this_moment_is_no_damage(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _made(state_dir)

    def read(path: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for module in (identity, ledger):
        with monkeypatch.context() as patched:
            patched.setattr(module, "read_private", read)
            with pytest.raises(PoolUnusable, match="Too many open files"):
                StateDirectory.open(state_dir)
    assert {name: (state_dir / name).read_bytes() for name in FILES} == whole


def test_a_lost_identity_is_what_the_names_in_the_ledger_tell(state_dir: Path) -> None:
    _made(state_dir)
    (state_dir / "pool.json").unlink()
    _hold(state_dir, "pool.json")


@pytest.mark.parametrize("names", [(), ("box",), (NAMES["bound"], "emberpool-ba9876543210-0badcafe-1")])
def test_where_the_names_tell_no_identity_it_is_new(state_dir: Path, names: tuple[str, ...]) -> None:
    state = StateDirectory.open(state_dir)
    old = state.session_id("a", "b")
    for name in names:
        state.enter(Entry(name, "bound", "c" * 64))
    state.close()
    (state_dir / "pool.json").write_text("")
    state = StateDirectory.open(state_dir)
    assert state.pool_id not in (ID, "ba9876543210")
    assert state.session_id("a", "b") != old
    assert {entry.name for entry in state.entries()} == set(names)
    assert state.repaired == ["pool.json"]


def test_a_first_start_that_was_cut_off_is_no_damage(state_dir: Path) -> None:
    StateDirectory.open(state_dir).close()
    (state_dir / "pool.json").rename(state_dir / ".new-pool.json")
    (state_dir / ".new-pool.json").write_text('{"vers')
    state = StateDirectory.open(state_dir)
    assert state.repaired == []
    assert sorted(file.name for file in state_dir.iterdir()) == ["ledger", "lock", "pool.json", "staging"]


def test_an_identity_of_a_newer_version_is_refused_and_kept(state_dir: Path) -> None:
    _made(state_dir)
    (state_dir / "pool.json").write_text('{"version": 2}')
    with pytest.raises(PoolUnusable, match="newer emberpool"):
        StateDirectory.open(state_dir)
    assert (state_dir / "pool.json").read_text() == '{"version": 2}'
    (state_dir / "pool.json").unlink()
    StateDirectory.open(state_dir).close()  # the lock was given back


@pytest.mark.parametrize("name", ["box.unknown", "box", "...standby", "--force.standby", ".standby", "notes.txt"])
def test_what_no_pool_makes_is_left_in_the_ledger_and_stops_nobody(state_dir: Path, name: str) -> None:
    _made(state_dir)
    (state_dir / "ledger" / name).write_text("precious")
    state = StateDirectory.open(state_dir)
    assert {entry.state: entry.name for entry in state.entries()} == NAMES
    assert (state.repaired, state.foreign) == ([], [f"ledger/{name}"])
    for container in NAMES.values():
        state.drop(container)
    with pytest.raises(PoolUnusable, match="which no pool made"):
        state.destroy()
    assert (state_dir / "ledger" / name).read_text() == "precious"


# --- what is on the disk when -----------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was synced and renamed, in order, by file name."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(file: int) -> None:
        done.append("sync " + Path(f"/proc/self/fd/{file}").readlink().name)
        fsync(file)

    def note_rename(path: Path, target: Path) -> Path:
        done.append(f"rename {path.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_rename)
    return done


def test_an_entry_is_on_the_disk_once_it_is_entered_and_no_later_fact_waits_for_it(
    state_dir: Path, disk: list[str]
) -> None:
    state = StateDirectory.open(state_dir / "pool")
    # What was made, from the outside to the inside; the innermost holds `ledger` and `staging`.
    assert disk[:3] == [f"sync {state_dir.parent.name}", f"sync {state_dir.name}", "sync pool"]
    assert disk[-3:] == ["sync .new-pool.json", "rename .new-pool.json", "sync pool"]
    disk.clear()
    state.enter(Entry("box", "standby"))
    assert disk == ["sync .new-box.standby", "rename .new-box.standby", "sync ledger"]
    disk.clear()
    state.note(Entry("box", "standby", "c" * 64))
    state.bind("box")
    state.drop("box")
    assert [step for step in disk if step.startswith("sync")] == []


@pytest.mark.parametrize("step", ["file", "directory"])
def test_a_sync_that_fails_is_a_refusal(state_dir: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    state = StateDirectory.open(state_dir)
    fsync = os.fsync

    def fail(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").is_dir() == (step == "directory"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(file)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(PoolUnusable, match="Input/output error") as refused:
        state.enter(Entry("box", "standby"))
    assert refused.value.retry_after
    assert not list((state_dir / "ledger").glob(".new-*"))


def test_a_filesystem_that_cannot_sync_a_directory_is_used_all_the_same(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def fail(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(file)

    monkeypatch.setattr(os, "fsync", fail)
    state = StateDirectory.open(state_dir)
    state.enter(Entry("box", "standby"))
    assert state.entries() == [Entry("box", "standby")]


# --- what a start makes of it -----------------------------------------------------------------------------------------


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["start", "cold"])
async def test_a_container_is_in_the_ledger_on_the_disk_before_its_start(
    engine: ScriptedEngine, state_dir: Path, disk: list[str], kind: str
) -> None:
    began: list[list[str]] = []
    operation = "start" if kind == "start" else "attach"
    async with running(engine, settings_of(state_dir)) as pool:
        disk.clear()
        engine.before = lambda what: began.append(list(disk)) if what == operation else None
        await (pool.acquire("agent", "session") if kind == "start" else pool.call_cold(code="echo x"))
    name = next(step.partition(" .new-")[2] for step in began[-1] if step.startswith("sync .new-"))
    assert began[-1][:3] == [f"sync .new-{name}", f"rename .new-{name}", "sync ledger"]


async def _left(engine: ScriptedEngine, settings: Settings) -> list[Box]:
    """What a pool left that was killed with a session and a standby: the session's sandbox first."""
    pool = await SandboxPool(settings, find=engine.find).__aenter__()
    await pool.acquire("agent", "session")
    await full(pool)
    await killed(pool, engine)
    (bound,) = (settings.pool.state_dir / "ledger").glob("*.bound")
    return sorted(engine.boxes.values(), key=lambda box: box.name != bound.stem)


@pytest.mark.anyio
@pytest.mark.parametrize("change", [lambda text: b"", lambda text: text[:40], lambda text: b"\0" * len(text)])
@pytest.mark.parametrize("part", ["pool.json", "*.bound", "*.standby", "every"])
async def test_a_start_after_damage_removes_what_the_ledger_names_and_nothing_else(
    engine: ScriptedEngine, state_dir: Path, part: str, change: Callable[[bytes], bytes]
) -> None:
    settings = settings_of(state_dir, min_standby=1)
    left = await _left(engine, settings)
    pool_id = json.loads((state_dir / "pool.json").read_text())["pool_id"]
    # Labels prove nothing: this one is in no ledger.
    other = engine.foreign(f"emberpool-{pool_id}-0badcafe-1", {LABEL_POOL: pool_id})
    for file in [state_dir / "pool.json", *(state_dir / "ledger").iterdir()]:
        if part == "every" or file.match(part):
            file.write_bytes(change(file.read_bytes()))
    with capture_logs() as lines:
        async with SandboxPool(settings, find=engine.find) as pool:
            await full(pool)
            assert pool.snapshot().pool == pool_id
            assert not set(left) & set(engine.boxes.values())
            session = await pool.acquire("agent", "session")
            assert (await session.call(code="echo x")).ok
    (told,) = [line for line in lines if line["event"] == "pool.state_repaired"]
    assert len(told["files"]) == (3 if part == "every" else 1)
    assert list(engine.boxes.values()) == [other]
    assert list((state_dir / "ledger").iterdir()) == []


@pytest.mark.anyio
@pytest.mark.parametrize("boot", ["other", "", None])
async def test_a_standby_of_an_earlier_boot_is_not_taken_over(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch, boot: str | None
) -> None:
    # A loss of power may have undone the move to bound, so that a session may have had it. (On an engine elsewhere it lives.)
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    if boot is None:
        monkeypatch.setattr(ledger, "boot_id", lambda: "")
    else:
        change_entry(state_dir, box.name, boot=boot)
    async with running(engine, settings) as pool:
        await until(lambda: count(pool, "standby") == 1, limit=5)
        assert box not in engine.boxes.values()


@pytest.mark.anyio
async def test_file_that_no_pool_creates_is_reported(engine: ScriptedEngine, state_dir: Path) -> None:
    StateDirectory.open(state_dir).close()
    (state_dir / "ledger" / "notes.txt").write_text("precious")
    with capture_logs() as lines:
        async with SandboxPool(settings_of(state_dir), find=engine.find) as pool:
            await pool.acquire("agent", "session")
    assert [line["files"] for line in lines if line["event"] == "pool.foreign_files"] == [["ledger/notes.txt"]]
    assert [file.name for file in (state_dir / "ledger").iterdir()] == ["notes.txt"]
