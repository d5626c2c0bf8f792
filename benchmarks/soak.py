"""``python -m benchmarks.soak``: one pool under mixed calls, kills and cancels for minutes, and whether anything is left."""

from __future__ import annotations

import importlib.util
import json
import secrets
import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console

from benchmarks.bench import BenchmarkError
from benchmarks.latency import Backend
from benchmarks.soak_load import Scale
from benchmarks.soak_report import as_json, show
from benchmarks.soak_run import Soak, run
from executor.errors import EmberpoolError
from pool.config.load import ConfigError, load_settings

FAILED = 1

app = typer.Typer(add_completion=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(min=0.01, max=100_000, help="How long the pool is loaded.")] = 2.0,
    json_file: Annotated[
        str,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout, and nothing else then."),
    ] = "",
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="What is done, and when, is drawn from it (default: a new one, which is printed)."),
    ] = None,
    sandboxes: Annotated[int, typer.Option(min=2, max=1_000, help="The pool's max_sandboxes.")] = 8,
    clients: Annotated[int, typer.Option(min=1, max=10_000, help="Callers at once.")] = 8,
    backend: Annotated[Backend, typer.Option(help="The event loop.")] = Backend.ASYNCIO,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Configuration: \\[sandbox] and \\[call] are used, \\[pool] is the soak's own."
        ),
    ] = None,
) -> None:
    """Put one pool under heavy load, and check that every call ends exactly once and that nothing grows.

    Needs an engine and the image. Ctrl-C ends the load early; the rest and the report follow.

    Exits with status 1 if the soak failed; the last lines say why.
    """
    notes = Console(stderr=True, highlight=False)
    try:
        soak = _soaked(minutes, json_file, seed, sandboxes, clients, backend, config, notes)
    except (EmberpoolError, BenchmarkError, ConfigError) as error:
        for line in str(error).splitlines():
            typer.echo(f"soak: {line}", err=True)
        raise typer.Exit(FAILED) from None
    if soak.faults:
        raise typer.Exit(FAILED)


def _soaked(
    minutes: float,
    json_file: str,
    seed: int | None,
    sandboxes: int,
    clients: int,
    backend: Backend,
    config: Path | None,
    notes: Console,
) -> Soak:
    """Check everything that can be checked first, soak, and write what was asked for."""
    if not Path(json_file).parent.is_dir():
        raise BenchmarkError(f"--json {json_file}: there is no directory {Path(json_file).parent}")
    if importlib.util.find_spec(backend.value) is None:
        raise BenchmarkError(f'--backend {backend.value} is not installed: pip install "emberpool[trio]"')
    settings = load_settings(config)
    scale = Scale(
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        clients=clients,
        min_standby=max(1, sandboxes // 4),
        max_sandboxes=sandboxes,
    )
    soak = Soak(scale=scale, minutes=minutes)
    soak.tap.install()

    def report(text: str) -> None:
        notes.print(f"soak: {text}")

    report(f"seed {scale.seed}")
    anyio.run(run, settings, soak, backend.value, report, backend=backend.value)
    show(soak, notes if json_file == "-" else Console(highlight=False))
    if json_file:
        text = json.dumps(as_json(soak), indent=2) + "\n"
        try:
            if json_file == "-":
                sys.stdout.write(text)
            else:
                Path(json_file).write_text(text, "utf-8")
        except OSError as error:
            raise BenchmarkError(f"--json {json_file}: {error.strerror}") from error
    return soak


if __name__ == "__main__":
    app()
