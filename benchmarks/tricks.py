"""``python -m benchmarks.tricks``: what each trick of the runner saves, with all but one of them switched on, in turn.

A trick is switched off by changing lines of the runner's text before it is sent; the code itself has no switches.
Beside the median stands the tenth percentile, which a busy machine changes less. ``--fidelity NAME`` runs the tests that compare a call with ``python3 FILE`` with that trick switched off.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import anyio
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.bench import Bench, BenchmarkError
from benchmarks.modes import MODES, Measure, Mode
from benchmarks.profile import replaced
from benchmarks.rounds import measure
from benchmarks.stats import percentile
from executor import inside
from executor.errors import EmberpoolError
from executor.sandbox import runner_client
from pool import logs
from pool.config.load import load_settings

ROUNDS = 40
ALL = "all"
_PYTHON_STEPS = """\
        def steps(*_):
            self.begin()
            self._results.append(self._libc.run_file(self._stream, os.fsencode(self.name), 1, None))
            self._watched.extend((sys.gettrace(), sys.getprofile()))
            sys.settrace(None)
            sys.setprofile(None)
            self.finish()
            for step in self._steps[5:]:
                step()
        self._steps += [None] * 5
        return steps
"""
Change = tuple[str, str]
TRICKS: dict[str, tuple[str, tuple[Change, ...]]] = {
    ALL: ("every trick", ()),
    "rehearsed_call": (
        "the runner serves a simulated call after each fork",
        ((
            "        (input_r, input_w), (ask_r, ask)",
            "        processes.note_oom_kills()\n        return child.wait_until_prepared(processes)\n"
            "        (input_r, input_w), (ask_r, ask)",
        ),),
    ),
    "first_call": (
        "the runner carries out a call that does nothing before its hello",
        (("        if not runner.run_first_call(child):\n", "        if not runner.discard(child):\n"),),
    ),
    "rehearsed_code": (
        "the child runs a small program before the call",
        (
            ("        self.rehearse()\n        gc.collect()\n", "        gc.collect()\n"),
            ("        self.rehearse()  # again", "        pass  # again"),
        ),
    ),
    "rehearsed_exit": (
        "the child looks, before the call, at all that the exit check looks at",
        (
            ("        self.exit_check.rehearse(SOURCE", "        (SOURCE"),
            ("        self.rehearse()  # again", "        pass  # again"),
        ),
    ),
    "exit_check": (
        "the process ends at once where nothing could notice that its interpreter is not finalised",
        (("            if not interrupted and self.exit_check.allows_exit():\n", "            if False:\n"),),
    ),
    "kept_memory": (
        "a process shares the child's memory, so that it is freed after the answer",
        (("        libc.keep_memory()  #", "        #"),),
    ),
    "held_output": (
        "output waits up to 2 ms for the report, to leave in one write with it",
        (("HOLD_SECONDS = 0.002", "HOLD_SECONDS = 0.0"),),
    ),
    "c_steps": (
        "only C callables stand between the interpreter and the caller's code",
        (("        call = functools.partial.__call__\n", _PYTHON_STEPS + "        call = functools.partial.__call__\n"),),
    ),
}  # fmt: skip


def program(off: str) -> bytes:
    """Return the runner's text with one trick switched off. Raises ``BenchmarkError`` where a line is missing."""
    parts = inside.parts("runner")
    for line, by in TRICKS[off][1]:
        parts = replaced(parts, line, by, "benchmarks/tricks.py")
    return inside.join(parts).encode("utf-8")


def switch_off(name: str) -> None:
    """From now on, send runners without this trick."""
    text = program(name)
    runner_client._program = lambda: text  # type: ignore[assignment]


def _mode(name: str) -> Mode:
    """An armed call without one trick. Only one mode is active at a time, and arms its next runner before it rests."""

    @asynccontextmanager
    async def opened(bench: Bench) -> AsyncIterator[Measure]:
        switch_off(name)
        async with MODES["armed"].open(bench) as once:

            async def measured() -> float:
                switch_off(name)
                return await once()

            yield measured

    return Mode(name, TRICKS[name][0], opened, usual=False)


class _Quiet:
    """No progress is shown."""

    def begins(self, rounds: int) -> None: ...
    def round(self, number: int, rounds: int) -> None: ...


def main(
    rounds: Annotated[int, typer.Option(min=1, max=100_000, help="Measurements without each trick.")] = ROUNDS,
    fidelity: Annotated[str, typer.Option(metavar="NAME", help="Run tests/engine/test_fidelity.py without it.")] = "",
) -> None:
    """Measure an armed call without each trick. Needs an engine and the image; all that it starts is removed at the end."""
    if fidelity:
        switch_off(fidelity)
        raise typer.Exit(importlib.import_module("pytest").main(["-q", "tests/engine/test_fidelity.py"]))
    logs.configure("warning")
    try:
        report = anyio.run(measure, load_settings(None), [_mode(name) for name in TRICKS], rounds, "asyncio", _Quiet())
    except (EmberpoolError, BenchmarkError) as error:
        typer.echo(f"tricks: {error}", err=True)
        raise typer.Exit(1) from None
    if report is None:
        raise typer.Exit(130)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    figures = {name: [percentile(it, 50), percentile(it, 10)] for name, it in report.samples.items()}
    for title in ("without", "p50 ms", "to all", "p10 ms", "to all", "what is switched off"):
        table.add_column(title, justify="right" if title.endswith(("ms", "all")) else "left")
    for name, (p50, p10) in figures.items():
        ratios = [f"{it / every:.2f}" for it, every in zip((p50, p10), figures[ALL], strict=True)]
        table.add_row(name, f"{p50 * 1e3:.3f}", ratios[0], f"{p10 * 1e3:.3f}", ratios[1], TRICKS[name][0])
    console = Console(highlight=False)
    console.print(table)
    console.print(report.where())


if __name__ == "__main__":
    typer.run(main)
