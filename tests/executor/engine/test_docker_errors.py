"""What engines really print and report, recorded, becomes the right typed error and the right event."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engine.docker import classify, parse_event
from executor.engine.protocol import ContainerGone, NameTaken
from executor.errors import (
    EmberpoolError,
    EngineFailed,
    EngineUnavailable,
    ImageMissing,
    ImageUnfit,
    ProfileMismatch,
)
from tests.support import DATA

ERRORS: dict[str, dict[str, tuple[int, str]]] = json.loads((DATA / "engine_errors.json").read_text())

MEANS: dict[str, type[EmberpoolError]] = {
    "no_container_exec": ContainerGone,
    "no_container_inspect": ContainerGone,
    "no_container_kill": ContainerGone,
    "not_running_exec": ContainerGone,
    "not_running_kill": ContainerGone,
    "no_image_inspect": ImageMissing,
    "no_image_run": ImageMissing,
    "name_taken": NameTaken,
    "bad_runtime": ProfileMismatch,
    "unknown_flag": ProfileMismatch,
    "missing_program": ImageUnfit,
    "missing_source": EngineFailed,
    "no_daemon": EngineUnavailable,
    "no_daemon_tcp": EngineUnavailable,
}
RECORDED = [(engine, case) for engine, cases in ERRORS.items() for case in cases if case in MEANS]


@pytest.mark.parametrize(("engine", "case"), RECORDED)
def test_recorded_message_becomes_its_typed_error(engine: str, case: str) -> None:
    code, stderr = ERRORS[engine][case]
    assert code != 0
    error = classify(stderr.encode(), code, "asking")
    assert type(error) is MEANS[case]
    assert str(error).count("asking") == 1


@pytest.mark.parametrize("engine", ERRORS)
def test_missing_container_runtime_names_the_setting_and_where_to_look(engine: str) -> None:
    code, stderr = ERRORS[engine]["bad_runtime"]
    message = str(classify(stderr.encode(), code, "starting a container"))
    assert message.startswith(
        "starting a container: the engine does not have the container runtime that sandbox.runtime"
    )
    assert "`docker info`" in message
    assert "nope" in message
    code, stderr = ERRORS[engine]["unknown_flag"]
    assert "sandbox.runtime" not in str(classify(stderr.encode(), code, "starting a container"))


def test_every_engine_was_recorded() -> None:
    assert set(ERRORS) == {"docker 20.10", "docker 28", "podman 4.3"}
    assert len(RECORDED) >= 38


def test_removal_of_what_is_absent_is_no_failure_for_any_engine() -> None:
    assert {cases["no_container_rm"][0] for cases in ERRORS.values()} == {0}


@given(st.binary(max_size=400), st.integers(-64, 255))
def test_every_message_becomes_one_short_error(stderr: bytes, code: int) -> None:
    error = classify(stderr, code, "asking")
    assert isinstance(error, EmberpoolError)
    assert len(str(error)) < 500
    assert str(error).isprintable()


def test_the_cause_at_the_end_of_a_long_message_is_told() -> None:
    said = "docker: Error response from daemon: " + "failed to create a shim task, " * 200 + "no space left on device"
    message = str(classify(said.encode(), 125, "starting"))
    assert message.startswith("the engine failed while starting: docker: Error response from daemon: failed")
    assert message.endswith("no space left on device")
    assert " [...] " in message
    assert len(message) < 2_200


def test_no_word_of_an_engine_steers_the_terminal_that_shows_it() -> None:
    said = b"cannot find it \x1b]0;owned\x07\x1b[2J\x9b31m\r\nis\xe2\x80\xae \x00not there"
    message = str(classify(said, 1, "looking"))
    assert message.isprintable()
    assert "cannot find it" in message
    assert "not there" in message


def test_silent_failure_names_its_exit_status() -> None:
    assert "exit status 9" in str(classify(b" \n", 9, "asking"))


def events(engine: str) -> list[tuple[str, str, int | None]]:
    found = [parse_event(line) for line in (DATA / f"{engine}_events.txt").read_bytes().splitlines()]
    assert None not in found
    return [(event.action, event.detail, event.exit_code) for event in found if event is not None]


def test_recorded_docker_events_tell_each_exec_and_its_end() -> None:
    rows = [parse_event(line) for line in (DATA / "docker_events.txt").read_bytes().splitlines()]
    seen = [event for event in rows if event is not None and event.name == "ember-test-1"]
    assert [event.action for event in seen][:5] == ["create", "start", "exec_create", "exec_start", "exec_die"]
    assert {event.container for event in seen} == {json.loads((DATA / "docker_inspect.json").read_text())["Id"]}
    times = [event.time for event in seen]
    assert times == sorted(times)
    assert min(times) > 10**18
    made = {event.exec_id: event.detail for event in seen if event.action == "exec_create"}
    ended = {event.exec_id: event.exit_code for event in seen if event.action == "exec_die"}
    assert "" not in made
    assert set(ended) <= set(made)
    assert all(detail.startswith(("cat /tool/nonce", "python3 -I", "nope", "true")) for detail in made.values())
    assert set(ended.values()) == {0, 1, 137}
    assert "oom" in [event.action for event in seen]


def test_recorded_docker_events_write_a_space_after_a_program_without_arguments() -> None:
    assert ("exec_create", "nope ", None) in events("docker")


def test_recorded_podman_events_are_read_in_dockers_words() -> None:
    seen = events("podman")
    assert seen[0] == ("create", "", None)
    assert {"create", "start", "die", "destroy", "kill", "exec", "exec_die"} <= {action for action, _, _ in seen}
    assert ("die", "", 137) in seen
    assert ("exec_die", "", 3) in seen


@pytest.mark.parametrize(
    "line",
    [b"", b"null", b"5", b'"Actor"', b"[]", b"{}", b'{"Actor": 5}', b'{"Actor": {}}', b'{"Actor": {"ID": "x"}}',
     b'{"Actor": {"ID": "x", "Attributes": 5}, "Action": "die", "timeNano": 1}', b'{"Status": "died"}', b"\xff\xfe", b"{",
     b'{"Actor": {"ID": "x"}, "Action": 5, "timeNano": 1}', b'{"Actor": {"ID": "x"}, "Action": "die", "timeNano": "soon"}',
     b'{"Actor": {"ID": "x", "Attributes": {"exitCode": "none"}}, "Action": "die", "timeNano": 1}'],
)  # fmt: skip
def test_line_of_no_known_form_is_no_event(line: bytes) -> None:
    assert parse_event(line) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from(["Actor", "Action", "timeNano", "Status", "ID", "Name", "Attributes", "ContainerExitCode"])


@given(st.dictionaries(fields, json_values) | json_values)
def test_no_line_makes_the_reader_raise(raw: object) -> None:
    parse_event(json.dumps(raw).encode())


@given(st.binary(max_size=100), st.integers(0, 400))
def test_no_damaged_line_makes_the_reader_raise(junk: bytes, at: int) -> None:
    line = (DATA / "docker_events.txt").read_bytes().splitlines()[0]
    parse_event(line[:at] + junk + line[at:])
    parse_event(line[:at])
