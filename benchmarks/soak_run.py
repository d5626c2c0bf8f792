"""A soak from its beginning to its end: open a pool, warm it up, rest, load it, rest again, close it, and judge."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from benchmarks.bench import Bench, BenchmarkError, temporary_state, until
from benchmarks.machine import Facts, machine
from benchmarks.soak_books import PoolState
from benchmarks.soak_gauge import REST_PATIENCE, Gauge
from benchmarks.soak_judge import Reading, grown, miscounted, misled
from benchmarks.soak_load import Load, Scale
from benchmarks.soak_log import LogTap
from benchmarks.soak_steps import Steps, write_tool
from executor.engine.locate import find_engine
from executor.errors import EmberpoolError, ImageMissing
from pool.config.load import PoolSettings, Settings
from pool.pool import SandboxPool

MEMORY_MB = 96
"""Of a sandbox at most: a call that takes all of it is over soon, and the host has enough for every sandbox."""
WARM_UP = 0.15
"""Of the load's time, within ``WARM_UP_LEAST`` and ``WARM_UP_MOST`` seconds; on top of it."""
WARM_UP_LEAST, WARM_UP_MOST = 3.0, 30.0
LAST_EVENTS = 5.0
"""Seconds in which the engine's events of the last removals must have come."""


@dataclass(kw_only=True)
class Soak:
    """What is asked for, and what came of it. ``seconds`` were loaded; ``before`` and ``after`` are the readings at rest."""

    scale: Scale
    minutes: float
    books: PoolState = field(default_factory=PoolState)
    tap: LogTap = field(default_factory=LogTap)
    machine: Facts = field(default_factory=dict)
    seconds: float = 0.0
    interrupted: bool = False
    before: Reading | None = None
    after: Reading | None = None
    created: int = 0
    destroyed: int = 0
    faults: list[str] = field(default_factory=list)


class _Interrupt:
    """Ends the loading early, once; what follows is bounded, and torn it would leave containers behind."""

    def __init__(self, soak: Soak) -> None:
        self._soak, self._scope = soak, anyio.CancelScope()

    async def listen(self, signals: AsyncIterator[signal.Signals]) -> None:
        async for _ in signals:
            self._soak.interrupted = True
            self._scope.cancel()

    async def until_then(self, work: Callable[[], Awaitable[None]]) -> None:
        with anyio.CancelScope() as self._scope:
            if not self._soak.interrupted:
                await work()


@dataclass(frozen=True, slots=True)
class Setting:
    """What a soak runs in: the event loop's name, the function that prints progress, and a task group that outlives it."""

    backend: str
    report: Callable[[str], None]
    interrupt: _Interrupt
    tasks: TaskGroup


async def run(settings: Settings, soak: Soak, backend: str, report: Callable[[str], None]) -> None:
    """Carry a soak out, and write the outcome into it; ``report`` is called with what is being done.

    SIGINT and SIGTERM end the loading early; what follows it is done as always. Raises ``EmberpoolError`` or
    ``BenchmarkError`` where there is nothing to soak, or the engine is lost.
    """
    failures: list[EmberpoolError | BenchmarkError] = []
    interrupt = _Interrupt(soak)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(interrupt.listen, signals)
            try:
                await _soak(settings, soak, Setting(backend, report, interrupt, tasks))
            except (EmberpoolError, BenchmarkError) as error:
                # Kept, not raised: a task group would wrap it.
                failures.append(error)
            tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]


async def _soak(settings: Settings, soak: Soak, setting: Setting) -> None:
    engine, info = await find_engine(settings.sandbox.binary)
    reference = settings.sandbox.image
    try:
        image = await engine.image(reference)
    except ImageMissing as error:
        raise BenchmarkError(f"the image {reference} is not on the engine; run: emberpool image build") from error
    with temporary_state() as place:
        own = soaked(settings, soak.scale, place)
        async with SandboxPool(own) as pool:
            await until(pool, lambda: pool.snapshot().engine == "up", "reach the engine")
            soak.machine = machine(Bench(own, engine, info, image, pool, setting.tasks), setting.backend)
            gauge = Gauge(pool, engine, info)
            await setting.tasks.start(gauge.watch)
            tool = write_tool(place.parent / "tool")
            steps = Steps(pool=pool, books=soak.books, tool=tool)
            load = Load(pool=pool, engine=engine, tap=soak.tap, books=soak.books, steps=steps, scale=soak.scale)
            await _load_and_rest(soak, load, gauge, setting)
        await _count_what_is_left(soak, gauge, place)
    soak.faults += misled(soak.books, soak.tap.calls, ended_early=soak.interrupted)
    if soak.tap.errors.count:
        soak.faults.append(f"the pool logged {soak.tap.errors.count} errors: {'; '.join(soak.tap.errors.first[:3])}")


async def _load_and_rest(soak: Soak, load: Load, gauge: Gauge, setting: Setting) -> None:
    """Warm up, rest, load, rest; each rest is read."""
    seconds, standby = soak.minutes * 60.0, soak.scale.min_standby
    warm_up = min(WARM_UP_MOST, max(WARM_UP_LEAST, WARM_UP * seconds))

    async def warm() -> None:
        setting.report(f"warming up: every kind of step once, then {warm_up:.0f} s of them all")
        await load.once_each()
        await load.run("warm-up", warm_up)
        setting.report("resting")
        if await gauge.at_rest(standby):
            soak.before = await gauge.settled(standby)

    async def work() -> None:
        setting.report(f"loading for {soak.minutes:g} minutes")
        began = anyio.current_time()
        try:
            await load.run("load", seconds)
        finally:
            soak.seconds = anyio.current_time() - began

    await setting.interrupt.until_then(warm)
    await setting.interrupt.until_then(work)
    setting.report("resting")
    before = soak.before
    if not await gauge.at_rest(standby):
        soak.faults.append(f"the pool did not come to rest within {REST_PATIENCE:g} s: {load.pool.snapshot()}")
    after = soak.after = await gauge.settled(standby, lambda it: before is None or not grown(before, it))
    soak.faults += [*miscounted(after, standby), *(grown(before, after) if before is not None else [])]
    if before is None and not soak.interrupted:
        soak.faults.append(f"the pool did not come to rest within {REST_PATIENCE:g} s of its warm-up")


async def _count_what_is_left(soak: Soak, gauge: Gauge, place: Path) -> None:
    """Of a closed pool there is nothing: no container, no entry in its ledger, and every creation was undone."""
    with anyio.move_on_after(LAST_EVENTS):
        while gauge.created > gauge.destroyed and not gauge.lost:  # noqa: ASYNC110 - events that come have no event
            await anyio.sleep(0.05)
    soak.created, soak.destroyed = gauge.created, gauge.destroyed
    if gauge.lost:
        soak.faults.append(gauge.lost)
    elif gauge.created != gauge.destroyed:
        soak.faults.append(f"the engine reported {gauge.created} containers created and {gauge.destroyed} destroyed")
    if left := [*await gauge.containers(), *(entry.name for entry in (place / "ledger").glob("*"))]:
        soak.faults.append(f"the closed pool left behind: {', '.join(sorted(set(left)))}")


def soaked(settings: Settings, scale: Scale, place: Path) -> Settings:
    """``[sandbox]`` and ``[call]`` as configured, under a pool in which everything that takes time comes about soon."""
    pool = PoolSettings(
        name="soak",
        state_dir=place,
        min_standby=scale.min_standby,
        max_sandboxes=scale.max_sandboxes,
        max_starting=min(2, scale.max_sandboxes),
        max_cold=2,
        max_cold_waiters=8,
        idle_timeout=2.0,
        reclaim_idle_after=1.0,
        standby_max_age=30.0,
        max_lifetime=60.0,
        max_calls=30,
        max_waiters=max(1, scale.clients * 3 // 4),
        restart_limit=3,
        restart_window=5.0,
        resync_interval=5.0,
        drain_timeout=5.0,
        overcommit=True,
    )
    call = settings.call.model_copy(update={"timeout": 30.0, "grace": 0.5, "max_output": 262_144})
    sandbox = settings.sandbox.model_copy(update={"memory_mb": min(MEMORY_MB, settings.sandbox.memory_mb)})
    return Settings(sandbox=sandbox, pool=pool, call=call)
