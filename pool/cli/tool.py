"""``emberpool tool``: call a tool of a manifest once, and list what there is; ``emberpool launch-check``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from executor.common.printable import printable
from executor.tool import ToolResult
from pool.cli import interrupts
from pool.cli.call import RAW, one_shot, result_object, swept
from pool.cli.errors import reported
from pool.cli.output import say, write_call
from pool.cli.streams import read_stdin
from pool.config.load import Settings, load_settings
from pool.doctor.doctor import examine
from pool.doctor.launch_check import Launch, check_launch, failed
from pool.manifest.load import Manifest, ToolEntry, load_manifest, resolve
from pool.pool import SandboxPool
from pool.supervisor.startup import make_ready
from pool.tools import ToolPlan, plan_tool, run_on_host

tool_app = typer.Typer(no_args_is_help=True, help="The Python tools of a manifest.")

_Manifest = Annotated[Path, typer.Argument(metavar="MANIFEST", help="The TOML file that describes agents and tools.")]
_Config = Annotated[Path | None, typer.Option(metavar="FILE", help="The configuration file (TOML).")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
_COLOURS = {"container": typer.colors.GREEN, "limits": typer.colors.YELLOW, "refused": typer.colors.RED}


@tool_app.command("run")
def run(
    manifest: _Manifest,
    tool: Annotated[str, typer.Argument(metavar="TOOL", help="Its name; a plugin's is plugin__<id>__<tool>.")],
    args: Annotated[str, typer.Option("--args", metavar="JSON", help="The arguments, one object; - for stdin.")] = "{}",
    agent: Annotated[str | None, typer.Option(help="The agent; needed if several have a tool of this name.")] = None,
    session: Annotated[str, typer.Option(help="The session's name.")] = "cli",
    config: _Config = None,
    as_json: _Json = False,
    raw: Annotated[bool, typer.Option("--raw", help=RAW)] = False,
) -> None:
    """Call a tool with ARGS and print what it returns; the configuration decides where it runs.

    A container is new for each run and removed afterwards: no state is kept. The exit status is 1 for a tool that fails, with its
    error on stderr, and for a refusal. On a terminal the tool's lines begin with out| or err|, and control characters are shown
    escaped; elsewhere the output is written unchanged.
    """
    with reported(as_json=as_json):
        settings = load_settings(config)
        plan = plan_tool(load_manifest(manifest).find(tool, agent), settings)
        arguments = read_stdin(settings.call.max_input) if args == "-" else args
        result = interrupts.run(_run, settings, plan, arguments, session)
    _print(result, as_json, raw)
    raise typer.Exit(0 if result.ok else 1)


async def _run(settings: Settings, plan: ToolPlan, arguments: str | bytes, session: str) -> ToolResult:
    if plan.python_tools == "limits":
        return await run_on_host(plan, arguments, settings)
    await make_ready(settings, lambda text: say(f"emberpool: {text}", err=True))
    alone = one_shot(settings)
    async with swept(alone), SandboxPool(alone) as pool:
        return await pool.run_tool(plan, arguments, session=session)


def _print(result: ToolResult, as_json: bool, raw: bool) -> None:
    if as_json:
        shown = {"ok": result.ok, "output": result.output, "error": result.error}
        typer.echo(json.dumps({**shown, "result": result_object(result.result)}))
        return
    # As UTF-8 whatever the locale: it may be one that has no such characters.
    output = (
        f"{result.output}\n".encode() if result.output and not result.output.endswith("\n") else result.output.encode()
    )
    # What the tool printed; where it failed, its traceback is the end of that.
    write_call([("err", result.result.stderr), ("out", output)], [result.verdict] if result.verdict else [], raw=raw)


@tool_app.command("list")
def list_tools(manifest: _Manifest, config: _Config = None, as_json: _Json = False) -> None:
    """List the tools of a manifest: each with its agent and where it runs."""
    with reported():
        settings, found = load_settings(config), load_manifest(manifest)
        rows = [(entry, resolve(entry, settings).python_tools) for entry in found.entries]
    if as_json:
        typer.echo(json.dumps([{**_facts(entry), "python_tools": place} for entry, place in rows]))
        return
    cells = [(entry.agent, entry.name, place, entry.description) for entry, place in rows]
    _print_aligned([("agent", "tool", "runs in", "description"), *cells])


def _print_aligned(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as what is in them; the last one is as long as it is."""
    rows = [tuple(printable(cell) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        *cells, last = row
        padded = [
            typer.style(f"{cell:<{width}}", fg=_COLOURS.get(cell)) for cell, width in zip(cells, widths, strict=True)
        ]
        typer.echo("  ".join([*padded, last]).rstrip())


def _facts(entry: ToolEntry) -> dict[str, str]:
    return {"agent": entry.agent, "tool": entry.name, "description": entry.description}


def launch_check(
    manifest: _Manifest,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also fail if a tool would run on the host, without isolation.")
    ] = False,
    config: _Config = None,
    as_json: _Json = False,
) -> None:
    """Show for each agent and tool where it would run (container, limits, refused), why, and what to change.

    Exits with status 1 if a tool cannot run at all, and with --strict if one would run on the host.
    """
    with reported(as_json=as_json):
        settings, found = load_settings(config), load_manifest(manifest)
        launches = interrupts.run(_check, settings, found)
    bad = failed(launches, strict=strict)
    if as_json:
        typer.echo(
            json.dumps({"ok": not bad, "strict": strict, "tools": [dataclasses.asdict(one) for one in launches]})
        )
    else:
        _print_launches(launches)
    raise typer.Exit(1 if bad else 0)


async def _check(settings: Settings, manifest: Manifest) -> list[Launch]:
    return await check_launch(manifest, settings, await examine(settings))


def _print_launches(launches: list[Launch]) -> None:
    rows = [
        (one.runs, one.agent, one.tool, f"{one.why} -> {one.change}" if one.change else one.why) for one in launches
    ]
    if rows:
        _print_aligned(rows)
    unisolated = sorted({one.agent for one in launches if one.runs == "limits"})
    if unisolated:
        say(f"agents with tools that run unisolated: {', '.join(unisolated)}")
