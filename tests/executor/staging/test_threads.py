"""Directories that hang while they are read: whoever waits gives up in time, and nobody else notices."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from structlog.testing import capture_logs

from executor.errors import StagingFailed
from executor.staging import fingerprints
from executor.staging import threads as staging_threads
from executor.staging.threads import StagingThreads
from executor.tool import Tool
from pool.config.load import Settings
from tests.support.pools import outcome, running, settings_of, until
from tests.support.scripted import ScriptedEngine
from tests.support.tools import Toolbox, changed

pytestmark = pytest.mark.anyio


class Hanging:
    """Work that hangs until it is let go, as a read of a network directory whose server has gone."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self, value: str = "read") -> str:
        self.threads.append(threading.current_thread())
        assert self.go_on.wait(60)
        return value

    async def begun(self, count: int = 1) -> None:
        await until(lambda: len(self.threads) >= count, limit=30)


@pytest.fixture
def hanging() -> Any:
    hanging = Hanging()
    yield hanging
    hanging.go_on.set()


async def leave(threads: StagingThreads, what: str, work: Hanging, undo: Callable[[str], object] | None = None) -> None:
    """Begin to read ``what``, and be cancelled while that hangs."""
    before = len(work.threads)
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            await threads.run(what, work, undo=undo)

        tasks.start_soon(read)
        await work.begun(before + 1)
        tasks.cancel_scope.cancel()


async def test_a_result_and_an_error_come_through() -> None:
    threads = StagingThreads()
    assert await threads.run("a", lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 // 0)
    assert repr(threads) == "<StagingThreads places=0 hung=0>"


async def test_what_was_abandoned_is_undone_once_it_comes_back(hanging: Hanging) -> None:
    threads, undone = StagingThreads(), list[str]()
    await leave(threads, "a", hanging, undone.append)
    assert repr(threads) == "<StagingThreads places=1 hung=1>"
    hanging.go_on.set()
    await until(lambda: repr(threads) == "<StagingThreads places=0 hung=0>", limit=30)
    assert undone == ["read"]
    assert await threads.run("a", lambda: "taken", undo=undone.append) == "taken"
    assert undone == ["read"]


async def test_what_ended_just_as_it_was_cancelled_is_undone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, undone, ended = StagingThreads(), list[int](), threading.Event()
    monkeypatch.setattr(threads, "_ended", lambda place, job: ended.set())  # its word does not arrive
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            await threads.run("a", lambda: 1, undo=undone.append)

        tasks.start_soon(read)
        await until(ended.is_set, limit=30)
        tasks.cancel_scope.cancel()
    await until(lambda: undone, limit=30)
    assert undone == [1]
    assert repr(threads) == "<StagingThreads places=0 hung=0>"


async def test_a_directory_that_hangs_costs_no_further_thread_and_no_other_directory(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = StagingThreads()
    await leave(threads, "hangs", hanging)
    monkeypatch.setattr(staging_threads, "HUNG", 0.05)
    for _ in range(2):
        error = await outcome(lambda: threads.run("hangs", hanging))
        assert isinstance(error, StagingFailed)
        assert (error.retryable, error.started) == (True, False)
        assert str(error) == "'hangs' hangs: reading it gets no answer; check its file system"
        assert await threads.run("other", lambda: 1) == 1
    assert len(hanging.threads) == 1
    monkeypatch.setattr(staging_threads, "HUNG", 60.0)  # one that is merely slow is waited for
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(threads.run, "hangs", lambda: hanging("again"))
        await anyio.wait_all_tasks_blocked()
        assert len(hanging.threads) == 1
        hanging.go_on.set()
    assert len(hanging.threads) == 2


async def test_many_who_read_one_directory_leave_threads_for_the_others(hanging: Hanging) -> None:
    threads = StagingThreads()
    async with anyio.create_task_group() as tasks:
        for _ in range(3 * staging_threads.MOST):
            tasks.start_soon(threads.run, "hangs", hanging)
        await hanging.begun(staging_threads.MOST_OF_ONE)
        assert await threads.run("other", lambda: 1) == 1
        assert len(hanging.threads) == staging_threads.MOST_OF_ONE
        tasks.cancel_scope.cancel()


async def test_threads_that_hang_are_bounded_in_all(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_threads, "MOST_HUNG", 3)
    threads = StagingThreads()
    for what in ("a", "b", "c"):
        await leave(threads, what, hanging)
    with pytest.raises(StagingFailed, match="3 threads hang in directories"):
        await threads.run("d", lambda: 1)
    hanging.go_on.set()
    await until(lambda: "hung=0" in repr(threads), limit=30)
    assert await threads.run("d", lambda: 1) == 1


async def test_host_that_cannot_start_a_thread_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = StagingThreads()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(StagingFailed, match="no thread for reading"):
            await threads.run("a", lambda: 1)
    assert await threads.run("a", lambda: 1) == 1


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_thread_that_hangs_does_not_keep_the_process_from_ending(backend: str) -> None:
    program = f"""
import anyio, threading
from executor.staging.threads import StagingThreads

async def main():
    with anyio.move_on_after(0.1):
        await StagingThreads().run("a", threading.Event().wait)
    print("left")

anyio.run(main, backend={backend!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


# --- in a pool --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
def toolbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: Hanging) -> Toolbox:
    """A tool that is well, and one in a directory that hangs."""
    monkeypatch.setattr("pool.session.tool_code", lambda tool, root: f"echo {root}/{tool.path}")
    (tmp_path / "tools").mkdir()
    toolbox = Toolbox(tmp_path / "tools")
    for name in ("well", "hangs"):
        toolbox.write(f"{name}/{name}.py")
    look = fingerprints.look

    def slow(real: str, most: int) -> Any:
        if real.endswith("/hangs"):
            hanging()
        return look(real, most)

    monkeypatch.setattr("executor.staging.versions.look", slow)
    return toolbox


async def test_a_call_whose_tool_hangs_is_refused_at_its_deadline_and_the_session_goes_on(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox, hanging: Hanging
) -> None:
    settings = settings_of(state_dir, max_sandboxes=1, max_starting=1)
    well, hangs = toolbox.plan(settings, "well"), toolbox.plan(settings, "hangs", timeout=0.2)
    async with running(engine, settings) as pool:
        error = await outcome(lambda: pool.run_tool(hangs, {}, session="s"))
        assert isinstance(error, StagingFailed), error
        assert (error.retryable, error.started) == (True, False)
        assert "/tools/hangs' was not copied within the 0." in str(error)
        assert (await pool.run_tool(well, {}, session="s")).ok
        hanging.go_on.set()
        await until(lambda: "hung=0" in repr(pool._shell.threads), limit=30)
        assert (await pool.run_tool(hangs, {}, session="s")).ok
        (box,) = pool._shell.containers.sandboxes.values()
        assert "held=0" in repr(box._staging)  # what came back too late holds nothing


async def test_a_caller_that_is_cancelled_does_not_wait_for_a_tool_that_hangs_nor_does_the_pools_end(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox, hanging: Hanging
) -> None:
    settings = settings_of(state_dir)
    async with running(engine, settings) as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: pool.run_tool(toolbox.plan(settings, "hangs"), {}, session="s"))
            await hanging.begun()
            tasks.cancel_scope.cancel()
        assert (await pool.run_tool(toolbox.plan(settings, "well"), {}, session="s")).ok


async def test_a_session_that_is_closed_ends_a_call_whose_tool_hangs(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox, hanging: Hanging
) -> None:
    settings, told = settings_of(state_dir), list[object]()
    async with running(engine, settings) as pool:
        session = await pool.acquire("agent", "s")
        file = toolbox.root / "hangs/hangs.py"
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                tool = Tool(name="hangs", file=file, function="hangs", directory=file.parent)
                told.append(await outcome(lambda: session.tool(tool, {})))

            tasks.start_soon(call)
            await hanging.begun()
            await session.close()
    assert [getattr(error, "reason", error) for error in told] == ["session_closed"]


@pytest.mark.parametrize("where", ["host", "workspace"])
async def test_other_directories_that_hang_are_refused_in_time_too(
    engine: ScriptedEngine,
    state_dir: Path,
    toolbox: Toolbox,
    hanging: Hanging,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    keys: dict[str, dict[str, Any]] = {"sandbox": {"python_tools": "limits", "workspace": str(toolbox.root)}}
    settings = changed(settings_of(state_dir), **keys)
    monkeypatch.setattr("pool.tools.place_on_host", lambda plan: hanging())
    monkeypatch.setattr("pool.privileged.Privileged._place", lambda self, name: hanging())
    async with running(engine, settings) as pool:
        if where == "host":
            plan = toolbox.plan(settings, "well", timeout=0.2)
            error = await outcome(lambda: pool.run_tool(plan, {}, session="s"))
        else:
            error = await outcome(lambda: pool.privileged.shell_exec("true", timeout=0.2))
    assert isinstance(error, StagingFailed), error
    assert "look after its file system" in str(error)
    assert not error.started


async def test_staging_leaves_the_default_threads_alone_and_needs_none_of_them(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox
) -> None:
    settings = settings_of(state_dir)
    limiter = anyio.to_thread.current_default_thread_limiter()
    taken = [object() for _ in range(int(limiter.total_tokens))]
    for one in taken:
        limiter.acquire_on_behalf_of_nowait(one)
    with anyio.fail_after(30), capture_logs() as logs:  # ends the test, where it would hang
        async with running(engine, settings) as pool:
            assert (await pool.run_tool(toolbox.plan(settings, "well"), {}, session="s")).ok
            host = toolbox.plan(changed(settings, sandbox={"python_tools": "limits"}), "well")
            assert (await pool.run_tool(host, {}, session="s")).ok
    for one in taken:
        limiter.release_on_behalf_of(one)
    assert [entry for entry in logs if entry["event"] == "host.survivors"] == []


async def test_copies_are_removed_apart_from_the_event_loop(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: dict[str, bool] = {}
    rmtree = shutil.rmtree

    def watched(path: Path, **more: Any) -> None:
        if Path(path).exists():
            copies = any(name.name != "nonce" for name in Path(path).iterdir())
            where[str(path)] = copies and threading.current_thread() is threading.main_thread()
        rmtree(path, **more)

    monkeypatch.setattr("pool.ledger.ledger.shutil.rmtree", watched)
    settings: Settings = settings_of(state_dir)
    async with running(engine, settings) as pool:
        assert (await pool.run_tool(toolbox.plan(settings, "well"), {}, session="s")).ok
        stray = state_dir / "staging" / "stray"
        (stray / ("a" * 32)).mkdir(parents=True)
        await pool._shell.containers._sweeper._remove_strays()
        assert not stray.exists()
    assert len(where) == 2
    assert not any(where.values())
