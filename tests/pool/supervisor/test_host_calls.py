"""Calls on the host are bounded, wait their turn, and end with their pool."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from executor.errors import EmberpoolError, PoolClosed, PoolExhausted
from pool.config.load import Settings
from pool.pool import SandboxPool
from pool.supervisor.host_calls import HostCalls
from tests.support.pools import outcome, settings_of, until, virtual_backend
from tests.support.scripted import ScriptedEngine
from tests.support.tools import Toolbox, changed

pytestmark = pytest.mark.anyio


class TestPlaces:
    """The places alone, under virtual time."""

    @pytest.fixture
    def anyio_backend(self) -> tuple[str, dict[str, Any]]:
        return virtual_backend()

    async def test_no_more_than_the_limit_run_and_the_others_come_in_order(self) -> None:
        calls, began, most = HostCalls(2, 10, 100), list[tuple[int, float]](), 0
        running = 0

        async def work(n: int) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            began.append((n, anyio.current_time() - start))
            await anyio.sleep(10)
            running -= 1

        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for n in range(5):
                tasks.start_soon(calls.run, partial(work, n))
                await anyio.wait_all_tasks_blocked()
        assert most == 2
        assert dict(began) == {0: 0, 1: 0, 2: 10, 3: 10, 4: 20}
        assert repr(calls) == "<HostCalls running=0 waiting=0>"

    async def test_waiting_is_bounded_in_number_and_time(self) -> None:
        calls = HostCalls(1, 1, 5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(calls.run, lambda: anyio.sleep(100))
            await anyio.wait_all_tasks_blocked()
            start, errors = anyio.current_time(), list[object]()

            async def wait() -> None:
                errors.append(await outcome(lambda: calls.run(anyio.lowlevel.checkpoint)))

            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(PoolExhausted, match=r"1 calls run .*host.max_calls.* and 1 wait .*host.max_waiters"):
                await calls.run(anyio.lowlevel.checkpoint)
            await until(lambda: errors)
            assert round(anyio.current_time() - start) == 5
            (error,) = errors
            assert isinstance(error, PoolExhausted)
            assert (error.retryable, error.started) == (True, False)
            assert "within 5 s" in str(error)
            tasks.cancel_scope.cancel()
        assert repr(calls) == "<HostCalls running=0 waiting=0>"

    async def test_a_close_refuses_who_waits_drains_who_runs_and_then_cancels(self) -> None:
        calls, told = HostCalls(2, 5, 1_000), dict[str, object]()

        async def call(name: str, seconds: float) -> None:
            told[name] = await outcome(lambda: calls.run(lambda: anyio.sleep(seconds)))

        async with anyio.create_task_group() as tasks:
            for name, seconds in (("short", 5), ("long", 500), ("waits", 1)):
                tasks.start_soon(call, name, seconds)
                await anyio.wait_all_tasks_blocked()
            start = anyio.current_time()
            await calls.close(10)
            assert round(anyio.current_time() - start) == 10
        errors = {name: error for name, error in told.items() if isinstance(error, EmberpoolError)}
        assert {name: (type(error), error.started) for name, error in errors.items()} == {
            "long": (PoolClosed, True),
            "waits": (PoolClosed, False),
        }
        assert told["short"] is None
        with pytest.raises(PoolClosed):
            await calls.run(anyio.lowlevel.checkpoint)


async def test_a_waiter_that_is_cancelled_as_it_is_granted_gives_its_place_back() -> None:
    calls, ran, hold, scope = HostCalls(1, 5, 100), list[str](), anyio.Event(), anyio.CancelScope()

    async def first() -> None:
        await calls.run(hold.wait)
        scope.cancel()  # its place has just been granted to the second

    async def second() -> None:
        with scope:
            await calls.run(anyio.lowlevel.checkpoint)
            ran.append("second")

    async def third() -> None:
        await calls.run(anyio.lowlevel.checkpoint)
        ran.append("third")

    async with anyio.create_task_group() as tasks:
        for task in (first, second, third):
            tasks.start_soon(task)
            await anyio.wait_all_tasks_blocked()
        hold.set()
    assert ran == ["third"]
    assert repr(calls) == "<HostCalls running=0 waiting=0>"


def test_a_task_of_asyncio_that_is_cancelled_as_it_is_granted_gives_its_place_back() -> None:
    async def main() -> str:
        calls, hold, second = HostCalls(1, 5, 100), asyncio.Event(), list[asyncio.Future[object]]()

        async def first() -> None:
            await calls.run(hold.wait)
            second[0].cancel()  # whose place has just been granted

        begun = asyncio.ensure_future(first())
        await asyncio.sleep(0)
        second.append(asyncio.ensure_future(calls.run(hold.wait)))
        await asyncio.sleep(0.01)
        assert "waiting=1" in repr(calls)
        hold.set()
        with pytest.raises(asyncio.CancelledError):
            await second[0]
        await begun
        return repr(calls)

    assert asyncio.run(main()) == "<HostCalls running=0 waiting=0>"


# --- in a pool, on this host ------------------------------------------------------------------------------------------


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    return Toolbox(tmp_path)


def on_host(state_dir: Path, **host: int) -> Settings:
    keys: dict[str, dict[str, Any]] = {"sandbox": {"python_tools": "limits"}, "host": host}
    return changed(settings_of(state_dir, drain_timeout=0.1), **keys)


async def test_a_tool_on_the_host_is_refused_by_a_pool_that_does_not_run(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox
) -> None:
    settings = on_host(state_dir)
    plan = toolbox.plan(settings, "tool", inline="print(1)")
    pool = SandboxPool(settings, find=engine.find)
    with pytest.raises(PoolClosed):
        await pool.run_tool(plan, {}, session="s")
    async with pool:
        assert (await pool.run_tool(plan, {}, session="s")).output == "1\n"
    with pytest.raises(PoolClosed):
        await pool.run_tool(plan, {}, session="s")


async def test_a_closing_pool_ends_its_tools_on_the_host(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox, tmp_path: Path
) -> None:
    settings = on_host(state_dir, max_calls=1)
    file = tmp_path / "pid"
    code = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    plan, told = toolbox.plan(settings, "tool", inline=code), list[object]()
    async with anyio.create_task_group() as tasks, SandboxPool(settings, find=engine.find) as pool:

        async def call() -> None:
            told.append(await outcome(lambda: pool.run_tool(plan, {}, session="s")))

        tasks.start_soon(call)
        tasks.start_soon(call)
        await until(lambda: file.exists() and file.read_text(), limit=30)
        assert "waiting=1" in repr(pool._shell.host_calls)
    assert [(getattr(error, "reason", error), getattr(error, "started", None)) for error in told] == [
        ("pool_closed", False),
        ("pool_closed", True),
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


async def test_a_tool_on_the_host_is_tried_again_for_a_place(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox
) -> None:
    settings = on_host(state_dir, max_calls=1, max_waiters=0)
    plan = toolbox.plan(settings, "tool", inline="print(1)", retries=5, backoff=0.01)
    async with SandboxPool(settings, find=engine.find) as pool:
        taken = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool._shell.host_calls.run, taken.wait)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(PoolExhausted):
                await pool.run_tool(toolbox.plan(settings, "tool", inline="print(1)"), {}, session="s")
            tasks.start_soon(lambda: pool.run_tool(plan, {}, session="s"))
            await anyio.wait_all_tasks_blocked()
            taken.set()
