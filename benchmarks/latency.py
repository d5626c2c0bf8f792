"""``python -m benchmarks.latency``: how long a call takes cold and warm, in turn within one run, on this machine."""

from __future__ import annotations

import importlib.util
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.status import Status

from benchmarks.bench import BenchmarkError
from benchmarks.document import PARTS, check_page, write_figures
from benchmarks.modes import MODES
from benchmarks.plot import check_plot, plot
from benchmarks.report import Report
from benchmarks.rounds import measure
from executor.errors import EmberpoolError
from pool import logs
from pool.config.load import ConfigError, load_settings

ROUNDS, QUICK_ROUNDS = 100, 15
INTERRUPTED = 130

app = typer.Typer(add_completion=False)


class Backend(StrEnum):
    """The event loops that the pool runs on."""

    ASYNCIO = "asyncio"
    TRIO = "trio"


class _Shown:
    """Progress on stderr: one line, and on a terminal the round that is being measured."""

    def __init__(self, notes: Console, status: Status) -> None:
        self._notes, self._status = notes, status

    def begins(self, rounds: int) -> None:
        self._notes.print(f"latency: warm; measuring {rounds} rounds")

    def round(self, number: int, rounds: int) -> None:
        self._status.update(f"round {number} of {rounds}")


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_ROUNDS} rounds, about a minute.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=100_000, help=f"Measurements of each mode (default {ROUNDS}).")
    ] = None,
    json_file: Annotated[
        str,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout, and nothing else then."),
    ] = "",
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the distributions (.png or .svg).")
    ] = None,
    docs_file: Annotated[
        Path | None,
        typer.Option(
            "--docs",
            metavar="FILE",
            help="Write the tables between the marks of a Markdown page; adds the parts' modes.",
        ),
    ] = None,
    backend: Annotated[Backend, typer.Option(help="The event loop.")] = Backend.ASYNCIO,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Configuration: \\[sandbox] and \\[call] are used, \\[pool] is the benchmark's own."
        ),
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help=f"Measure only this; may be repeated. One of: {', '.join(MODES)}.")
    ] = None,
) -> None:
    """Measure what a call costs cold (one docker run for each) and warm (in a session's sandbox), and compare.

    Needs an engine and the image. Everything it starts is removed at the end, after Ctrl-C too.
    """
    logs.configure("warning")
    notes = Console(stderr=True, highlight=False)
    try:
        report = _measured(quick, rounds, json_file, plot_file, docs_file, backend, config, mode, notes)
    except (EmberpoolError, BenchmarkError, ConfigError) as error:
        for line in str(error).splitlines():
            typer.echo(f"latency: {line}", err=True)
        raise typer.Exit(1) from None
    if report is None:
        typer.echo("latency: interrupted; everything it started is removed", err=True)
        raise typer.Exit(INTERRUPTED)


def _measured(
    quick: bool,
    rounds: int | None,
    json_file: str,
    plot_file: Path | None,
    docs_file: Path | None,
    backend: Backend,
    config: Path | None,
    names: list[str] | None,
    notes: Console,
) -> Report | None:
    """Check everything that can be checked first, measure, and write what was asked for."""
    for name in names or ():
        if name not in MODES:
            raise BenchmarkError(f"--mode {name!r} is unknown; there are {', '.join(MODES)}")
    parts = {mode for _, mode, _ in PARTS} if docs_file is not None else set()
    modes = [it for it in MODES.values() if (it.name in names if names else it.usual or it.name in parts)]
    for option, path in (("--json", Path(json_file)), ("--plot", plot_file or Path())):
        if not path.parent.is_dir():
            raise BenchmarkError(f"{option} {path}: there is no directory {path.parent}")
    if plot_file is not None:
        check_plot(plot_file)
    if docs_file is not None:
        check_page(docs_file)
    if importlib.util.find_spec(backend.value) is None:
        raise BenchmarkError(f'--backend {backend.value} is not installed: pip install "emberpool[trio]"')
    settings = load_settings(config)
    wanted = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    with notes.status("starting") as status:
        shown = _Shown(notes, status)
        report = anyio.run(measure, settings, modes, wanted, backend.value, shown, backend=backend.value)
    if report is not None:
        _write(report, json_file, plot_file, notes)
        if docs_file is not None:
            write_figures(report, docs_file)
    return report


def _write(report: Report, json_file: str, plot_file: Path | None, notes: Console) -> None:
    report.print(notes if json_file == "-" else Console(highlight=False))
    if json_file:
        text = json.dumps(report.as_json(), indent=2) + "\n"
        try:
            if json_file == "-":
                sys.stdout.write(text)
            else:
                Path(json_file).write_text(text, "utf-8")
        except OSError as error:
            raise BenchmarkError(f"--json {json_file}: {error.strerror}") from error
    if plot_file is not None:
        plot(report, plot_file)


if __name__ == "__main__":
    app()
