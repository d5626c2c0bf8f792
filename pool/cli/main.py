"""The command ``emberpool``: puts the sub-commands together and turns every refusal into one line and exit status 1."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Annotated

import typer

from pool import logs
from pool.cli import streams
from pool.cli.call import call
from pool.cli.cleanup import cleanup
from pool.cli.config import config_app
from pool.cli.doctor import doctor
from pool.cli.engine import engine_app, image_app
from pool.cli.tool import launch_check, tool_app

app = typer.Typer(no_args_is_help=True, help="A warm pool of hardened containers for untrusted tool code.")
app.add_typer(config_app, name="config")
app.add_typer(engine_app, name="engine")
app.add_typer(image_app, name="image")
app.add_typer(tool_app, name="tool")
app.command("doctor")(doctor)
app.command("launch-check")(launch_check)
app.command("call")(call)
app.command("cleanup")(cleanup)


def _join_help_lines(group: typer.Typer) -> None:
    """Make each paragraph of the commands' help one line, so that it wraps at the width of the terminal.

    typer takes the help from the docstring and keeps its line breaks in all paragraphs but the first.
    """
    for command in group.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    for added in group.registered_groups:
        if added.typer_instance is not None:
            _join_help_lines(added.typer_instance)


_join_help_lines(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"emberpool {version('emberpool')}")
        raise typer.Exit


@app.callback()
def _options(
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error; logs go to stderr.")] = "error",
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    try:
        logs.configure(log_level)
    except KeyError:
        raise typer.BadParameter(f"{log_level!r} is none of debug, info, warning, error") from None


def main() -> None:
    streams.install()
    try:
        app()
    finally:
        streams.finish()


if __name__ == "__main__":
    main()
