"""``emberpool cleanup``: what it removes of dead pools, what it shows before, and what it never touches."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from executor.engine.protocol import EngineInfo
from executor.errors import EngineFailed, EngineUnavailable
from executor.sandbox.profile import LABEL_POOL
from pool.cli import cleanup as cli_cleanup
from pool.ledger import cleanup
from pool.ledger.ledger import Entry, EntryState, StateDirectory
from tests.support.scripted import Fault, ScriptedEngine

ONE_SHOT = "one-shot-0123456789ab"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """What the command finds. Nothing runs in its containers, so that it need not be entered."""
    engine = ScriptedEngine()

    async def find(binary: str) -> tuple[ScriptedEngine, EngineInfo]:
        return await engine.find()

    monkeypatch.setattr(cli_cleanup, "find_engine", find)
    return engine


def run(state_dir: Path, *words: str) -> Result:
    app = typer.Typer()
    app.command()(cli_cleanup.cleanup)
    return CliRunner().invoke(app, ["--state-dir", str(state_dir), *words])


def left(path: Path, *entries: Entry) -> str:
    """A dead pool's directory with these entries and their staging directories; the pool's id."""
    state = StateDirectory.open(path)
    for entry in entries:
        state.enter(entry)
        state.stage(entry.name)
    state.close()
    return state.pool_id


def entry(name: str, state: EntryState = "bound", container: str = "") -> Entry:
    return Entry(name, state, container, "1:1", 1_000.0)


def files(place: Path) -> dict[str, bytes]:
    """Everything below a directory but the lock files, which name their last holder."""
    found = (file for file in sorted(place.rglob("*")) if file.name != "lock")
    return {str(file.relative_to(place)): file.read_bytes() if file.is_file() else b"" for file in found}


@contextmanager
def alive(path: Path) -> Iterator[StateDirectory]:
    state = StateDirectory.open(path)
    try:
        yield state
    finally:
        state.close()


# --- what goes --------------------------------------------------------------------------------------------------------


def test_what_the_ledger_names_goes_whether_its_id_is_known_or_not(engine: ScriptedEngine, state_dir: Path) -> None:
    pool_id = left(state_dir, entry("by-name"))
    engine.foreign("by-name", {LABEL_POOL: pool_id})
    left(state_dir, entry("by-id", "standby", engine.foreign("by-id").id), entry("gone", "cold", "d" * 64))
    result = run(state_dir)
    assert result.exit_code == 0, result.output
    assert engine.boxes == {}
    assert [name for name in files(state_dir) if name.startswith(("ledger/", "staging/"))] == []
    assert "container by-name (bound)" in result.stdout
    assert "container by-id (standby)" in result.stdout
    assert "ledger entry gone (cold); its container is gone" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("removed: 2 containers, 3 ledger entries,")


def test_the_pool_itself_is_kept(engine: ScriptedEngine, state_dir: Path) -> None:
    pool_id = left(state_dir, entry("box"))
    assert run(state_dir).exit_code == 0
    with alive(state_dir) as state:
        assert state.pool_id == pool_id


def test_a_second_run_finds_nothing(engine: ScriptedEngine, state_dir: Path) -> None:
    left(state_dir, entry("box"))
    left(state_dir.with_name(ONE_SHOT), entry("shot"))
    assert run(state_dir).exit_code == 0
    asked = dict(engine.asked)
    again = run(state_dir)
    assert (again.exit_code, again.stdout, again.stderr) == (0, "nothing to remove\n", "")
    assert engine.asked == asked


def test_one_shot_pools_beside_it_go_with_their_directories(engine: ScriptedEngine, state_dir: Path) -> None:
    place = state_dir.with_name(ONE_SHOT)
    pool_id = left(place, entry("shot", "cold"))
    engine.foreign("shot", {LABEL_POOL: pool_id})
    left(state_dir.with_name("one-shot-ffffffffffff"))
    result = run(state_dir)
    assert result.exit_code == 0, result.output
    assert engine.boxes == {}
    assert list(state_dir.parent.iterdir()) == []
    assert f"{place} (a one-shot pool's, goes too)" in result.stdout
    assert "2 one-shot directories" in result.stdout


def test_staging_directories_that_no_entry_names_go(engine: ScriptedEngine, state_dir: Path) -> None:
    left(state_dir)
    (state_dir / "staging" / "stray" / "tool").mkdir(parents=True)
    result = run(state_dir)
    assert result.exit_code == 0
    assert "staging directory stray, which no entry names" in result.stdout
    assert list((state_dir / "staging").iterdir()) == []


def test_the_parent_cgroup_of_a_dead_pool_goes(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[str] = []
    monkeypatch.setattr(cli_cleanup, "remove_parent", gone.append)

    async def find(binary: str) -> tuple[ScriptedEngine, EngineInfo]:
        return engine, EngineInfo(kind="docker", version="1", endpoint="here", cgroup_driver="cgroupfs")

    monkeypatch.setattr(cli_cleanup, "find_engine", find)
    pool_id = left(state_dir, entry("box"))
    assert run(state_dir, "--dry-run").exit_code == 0
    assert gone == []
    assert run(state_dir).exit_code == 0
    assert gone == [f"/emberpool-{pool_id}"]


# --- what is only shown -----------------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_same_and_changes_nothing(engine: ScriptedEngine, state_dir: Path) -> None:
    pool_id = left(state_dir, entry("box"), entry("gone"))
    engine.foreign("box", {LABEL_POOL: pool_id})
    left(state_dir.with_name(ONE_SHOT))
    (state_dir / "staging" / "stray").mkdir()
    before = files(state_dir.parent)
    dry = run(state_dir, "--dry-run")
    assert dry.exit_code == 0
    assert files(state_dir.parent) == before
    assert engine.asked["remove"] == 0
    assert "removed" not in dry.stdout
    assert run(state_dir).stdout.splitlines()[:-1] == dry.stdout.splitlines()


def test_what_would_go_is_shown_before_anything_goes(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(state_dir, entry("box", container=engine.foreign("box").id))
    shown: list[str] = []
    monkeypatch.setattr(typer, "echo", lambda text, err=False: shown.append(text))
    engine.before = lambda operation: before.append(list(shown)) if operation == "remove" else None
    before: list[list[str]] = []
    assert run(state_dir).exit_code == 0
    assert before == [[str(state_dir), "  container box (bound)"]]


def test_json_reports_the_same_as_the_text(engine: ScriptedEngine, state_dir: Path) -> None:
    box = engine.foreign("box")
    pool_id = left(state_dir, entry("box", container=box.id))
    place = state_dir.with_name(ONE_SHOT)
    with alive(place):
        dry, done = run(state_dir, "--json", "--dry-run"), run(state_dir, "--json")
    for result, removed in ((dry, False), (done, True)):
        assert result.exit_code == 0
        told = json.loads(result.stdout)
        assert (told["ok"], told["dry_run"], told["error"]) == (True, not removed, None)
        assert told["pools"] == [
            {
                "state_dir": str(state_dir),
                "pool": pool_id,
                "one_shot": False,
                "entries": [
                    {"name": "box", "state": "bound", "found": "ours", "container": box.id, "removed": removed}
                ],
                "staging": [],
                "directory_removed": False,
                "failed": {},
            }
        ]
        (skipped,) = told["skipped"]
        assert (skipped["state_dir"], skipped["live"]) == (str(place), True)


# --- what is never touched --------------------------------------------------------------------------------------------


def test_another_container_under_an_entrys_name_is_left_alone(engine: ScriptedEngine, state_dir: Path) -> None:
    pool_id = left(state_dir, entry("by-id", container="c" * 64), entry("by-name"))
    others = [engine.foreign("by-id", {LABEL_POOL: pool_id}), engine.foreign("by-name", {LABEL_POOL: "somebody"})]
    result = run(state_dir)
    assert result.exit_code == 0
    assert list(engine.boxes.values()) == others
    assert engine.asked["remove"] == 0
    assert result.stdout.count("its name is now another's container, which is left alone") == 2
    assert list((state_dir / "ledger").iterdir()) == []


def test_a_container_that_takes_an_entrys_name_at_the_last_moment_is_left_alone(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    box = engine.foreign("box")
    left(state_dir, entry("box", container=box.id))

    def before(operation: str) -> None:
        if operation == "remove":
            engine.die(box, 0)
            engine.foreign("box")

    engine.before = before
    assert run(state_dir).exit_code == 0
    assert [other.id == box.id for other in engine.boxes.values()] == [False]


def test_a_container_with_the_pools_label_that_no_ledger_names_is_left_alone(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    pool_id = left(state_dir, entry("box"))
    other = engine.foreign(f"emberpool-{pool_id}-0badcafe-1", {LABEL_POOL: pool_id})
    assert run(state_dir).exit_code == 0
    assert list(engine.boxes.values()) == [other]


def test_a_live_pool_is_skipped_and_named_and_its_one_shots_are_cleaned_all_the_same(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    left(state_dir, entry("box", container=engine.foreign("box").id))
    left(state_dir.with_name(ONE_SHOT), entry("shot", container=engine.foreign("shot").id))
    with alive(state_dir):
        before = files(state_dir)
        result = run(state_dir)
        assert result.exit_code == 1
        assert f"in use by a live pool (pid {os.getpid()}, since " in result.stdout
        assert list(engine.boxes) == ["box"]
        assert files(state_dir) == before
        assert not state_dir.with_name(ONE_SHOT).exists()


def test_a_live_one_shot_pool_is_skipped_and_is_no_failure(engine: ScriptedEngine, state_dir: Path) -> None:
    left(state_dir, entry("box"))
    place = state_dir.with_name(ONE_SHOT)
    left(place, entry("shot", container=engine.foreign("shot").id))
    with alive(place):
        result = run(state_dir)
        assert result.exit_code == 0
        assert f"skipped {place}: " in result.stdout
        assert list(engine.boxes) == ["shot"]
        assert (place / "ledger" / "shot.bound").exists()


@pytest.mark.parametrize("name", ["one-shot-mine", "one-shot-0123456789AB", "one-shot-0123456789abc", "other"])
def test_pools_of_other_names_beside_it_are_left_alone(engine: ScriptedEngine, state_dir: Path, name: str) -> None:
    left(state_dir, entry("box"))
    place = state_dir.with_name(name)
    left(place, entry("theirs", container=engine.foreign("theirs").id))
    before = files(place)
    assert run(state_dir).exit_code == 0
    assert list(engine.boxes) == ["theirs"]
    assert files(place) == before


def test_a_one_shot_directory_that_is_just_being_made_is_left_to_its_maker(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    place = state_dir.with_name(ONE_SHOT)
    place.mkdir(mode=0o700)
    (place / "lock").touch(0o600)
    result = run(state_dir)
    assert (result.exit_code, "has just been made" in result.stdout) == (0, True)
    assert files(state_dir.parent) == {ONE_SHOT: b""}
    long_ago = time.time() - cleanup.JUST_MADE - 1
    os.utime(place, (long_ago, long_ago))
    assert run(state_dir).exit_code == 0
    assert not place.exists()


def test_what_is_no_state_directory_is_refused_and_nothing_is_made_in_it(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    state_dir.mkdir(mode=0o700)
    (state_dir / "notes.txt").write_text("precious")
    result = run(state_dir)
    assert (result.exit_code, "is not a pool's state directory" in result.stdout) == (1, True)
    assert [file.name for file in state_dir.iterdir()] == ["notes.txt"]


def test_a_one_shot_directory_that_holds_something_else_stays(engine: ScriptedEngine, state_dir: Path) -> None:
    place = state_dir.with_name(ONE_SHOT)
    left(place, entry("shot", container=engine.foreign("shot").id))
    (place / "notes.txt").write_text("precious")
    result = run(state_dir)
    assert result.exit_code == 1
    assert "holds 'notes.txt', which no pool made" in result.stderr
    assert (place / "notes.txt").exists()
    assert engine.boxes == {}


@pytest.mark.parametrize("name", ["state", ONE_SHOT])
def test_a_damaged_state_directory_is_read_from_its_names(engine: ScriptedEngine, state_dir: Path, name: str) -> None:
    place = state_dir.with_name(name)
    pool_id = left(place)
    names = [f"emberpool-{pool_id}-0badcafe-{n}" for n in (1, 2, 3)]
    left(place, entry(names[0], container=engine.foreign(names[0]).id), entry(names[1]), entry(names[2]))
    engine.foreign(names[1], {LABEL_POOL: pool_id})
    engine.foreign(names[2], {LABEL_POOL: "another's"})
    (place / "ledger" / f"{names[1]}.bound").write_text("{")
    (place / "pool.json").write_text("")
    result = run(state_dir)
    assert result.exit_code == 0, result.output
    assert (
        f"{place} was damaged; the names come from its file names: pool.json, ledger/{names[1]}.bound" in result.stdout
    )
    assert list(engine.boxes) == [names[2]]
    assert place.exists() == (name == "state")


@pytest.mark.parametrize("name", ["state", ONE_SHOT])
def test_a_state_directory_that_lost_its_identity_is_cleaned(
    engine: ScriptedEngine, state_dir: Path, name: str
) -> None:
    place = state_dir.with_name(name)
    box = f"emberpool-{left(place)}-0badcafe-1"
    left(place, entry(box, container=engine.foreign(box).id))
    (place / "pool.json").unlink()
    os.utime(place, (1_000, 1_000))
    assert run(state_dir).exit_code == 0
    assert engine.boxes == {}


def test_a_clock_that_was_set_back_keeps_no_entry_for_long(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(state_dir, entry("late"))
    for now, there in ((10.0, True), (10.0 + cleanup.LATE_START - 1, True), (10.0 + cleanup.LATE_START, False)):
        monkeypatch.setattr(cleanup, "time", SimpleNamespace(time=lambda now=now: now))
        before = files(state_dir)
        run(state_dir, "--dry-run")
        assert files(state_dir) == before
        assert run(state_dir).exit_code == there
        assert bool(list((state_dir / "ledger").iterdir())) == there


def test_a_link_in_place_of_a_directory_is_refused(engine: ScriptedEngine, state_dir: Path) -> None:
    target = state_dir.with_name("target")
    left(target, entry("box", container=engine.foreign("box").id))
    state_dir.symlink_to(target)
    state_dir.with_name(ONE_SHOT).symlink_to(target)
    result = run(state_dir)
    assert (result.exit_code, result.stdout.count("links are not followed")) == (1, 2)
    assert list(engine.boxes) == ["box"]


# --- what cannot be removed -------------------------------------------------------------------------------------------


def test_without_an_engine_nothing_is_removed(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(binary: str) -> tuple[Any, EngineInfo]:
        raise EngineUnavailable("no container engine answers. `emberpool engine up` starts one")

    monkeypatch.setattr(cli_cleanup, "find_engine", find)
    left(state_dir, entry("box"))
    left(state_dir.with_name(ONE_SHOT))
    before = files(state_dir.parent)
    for words in ((), ("--dry-run",)):
        result = run(state_dir, *words)
        assert result.exit_code == 1
        assert "nothing was removed" in result.stderr
        assert "emberpool engine up" in result.stderr
        assert files(state_dir.parent) == before
    told = json.loads(run(state_dir, "--json").stdout)
    assert (told["ok"], "no container engine answers" in told["error"]) == (False, True)
    assert told["pools"][0]["entries"][0]["removed"] is False


def test_where_nothing_was_left_no_engine_is_needed_and_nothing_is_made(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_cleanup, "find_engine", None)
    result = run(state_dir)
    assert (result.exit_code, result.stdout) == (0, "nothing to remove\n")
    assert not state_dir.exists()


def test_an_engine_that_fails_while_it_is_asked_has_nothing_removed(engine: ScriptedEngine, state_dir: Path) -> None:
    left(state_dir, entry("a", container=engine.foreign("a").id), entry("b", container=engine.foreign("b").id))
    engine.faults["inspect"] = [Fault(), Fault(garbage=True)]
    before = files(state_dir)
    result = run(state_dir)
    assert (result.exit_code, "nothing was removed" in result.stderr) == (1, True)
    assert list(engine.boxes) == ["a", "b"]
    assert files(state_dir) == before


def test_what_the_engine_will_not_remove_stays_in_the_ledger_and_all_else_goes(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    place = state_dir.with_name(ONE_SHOT)
    left(place, entry("a", container=engine.foreign("a").id), entry("b", container=engine.foreign("b").id))
    engine.faults["remove"] = [Fault(error=EngineFailed("device busy"))]
    result = run(state_dir)
    assert result.exit_code == 1
    assert result.stderr == "error: a stays: device busy\n"
    assert list(engine.boxes) == ["a"]
    assert [file.name for file in (place / "ledger").iterdir()] == ["a.bound"]
    assert run(state_dir).exit_code == 0
    assert engine.boxes == {}
    assert not place.exists()


def test_a_start_that_may_still_be_carried_out_stays_for_a_while(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(state_dir, entry("late"), entry("known", container="c" * 64))
    monkeypatch.setattr(cleanup, "time", SimpleNamespace(time=lambda: 1_000.0 + cleanup.LATE_START - 1))
    result = run(state_dir)
    assert result.exit_code == 1
    assert "its start may still be carried out; run this again in two minutes" in result.stdout
    assert "error: late stays: " in result.stderr
    assert [file.name for file in (state_dir / "ledger").iterdir()] == ["late.bound"]
    monkeypatch.setattr(cleanup, "time", SimpleNamespace(time=lambda: 1_000.0 + cleanup.LATE_START + 1))
    assert run(state_dir).exit_code == 0
    assert list((state_dir / "ledger").iterdir()) == []


def test_a_configuration_that_does_not_load_is_told(state_dir: Path) -> None:
    config = state_dir.with_name("config.toml")
    config.write_text("[pool]\nmin_standby = -1\n")
    result = run(state_dir, "--config", str(config))
    assert (result.exit_code, "pool.min_standby" in result.stderr) == (1, True)


def test_the_state_directory_is_the_configurations_unless_it_is_named(engine: ScriptedEngine, state_dir: Path) -> None:
    config = state_dir.with_name("config.toml")
    config.write_text(f'[pool]\nstate_dir = "{state_dir}"\n')
    left(state_dir, entry("box", container=engine.foreign("box").id))
    app = typer.Typer()
    app.command()(cli_cleanup.cleanup)
    assert CliRunner().invoke(app, ["--config", str(config)]).exit_code == 0
    assert engine.boxes == {}


def test_other_pools_beside_it_that_left_something_are_named(engine: ScriptedEngine, state_dir: Path) -> None:
    left(state_dir)
    left(state_dir.with_name("other"), entry("a", container="c" * 64))
    left(state_dir.with_name("empty"))
    state_dir.with_name("no-pool").mkdir()
    result = run(state_dir)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"not looked at: {state_dir.with_name('other')}, another pool's; if that one is dead: "
        f"emberpool cleanup --state-dir {state_dir.with_name('other')}",
        "nothing to remove",
    ]
