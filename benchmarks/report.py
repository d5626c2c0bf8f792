"""One run's result: as JSON for machines and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.machine import Facts
from benchmarks.modes import Mode
from benchmarks.stats import TARGETS, Summary, ratios, summarise


@dataclass(frozen=True, slots=True)
class Report:
    """Every mode's latencies (seconds, in the order measured) and the machine that they were measured on."""

    machine: Facts
    modes: Sequence[Mode]
    samples: Mapping[str, Sequence[float]]

    @property
    def summaries(self) -> dict[str, Summary]:
        return {mode.name: summarise(self.samples[mode.name]) for mode in self.modes}

    def as_json(self) -> dict[str, Any]:
        """``{"machine", "modes": {name: {"n", "p50_ms", "p95_ms", "p99_ms"}}, "ratios": {"<name>/<name>": number}}``."""
        summaries = self.summaries
        return {
            "machine": dict(self.machine),
            "modes": {name: asdict(summary) for name, summary in summaries.items()},
            "ratios": ratios(summaries),
        }

    def print(self, console: Console) -> None:
        """The table, and below it what was timed and on what."""
        summaries = self.summaries
        times = ratios(summaries)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("mode", no_wrap=True)
        for title in ("n", "p50 ms", "p95 ms", "p99 ms", "cold / it"):
            table.add_column(title, justify="right", no_wrap=True)
        for mode in self.modes:
            it = summaries[mode.name]
            figures = [milliseconds(value) for value in (it.p50_ms, it.p95_ms, it.p99_ms)]
            ratio = times.get(f"cold/{mode.name}")
            table.add_row(mode.name, str(it.n), *figures, f"{ratio:,.1f}x" if ratio else "")
        console.print(table)
        for target in TARGETS:
            if target.name in times:
                console.print(Text(f"{target.name} is {times[target.name]:,.1f}; it ought to be {target}"))
        for mode in self.modes:
            console.print(Text(f"{mode.name}: {mode.about}"), soft_wrap=True)
        console.print(Text(self.where()), soft_wrap=True)

    def where(self) -> str:
        """The machine in one line."""
        it = self.machine
        return (
            f"{it['engine']}, {it['runtime']}, {it['image']}; {it['cpu']}, {it['cores']} cores, "
            f"{it['kernel']}; Python {it['python']} on {it['backend']}; load {it['load_1m']}; {it['date']}"
        )


def milliseconds(value: float) -> str:
    """``value`` with three digits that count, and at least its tenths: ``415.2``, ``15.1``, ``1.55``, ``0.213``."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
