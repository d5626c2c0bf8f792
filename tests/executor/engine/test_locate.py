"""How the engine in use is found and named: by ``sandbox.binary``, by the context that the docker client would use."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from executor.engine.locate import context_in_use, find_engine
from executor.errors import EngineUnavailable


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    return tmp_path


def context(place: Path, name: str, meta: object) -> None:
    directory = place / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest()
    directory.mkdir(parents=True)
    (directory / "meta.json").write_text(json.dumps(meta))


def test_without_a_configuration_it_is_the_default_one(place: Path) -> None:
    assert context_in_use() == "default"
    (place / "config.json").write_text("{}")
    assert context_in_use() == "default"


def test_context_of_the_configuration_is_named_with_its_endpoint(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "config.json").write_text(json.dumps({"currentContext": "rootless"}))
    assert context_in_use() == "rootless"
    context(
        place, "rootless", {"Name": "rootless", "Endpoints": {"docker": {"Host": "unix:///run/user/1/docker.sock"}}}
    )
    assert context_in_use() == "rootless (unix:///run/user/1/docker.sock)"
    monkeypatch.setenv("DOCKER_CONTEXT", "remote")  # which the client prefers
    assert context_in_use() == "remote"


@pytest.mark.parametrize(
    "text", ["", "[]", "no json", '{"currentContext": null}', '{"currentContext": ""}', "[" * 9999]
)
def test_client_configuration_of_an_unknown_form_is_left_to_the_client(place: Path, text: str) -> None:
    (place / "config.json").write_text(text)
    assert context_in_use() == "default"


@pytest.mark.parametrize("meta", [None, [], {"Endpoints": None}, {"Endpoints": {"docker": {}}}])
def test_context_of_an_unknown_form_is_named_without_its_endpoint(place: Path, meta: object) -> None:
    (place / "config.json").write_text(json.dumps({"currentContext": "odd\x1b[2J"}))
    context(place, "odd\x1b[2J", meta)
    assert context_in_use() == "odd\\x1b[2J"


# A command that is not on this host


async def _refused(binary: str) -> EngineUnavailable:
    with pytest.raises(EngineUnavailable) as caught:
        await find_engine(binary)
    return caught.value


@pytest.mark.anyio
@pytest.mark.parametrize("docker_host", ["", "unix:///elsewhere.sock"])
@pytest.mark.parametrize("name", ["podman-9", "docker-9"])
async def test_configured_command_that_is_not_on_path_is_no_matter_of_time(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, docker_host: str
) -> None:
    monkeypatch.delenv("EMBERPOOL_ENGINE_HOME", raising=False)
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    monkeypatch.setenv("PATH", f"{place}:/else\x1b[2J")
    error = await _refused(name)
    assert (error.retryable, error.retry_after, error.started) == (False, None, False)
    assert str(error) == (
        f"sandbox.binary: there is no command {name} on this host (PATH is {place}:/else\\x1b[2J); install it, or change "
        "the setting (empty: docker or podman, whichever answers)"
    )
    monkeypatch.setenv("PATH", "")
    assert "(PATH is empty or not set)" in str(await _refused(name))


@pytest.mark.anyio
async def test_configured_path_has_to_be_an_executable_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERPOOL_ENGINE_HOME", raising=False)
    file = place / "podman"
    for _ in range(2):
        error = await _refused(str(file))
        assert not error.retryable
        assert str(error).startswith(f"sandbox.binary: there is no executable file {file} on this host; install it")
        file.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    file.chmod(0o755)
    error = await _refused(str(file))  # it is there, and does not answer: that may pass
    assert (error.retryable, error.retry_after) == (True, 2.0)
    assert "broken" in str(error)
