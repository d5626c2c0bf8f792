"""The ledger: what it keeps, what it refuses, and what a start removes because of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.errors import PoolUnusable
from executor.sandbox.profile import LABEL_POOL
from pool.ledger import private_files
from pool.ledger.ledger import Entry, EntryState, StateDirectory
from pool.pool import SandboxPool
from tests.support.pools import count, outcome, running, settings_of, until
from tests.support.scripted import Fault, ScriptedEngine


def _made(path: Path) -> StateDirectory:
    """A state directory that was used once, open."""
    return StateDirectory.open(path)


def _disk_is_full(*args: Any, **words: Any) -> Any:
    """What a call of the system meets then."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_an_entry_is_kept_with_all_its_facts(state_dir: Path) -> None:
    directory = _made(state_dir)
    entry = Entry("box", "standby", "c" * 64, "1:2", 3.5)
    directory.enter(Entry("box", "standby"))
    directory.enter(entry)
    directory.close()
    assert _made(state_dir).entries() == [entry]


def test_binding_moves_an_entry_and_dropping_takes_it_with_its_staging(state_dir: Path) -> None:
    directory = _made(state_dir)
    directory.enter(Entry("box", "standby", "c" * 64))
    place, nonce = directory.stage("box")
    assert (place / "nonce").read_text() == nonce + "\n"
    directory.bind("box")
    assert directory.entries() == [Entry("box", "bound", "c" * 64)]
    directory.drop("box")
    directory.drop("box")
    assert directory.entries() == []
    assert not place.exists()


def test_binding_what_is_not_in_the_ledger_is_refused(state_dir: Path) -> None:
    with pytest.raises(PoolUnusable):
        _made(state_dir).bind("box")


@pytest.mark.parametrize("step", ["write", "rename"])
@pytest.mark.parametrize("method", [StateDirectory.enter, StateDirectory.note])
def test_a_write_that_is_cut_off_leaves_the_old_entry_whole(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, step: str, method: Callable[[StateDirectory, Entry], None]
) -> None:
    directory = _made(state_dir)
    old = Entry("box", "standby", "c" * 64)
    directory.enter(old)

    def cut_off(path: Path, text: str, *, sync: bool) -> None:
        path.write_bytes(b'{"na')
        _disk_is_full()

    with monkeypatch.context() as patched:
        if step == "write":
            patched.setattr(private_files, "write_private", cut_off)
        else:
            patched.setattr(Path, "replace", _disk_is_full)
        with pytest.raises(PoolUnusable, match="No space left") as refused:
            method(directory, Entry("box", "standby", "d" * 64))
        assert refused.value.retry_after
        assert directory.entries() == [old]
    directory.close()
    assert _made(state_dir).entries() == [old]
    assert [file.name for file in (state_dir / "ledger").iterdir()] == ["box.standby"]


@pytest.mark.parametrize("step", ["enter", "bind", "drop", "stage"])
def test_a_full_disk_is_a_refusal_that_says_when_to_come_back(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    directory = _made(state_dir)
    directory.enter(Entry("box", "standby"))
    steps: dict[str, Callable[[], object]] = {
        "enter": lambda: directory.enter(Entry("new", "standby")),
        "bind": lambda: directory.bind("box"),
        "drop": lambda: directory.drop("box"),
        "stage": lambda: directory.stage("box"),
    }
    with monkeypatch.context() as patched:
        patched.setattr(private_files, "write_private", _disk_is_full)
        for operation in ("rename", "unlink", "write_text"):
            patched.setattr(Path, operation, _disk_is_full)
        with pytest.raises(PoolUnusable, match="No space left") as refused:
            steps[step]()
        assert refused.value.retry_after
        assert directory.entries() == [Entry("box", "standby")]
    directory.drop("box")
    assert list((state_dir / "staging").iterdir()) == []


# --- what a sandbox of an earlier start has staged, and what is left of it --------------------------------------------


def test_what_was_staged_is_found_again_by_the_next_start(state_dir: Path) -> None:
    directory = _made(state_dir)
    staged = directory.stage("box")
    directory.close()
    assert _made(state_dir).staged("box") == staged


def _replaced_by_link(place: Path) -> None:
    place.symlink_to(place.rename(place.with_name("elsewhere")))


@pytest.mark.parametrize(
    "touch",
    [
        lambda place: (place / "nonce").unlink(),
        lambda place: (place / "tool").mkdir(),
        lambda place: (place / "nonce").write_text("short\n"),
        lambda place: (place / "nonce").write_bytes(b"\xff" * 33),
        lambda place: _replaced_by_link(place / "nonce"),
        lambda place: _replaced_by_link(place),
        shutil.rmtree,
    ],
)
def test_what_was_staged_and_is_not_as_it_was_left_is_refused(state_dir: Path, touch: Callable[[Path], object]) -> None:
    directory = _made(state_dir)
    place, _ = directory.stage("box")
    touch(place)
    with pytest.raises(PoolUnusable):
        directory.staged("box")


def test_strays_are_what_no_entry_names(state_dir: Path) -> None:
    directory = _made(state_dir)
    directory.enter(Entry("box", "bound"))
    directory.stage("box")
    stray, _ = directory.stage("stray")
    target = state_dir.with_name("target")
    target.mkdir()
    link = state_dir / "staging" / "zlink"
    link.symlink_to(target)
    assert directory.strays() == [stray, link]
    for one in directory.strays():
        directory.remove_stray(one)
    assert directory.strays() == []
    assert target.exists()
    assert (state_dir / "staging" / "box").exists()


def test_a_state_directory_is_not_destroyed_while_it_names_or_holds_anything_else(state_dir: Path) -> None:
    directory = _made(state_dir)
    directory.enter(Entry("box", "bound"))
    with pytest.raises(PoolUnusable, match="still names containers"):
        directory.destroy()
    directory.drop("box")
    (state_dir / "notes.txt").write_text("precious")
    with pytest.raises(PoolUnusable, match=r"holds 'notes.txt', which no pool made"):
        directory.destroy()
    assert (state_dir / "pool.json").exists()
    (state_dir / "notes.txt").unlink()
    directory.destroy()
    assert not state_dir.exists()


# --- what a start removes ---------------------------------------------------------------------------------------------


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


def _left(state_dir: Path, name: str, state: EntryState, container: str) -> str:
    """An earlier instance's entry; the pool's id."""
    directory = _made(state_dir)
    directory.enter(Entry(name, state, container))
    directory.close()
    return directory.pool_id


@pytest.mark.anyio
@pytest.mark.parametrize("state", ["standby", "bound", "cold", "probe"])
@pytest.mark.parametrize("known", [True, False])
async def test_a_start_removes_what_the_ledger_names(
    engine: ScriptedEngine, state_dir: Path, state: EntryState, known: bool
) -> None:
    pool_id = _left(state_dir, "box", state, "")
    box = engine.foreign("box", {LABEL_POOL: pool_id})
    if known:
        _left(state_dir, "box", state, box.id)
    async with running(engine, settings_of(state_dir)) as pool:
        await until(lambda: not engine.boxes and pool.snapshot().engine == "up", limit=5)


@pytest.mark.anyio
async def test_a_start_drops_entries_whose_containers_are_gone(engine: ScriptedEngine, state_dir: Path) -> None:
    _left(state_dir, "box", "bound", "c" * 64)
    async with running(engine, settings_of(state_dir)) as pool:
        await until(lambda: pool.snapshot().engine == "up", limit=5)
        await until(lambda: not list((state_dir / "ledger").iterdir()), limit=5)
        assert engine.asked["remove"] == 0


@pytest.mark.anyio
@pytest.mark.parametrize("known", [True, False])
async def test_a_start_leaves_a_container_alone_that_only_has_the_name(
    engine: ScriptedEngine, state_dir: Path, known: bool
) -> None:
    pool_id = _left(state_dir, "box", "bound", "c" * 64 if known else "")
    # With the ID known even a copied label proves nothing.
    other = engine.foreign("box", {LABEL_POOL: pool_id if known else "somebody"})
    async with SandboxPool(settings_of(state_dir), find=engine.find) as pool:
        await until(lambda: pool.snapshot().engine == "up", limit=5)
    assert list(engine.boxes.values()) == [other]
    assert engine.asked["remove"] == 0
    assert list((state_dir / "ledger").iterdir()) == []


@pytest.mark.anyio
async def test_a_container_with_our_labels_that_the_ledger_does_not_name_is_left_alone(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    directory = _made(state_dir)
    directory.close()
    other = engine.foreign(f"emberpool-{directory.pool_id}-0badcafe-1", {LABEL_POOL: directory.pool_id})
    async with SandboxPool(settings_of(state_dir, min_standby=1), find=engine.find) as pool:
        await until(lambda: count(pool, "standby") == 1, limit=5)
        engine.cut_events()
        await until(lambda: engine.asked["list"] > 1, limit=5)
    assert list(engine.boxes.values()) == [other]


@pytest.mark.anyio
async def test_what_a_start_cannot_remove_stays_in_the_ledger_and_stops_nobody(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    pool_id = _left(state_dir, "box", "bound", "")
    box = engine.foreign("box", {LABEL_POOL: pool_id})
    engine.faults["remove"] = [Fault(garbage=True)]
    engine.faults["inspect"] = [Fault(garbage=True)]
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        assert (await session.call(code="echo x")).ok
        assert box.running
        assert "box.bound" in [file.name for file in (state_dir / "ledger").iterdir()]
        # Each new link sweeps, beside the pool's other work: one whose link is cut before it has begun would be the next resync's.
        engine.cut_events()
        await until(lambda: engine.asked["remove"] > 0 and box not in engine.boxes.values(), limit=30)
        engine.cut_events()
        await until(lambda: not (state_dir / "ledger" / "box.bound").exists(), limit=30)


@pytest.mark.anyio
async def test_a_sandbox_is_in_the_ledger_before_its_start_and_bound_before_its_grant(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        name = pool._shell.containers.name(1)
        engine.before = lambda operation: seen.append((operation, sorted(os.listdir(state_dir / "ledger"))))  # noqa: PTH208
        seen: list[tuple[str, list[str]]] = []
        await pool.acquire("agent", "session")
        assert ("start", [f"{name}.standby"]) in seen
        assert [file.name for file in (state_dir / "ledger").iterdir()] == [f"{name}.bound"]
        entry = json.loads((state_dir / "ledger" / f"{name}.bound").read_text())
        assert entry["container"] == engine.the_box().id


@pytest.mark.anyio
async def test_two_pools_of_one_name_with_two_directories_see_only_their_own(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    places = state_dir.with_name("other"), state_dir
    async with running(engine, settings_of(places[0], name="same", min_standby=1)) as other:
        async with SandboxPool(settings_of(places[1], name="same", min_standby=1), find=engine.find) as pool:
            for one in (pool, other):
                session = await one.acquire("agent", "session")
                assert (await session.call(code="echo x")).ok
                await until(lambda one=one: count(one, "standby") == 1, limit=5)  # type: ignore[misc]
            listed = engine.asked["list"]
            engine.cut_events()
            await until(lambda: engine.asked["list"] >= listed + 2, limit=5)
            for one, place in zip((other, pool), places, strict=True):
                await until(lambda one=one: one._shell.hub.connected, limit=5)  # type: ignore[misc]
                pool_id = one.snapshot().pool
                own = {box.name for box in engine.boxes.values() if box.words.labels[LABEL_POOL] == pool_id}
                assert own == one._shell.containers.names == {file.stem for file in (place / "ledger").iterdir()}
                assert (count(one, "standby"), count(one, "bound")) == (1, 1)
        assert {box.name for box in engine.boxes.values()} == other._shell.containers.names
        assert (await session.call(code="echo x")).ok


@pytest.mark.anyio
async def test_a_ledger_that_cannot_be_written_refuses_and_heals(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        await until(lambda: pool.snapshot().engine == "up", limit=5)
        with monkeypatch.context() as patched:
            patched.setattr(private_files, "write_private", _disk_is_full)
            error = await outcome(lambda: pool.acquire("agent", "session"))
            assert isinstance(error, PoolUnusable)
            assert error.retry_after
            assert engine.asked["start"] == 0
        session = None
        while session is None:
            answer = await outcome(lambda: pool.acquire("agent", "session"))
            if isinstance(answer, PoolUnusable):
                await until(lambda: pool._shell.state.health.binds.retry_at < pool._shell._now, limit=5)
            else:
                session = answer


@pytest.mark.anyio
async def test_a_bind_that_cannot_be_recorded_hands_nothing_out(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(engine, settings_of(state_dir, min_standby=1)) as pool:
        await until(lambda: count(pool, "standby") == 1, limit=5)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", _disk_is_full)
            assert isinstance(await outcome(lambda: pool.acquire("agent", "session")), PoolUnusable)
        assert count(pool, "bound") == 0


@pytest.mark.anyio
@pytest.mark.parametrize("step", ["the ID", "the staging directory"])
async def test_a_disk_that_fills_up_during_a_start_refuses_and_leaks_nothing(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        assert (await pool.call_cold(code="echo x")).ok
        with monkeypatch.context() as patched:
            if step == "the ID":
                engine.before = lambda op: (
                    patched.setattr(private_files, "write_private", _disk_is_full) if op == "start" else None
                )
            else:
                patched.setattr(Path, "write_text", _disk_is_full)
            assert isinstance(await outcome(lambda: pool.acquire("agent", "session")), PoolUnusable)
            await until(lambda: pool._shell.state.sandboxes == {}, limit=5)
            assert engine.boxes == {}
            engine.before = lambda op: None
        # The pool was told of the start although the ledger was not, and its container is gone: nothing is left to wait for.
        assert list((state_dir / "ledger").iterdir()) == []


@pytest.mark.anyio
async def test_an_entry_that_cannot_be_dropped_now_is_dropped_later(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", _disk_is_full)
            await session.close()
            await until(lambda: not engine.boxes, limit=5)
            # Its place counts as taken for as long as its end is not on record.
            await until(lambda: any(box.stop_attempts for box in pool._shell.state.sandboxes.values()), limit=5)
            assert len(list((state_dir / "ledger").iterdir())) == 1
        await until(lambda: not list((state_dir / "ledger").iterdir()), limit=5)
        await until(lambda: pool._shell.state.sandboxes == {}, limit=5)


@pytest.mark.anyio
async def test_a_cold_calls_entry_tells_which_container_is_its_own(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir)) as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: pool.call_cold(code="gate go; echo x"))
        await until(lambda: any(entry.container for entry in pool._shell.directory.entries()), limit=5)
        (entry,) = pool._shell.directory.entries()
        box = engine.the_box()
        assert (entry.name, entry.state, entry.container) == (box.name, "cold", box.id)
        assert entry.user == box.words.one("--user")
        engine.gates.add("go")


@pytest.mark.anyio
async def test_a_cold_call_runs_although_its_containers_id_cannot_be_noted(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        await until(lambda: pool.snapshot().engine == "up", limit=5)
        with monkeypatch.context() as patched:
            engine.before = lambda op: (
                patched.setattr(private_files, "write_private", _disk_is_full) if op == "attach" else None
            )
            assert (await pool.call_cold(code="echo x")).ok
            engine.before = lambda op: None
        assert list((state_dir / "ledger").iterdir()) == []


@pytest.mark.anyio
async def test_a_cold_calls_entry_that_cannot_be_written_refuses_the_call(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        await until(lambda: pool.snapshot().engine == "up", limit=5)
        with monkeypatch.context() as patched:
            patched.setattr(private_files, "write_private", _disk_is_full)
            error = await outcome(lambda: pool.call_cold(code="echo x"))
        assert isinstance(error, PoolUnusable)
        assert error.retry_after
        assert not error.started
        assert engine.started == []
