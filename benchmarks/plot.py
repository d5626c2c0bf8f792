"""A picture of a run: one row for each mode, one dot for each measurement, on a logarithmic scale."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.bench import BenchmarkError
from benchmarks.report import Report, milliseconds

SUFFIXES = (".png", ".svg")
_DOT, _MARK = "#4c78a8", "#b22222"


def check_plot(path: Path) -> None:
    """Raises ``BenchmarkError`` where a plot could not be written to ``path``: before the measuring, not after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise BenchmarkError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401 - an optional extra
    except ImportError:
        raise BenchmarkError('--plot needs matplotlib: pip install "emberpool[benchmarks]"') from None


def plot(report: Report, path: Path) -> None:
    """Write the picture as PNG or SVG, by the suffix of ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    modes, summaries = report.modes, report.summaries
    figure = Figure(figsize=(10, 1.6 + 0.9 * len(modes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    spread = random.Random(0)  # noqa: S311 - only keeps dots apart
    for row, mode in enumerate(modes):
        latencies = [seconds * 1000 for seconds in report.samples[mode.name]]
        heights = [row + spread.uniform(-0.14, 0.14) for _ in latencies]
        axes.plot(latencies, heights, "o", color=_DOT, markersize=4, alpha=0.45, markeredgewidth=0)
        it = summaries[mode.name]
        axes.vlines(it.p50_ms, row - 0.24, row + 0.24, color=_MARK, linewidth=2)
        label = f"p50 {milliseconds(it.p50_ms)} ms   p95 {milliseconds(it.p95_ms)}   p99 {milliseconds(it.p99_ms)}"
        axes.annotate(label, (it.p50_ms, row - 0.28), ha="center", va="bottom", fontsize=9, color="#333333")
    axes.set_xscale("log")
    # Room for the labels, which are wider than what they stand over.
    every = [seconds * 1000 for mode in modes for seconds in report.samples[mode.name]]
    axes.set_xlim(min(every) / 4, max(every) * 4)
    axes.set_yticks(range(len(modes)), [mode.name for mode in modes])
    axes.set_ylim(len(modes) - 0.4, -0.65)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("milliseconds, logarithmic; each dot is one measurement, the bar is the median")
    axes.grid(axis="x", which="major", color="#dddddd")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=11)
    n = min(it.n for it in summaries.values())
    figure.suptitle(f"Latency, cold against warm ({n} rounds, modes in turn)", fontsize=13)
    figure.supxlabel(report.where(), fontsize=7, color="#555555")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BenchmarkError(f"--plot {path}: {error.strerror}") from error
