"""A pool that is used from another event loop, thread or process is refused at once, and takes no harm."""

from __future__ import annotations

import asyncio
import functools
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
import trio

from executor.common.locks import try_lock
from executor.errors import PoolClosed, PoolUnusable
from executor.tool import Tool
from pool.ledger.ledger import StateDirectory
from pool.ledger.private_files import StateLocked
from pool.pool import SandboxPool
from pool.session import Session
from tests.support import ROOT
from tests.support.pools import assert_closed, outcome, running, settings_of, until
from tests.support.scripted import ScriptedEngine

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def methods(pool: SandboxPool, session: Session) -> dict[str, Callable[[], Any]]:
    """Every public method, as a caller uses it; an asynchronous one returns what is to be awaited."""

    async def stream() -> None:
        async for _ in session.stream(code="echo x"):
            pass

    return {
        "start": pool.start,
        "ready": pool.ready,
        "acquire": lambda: pool.acquire("agent", "other"),
        "call_cold": lambda: pool.call_cold(["true"]),
        "privileged": lambda: pool._calls.cold(None),  # type: ignore[arg-type]
        "resize": lambda: pool.resize(max_sandboxes=3),
        "snapshot": pool.snapshot,
        "sessions": pool.sessions,
        "close_session": lambda: pool.close_session("agent", "session"),
        "aclose": pool.aclose,
        "call": lambda: session.call(code="echo x"),
        "tool": lambda: session.tool(Tool(name="x", inline="pass")),
        "stream": stream,
        "write_file": lambda: session.write_file("x", b""),
        "read_file": lambda: session.read_file("x"),
        "list_files": session.list_files,
        "session.ready": session.ready,
        "release": session.release,
        "close": session.close,
    }


async def tried(pool: SandboxPool, session: Session) -> dict[str, str]:
    """The error of each method."""
    errors = {}
    for name, method in methods(pool, session).items():

        async def call(method: Callable[[], Any] = method) -> None:
            answer = method()
            if isinstance(answer, Awaitable):
                await answer

        with anyio.fail_after(5):
            errors[name] = type(await outcome(call)).__name__
    return errors


def all_refused(errors: dict[str, str]) -> None:
    # A pool is started once, wherever.
    assert {name: error for name, error in errors.items() if error != "PoolUnusable"} in ({}, {"start": "PoolClosed"})
    assert len(errors) == 19


async def still_works(pool: SandboxPool, session: Session) -> None:
    assert (await session.call(code="echo on")).stdout == b"on\n"
    assert (await (await pool.acquire("agent", "next")).call(code="echo on")).ok


# --- loops and threads ------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_another_threads_loop_is_refused_by_every_method(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        for backend in ("asyncio", "trio"):
            elsewhere = functools.partial(anyio.run, tried, pool, session, backend=backend)
            all_refused(await anyio.to_thread.run_sync(elsewhere))
        await still_works(pool, session)


@pytest.mark.anyio
async def test_a_thread_without_a_loop_is_refused_and_a_portal_is_not(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")

        def in_a_thread() -> bytes:
            for method in (pool.snapshot, pool.sessions, pool.resize):
                with pytest.raises(PoolUnusable, match="portal"):
                    method()
            return anyio.from_thread.run(lambda: session.call(code="echo portal")).stdout

        assert await anyio.to_thread.run_sync(in_a_thread) == b"portal\n"


@pytest.mark.filterwarnings("ignore:SandboxPool:ResourceWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_second_run_is_refused_by_every_method_and_the_first_left_nothing(state_dir: Path) -> None:
    engine = ScriptedEngine()

    async def first() -> tuple[SandboxPool, Session]:
        await engine.__aenter__()
        pool = await SandboxPool(settings_of(state_dir), find=engine.find).start()
        session = await pool.acquire("agent", "session")
        await session.call(code="echo one")
        return pool, session

    pool, session = asyncio.run(first())
    errors = asyncio.run(tried(pool, session))
    # What gives something back has nothing to give back any more.
    assert errors.pop("release") == errors.pop("close") == errors.pop("snapshot") == "NoneType"
    assert {error for name, error in errors.items() if name != "start"} == {"PoolUnusable"}
    assert engine.boxes == {}
    StateDirectory.open(state_dir).close()  # the lock was given back


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_error_says_that_the_loop_ended_before_the_pool_was_closed(state_dir: Path) -> None:
    loop, engine = asyncio.new_event_loop(), ScriptedEngine()

    async def first() -> tuple[SandboxPool, Session]:
        await engine.__aenter__()
        pool = await SandboxPool(settings_of(state_dir), find=engine.find).start()
        return pool, await pool.acquire("agent", "session")

    pool, session = loop.run_until_complete(first())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    with pytest.raises(StateLocked):
        StateDirectory.open(state_dir)
    error = asyncio.run(outcome(lambda: session.call(code="echo x")))
    assert isinstance(error, PoolUnusable)
    assert "ended before the pool was closed" in str(error)
    assert isinstance(asyncio.run(outcome(pool.aclose)), PoolUnusable)
    StateDirectory.open(state_dir).close()


@BACKENDS
def test_a_closed_pool_is_closed_in_every_run(state_dir: Path, backend: str) -> None:
    async def first() -> SandboxPool:
        async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
            return pool

    async def second(pool: SandboxPool) -> object:
        await pool.aclose()
        pool.drain()
        return await outcome(lambda: pool.acquire("agent", "session"))

    pool = anyio.run(first, backend=backend)
    assert isinstance(anyio.run(second, pool, backend=backend), PoolClosed)


def test_before_its_start_a_pool_refuses() -> None:
    pool = SandboxPool()
    assert isinstance(anyio.run(outcome, lambda: pool.acquire("agent", "session")), PoolClosed)
    assert pool.snapshot().state == "new"


# --- a pool that is never closed --------------------------------------------------------------------------------------


@BACKENDS
def test_a_pool_that_is_never_closed_warns_when_it_is_collected(state_dir: Path, backend: str) -> None:
    async def forget() -> None:
        engine = await ScriptedEngine().__aenter__()
        await SandboxPool(settings_of(state_dir), find=engine.find).start()
        if backend == "trio":
            engine._tasks.cancel_scope.cancel()
            await engine._tasks.__aexit__(None, None, None)

    async def close() -> None:
        async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)):
            pass

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        anyio.run(close, backend=backend)
        gc.collect()
        assert [str(one.message) for one in seen if "SandboxPool" in str(one.message)] == []
        anyio.run(forget, backend=backend)
        gc.collect()
        told = [str(one.message) for one in seen if "SandboxPool" in str(one.message)]
    # The end of a trio run closes it in order, so nothing is wrong.
    assert len(told) == (1 if backend == "asyncio" else 0)
    StateDirectory.open(state_dir).close()


# --- forks ------------------------------------------------------------------------------------------------------------


def forked(function: Callable[[], object]) -> object:
    """What a function returns, or the name of its error, in a forked child."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        child = os.fork()
    if child == 0:
        try:
            text = repr(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.mark.anyio
async def test_a_forked_child_is_refused_by_every_method_and_the_parent_goes_on(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")

        def in_the_child() -> dict[str, str]:
            answers: list[dict[str, str]] = []
            # A thread has no event loop yet, as a worker that a server forks.
            thread = threading.Thread(target=lambda: answers.append(asyncio.run(tried(pool, session))))
            thread.start()
            thread.join(20)
            return answers[0]

        errors = eval(str(forked(in_the_child)))  # noqa: S307 - what the child has printed
        assert {error for name, error in errors.items() if name != "start"} == {"PoolUnusable"}
        assert "this one is a fork" in str(forked(pool.snapshot))
        assert "this one is a fork" in str(forked(pool.drain))
        assert engine.asked["start"] == 1
        await still_works(pool, session)
    assert_closed(pool, engine)


def test_a_child_of_multiprocessing_is_refused_in_the_loop_that_it_inherits(state_dir: Path) -> None:
    async def main() -> str:
        async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
            receive, send = multiprocessing.get_context("fork").Pipe()

            def child() -> None:
                try:
                    pool.resize(max_sandboxes=2)
                except PoolUnusable as error:
                    send.send(str(error))

            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            process.join(20)
            assert receive.poll(5)
            return str(receive.recv())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert f"belongs to process {os.getpid()}" in asyncio.run(main())


def test_a_lock_goes_with_its_pool_and_not_with_a_forked_child(state_dir: Path) -> None:
    holder = StateDirectory.open(state_dir)
    go, wait = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(wait)
        holder.close()  # gives nothing back that is the parent's
        os.read(go, 1)
        os._exit(0)
    try:
        with pytest.raises(StateLocked, match=f"pid {os.getpid()}"):
            StateDirectory.open(state_dir)
        holder.close()
        StateDirectory.open(state_dir).close()
    finally:
        os.close(wait)
        os.waitpid(child, 0)
        os.close(go)


def test_every_lock_goes_with_its_process_and_not_with_a_forked_child(tmp_path: Path) -> None:
    go, wait = os.pipe()
    with try_lock(tmp_path / "lock") as free:
        assert free
        child = os.fork()
        if child == 0:
            os.close(wait)
            os.read(go, 1)
            os._exit(0)
    with try_lock(tmp_path / "lock") as free:
        assert free
    os.close(wait)
    os.waitpid(child, 0)
    os.close(go)


HOLD = """
import os, signal, sys
from pathlib import Path
from pool.ledger.ledger import StateDirectory
directory = StateDirectory.open(Path(sys.argv[1]))
if sys.argv[2] == "fork":
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"x")
        os.close(1)
        sys.stdin.read()
        os._exit(0)
    os.read(hear, 1)  # what it does right after its fork is done
else:  # a copy of the lock that no hook of ours sees, as one made in C
    import subprocess
    child = subprocess.Popen(["cat"], stdout=subprocess.DEVNULL, pass_fds=(directory._lock.fd,)).pid
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["fork", "inherited"])
def test_after_a_killed_pool_a_living_child_locks_nobody_out_or_is_named(state_dir: Path, how: str) -> None:
    argv = [sys.executable, "-c", HOLD, str(state_dir), how]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.wait(20)
        if how == "fork":
            StateDirectory.open(state_dir).close()
        else:
            with pytest.raises(StateLocked, match=f"pid {child}, which has it from pid {parent.pid}"):
                StateDirectory.open(state_dir)


@BACKENDS
def test_a_fork_of_a_loop_wakes_nobody(backend: str) -> None:
    async def main() -> None:
        from executor.common.event_loop import current_loop

        loop = current_loop()
        assert loop.is_current()
        assert loop.alive
        heard: list[int] = []
        assert forked(lambda: (loop.is_current(), loop.call_soon(lambda: heard.append(1)))) == "(False, False)"
        assert loop.call_soon(lambda: heard.append(2))
        await until(lambda: heard, limit=5)
        assert heard == [2]

    anyio.run(main, backend=backend)


def test_a_loop_that_has_ended_is_no_more() -> None:
    from executor.common.event_loop import EventLoop, current_loop

    async def main() -> EventLoop:
        return current_loop()

    for loop in (asyncio.run(main()), trio.run(main)):
        assert not loop.alive
        assert not loop.call_soon(lambda: None)
        assert not loop.is_current()
