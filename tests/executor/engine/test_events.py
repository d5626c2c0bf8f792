"""What a container's events say of how its execs and itself ended."""

from __future__ import annotations

import pytest

from executor.engine.docker import parse_event
from executor.engine.events import EventHub, ExecWatch, Watch
from executor.engine.protocol import EngineEvent
from tests.support import DATA

pytestmark = pytest.mark.anyio


def event(
    action: str, *, name: str = "box", detail: str = "", exec_id: str = "", code: int | None = None
) -> EngineEvent:
    return EngineEvent(
        action=action, container="c" * 64, name=name, time=1, detail=detail, exec_id=exec_id, exit_code=code
    )


async def test_exec_is_known_by_its_command_and_ended_by_its_own_event() -> None:
    watch = Watch("box")
    first, second = watch.expect(("python3", "-c", "x", "token1")), watch.expect(("python3", "-c", "x", "token2"))
    watch.take(event("exec_create", detail="python3 -c x token2", exec_id="e2"))
    watch.take(event("exec_create", detail="something else", exec_id="e3"))
    assert (first.created, second.created) == (False, True)
    watch.take(event("exec_die", exec_id="e3", code=9))
    watch.take(event("exec_die", exec_id="", code=9))
    assert not first.ended.is_set()
    assert not second.ended.is_set()
    watch.take(event("exec_die", exec_id="e2", code=3))
    assert (second.exit_code, second.ended.is_set(), first.exit_code) == (3, True, None)


@pytest.mark.parametrize("argv", [("env",), ("env", ""), ("env", "a b", ""), ("sh", "-c", "echo: x")])
async def test_exec_is_known_by_what_docker_makes_of_its_command(argv: tuple[str, ...]) -> None:
    watch = Watch("box")
    seen = watch.expect(argv)
    # Docker joins the program and its arguments by spaces, one after the program even where there are none.
    watch.take(event("exec_create", detail=f"{argv[0]} {' '.join(argv[1:])}", exec_id="e1"))
    assert seen.created


async def test_recorded_events_lead_to_the_execs_that_they_tell_of() -> None:
    hub = EventHub()
    watch = hub.watch("ember-test-1")
    rows = [parse_event(row) for row in (DATA / "docker_events.txt").read_bytes().splitlines()]
    seen: dict[str, ExecWatch] = {}
    for row in rows:
        assert row is not None
        if row.action == "exec_create" and row.name == "ember-test-1":
            seen[row.exec_id] = watch.expect(tuple(row.detail.split(" ")))
        hub.publish(row)
    assert [exec_.exit_code for exec_ in seen.values()][:4] == [1, 1, 0, 137]
    assert all(exec_.created for exec_ in seen.values())
    assert (watch.created, watch.started, watch.ooms >= 1) == (True, True, True)


async def test_two_execs_of_one_command_are_each_told_once() -> None:
    watch = Watch("box")
    pair = [watch.expect(("env",)), watch.expect(("env",))]
    for number in (1, 2):
        watch.take(event("exec_create", detail="env ", exec_id=f"e{number}"))
    assert [exec_.exec_id for exec_ in pair] == ["e1", "e2"]


async def test_dismissed_exec_is_told_nothing_more() -> None:
    watch = Watch("box")
    gone = watch.expect(("env",))
    watch.dismiss(gone)
    watch.take(event("exec_create", detail="env", exec_id="e1"))
    assert not gone.created


@pytest.mark.parametrize(
    ("actions", "cause"),
    [
        ([("die", 137)], "killed"),
        ([("die", 143)], "killed"),
        ([("oom", None), ("oom", None), ("die", 137)], "oom"),
        ([("oom", None), ("kill", None), ("die", 137)], "killed"),
        ([("kill", None), ("oom", None), ("die", 137)], "killed"),
        ([("oom", None), ("die", 0)], "unknown"),
        ([("die", 0)], "unknown"),
        ([("destroy", None)], "unknown"),
    ],
)
async def test_cause_of_a_death_is_what_its_events_tell(actions: list[tuple[str, int | None]], cause: str) -> None:
    watch = Watch("box")
    for action, code in actions:
        assert not watch.died.is_set()
        watch.take(event(action, code=code))
    assert watch.died.is_set()
    assert watch.cause == cause


async def test_container_that_the_engine_no_longer_knows_died_by_the_engine() -> None:
    watch = Watch("box")
    watch.lost()
    assert (watch.died.is_set(), watch.destroyed.is_set(), watch.cause) == (True, True, "engine")


async def test_kill_by_the_engine_is_noted() -> None:
    watch = Watch("box")
    watch.take(event("oom"))
    assert not watch.killed
    watch.take(event("kill"))
    assert watch.killed


async def test_hub_hands_events_to_the_watched_container_alone() -> None:
    hub = EventHub()
    one = hub.watch("one")
    assert hub.watch("one") is one
    assert hub.publish(event("start", name="two")) is None
    assert hub.publish(event("start", name="one")) is one
    assert (one.started, list(hub._watches)) == (True, ["one"])
    hub.forget("one")
    hub.forget("one")
    assert hub.publish(event("die", name="one")) is None
    assert not one.died.is_set()


async def test_unknown_actions_say_nothing() -> None:
    watch = Watch("box")
    for action in ("", "attach", "top", "health_status: healthy", "exec_start"):
        watch.take(event(action, detail="env", exec_id="e"))
    assert (watch.created, watch.started, watch.died.is_set(), watch.ooms) == (False, False, False, 0)


async def test_pause_is_a_death_by_a_hand() -> None:
    watch = Watch("box")
    watch.take(event("pause"))
    assert watch.died.is_set()
    assert not watch.destroyed.is_set()
    assert watch.cause == "killed"


async def test_creation_tells_the_containers_id() -> None:
    watch = Watch("box")
    told: list[str] = []
    watch.on_created = told.append
    assert watch.container == ""
    watch.take(event("create"))
    assert watch.container == "c" * 64
    assert told == ["c" * 64]
