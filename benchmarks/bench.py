"""What every mode measures on: one engine, one image, one profile, and pools that leave nothing behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from executor.engine.docker import CommandLineEngine
from executor.engine.locate import find_engine
from executor.engine.process import Finished
from executor.engine.protocol import EngineInfo, ImageInfo
from executor.errors import ImageMissing
from executor.result import CallResult
from pool.config.load import PoolSettings, Settings
from pool.pool import SandboxPool
from pool.session import Session
from pool.supervisor.snapshot import SandboxCounts

CODE = "print(1)"
OUTPUT = b"1\n"
PATIENCE = 60.0
"""Seconds that a pool is given to become as a mode needs it."""
STILL = 3600.0
"""Seconds between the housekeepings of a measured pool: more than a run takes, so none falls on a measurement."""


class BenchmarkError(Exception):
    """The benchmark cannot measure, or what it measured failed; one line says why."""


@dataclass(frozen=True, slots=True)
class Bench:
    """``pool`` is the pool whose profile is measured; ``new_pool`` makes another like it. ``tasks`` outlives every mode.

    Containers of a run are named ``emberpool-<id of the pool>-...``, those that no pool made included.
    """

    settings: Settings
    engine: CommandLineEngine
    info: EngineInfo
    image: ImageInfo
    pool: SandboxPool
    tasks: TaskGroup

    @property
    def pool_id(self) -> str:
        return str(self.pool.snapshot().pool)


@asynccontextmanager
async def open_bench(settings: Settings, tasks: TaskGroup) -> AsyncIterator[Bench]:
    """Find the engine and the image, and open the pool. Raises ``EngineUnavailable``, ``ImageMissing``."""
    engine, info = await find_engine(settings.sandbox.binary)
    try:
        image = await engine.image(settings.sandbox.image)
    except ImageMissing as error:
        reference = settings.sandbox.image
        raise BenchmarkError(f"the image {reference} is not on the engine; run: emberpool image build") from error
    async with new_pool(settings, min_standby=0) as pool:
        yield Bench(settings, engine, info, image, pool, tasks)


@asynccontextmanager
async def new_pool(
    settings: Settings, *, min_standby: int, calls_per_exec: int | None = None
) -> AsyncIterator[SandboxPool]:
    """A pool with ``[sandbox]`` and ``[call]`` of ``settings``, connected, and as still as a pool can be.

    On leaving, its containers are gone.
    """
    call = settings.call if calls_per_exec is None else settings.call.model_copy(
        update={"calls_per_exec": calls_per_exec}
    )  # fmt: skip
    with temporary_state() as place:
        own = PoolSettings(
            name="benchmark",
            state_dir=place,
            min_standby=min_standby,
            max_sandboxes=4,
            max_starting=1,
            max_cold=0,
            overcommit=True,
            idle_timeout=STILL,
            resync_interval=STILL,
            standby_max_age=STILL,
            max_lifetime=max(STILL, call.timeout),
        )
        async with SandboxPool(Settings(sandbox=settings.sandbox, pool=own, call=call)) as pool:
            await until(pool, lambda: pool.snapshot().engine == "up", "reach the engine")
            yield pool


@contextmanager
def temporary_state() -> Iterator[Path]:
    """Where a state directory may be made; it goes on leaving, unless its ledger still names a container."""
    place = Path(tempfile.mkdtemp(prefix="emberpool-benchmark-"))
    try:
        yield place / "state"
    finally:
        # A container that could not be removed is still in the ledger, and the log says where that is.
        if not any((place / "state" / "ledger").glob("*")):
            shutil.rmtree(place)


async def at_rest(pool: SandboxPool, *, standby: int = 0, bound: int = 0) -> None:
    """Wait until the pool has exactly these sandboxes and neither starts nor stops any: nothing of it disturbs then."""
    wanted = SandboxCounts(standby=standby, bound=bound)
    await until(pool, lambda: pool.snapshot().sandboxes == wanted, f"come to rest with {standby} standby")


async def until(pool: SandboxPool, reached: Callable[[], bool], what: str) -> None:
    """Wait until the pool has ``reached`` something. Raises ``BenchmarkError`` where it does not in time."""
    with anyio.move_on_after(PATIENCE):
        while not reached():  # noqa: ASYNC110 - from outside, a pool can only be polled
            await anyio.sleep(0.005)
        return
    fault = pool.snapshot().fault
    raise BenchmarkError(f"the pool did not {what} within {PATIENCE:g} s (its fault: {fault or 'none'})")


async def check_session(session: Session) -> None:
    """Prove that the session runs code. Raises ``BenchmarkError``."""
    check_result(await session.call(code=CODE))


def check_result(result: CallResult) -> None:
    """Raises ``BenchmarkError`` unless the call printed what it must: a failure is never a measurement."""
    _check(result.exit_code, result.stdout, result.stderr)


def check_finished(done: Finished) -> None:
    """The same of an engine client that was run to its end."""
    _check(done.code, done.stdout, done.stderr)


def _check(code: int | None, stdout: bytes, stderr: bytes) -> None:
    if code != 0 or stdout != OUTPUT:
        said = " ".join(stderr.decode("utf-8", "replace").split())[:200] or "nothing"
        raise BenchmarkError(
            f"a measured call failed; nothing is reported: exit status {code}, stdout {stdout[:40]!r}, stderr: {said}"
        )
