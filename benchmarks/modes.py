"""The modes that are compared. A mode is one function here: what it prepares, what it measures, what it clears up."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count

import anyio.to_thread

from benchmarks.bench import CODE, Bench, BenchmarkError, at_rest, check_finished, check_result, check_session, new_pool
from executor.process import Finished, client_environment
from executor.profile import Identity, exec_args
from pool.users import UserPolicy
from pool.workshop import shared_profile

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


@mode("a call in a session that has its sandbox, through the pool")
async def warm_exec(bench: Bench) -> AsyncIterator[Measure]:
    session = await bench.pool.acquire("benchmark", "warm_exec")

    async def measure() -> float:
        began = time.perf_counter()
        result = await session.call(code=CODE)
        seconds = time.perf_counter() - began
        check_result(result)
        return seconds

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
