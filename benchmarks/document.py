"""Writes a run's figures into a Markdown page, between the two comments that mark their place."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench import BenchmarkError
from benchmarks.report import Report, milliseconds
from benchmarks.stats import TARGETS, Summary, ratios

BEGIN, END = "<!-- figures: written by benchmarks.latency --docs -->", "<!-- end of figures -->"

PARTS = (
    ("the stream: as many bytes there and back over a `docker exec`", "echo", ""),
    ("the call itself: a child that waits runs the code and ends, and its status is known", "floor", "echo"),
    ("the runner and its host's end: limits, environment, frames, credit, deadline, report", "sandbox", "floor"),
    ("the pool: turn, deadline, core, log line", "resident", "sandbox"),
    ("one runner for each call instead of one that stays", "armed", "resident"),
)
"""Where a call's time goes: what the median of one mode has beyond that of another."""


def check_page(path: Path) -> None:
    """Raises ``BenchmarkError`` where the page has no place for figures: before the measuring, not after it."""
    _split(path)


def write_figures(report: Report, path: Path) -> None:
    """Replace what stands between the marks."""
    before, after = _split(path)
    try:
        path.write_text(f"{before}{BEGIN}\n\n{figures(report)}\n{END}{after}", "utf-8")
    except OSError as error:
        raise BenchmarkError(f"--docs {path}: {error.strerror}") from error


def figures(report: Report) -> str:
    """The tables: the modes, the ratios that have a target, and the parts of a call."""
    summaries = report.summaries
    times = ratios(summaries)
    n = min(it.n for it in summaries.values())
    lines = [
        f"{n} rounds. {report.where()}.",
        "",
        "| mode | p50 ms | p95 ms | p99 ms | cold / it |",
        "|---|---|---|---|---|",
    ]
    for name, it in summaries.items():
        values = " | ".join(milliseconds(value) for value in (it.p50_ms, it.p95_ms, it.p99_ms))
        ratio = times.get(f"cold/{name}")
        lines.append(f"| `{name}` | {values} | {f'{ratio:,.1f}x' if ratio else ''} |")
    wanted = [target for target in TARGETS if target.name in times]
    if wanted:
        lines += ["", "| ratio of medians | here | ought to be |", "|---|---|---|"]
        lines += [f"| `{it.name}` | {times[it.name]:,.1f} | {it} |" for it in wanted]
    parts = _parts(summaries)
    if parts:
        lines += ["", "| part of an armed call | modes | ms |", "|---|---|---|", *parts]
    return "\n".join(lines) + "\n"


def _parts(summaries: dict[str, Summary]) -> list[str]:
    rows = []
    for about, mode, less in PARTS:
        if mode in summaries and (not less or less in summaries):
            value = summaries[mode].p50_ms - (summaries[less].p50_ms if less else 0.0)
            modes = f"`{mode}` less `{less}`" if less else f"`{mode}`"
            rows.append(f"| {about} | {modes} | {value:.2f} |")
    return rows


def _split(path: Path) -> tuple[str, str]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise BenchmarkError(f"--docs {path}: {error.strerror}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchmarkError(f"--docs {path}: it has no place for figures; mark one with {BEGIN} and {END}")
    return before, after
