"""Measure modes in turn (A B C, A B C, ...), so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import gc
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

import anyio

from benchmarks.bench import Bench, BenchmarkError, open_bench
from benchmarks.machine import machine
from benchmarks.modes import Measure, Mode
from benchmarks.report import Report
from executor.errors import EmberpoolError
from pool.config.load import Settings


class Progress(Protocol):
    """Receives the progress of a measurement."""

    def begins(self, rounds: int) -> None:
        """Everything is warm, and the rounds that count begin."""

    def round(self, number: int, rounds: int) -> None:
        """Round ``number`` of ``rounds``, from 1 on, begins."""


async def measure(
    settings: Settings, modes: Sequence[Mode], rounds: int, backend: str, progress: Progress
) -> Report | None:
    """Measure every mode ``rounds`` times, each time right after one that does not count; ``backend`` names the event loop.

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
                async with open_bench(settings, tasks) as bench:
                    samples = await sample(bench, modes, rounds, progress)
                    report = Report(machine(bench, backend), modes, samples)
            except (EmberpoolError, BenchmarkError) as error:
                # Kept, not raised: a task group would wrap it.
                failures.append(error)
            tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return report


async def sample(bench: Bench, modes: Sequence[Mode], rounds: int, progress: Progress) -> Mapping[str, Sequence[float]]:
    """Open all modes, warm each up once, and return the seconds of ``rounds`` measurements of each, by its name.

    Each measurement comes right after one that does not count. The modes differ in what they leave to the next one, an
    idle processor or a busy one, and that alone was seen to change a call of a millisecond by half. What is there before the
    first one is kept from the garbage collector: its passes over all that a benchmark has loaded are no part of a call.
    """
    samples: dict[str, list[float]] = {mode.name: [] for mode in modes}
    async with AsyncExitStack() as stack:
        measures: dict[str, Measure] = {}
        for mode in modes:
            measures[mode.name] = await stack.enter_async_context(mode.open(bench))
        for once in measures.values():
            await once()
        gc.collect()
        gc.freeze()
        progress.begins(rounds)
        for number in range(1, rounds + 1):
            progress.round(number, rounds)
            for name, once in measures.items():
                await once()
                samples[name].append(await once())
    return samples
