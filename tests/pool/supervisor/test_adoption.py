"""Standbys of a killed pool: which of them its next start takes over, which it removes, and what it never touches."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.engine.protocol import EngineInfo, ImageInfo
from executor.errors import EngineFailed, PoolUnusable, StateLost
from executor.sandbox.mount import Mount
from executor.sandbox.profile import LABEL_CONFIG, LABEL_KIND, LABEL_POOL
from pool.config.load import Settings
from pool.config.types import UidRange
from pool.ledger.cleanup import Found, Leftover
from pool.ledger.ledger import Entry
from pool.pool import SandboxPool
from pool.supervisor.connection import connection
from pool.supervisor.sweep import Requirements, unfit
from pool.supervisor.users import UserPolicy
from tests.support.pools import count, outcome, running, settings_of, until, virtual_backend, wall_clock_follows
from tests.support.scripted import IMAGE, Box, Fault, ScriptedEngine

pytestmark = pytest.mark.anyio

in_virtual_time = pytest.mark.parametrize("anyio_backend", [virtual_backend()])
"""For what has to wait for a deadline."""


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


async def killed(pool: SandboxPool, engine: ScriptedEngine) -> None:
    """End a pool that was entered by hand as SIGKILL ends its process: everything stops, nothing is cleared away."""

    async def nothing(*, everything: bool) -> None:
        pass

    pool._shell.clear_away = nothing  # type: ignore[method-assign]
    pool._shell.life.tasks.cancel_scope.cancel()
    engine.kill_clients()
    with pytest.raises(PoolUnusable):
        await pool.aclose()
    # What had waited in there has seen the end of its stdin.
    await until(lambda: not any(box.execs for box in engine.boxes.values()), limit=5)


async def left_by(engine: ScriptedEngine, settings: Settings) -> list[Box]:
    """The standbys of a pool that was killed, the oldest first."""
    pool = await SandboxPool(settings, find=engine.find).__aenter__()
    await full(pool)
    await killed(pool, engine)
    standing = {entry.stem for entry in (settings.pool.state_dir / "ledger").glob("*.standby")}
    return [box for box in engine.boxes.values() if box.name in standing]


async def full(pool: SandboxPool, *, limit: float = 5) -> None:
    """Wait until the pool has its standbys."""
    wanted = pool.settings.pool.min_standby
    await until(lambda: count(pool, "standby") == wanted and not count(pool, "starting"), limit=limit)


def change_entry(state_dir: Path, name: str, **facts: Any) -> None:
    file = state_dir / "ledger" / f"{name}.standby"
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


# --- taking over ------------------------------------------------------------------------------------------------------


async def test_standbys_of_a_killed_pool_are_taken_over_and_serve(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=2)
    boxes = await left_by(engine, settings)
    asked = engine.asked["start"], engine.asked["remove"], len(engine.started)
    async with running(engine, settings) as pool:
        await full(pool)
        assert (engine.asked["start"], engine.asked["remove"], len(engine.started)) == asked
        assert set(engine.boxes.values()) == set(boxes)
        assert pool._shell.containers.names == {box.name for box in boxes}
        session = await pool.acquire("agent", "session")
        result = await session.call(code="echo x")
        assert (result.ok, result.generation) == (True, session.generation)
        # A generation is this instance's, whoever made the container.
        assert str(session.generation).rpartition("-")[0] == pool.snapshot().instance
        bound = [file.stem for file in (state_dir / "ledger").glob("*.bound")]
        assert bound in [[box.name] for box in boxes]


async def test_what_was_bound_is_removed_and_its_generation_is_lost(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    pool = await SandboxPool(settings, find=engine.find).__aenter__()
    generation = (await pool.acquire("agent", "session")).generation
    used = next(iter(pool._shell.containers.sandboxes.values())).name
    await full(pool)
    await killed(pool, engine)
    async with running(engine, settings) as pool:
        await full(pool)
        assert used not in engine.boxes
        session = await pool.acquire("agent", "session")
        error = await outcome(lambda: session.call(code="echo x", generation=generation))
        assert isinstance(error, StateLost)


async def test_the_youngest_are_taken_over_and_no_more_than_min_standby(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    boxes = await left_by(engine, settings_of(state_dir, min_standby=3, max_starting=1))
    async with running(engine, settings_of(state_dir, min_standby=2)) as pool:
        await full(pool)
        assert set(engine.boxes.values()) == set(boxes[1:])
        assert sorted(file.stem for file in (state_dir / "ledger").iterdir()) == sorted(box.name for box in boxes[1:])


async def test_two_starts_later_a_standby_is_still_taken_over(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    boxes = await left_by(engine, settings)
    assert await left_by(engine, settings) == boxes
    async with running(engine, settings) as pool:
        await full(pool)
        assert list(engine.boxes.values()) == boxes


async def test_a_caller_gets_what_was_taken_over_although_no_standby_is_ready_yet(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    async with running(engine, settings) as pool:
        await pool.acquire("agent", "session")
        assert [file.name for file in (state_dir / "ledger").glob("*.bound")] == [f"{box.name}.bound"]


async def test_a_sandbox_that_was_taken_over_and_dies_is_replaced(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=2, max_starting=1)
    boxes = await left_by(engine, settings)
    async with running(engine, settings) as pool:
        await full(pool)
        session = await pool.acquire("agent", "session")
        first = session.generation
        (bound,) = (state_dir / "ledger").glob("*.bound")
        # The youngest has become this instance's first: by its name's number it would be another.
        assert (bound.stem, str(first)[-2:]) == (boxes[-1].name, "-1")
        engine.die(boxes[-1], 137)
        await until(lambda: session.generation not in (None, first), limit=5)
        assert (await session.call(code="echo x")).ok


async def test_a_death_of_what_was_taken_over_that_no_event_told_is_noticed(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    async with running(engine, settings) as pool:
        session = await pool.acquire("agent", "session")
        first = session.generation
        engine.lose |= {"die", "destroy", "exec_die"}
        engine.die(box, 137)
        engine.lose.clear()
        engine.cut_events()
        await until(lambda: session.generation not in (None, first), limit=5)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each sandbox a user of its own")
async def test_a_user_of_what_was_taken_over_is_nobody_elses(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pool.supervisor.containers.secrets.randbelow", lambda count: 0
    )  # every instance begins at the same uid
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    async with running(engine, settings) as pool:
        for name in ("first", "second"):
            await pool.acquire("agent", name)
        assert box.name in pool._shell.containers.names
        assert len(set(pool._shell.containers._users.values())) == len(pool._shell.containers.names) == 3


async def test_the_core_is_told_the_age_of_what_was_taken_over(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    entry = json.loads((state_dir / "ledger" / f"{box.name}.standby").read_text())
    change_entry(state_dir, box.name, created=entry["created"] - 1_000)
    async with running(engine, settings) as pool:
        await full(pool)
        (n,) = pool._shell.containers.sandboxes
        assert 1_000 <= pool._shell.containers.age(n) < 1_100
        await pool.acquire("agent", "session")
        await full(pool)
        assert pool._shell.containers.age(max(pool._shell.containers.sandboxes)) == 0.0
    # What was taken over has shown that the image has a Python; it is not asked again.
    assert [words.labels[LABEL_KIND] for words in engine.started].count("probe") == 1


# --- what is not taken over -------------------------------------------------------------------------------------------


def _weaker(record: dict[str, Any]) -> None:
    record["HostConfig"]["ReadonlyRootfs"] = False


async def assert_replaced(engine: ScriptedEngine, settings: Settings, boxes: list[Box]) -> None:
    """A start with these settings removes the boxes and makes others, and they serve."""
    async with running(engine, settings) as pool:
        await full(pool)
        assert not {box.name for box in boxes} & set(engine.boxes)
        assert {box.name for box in engine.boxes.values()} == pool._shell.containers.names
        assert {file.stem for file in (settings.pool.state_dir / "ledger").iterdir()} == pool._shell.containers.names
        assert {place.name for place in (settings.pool.state_dir / "staging").iterdir()} == pool._shell.containers.names
        session = await pool.acquire("agent", "session")
        assert (await session.call(code="echo x")).ok


@pytest.mark.parametrize(
    "changes",
    [
        {"sandbox": {"memory_mb": 256}},
        {"sandbox": {"uid_range": "1000000:5000"}},
        {"sandbox": {"user": "4711:4711"}},
        {"pool": {"max_lifetime": 9_000.0}},
    ],
)
async def test_standbys_of_other_settings_are_replaced(
    engine: ScriptedEngine, state_dir: Path, changes: dict[str, dict[str, Any]]
) -> None:
    settings = settings_of(state_dir, min_standby=1)
    boxes = await left_by(engine, settings)
    pool = {**settings.pool.model_dump(), **changes.get("pool", {})}
    await assert_replaced(engine, Settings(pool=pool, sandbox=changes.get("sandbox", {})), boxes)


async def test_a_standby_that_is_too_old_is_replaced(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    boxes = await left_by(engine, settings)
    change_entry(state_dir, boxes[0].name, created=1.0)
    await assert_replaced(engine, settings, boxes)


async def test_a_standby_that_has_ended_meanwhile_is_replaced(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=2)
    boxes = await left_by(engine, settings)
    engine.die(boxes[0], 0)
    async with running(engine, settings) as pool:
        await full(pool)
        assert boxes[1] in engine.boxes.values()
        assert boxes[0].name not in pool._shell.containers.names


async def test_a_standby_that_ends_while_it_is_taken_over_is_replaced(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    engine.before = lambda operation: engine.die(box, 137) if operation == "attach" else None
    await assert_replaced(engine, settings, [box])


async def test_a_standby_with_something_inside_is_replaced(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    boxes = await left_by(engine, settings)
    boxes[0].busy = 1  # a runner or a call that the killed pool's clients left behind
    await assert_replaced(engine, settings, boxes)


async def test_a_standby_that_is_weaker_than_the_profile_is_replaced(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    engine.patch = lambda record: _weaker(record) if record["Id"] == box.id else None
    await assert_replaced(engine, settings, [box])


async def test_a_standby_whose_inside_tells_another_nonce_is_replaced(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    boxes = await left_by(engine, settings)
    hellos: list[dict[str, Any]] = []

    def hello(facts: dict[str, Any]) -> None:
        if not hellos:
            facts["nonce"] = "0" * 32
        hellos.append(facts)

    engine.hello = hello
    await assert_replaced(engine, settings, boxes)


@pytest.mark.parametrize(
    "touch",
    [
        lambda place: (place / "nonce").write_text("0" * 31 + "\n"),
        lambda place: (place / "nonce").rename(place / "nonce2"),
        lambda place: (place / "tool").mkdir(),
    ],
)
async def test_a_standby_whose_staging_directory_was_touched_is_replaced(
    engine: ScriptedEngine, state_dir: Path, touch: Callable[[Path], object]
) -> None:
    settings = settings_of(state_dir, min_standby=1)
    boxes = await left_by(engine, settings)
    touch(state_dir / "staging" / boxes[0].name)
    await assert_replaced(engine, settings, boxes)


@in_virtual_time
async def test_without_python_in_the_image_no_standby_is_taken_over(engine: ScriptedEngine, state_dir: Path) -> None:
    engine.python = False
    settings = settings_of(state_dir, min_standby=1)
    boxes = await left_by(engine, settings)

    async def no_such_program(runner: object) -> bool:
        raise EngineFailed("there is no python3")

    engine.misdeeds["hello"].append(no_such_program)
    async with running(engine, settings) as pool:
        await full(pool, limit=60)
        assert boxes[0] not in engine.boxes.values()


async def test_a_container_that_only_has_a_standbys_name_is_left_alone(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    labels = box.words.labels
    engine.die(box, 0)
    other = engine.foreign(box.name, labels)
    async with SandboxPool(settings, find=engine.find) as pool:
        await full(pool)
        assert box.name not in pool._shell.containers.names
    assert list(engine.boxes.values()) == [other]
    assert list((state_dir / "ledger").iterdir()) == []


async def test_a_container_that_takes_a_standbys_name_while_it_is_taken_over_is_left_alone(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    others: list[Box] = []

    def before(operation: str) -> None:
        if operation == "inspect":
            looks.append(operation)
            if len(looks) == 2:  # the first is the sweep's
                engine.lose |= {"die", "destroy"}  # no event tells of it, and the other is as like it as can be
                engine.die(box, 0)
                others.append(engine._run_detached(box.words))
                engine.lose.clear()

    looks: list[str] = []
    engine.before = before
    async with SandboxPool(settings, find=engine.find) as pool:
        await full(pool)
        assert box.name not in pool._shell.containers.names
    assert list(engine.boxes.values()) == others != []


async def test_a_standby_that_cannot_be_removed_is_the_next_sweeps(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    box.busy = 1
    engine.faults["remove"] = [Fault(error=EngineFailed("device busy"))]
    async with running(engine, settings) as pool:
        await full(pool)
        assert box in engine.boxes.values()
        assert box.name not in pool._shell.containers.names
        engine.cut_events()
        await until(lambda: box not in engine.boxes.values(), limit=5)


@in_virtual_time
async def test_an_engine_that_is_lost_while_a_standby_is_taken_over_is_no_loss(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    engine.before = lambda operation: engine.down() if operation == "attach" else None
    async with running(engine, settings) as pool:
        await until(lambda: not engine.up_now, limit=5)
        engine.before = lambda operation: None
        engine.up()  # and with the old daemon its containers went
        await full(pool, limit=60)
        assert box not in engine.boxes.values()


# --- what is on offer and never wanted --------------------------------------------------------------------------------


async def test_what_is_on_offer_and_not_wanted_is_removed(engine: ScriptedEngine, state_dir: Path) -> None:
    await left_by(engine, settings_of(state_dir, min_standby=2))
    async with running(engine, settings_of(state_dir, min_standby=2, max_starting=1)) as pool:
        engine.always["attach"] = Fault(slow=1_000)  # nothing arms, so that the second standby's turn never comes
        await until(lambda: count(pool, "starting") == 1, limit=5)
        assert len(pool._shell.containers.names) == 2
        engine.cut_events()
        await until(lambda: len(pool._shell.containers.names) == 1, limit=5)
        await until(lambda: len(engine.boxes) == 1, limit=5)
        del engine.always["attach"]
        for box in list(engine.boxes.values()):
            engine.die(box, 0)


async def test_a_pool_that_closes_at_once_leaves_nothing_of_what_was_on_offer(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    await left_by(engine, settings_of(state_dir, min_standby=3))
    begun = anyio.Event()
    engine.before = lambda operation: begun.set() if operation == "attach" else None
    async with running(engine, settings_of(state_dir, min_standby=3, max_starting=1)):
        await begun.wait()


async def test_a_pool_that_never_sees_its_engine_leaves_the_ledger_as_it_is(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    settings = settings_of(state_dir, min_standby=2)
    boxes = await left_by(engine, settings)
    before = {file.name: file.read_bytes() for file in (state_dir / "ledger").iterdir()}
    engine.up_now = False
    async with SandboxPool(settings, find=engine.find) as pool:
        await until(lambda: pool._shell.state.health.fault, limit=5)
    assert {file.name: file.read_bytes() for file in (state_dir / "ledger").iterdir()} == before
    engine.up_now = True
    async with running(engine, settings) as pool:
        await full(pool)
        assert set(engine.boxes.values()) == set(boxes)


async def test_staging_directories_that_no_entry_names_go_at_the_start(engine: ScriptedEngine, state_dir: Path) -> None:
    settings = settings_of(state_dir, min_standby=1)
    (box,) = await left_by(engine, settings)
    (state_dir / "staging" / "stray").mkdir()
    async with running(engine, settings) as pool:
        await full(pool)
        assert [place.name for place in (state_dir / "staging").iterdir()] == [box.name]


def digest(settings: Settings, image: ImageInfo = IMAGE) -> str:
    info = EngineInfo(kind="docker", version="1", endpoint="here")
    return connection(settings, ScriptedEngine(), info, image, "pool").config_hash


@pytest.mark.parametrize(
    "changes",
    [
        {"sandbox": {"memory_mb": 256}},
        {"sandbox": {"seccomp": "engine"}},
        {"sandbox": {"uid_range": "1000000:5000"}},
        {"sandbox": {"user": "4711:4711"}},
        {"pool": {"standby_max_age": 9_000.0}},
        {"pool": {"max_lifetime": 9_000.0}},
        {"call": {"timeout": 61.0}},
        {"call": {"grace": 3.0}},
    ],
)
def test_the_config_hash_tells_all_that_is_fixed_at_a_start(changes: dict[str, dict[str, Any]]) -> None:
    assert digest(Settings(**changes)) != digest(Settings())
    assert digest(Settings(), ImageInfo(id="sha256:" + "b" * 64)) != digest(Settings())
    assert digest(Settings(pool={"max_sandboxes": 5}, call={"calls_per_exec": 0})) == digest(Settings())


def test_the_config_hash_tells_one_content_of_a_seccomp_profile_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "seccomp.json"
    settings = Settings(sandbox={"seccomp": str(file)})
    missing = digest(settings)
    file.write_text("{}")
    assert len({missing, first := digest(settings), digest(Settings())}) == 3
    file.write_text('{"defaultAction": "SCMP_ACT_ERRNO"}')
    assert digest(settings) != first
    ours = digest(Settings())
    monkeypatch.setattr("executor.sandbox.profile.STRICT_PROFILE", file)  # that of another release
    assert digest(Settings()) != ours


# --- what the ledger and the engine's record have to say --------------------------------------------------------------

ENTRY = Entry("box", "standby", "c" * 64, "1000001:1000001", 1_000.0, "boot")
LABELS = {LABEL_POOL: "pool", LABEL_CONFIG: "hash", LABEL_KIND: "sandbox"}
FACTS = {
    "State": {"Running": True, "Paused": False},
    "Config": {"Labels": {**LABELS, "emberpool.instance": "old"}},
    "Image": IMAGE.id,
}
OWN = UserPolicy("auto", UidRange(1_000_000, 100))


def standard(**changes: Any) -> Requirements:
    facts: dict[str, Any] = {
        "pool_id": "pool", "config_hash": "hash", "image": IMAGE, "users": OWN, "taken": frozenset(), "now": 1_060.0,
        "max_age": 100.0, "boot": "boot",
    }  # fmt: skip
    return Requirements(**{**facts, **changes})


def leftover(*, found: Found = "ours", facts: dict[str, Any] | None = None, **entry: Any) -> Leftover:
    return Leftover(replace(ENTRY, **entry), found, "c" * 64, FACTS if facts is None else facts)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_a_standby_that_is_as_it_should_be_is_fit(root: None) -> None:
    assert unfit(leftover(), standard()) == ""
    assert unfit(leftover(facts={**FACTS, "State": {"Running": True}}), standard()) == ""  # as podman has it


@pytest.mark.parametrize(
    ("left", "changes", "why"),
    [
        (leftover(state="bound"), {}, "no standby"),
        (leftover(state="cold"), {}, "no standby"),
        (leftover(found="foreign"), {}, "no standby"),
        (leftover(found="gone", facts={}), {}, "no standby"),
        (leftover(container=""), {}, "cut off"),
        (leftover(boot="other"), {}, "started anew"),
        (leftover(boot=""), {}, "started anew"),
        (leftover(), {"boot": ""}, "started anew"),
        (leftover(boot=""), {"boot": ""}, "started anew"),
        (leftover(), {"now": 1_100.0}, "older"),
        (leftover(), {"now": 999.0}, "older"),
        (leftover(created=float("nan")), {}, "older"),
        (leftover(), {"max_age": 60.0}, "older"),
        (leftover(facts={}), {}, "unknown form"),
        (leftover(facts={**FACTS, "Config": {"Labels": None}}), {}, "unknown form"),
        (leftover(facts={**FACTS, "Config": None}), {}, "unknown form"),
        (leftover(facts={**FACTS, "State": {"Running": False}}), {}, "not run"),
        (leftover(facts={**FACTS, "State": {"Running": True, "Paused": True}}), {}, "not run"),
        (leftover(facts={**FACTS, "State": "running"}), {}, "not run"),
        *[
            (leftover(facts={**FACTS, "Config": {"Labels": {**LABELS, key: "other"}}}), {}, "other settings")
            for key in LABELS
        ],
        (leftover(facts={**FACTS, "Config": {"Labels": {}}}), {}, "other settings"),
        (leftover(), {"image": ImageInfo(id="sha256:" + "b" * 64)}, "another image"),
        (leftover(), {"taken": frozenset({ENTRY.user})}, "user"),
        (leftover(user="1000000:1000000"), {}, "user"),  # the keeper's
        (leftover(user="1000100:1000100"), {}, "user"),
        (leftover(user="1000001:0"), {}, "user"),
        (leftover(user="0:0"), {}, "user"),
        (leftover(user=""), {}, "user"),
        (leftover(user="ann"), {}, "user"),
        (leftover(), {"users": UserPolicy("4711:4711", OWN.uids)}, "user"),
        (leftover(), {"users": UserPolicy("auto", OWN.uids, (Mount("/nowhere/at/all", "/data"),))}, "user"),
    ],
)
def test_a_leftover_that_is_not_is_unfit(root: None, left: Leftover, changes: dict[str, Any], why: str) -> None:
    assert why in unfit(left, standard(**changes))


def test_a_user_that_all_sandboxes_share_is_no_hindrance() -> None:
    shared = UserPolicy("4711:4711", OWN.uids)
    left = leftover(user="4711:4711")
    assert unfit(left, standard(users=shared, taken=frozenset({"4711:4711"}))) == ""


@in_virtual_time
async def test_a_sandbox_that_was_taken_over_is_as_old_as_it_is(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_clock_follows(monkeypatch)
    settings = settings_of(state_dir, min_standby=1, standby_max_age=1_000)
    (box,) = await left_by(engine, settings)
    await anyio.sleep(900)
    async with running(engine, settings) as pool:
        await full(pool)
        assert list(engine.boxes.values()) == [box]
        await anyio.sleep(90)
        assert list(engine.boxes.values()) == [box]
        await anyio.sleep(20)
        assert box not in engine.boxes.values()
