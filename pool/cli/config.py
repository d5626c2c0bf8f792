"""``emberpool config``: say what a configuration means, or everything that is wrong with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, get_args

import typer
from pydantic.fields import FieldInfo
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from executor.common.printable import printable
from pool.cli.output import say
from pool.config.host import host_memory
from pool.config.load import ConfigError, Loaded, check_host, each_setting, load
from pool.config.types import format_duration, format_size, parse_duration, parse_duration_or_off, parse_size

config_app = typer.Typer(name="config", help="Check a configuration.", no_args_is_help=True)

# A pipe gets one line for each key, however long its value is.
_PIPE_WIDTH = 1_000_000


@config_app.callback()
def _config() -> None:
    """Check a configuration."""


@config_app.command("check")
def check(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The TOML file; EMBERPOOL_... variables override it.", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check FILE, with EMBERPOOL_... variables overriding it, against every rule and against this host.

    Prints ok and the effective settings; or every problem, one for each line, and exits with status 1.
    """
    try:
        loaded = load(file)
        problems = check_host(loaded.settings, host_memory() or sys.maxsize)
    except ConfigError as error:
        loaded, problems = None, [str(problem) for problem in error.problems]
    if loaded is None or problems:
        if as_json:
            typer.echo(json.dumps({"ok": False, "problems": problems}, indent=2))
        else:
            for problem in problems:
                say(problem, err=True)
        raise typer.Exit(1)
    if as_json:
        settings = loaded.settings.model_dump(mode="json")
        typer.echo(json.dumps({"ok": True, "settings": settings, "origins": dict(loaded.origins)}, indent=2))
        return
    say("ok")
    console = Console(highlight=False)
    if not sys.stdout.isatty():
        console.width = _PIPE_WIDTH
    console.print(_table(loaded))


def _table(loaded: Loaded) -> Table:
    table = Table("setting", Column("value", overflow="fold"), "from", box=box.SIMPLE_HEAD, pad_edge=False)
    for where, field, value in each_setting(loaded.settings):
        table.add_row(*(Text(printable(cell)) for cell in (where, _written(field, value), loaded.origins[where])))
    return table


def _written(field: FieldInfo, value: object) -> str:
    """``value`` as it is written in a file."""
    kinds = [field.metadata, *(getattr(kind, "__metadata__", ()) for kind in get_args(field.annotation))]
    readers = [getattr(item, "func", None) for metadata in kinds for item in metadata]
    if value is None:
        return '"off"'
    if isinstance(value, float) and (parse_duration in readers or parse_duration_or_off in readers):
        return json.dumps(format_duration(value))
    if isinstance(value, int) and parse_size in readers:
        return json.dumps(format_size(value))
    return json.dumps(value, default=str)
