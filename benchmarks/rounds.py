"""Measure modes in turn (A B C, A B C, ...), so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

import anyio

from benchmarks.bench import Bench, BenchmarkError, open_bench
from benchmarks.machine import machine
from benchmarks.modes import Measure, Mode
from benchmarks.report import Report
from executor.result import EmberpoolError
from pool.config import Settings

Progress = Callable[[str], None]


async def measure(settings: Settings, modes: Sequence[Mode], rounds: int, progress: Progress) -> Report | None:
    """Measure every mode ``rounds`` times, after one round that does not count.

    SIGINT and SIGTERM end it early: everything is removed as always, and there is no report. Raises ``EmberpoolError``
    or ``BenchmarkError``.
    """
    failures: list[EmberpoolError | BenchmarkError] = []
    report: Report | None = None
    # The receiver stays in place until everything is removed: a second Ctrl-C must not tear that.
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:

            async def stop_on_signal() -> None:
                async for _ in signals:
                    tasks.cancel_scope.cancel()
                    return

            tasks.start_soon(stop_on_signal)
            try:
                async with open_bench(settings) as bench:
                    samples = await _measure(bench, modes, rounds, progress)
                    report = Report(await machine(bench), modes, samples)
            except (EmberpoolError, BenchmarkError) as error:
                # Kept, not raised: a task group would wrap it.
                failures.append(error)
            tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return report


async def _measure(
    bench: Bench, modes: Sequence[Mode], rounds: int, progress: Progress
) -> Mapping[str, Sequence[float]]:
    samples: dict[str, list[float]] = {mode.name: [] for mode in modes}
    async with AsyncExitStack() as stack:
        measures: dict[str, Measure] = {}
        for mode in modes:
            measures[mode.name] = await stack.enter_async_context(mode.open(bench))
        progress("warming up")
        await in_turn(measures, 1, lambda name, seconds: None, progress)
        await in_turn(measures, rounds, lambda name, seconds: samples[name].append(seconds), progress)
        progress("clearing up")
    return samples


async def in_turn(
    measures: Mapping[str, Measure], rounds: int, take: Callable[[str, float], None], progress: Progress
) -> None:
    """Call every measure once a round, in the mapping's order, and hand each figure to ``take``."""
    for number in range(1, rounds + 1):
        progress(f"round {number} of {rounds}")
        for name, once in measures.items():
            take(name, await once())
