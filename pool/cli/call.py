"""``emberpool call``: one call in a session of a pool that lives for that call only."""

from __future__ import annotations

import base64
import dataclasses
import json
import secrets
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from executor.common.printable import printable
from executor.errors import InvalidCall
from executor.result import CallResult
from pool.cli import interrupts
from pool.cli.errors import reported
from pool.cli.output import say, write_call
from pool.cli.streams import read_stdin
from pool.config.load import Settings, load_settings
from pool.pool import SandboxPool
from pool.supervisor.requests import checked_call
from pool.supervisor.startup import make_ready

TIMED_OUT = 124
RAW = "Write its bytes to a terminal unchanged: they can control the terminal and imitate emberpool's messages."
_ONE_SANDBOX = {"min_standby": 0, "max_sandboxes": 1, "max_starting": 1, "max_cold": 0}


def call(
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- CMD [ARG]...]", show_default=False)] = None,
    agent: Annotated[str, typer.Option(help="The agent that the session belongs to.")] = "cli",
    session: Annotated[str, typer.Option(help="The session's name.")] = "cli",
    python: Annotated[Path | None, typer.Option(metavar="FILE", help="Python source to run; - for stdin.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds; at most call.timeout.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The configuration file (TOML).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole outcome as one JSON object.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help=RAW)] = False,
) -> None:
    """Run a command, or Python source, in a fresh hardened sandbox, print its output and exit with its status.

    On a terminal its lines begin with out| or err|, and control characters are shown escaped; elsewhere the output is written unchanged.

    What is piped into this command is the call's stdin. The exit status is 124 for a timeout, 128 + N for a
    call ended by signal N, and 1 for a refusal, with one line that says why. No state is kept: the sandbox is removed afterwards.
    """
    if bool(command) == (python is not None):
        raise typer.BadParameter("give either a command after --, or --python FILE")
    with reported(as_json=as_json):
        settings = one_shot(load_settings(config))
        most = settings.call.max_input
        source = None if python is None else _source(python, most)
        stdin = b"" if sys.stdin.isatty() or str(python) == "-" else read_stdin(most)
        # What is wrong with the call is reported at once, not once there is a sandbox for it.
        checked_call(settings, agent, command, source, stdin, None, timeout, None)
        result = interrupts.run(_call, settings, (agent, session), command, source, stdin, timeout)
    if as_json:
        typer.echo(json.dumps(result_object(result)))
    else:
        own = [f"emberpool: {note}" for note in _notes(result)]
        write_call([("out", result.stdout), ("err", result.stderr)], own, raw=raw)
    raise typer.Exit(_status(result))


def one_shot(settings: Settings) -> Settings:
    """The settings of a pool for one call: one sandbox, no standbys, and a state directory of its own that goes with it."""
    place = settings.pool.state_dir.parent / f"one-shot-{secrets.token_hex(6)}"
    changed = settings.pool.model_copy(update={"state_dir": place, **_ONE_SANDBOX})
    return settings.model_copy(update={"pool": changed})


async def _call(
    settings: Settings,
    key: tuple[str, str],
    command: list[str] | None,
    source: str | None,
    stdin: bytes,
    timeout: float | None,
) -> CallResult:
    await make_ready(settings, lambda text: say(f"emberpool: {text}", err=True))
    async with swept(settings), SandboxPool(settings) as pool:
        session = await pool.acquire(*key)
        return await session.call(command, code=source, stdin=stdin, timeout=timeout)


@asynccontextmanager
async def swept(settings: Settings) -> AsyncIterator[None]:
    """Remove the state directory of a one-shot pool after the block."""
    place = settings.pool.state_dir
    try:
        yield
    finally:
        # An entry that is left names a container that could not be removed: then the directory stays, for its removal.
        if not any((place / "ledger").glob("*")):
            shutil.rmtree(place, ignore_errors=True)


def result_object(result: CallResult) -> dict[str, Any]:
    """A result under its own field names; bytes as text, and as base64 besides where they are not UTF-8."""
    shown: dict[str, Any] = {}
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        if isinstance(value, bytes):
            shown[field.name] = value.decode("utf-8", "replace")
            try:
                value.decode("utf-8")
            except UnicodeDecodeError:
                shown[f"{field.name}_base64"] = base64.b64encode(value).decode("ascii")
        else:
            shown[field.name] = value
    return {**shown, "truncated": result.truncated}


def _source(path: Path, most: int) -> str:
    try:
        if str(path) == "-":
            return read_stdin(most).decode("utf-8")
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise InvalidCall(f"{path} is more than {most} bytes; send less, or raise call.max_input")
        return data.decode("utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{printable(path, name=True)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{printable(path, name=True)} is not UTF-8 (byte {error.start})") from None


def _notes(result: CallResult) -> list[str]:
    notes = []
    if result.timed_out:
        notes.append(f"timed out after {result.duration:.1f} s")
    if result.oom_killed:
        notes.append("killed by its memory limit")
    if result.cpu_limit:
        notes.append("killed by its CPU limit")
    if result.truncated:
        notes.append(f"output cut: stdout {result.stdout_total} bytes, stderr {result.stderr_total} in all")
    return notes


def _status(result: CallResult) -> int:
    if result.timed_out:
        return TIMED_OUT
    if result.signal is not None:
        return 128 + result.signal
    return result.exit_code or 0
