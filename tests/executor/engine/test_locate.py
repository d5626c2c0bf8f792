"""How the engine in use is named: by the context that the docker client would use, and where that leads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from executor.engine.locate import context_in_use


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
