"""``emberpool doctor``: say what stands between a configuration and a working pool, one line for each check."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import anyio
import typer

from executor.common.printable import printable
from pool.cli.output import say
from pool.doctor.doctor import Check, examine_file

_COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The TOML file; default: what EMBERPOOL_CONFIG names, or none."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check configuration, engine, runtime, image, user, memory and disk, and verify the boundary with a real sandbox.

    Prints one line for each check: ok, warn or fail, and how to fix it. Exits with status 1 if a check fails.
    """
    checks = anyio.run(_examined, config)
    if checks is None:
        say("error: interrupted", err=True)
        raise typer.Exit(130)
    ok = all(check.status != "fail" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print(checks)
    if not ok:
        raise typer.Exit(1)


async def _examined(config: Path | None) -> list[Check] | None:
    """The report; ``None`` where a signal came first, and then only after the probes are removed."""
    found: list[Check] | None = None
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:

            async def stop_on_signal() -> None:
                async for _ in signals:
                    tasks.cancel_scope.cancel()

            tasks.start_soon(stop_on_signal)
            found = await examine_file(config)
            tasks.cancel_scope.cancel()
    return found


def _print(checks: Sequence[Check]) -> None:
    # An engine's words are among them.
    checks = [Check(printable(one.name), one.status, printable(one.detail), printable(one.remedy)) for one in checks]
    width = max(len(check.name) for check in checks)
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        status = typer.style(f"{check.status:<4}", fg=_COLOURS[check.status])
        typer.echo(f"{status}  {check.name:<{width}}  {check.detail}{remedy}")
    counts = Counter(check.status for check in checks)
    verdict = "a pool cannot run like this" if counts["fail"] else "a pool can run"
    say(f"{verdict}: {counts['ok']} ok, {counts['warn']} to know of, {counts['fail']} failed")
