"""The state directory: whose it must be, what its ledger keeps, and what a start removes because of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from executor.profile import LABEL_POOL
from executor.result import PoolUnusable
from pool.ledger import Entry, EntryState, StateDirectory
from pool.pool import SandboxPool
from tests.pools import count, outcome, running, settings_of, until
from tests.scripted import Fault, ScriptedEngine

FACTS = {"container": "c" * 64, "user": "1:2", "created": 3.5}


def _files(path: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a directory: modes and contents."""
    return {
        str(file.relative_to(path)): (file.lstat().st_mode, file.read_bytes() if file.is_file() else b"")
        for file in sorted(path.rglob("*"))
    }


def _made(path: Path) -> StateDirectory:
    """A state directory that was used once, open."""
    return StateDirectory.open(path)


# --- whose it is ------------------------------------------------------------------------------------------------------


def test_a_new_state_directory_is_private(state_dir: Path) -> None:
    _made(state_dir).close()
    for file in (state_dir, state_dir / "ledger", state_dir / "staging"):
        assert file.stat().st_mode & 0o777 == 0o700
    for name in ("pool.json", "lock"):
        assert (state_dir / name).stat().st_mode & 0o777 == 0o600


def test_its_identity_outlives_it(state_dir: Path) -> None:
    first = _made(state_dir)
    first.close()
    first.close()
    second = _made(state_dir)
    assert (second.pool_id, second.session_id("a", "b")) == (first.pool_id, first.session_id("a", "b"))
    second.close()


def test_a_live_pools_directory_is_locked_and_names_its_holder(state_dir: Path) -> None:
    holder = _made(state_dir)
    with pytest.raises(PoolUnusable, match=f"in use by a live pool .pid {os.getpid()}"):
        StateDirectory.open(state_dir)
    holder.close()
    _made(state_dir).close()


def test_another_processs_lock_holds_until_it_ends(state_dir: Path) -> None:
    program = "import sys; from pathlib import Path; from pool.ledger import StateDirectory\n"
    program += "d = StateDirectory.open(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(state_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(PoolUnusable, match=f"pid {other.pid}"):
            StateDirectory.open(state_dir)
        other.kill()
    _made(state_dir).close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o705, 0o701])
def test_a_directory_that_is_open_to_others_is_refused(state_dir: Path, mode: int) -> None:
    state_dir.mkdir()
    state_dir.chmod(mode)
    with pytest.raises(PoolUnusable, match="chmod 700"):
        StateDirectory.open(state_dir)
    assert _files(state_dir) == {}


@pytest.mark.parametrize("part", ["ledger", "staging"])
def test_a_part_that_is_open_to_others_is_refused(state_dir: Path, part: str) -> None:
    _made(state_dir).close()
    (state_dir / part).chmod(0o777)
    with pytest.raises(PoolUnusable, match="chmod 700"):
        StateDirectory.open(state_dir)


def test_a_parent_that_everybody_may_write_is_refused(state_dir: Path) -> None:
    parent = state_dir / "open"
    parent.mkdir(parents=True)
    parent.chmod(0o777)
    with pytest.raises(PoolUnusable, match="can be written by every user"):
        StateDirectory.open(parent / "state")


def test_a_link_in_place_of_the_directory_is_refused(state_dir: Path) -> None:
    target = state_dir.with_name("target")
    target.mkdir(mode=0o700)
    state_dir.symlink_to(target)
    with pytest.raises(PoolUnusable, match="links are not followed"):
        StateDirectory.open(state_dir)
    assert _files(target) == {}


@pytest.mark.parametrize("part", ["ledger", "staging"])
def test_a_link_in_place_of_a_part_is_refused(state_dir: Path, part: str) -> None:
    target = state_dir.with_name("target")
    target.mkdir(mode=0o700)
    state_dir.mkdir(mode=0o700)
    (state_dir / part).symlink_to(target)
    with pytest.raises(PoolUnusable, match="links are not followed"):
        StateDirectory.open(state_dir)


def test_a_link_in_place_of_the_lock_is_refused_and_its_target_left_alone(state_dir: Path) -> None:
    state_dir.mkdir(mode=0o700)
    target = state_dir.with_name("target")
    target.write_text("precious")
    (state_dir / "lock").symlink_to(target)
    with pytest.raises(PoolUnusable, match="symbolic link"):
        StateDirectory.open(state_dir)
    assert target.read_text() == "precious"


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_lock_is_refused_without_waiting(state_dir: Path) -> None:
    state_dir.mkdir(mode=0o700)
    os.mkfifo(state_dir / "lock")
    with pytest.raises(PoolUnusable, match="regular file"):
        StateDirectory.open(state_dir)


def test_a_directory_of_another_user_is_refused(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _made(state_dir).close()
    before = _files(state_dir)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PoolUnusable, match="belongs to uid"):
        StateDirectory.open(state_dir)
    assert _files(state_dir) == before


def test_a_file_in_place_of_the_directory_is_refused(state_dir: Path) -> None:
    state_dir.write_text("not a directory")
    with pytest.raises(PoolUnusable):
        StateDirectory.open(state_dir)
    assert state_dir.read_text() == "not a directory"


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "7", '{"version": 2}', '{"version": 1}', '{"version": 1, "pool_id": "a", "secret": "00"}',
        '{"version": 1, "pool_id": "../../../../", "secret": "' + "00" * 32 + '"}',
        '{"version": 1, "pool_id": 123456789012, "secret": 7}', "\udcff",
    ],
)  # fmt: skip
def test_a_damaged_identity_is_refused_and_kept(state_dir: Path, content: str) -> None:
    _made(state_dir).close()
    (state_dir / "pool.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(PoolUnusable, match="damaged"):
        StateDirectory.open(state_dir)
    assert (state_dir / "pool.json").read_bytes() == content.encode("utf-8", "surrogateescape")
    # A refusal gives the lock back.
    (state_dir / "pool.json").unlink()
    _made(state_dir).close()


def test_a_missing_identity_beside_a_ledger_with_entries_is_refused(state_dir: Path) -> None:
    directory = _made(state_dir)
    directory.enter(Entry("box", "standby"))
    directory.close()
    (state_dir / "pool.json").unlink()
    with pytest.raises(PoolUnusable, match="missing although"):
        StateDirectory.open(state_dir)


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


@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_a_write_that_is_cut_off_leaves_the_old_entry_whole(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    directory = _made(state_dir)
    old = Entry("box", "standby", "c" * 64)
    directory.enter(old)

    def cut_off(self: Path, *args: Any) -> None:
        if step == "write_text":
            self.write_bytes(b'{"na')
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, step, cut_off)
        with pytest.raises(PoolUnusable, match="No space left"):
            directory.enter(Entry("box", "standby", "d" * 64))
        assert directory.entries() == [old]
    directory.close()
    assert _made(state_dir).entries() == [old]
    assert [file.name for file in (state_dir / "ledger").iterdir()] == ["box.standby"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("box.standby", ""),
        ("box.standby", '{"name": "box", "contai'),
        ("box.standby", "[]"),
        ("box.standby", '{"name": "box"}'),
        ("box.standby", json.dumps({"name": "other", **FACTS})),
        ("box.unknown", json.dumps({"name": "box", **FACTS})),
        ("box", json.dumps({"name": "box", **FACTS})),
        ("box.standby", json.dumps({"name": "box", **FACTS, "created": "late"})),
    ],
)
def test_a_damaged_entry_is_refused_and_kept(state_dir: Path, name: str, content: str) -> None:
    _made(state_dir).close()
    (state_dir / "ledger" / name).write_text(content)
    with pytest.raises(PoolUnusable, match="damaged"):
        StateDirectory.open(state_dir)
    assert (state_dir / "ledger" / name).read_text() == content


def test_an_entry_that_cannot_be_read_is_a_refusal(state_dir: Path) -> None:
    directory = _made(state_dir)
    (state_dir / "ledger" / "box.standby").mkdir()
    with pytest.raises(PoolUnusable):
        directory.entries()


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
        await until(lambda: pool.snapshot()["engine"] == "up", limit=5)
        assert engine.boxes == {}


@pytest.mark.anyio
async def test_a_start_drops_entries_whose_containers_are_gone(engine: ScriptedEngine, state_dir: Path) -> None:
    _left(state_dir, "box", "bound", "c" * 64)
    async with running(engine, settings_of(state_dir)) as pool:
        await until(lambda: pool.snapshot()["engine"] == "up", limit=5)
        assert engine.asked["remove"] == 0
        assert list((state_dir / "ledger").iterdir()) == []


@pytest.mark.anyio
@pytest.mark.parametrize("known", [True, False])
async def test_a_start_leaves_a_container_alone_that_only_has_the_name(
    engine: ScriptedEngine, state_dir: Path, known: bool
) -> None:
    pool_id = _left(state_dir, "box", "bound", "c" * 64 if known else "")
    # With the ID known even a copied label proves nothing.
    other = engine.foreign("box", {LABEL_POOL: pool_id if known else "somebody"})
    async with SandboxPool(settings_of(state_dir), find=engine.find) as pool:
        await until(lambda: pool.snapshot()["engine"] == "up", limit=5)
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
        for _ in range(2):
            listed = engine.asked["list"]
            engine.cut_events()
            await until(lambda listed=listed: engine.asked["list"] > listed and pool._hub.connected, limit=5)  # type: ignore[misc]
        assert box not in engine.boxes.values()
        await until(lambda: not (state_dir / "ledger" / "box.bound").exists(), limit=5)


@pytest.mark.anyio
async def test_a_sandbox_is_in_the_ledger_before_its_start_and_bound_before_its_grant(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        name = pool._shop.name(1)
        engine.before = lambda operation: seen.append((operation, sorted(os.listdir(state_dir / "ledger"))))  # noqa: PTH208
        seen: list[tuple[str, list[str]]] = []
        await pool.acquire("agent", "session")
        assert ("start", [f"{name}.standby"]) in seen
        assert [file.name for file in (state_dir / "ledger").iterdir()] == [f"{name}.bound"]
        entry = json.loads((state_dir / "ledger" / f"{name}.bound").read_text())
        assert entry["container"] == engine.the_box().id


@pytest.mark.anyio
async def test_a_ledger_that_cannot_be_written_refuses_and_heals(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    async with running(engine, settings_of(state_dir)) as pool:
        await until(lambda: pool.snapshot()["engine"] == "up", limit=5)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_text", full)
            assert isinstance(await outcome(lambda: pool.acquire("agent", "session")), PoolUnusable)
            assert engine.asked["start"] == 0
        session = None
        while session is None:
            answer = await outcome(lambda: pool.acquire("agent", "session"))
            if isinstance(answer, PoolUnusable):
                await until(lambda: pool._state.health.retry_at < pool._stepped, limit=5)
            else:
                session = answer


@pytest.mark.anyio
async def test_a_bind_that_cannot_be_recorded_hands_nothing_out(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    async with running(engine, settings_of(state_dir, min_standby=1)) as pool:
        await until(lambda: count(pool, "standby") == 1, limit=5)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", full)
            assert isinstance(await outcome(lambda: pool.acquire("agent", "session")), PoolUnusable)
        assert count(pool, "bound") == 0
