"""The engine on a fresh machine: its places, its process, the packages' policy, and a real second daemon."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest

from executor.common.locks import holders, try_lock
from executor.engine.paths import engine_paths
from executor.errors import EngineFailed, EngineUnavailable
from executor.machine import daemon, debian, private_engine

pytestmark = pytest.mark.anyio


def quiet(line: str) -> None:
    """A report that nobody reads."""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own for a private engine; short, since its sockets' paths are limited and pytest's are long."""
    with tempfile.TemporaryDirectory(prefix="ember-", dir="/tmp") as directory:
        monkeypatch.setenv("EMBERPOOL_ENGINE_HOME", directory)
        monkeypatch.delenv("DOCKER_HOST", raising=False)
        yield Path(directory)


# Places


def test_root_gets_the_systems_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERPOOL_ENGINE_HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    paths = engine_paths()
    assert (paths.root, paths.run) == (Path("/var/lib/emberpool/engine"), Path("/run/emberpool/engine"))
    paths.check()


def test_other_users_get_xdg_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERPOOL_ENGINE_HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/home/a/state")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    paths = engine_paths()
    assert paths.root == Path("/home/a/state/emberpool/engine")
    assert paths.socket == Path("/run/user/1000/emberpool/engine/docker.sock")


def test_relative_xdg_directories_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERPOOL_ENGINE_HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/a")
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert engine_paths().root == Path("/home/a/.local/state/emberpool/engine")


def test_engine_home_holds_every_file(home: Path) -> None:
    paths = engine_paths()
    files = [paths.data, paths.socket, paths.pid_file, paths.log_file, paths.lock_file, paths.users_file]
    assert all(file.is_relative_to(home) for file in [*files, paths.started_file, paths.containerd_config, paths.build])


async def test_socket_path_that_no_kernel_binds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERPOOL_ENGINE_HOME", "/tmp/" + "x" * 80)
    with pytest.raises(EngineUnavailable, match=r"sockets take 104.*bytes shorter"):
        await private_engine.up(quiet)


async def test_relative_engine_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERPOOL_ENGINE_HOME", "engine")
    with pytest.raises(EngineUnavailable, match="must be an absolute path"):
        await private_engine.up(quiet)


# Who lives on the engine


async def test_down_refuses_while_a_pool_holds_the_engine(home: Path) -> None:
    paths = engine_paths()
    with private_engine.hold_engine(paths), private_engine.hold_engine(paths):
        assert holders(paths.users_file) == [os.getpid()]  # once, however many of its pools hold it
        assert (await private_engine.status()).pools == (os.getpid(),)
        with pytest.raises(private_engine.EngineInUse, match=f"pid {os.getpid()}"):
            await private_engine.down()
    assert await private_engine.down() is False


def test_pool_is_refused_while_the_engine_is_being_stopped(home: Path) -> None:
    paths = engine_paths()
    with try_lock(paths.users_file) as free:
        assert free
        with pytest.raises(EngineUnavailable, match="being stopped"), private_engine.hold_engine(paths):
            pass


# The next step elsewhere


@pytest.mark.parametrize(
    ("platform", "release", "step"),
    [
        ("darwin", debian.Release(""), "colima start"),
        ("linux", debian.Release("fedora"), "sudo dnf install -y podman"),
        ("linux", debian.Release("rocky", ("rhel", "centos")), "sudo dnf install -y podman"),
        ("linux", debian.Release("debian", (), "bookworm"), "engine up"),
        ("linux", debian.Release("unheard-of"), "install podman or docker"),
    ],
)
async def test_up_says_the_next_step_where_it_installs_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, platform: str, release: debian.Release, step: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(private_engine, "release", lambda: release)
    monkeypatch.setattr(private_engine, "is_root", lambda: False)
    with pytest.raises(EngineUnavailable, match=step):
        await private_engine.up(quiet)


@pytest.mark.skipif(shutil.which("docker") is None, reason="without a docker command nothing is asked")
async def test_up_starts_nothing_that_docker_host_would_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERPOOL_ENGINE_HOME", raising=False)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(
        EngineUnavailable, match=r"unix:///nowhere/docker\.sock.*DOCKER_HOST names, or unset DOCKER_HOST; then"
    ):
        await private_engine.up(quiet)


# Real daemons


@asynccontextmanager
async def engine_at(monkeypatch: pytest.MonkeyPatch, home: Path) -> AsyncIterator[private_engine.EngineUp]:
    """A private engine below ``home``, stopped at the end whatever happened to it."""
    monkeypatch.setenv("EMBERPOOL_ENGINE_HOME", str(home))
    try:
        yield await private_engine.up(quiet)
    finally:
        monkeypatch.setenv("EMBERPOOL_ENGINE_HOME", str(home))
        with anyio.CancelScope(shield=True):
            await private_engine.down(force=True)


def pids() -> set[int]:
    return {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}


def kill_and_reuse_its_pid(pid: int) -> None:
    """SIGKILL the daemon, and have its pid file name a process that lives: pids are reused, and so this one's does."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    engine_paths().pid_file.write_text(str(os.getpid()))


@contextmanager
def a_file_for_a_data_root(home: Path) -> Iterator[None]:
    (home / "data").write_text("")
    yield


@pytest.fixture
def able(home: Path) -> None:
    """Second daemons need root and dockerd; where they cannot be had, CI fails and a laptop skips."""
    if os.geteuid() == 0 and shutil.which("dockerd", path="/usr/sbin:/usr/bin"):
        return
    if os.environ.get("EMBERPOOL_CI") == "1":
        pytest.fail("CI needs root and dockerd for a second private engine")
    pytest.skip("needs root and dockerd")


@pytest.mark.engine
async def test_up_twice_is_one_daemon(home: Path, able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[private_engine.EngineUp] = []

    async def start() -> None:
        results.append(await private_engine.up(quiet))

    async with engine_at(monkeypatch, home) as first, anyio.create_task_group() as tasks:
        pid = (await private_engine.status()).pid
        tasks.start_soon(start)
        tasks.start_soon(start)
    assert first.started
    assert [again.started for again in results] == [False, False]
    assert pid is not None


@pytest.mark.engine
async def test_simultaneous_first_starts_make_one_daemon(home: Path, able: None) -> None:
    results: list[private_engine.EngineUp] = []

    async def start() -> None:
        results.append(await private_engine.up(quiet))

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(start)
        assert sorted(result.started for result in results) == [False, False, True]
    finally:
        assert await private_engine.down()


@pytest.mark.engine
async def test_down_stops_its_own_daemon_and_no_other(home: Path, able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ember-", dir="/tmp") as other:
        async with engine_at(monkeypatch, Path(other)):
            kept = (await private_engine.status()).pid
            async with engine_at(monkeypatch, home):
                stopped = (await private_engine.status()).pid
                assert stopped != kept
                assert await private_engine.down()
                assert not (await private_engine.status()).answers
                assert stopped not in pids()
            monkeypatch.setenv("EMBERPOOL_ENGINE_HOME", other)
            after = await private_engine.status()
            assert (after.answers, after.pid, after.private) == (True, kept, True)


@pytest.mark.engine
async def test_daemon_outlives_ctrl_c_of_its_caller(home: Path, able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_at(monkeypatch, home):
        pid = (await private_engine.status()).pid
        assert pid is not None
        assert os.getsid(pid) == pid
        assert os.readlink(f"/proc/{pid}/cwd") == "/"  # noqa: PTH115 - nothing to wait for


@pytest.mark.engine
async def test_up_heals_what_a_killed_daemon_left(home: Path, able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_at(monkeypatch, home):
        first = (await private_engine.status()).pid
        assert first is not None
        kill_and_reuse_its_pid(first)
        assert not (await private_engine.status()).answers
        again = await private_engine.up(quiet)
        assert again.started
        now = await private_engine.status()
        assert now.answers
        assert now.pid not in (None, first)


@pytest.mark.engine
async def test_down_stops_a_daemon_whose_record_was_never_written(
    home: Path, able: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_at(monkeypatch, home):
        os.unlink(engine_paths().started_file)  # noqa: PTH108 - nothing to wait for
        assert (await private_engine.status()).pid is not None
        assert await private_engine.down()
        assert not (await private_engine.status()).answers


@pytest.mark.engine
async def test_up_gives_the_end_of_the_log_where_the_daemon_ends(
    home: Path, able: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        a_file_for_a_data_root(home),
        pytest.raises(EngineFailed, match=r"(?s)ended while it was starting.*dockerd\.log"),
    ):
        await private_engine.up(quiet)
    assert daemon.find_daemon(engine_paths()) is None
