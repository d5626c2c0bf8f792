"""The commands ``emberpool engine ...`` and ``emberpool image ...``: they speak to a person, and decide nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from executor.common.printable import printable
from executor.engine.locate import find_engine
from executor.errors import EmberpoolError
from executor.machine import private_engine
from executor.machine.debian import Report
from executor.machine.image import DEFAULT_IMAGE, ensure_image
from pool.cli import interrupts
from pool.cli.output import say

engine_app = typer.Typer(no_args_is_help=True, help="The container engine: find one, or run a private one.")
image_app = typer.Typer(no_args_is_help=True, help="The image that sandboxes run.")

_T = TypeVar("_T")


@engine_app.command("up")
def engine_up() -> None:
    """Make sure that a container engine answers; on Debian or Ubuntu as root, install and start a private one."""
    ready = _run(private_engine.up)
    state = "started" if ready.started else "already up"
    say(f"engine {state}: {ready.info.kind} {ready.info.version}, {ready.endpoint.found}")


@engine_app.command("down")
def engine_down(
    force: Annotated[bool, typer.Option("--force", help="Stop it although a pool lives on it.")] = False,
) -> None:
    """Stop the private engine, and nothing that `engine up` did not start."""
    stopped = _run(lambda report: private_engine.down(force=force, report=report))
    say("private engine stopped" if stopped else "no private engine runs; nothing to stop")


@engine_app.command("status")
def engine_status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on one line.")] = False,
) -> None:
    """Which engine is used, how it was found, and who lives on it; exit status 1 where none answers."""
    status = _run(lambda report: private_engine.status())
    if as_json:
        typer.echo(json.dumps(asdict(status)))
    elif status.answers:
        say(f"{status.kind} {status.version}, {status.found}")
    if status.pid is not None and not as_json:
        pools = ", ".join(f"pid {pid}" for pid in status.pools) or "none"
        say(f"private engine: pid {status.pid}; pools on it: {pools}")
    if not status.answers:
        if not as_json:
            say(f"error: {status.problem}", err=True)
        raise typer.Exit(1)


@image_app.command("build")
def image_build(
    image: Annotated[str, typer.Option("--image", help="The image to make ready.")] = DEFAULT_IMAGE,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make it anew although it is there.")] = False,
) -> None:
    """Pull the image, or build the default one from the distribution's packages where no registry can be reached."""

    async def build(report: Report) -> str:
        engine, _ = await find_engine()
        made = await ensure_image(engine, image, report, rebuild=rebuild)
        return f"image {image} ready: {made.id.removeprefix('sha256:')[:12]}, {made.size / 1e6:.0f} MB"

    say(_run(build))


def _run(work: Callable[[Report], Awaitable[_T]]) -> _T:
    """Run ``work`` with progress; a refusal becomes one line on stderr and exit status 1, Ctrl-C exit status 130."""
    try:
        with _progress() as report:
            return interrupts.run(work, report)
    except EmberpoolError as error:
        say(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say("error: interrupted", err=True)
        raise typer.Exit(130) from None


@contextmanager
def _progress() -> Iterator[Report]:
    """A spinner with the latest line on a terminal; elsewhere each line on stderr as it comes."""
    if not sys.stderr.isatty():
        yield lambda line: say(line, err=True)
        return
    console = Console(stderr=True)
    with console.status("looking for an engine") as shown:
        yield lambda line: shown.update(escape(printable(line)))
