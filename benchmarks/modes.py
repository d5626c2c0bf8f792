"""The modes that are compared. A mode is one function here: what it prepares, what it measures, what it clears up."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import anyio.to_thread

from benchmarks.bench import CODE, Bench, BenchmarkError, at_rest, check_finished, check_result, check_session, new_pool
from benchmarks.echo import ECHO_COMMAND, Echo
from benchmarks.floor import COMMAND, Floor, FloorError
from benchmarks.own import own_sandbox
from executor.engine.process import Finished, client_environment
from executor.sandbox.profile import Identity, exec_args
from executor.sandbox.request import Call
from executor.sandbox.sandbox import Sandbox
from pool.supervisor.containers import shared_profile
from pool.supervisor.users import UserPolicy

Measure = Callable[[], Awaitable[float]]
"""Does the thing once, checks that it worked, and returns its seconds; leaves everything at rest for the next mode."""
OpenMode = Callable[[Bench], AbstractAsyncContextManager[Measure]]

PYTHON = ("python3", "-I", "-B", "-c", CODE)
CLIENT_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Mode:
    """A named way to get a result; ``about`` says in a few words what its seconds are. ``usual``: measured unasked."""

    name: str
    about: str
    open: OpenMode
    usual: bool


MODES: dict[str, Mode] = {}


def mode(about: str, *, usual: bool = True) -> Callable[[Callable[[Bench], AsyncIterator[Measure]]], OpenMode]:
    """Register a mode under its function's name. The function prepares, yields its ``Measure``, and clears up."""

    def register(function: Callable[[Bench], AsyncIterator[Measure]]) -> OpenMode:
        opened = asynccontextmanager(function)
        MODES[function.__name__] = Mode(function.__name__, about, opened, usual)
        return opened

    return register


@mode("docker run --rm of the same profile, nothing of ours around it")
async def cold(bench: Bench) -> AsyncIterator[Measure]:
    box = bench.settings.sandbox
    user = UserPolicy(box.user, box.uid_range, tuple(box.mounts)).calls_user(bench.image, (), offset=0)
    profile = replace(shared_profile(bench.settings, bench.info, bench.pool_id), user=user)
    numbers = count()

    async def measure() -> float:
        name = f"emberpool-{bench.pool_id}-benchmark-{next(numbers)}"
        args = profile.run_args(bench.image.id, *PYTHON, identity=Identity(name=name))
        try:
            seconds, done = await _client(bench, args)
            check_finished(done)
        except BenchmarkError:
            await bench.engine.remove(name)
            raise
        return seconds

    yield measure


@mode("a call by plain exec in a sandbox that runs: one docker exec, Python's start included")
async def warm_exec(bench: Bench) -> AsyncIterator[Measure]:
    async with own_sandbox(bench, runners=False) as box:
        yield _sandbox_call(bench, box)


@mode("a session's call that finds its runner armed; one runner for each call (calls_per_exec 1)")
async def armed(bench: Bench) -> AsyncIterator[Measure]:
    async with _session_call(bench, calls_per_exec=1) as measure:
        yield measure


@mode("a session's call on a runner that stays (calls_per_exec 0)")
async def resident(bench: Bench) -> AsyncIterator[Measure]:
    async with _session_call(bench, calls_per_exec=0) as measure:
        yield measure


@mode("the barest loop over one docker exec: benchmarks/floor.py")
async def floor(bench: Bench) -> AsyncIterator[Measure]:
    async with _loop(bench, Floor, COMMAND) as measure:
        yield measure


@mode("a call on a runner that stays, of a sandbox without a pool", usual=False)
async def sandbox(bench: Bench) -> AsyncIterator[Measure]:
    async with own_sandbox(bench, runners=True) as box:
        yield _sandbox_call(bench, box)


@mode("as many bytes as a call has, there and back over one docker exec", usual=False)
async def echo(bench: Bench) -> AsyncIterator[Measure]:
    async with _loop(bench, Echo, ECHO_COMMAND) as measure:
        yield measure


@mode("a bare docker exec in a sandbox, nothing of ours around it", usual=False)
async def bare_exec(bench: Bench) -> AsyncIterator[Measure]:
    session = await bench.pool.acquire("benchmark", "bare_exec")
    args = exec_args(f"emberpool-{bench.pool_id}-{session.generation}", PYTHON, user="")

    async def measure() -> float:
        seconds, done = await _client(bench, args)
        check_finished(done)
        return seconds

    yield measure


@mode("acquire while a standby is ready")
async def acquire_standby(bench: Bench) -> AsyncIterator[Measure]:
    async with _acquire(bench, standby=1) as measure:
        yield measure


@mode("acquire without a standby: a sandbox is started and verified")
async def acquire_cold(bench: Bench) -> AsyncIterator[Measure]:
    async with _acquire(bench, standby=0) as measure:
        yield measure


@asynccontextmanager
async def _acquire(bench: Bench, *, standby: int) -> AsyncIterator[Measure]:
    sessions = count()
    async with new_pool(bench.settings, min_standby=standby) as pool:

        async def measure() -> float:
            await at_rest(pool, standby=standby)
            began = time.perf_counter()
            session = await pool.acquire("benchmark", f"acquire-{next(sessions)}")
            seconds = time.perf_counter() - began
            await check_session(session)
            await session.close()
            await at_rest(pool, standby=standby)
            return seconds

        yield measure


def _sandbox_call(bench: Bench, box: Sandbox) -> Measure:
    """A call straight on a sandbox, which is at rest again afterwards."""
    call = Call(code=CODE, timeout=bench.settings.call.timeout)

    async def measure() -> float:
        await box.ready()
        began = time.perf_counter()
        result = await box.call(call)
        seconds = time.perf_counter() - began
        check_result(result)
        await box.ready()
        return seconds

    return measure


@asynccontextmanager
async def _session_call(bench: Bench, *, calls_per_exec: int) -> AsyncIterator[Measure]:
    """A call through a pool of its own, paced: the next runner is armed before and after what is timed."""
    async with new_pool(bench.settings, min_standby=0, calls_per_exec=calls_per_exec) as pool:
        session = await pool.acquire("benchmark", "call")

        async def measure() -> float:
            await session.ready()
            began = time.perf_counter()
            result = await session.call(code=CODE)
            seconds = time.perf_counter() - began
            check_result(result)
            await session.ready()
            return seconds

        yield measure


class _Loop(Protocol):
    """A blocking loop over one engine client that times itself."""

    def once(self) -> float: ...
    def close(self) -> None: ...


@asynccontextmanager
async def _loop(
    bench: Bench, make: Callable[[list[str], dict[str, str]], _Loop], command: tuple[str, ...]
) -> AsyncIterator[Measure]:
    """A blocking loop in a thread, on a sandbox like those whose runners set the limit of CPU seconds."""
    endpoint = bench.engine.endpoint
    async with own_sandbox(bench, runners=True) as box:
        argv = [*endpoint.argv, *exec_args(box.name, command, user=box.user)]
        loop = await anyio.to_thread.run_sync(make, argv, client_environment(dict(endpoint.env)))

        async def measure() -> float:
            try:
                return await anyio.to_thread.run_sync(loop.once)
            except (FloorError, OSError) as error:
                raise BenchmarkError(f"the loop in {box.name} broke; nothing is reported: {error}") from error

        try:
            yield measure
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(loop.close)


async def _client(bench: Bench, args: list[str]) -> tuple[float, Finished]:
    """Seconds from the spawn of an engine client to its end, timed in the thread that waits for it."""
    endpoint = bench.engine.endpoint
    argv, env = [*endpoint.argv, *args], client_environment(dict(endpoint.env))

    def run() -> tuple[float, Finished]:
        began = time.perf_counter()
        # A session of its own: Ctrl-C must not reach the client, which then leaves its container to end by itself.
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=CLIENT_TIMEOUT,
            check=False, cwd="/", start_new_session=True,
        )  # fmt: skip
        return time.perf_counter() - began, Finished(done.returncode, done.stdout, done.stderr)

    try:
        return await anyio.to_thread.run_sync(run)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"`{argv[0]} {args[0]}` did not end within {CLIENT_TIMEOUT:g} s") from None
