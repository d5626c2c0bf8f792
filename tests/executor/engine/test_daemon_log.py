"""The private engine's log stays small while the daemon goes on writing to it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from executor.engine import daemon_log
from executor.engine.daemon_log import keep_small, rotate
from executor.engine.docker import CommandLineEngine, Endpoint

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(daemon_log, "MAX_LOG", 1_000)
    return tmp_path / "dockerd.log"


@pytest.fixture
def writer(path: Path) -> Iterator[int]:
    """The log as the daemon has it open."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    yield fd
    os.close(fd)


def test_the_log_and_the_one_before_it_are_bounded_and_no_line_is_lost(path: Path, writer: int) -> None:
    before, seen = path.with_name("dockerd.log.1"), list[bytes]()
    for n in range(1_000):
        os.write(writer, b"line %06d\n" % n)
        rotate(path)
        if path.stat().st_size == 0:
            seen += before.read_bytes().splitlines()
        assert path.stat().st_size <= 1_000 + 12
    seen += path.read_bytes().splitlines()  # no hole where it was emptied
    assert seen == [b"line %06d" % n for n in range(1_000)]
    assert before.stat().st_size <= 1_000 + 12
    assert before.stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in path.parent.iterdir()) == ["dockerd.log", "dockerd.log.1"]


def test_of_many_that_come_at_once_one_rotates(path: Path, writer: int) -> None:
    os.write(writer, b"x" * 5_000)
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(rotate, path) for _ in range(8)]:
            done.result()
    assert path.stat().st_size == 0
    assert path.with_name("dockerd.log.1").stat().st_size == 5_000


async def test_a_full_disk_costs_the_old_log(path: Path, writer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path.with_name("dockerd.log.1").write_bytes(b"old")

    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    os.write(writer, b"x" * 5_000)
    await keep_small(path)
    assert [(file.name, file.stat().st_size) for file in path.parent.iterdir()] == [("dockerd.log", 0)]


async def test_a_log_that_cannot_be_rotated_or_is_not_there_harms_nobody(
    path: Path, writer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, size: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    os.write(writer, b"x" * 5_000)
    monkeypatch.setattr(os, "truncate", denied)
    with capture_logs() as logs:
        await keep_small(path)
        await keep_small(path.with_name("none"))
    assert [entry["event"] for entry in logs] == ["engine.log_not_rotated"]


@pytest.mark.parametrize("private", [True, False])
async def test_whoever_starts_a_container_on_the_private_engine_keeps_its_log_small(
    monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    with tempfile.TemporaryDirectory(prefix="ember-", dir="/tmp") as home:
        monkeypatch.setenv("EMBERPOOL_ENGINE_HOME", home)
        monkeypatch.setattr(daemon_log, "MAX_LOG", 1_000)
        log, client = _places(Path(home))
        engine = CommandLineEngine(Endpoint(str(client), private=private))
        assert await engine.start(["run"]) == "a" * 64
        assert daemon_log.is_large(log) is not private


def _places(home: Path) -> tuple[Path, Path]:
    """A log that is too large, and an engine's command that starts containers."""
    log, client = home / "dockerd.log", home / "docker"
    log.write_bytes(b"x" * 5_000)
    client.write_text(f"#!/bin/sh\necho {'a' * 64}\n")
    client.chmod(0o700)
    return log, client
