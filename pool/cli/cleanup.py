"""``emberpool cleanup``: shows what dead pools left, and removes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from executor.engine.cgroups import remove_parent
from executor.engine.locate import find_engine
from executor.errors import EmberpoolError
from pool.cli import interrupts, output
from pool.cli.errors import say_problems
from pool.config.load import ConfigError, Settings, load_settings
from pool.ledger.cleanup import DeadPool, Leftover, Survey, clean, examine, others, survey
from pool.supervisor.connection import shared_profile

_SAID = {
    "ours": "container {name} ({state})",
    "gone": "ledger entry {name} ({state}); its container is gone",
    "foreign": "ledger entry {name} ({state}); its name is now another's container, which is left alone",
    "late": "nothing yet of {name} ({state}): its start may still be carried out; run this again in two minutes",
}


def cleanup(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="The configuration file (TOML).")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option("--state-dir", metavar="DIR", help="A pool's state directory; default: the configured."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Remove what dead pools left: the containers that their ledgers name, the entries, and one-shot directories.

    Looks at the pool's state directory and at those of `emberpool call` (one-shot-*) beside it. Running pools are
    skipped, and only containers that a ledger names are touched. Exits with status 1 if the pool itself is running, if no
    engine answers (nothing is removed then), or if anything could not be removed.
    """
    try:
        settings = load_settings(config)
        place = (state_dir or settings.pool.state_dir).absolute()
        done = interrupts.run(_cleanup, settings, place, dry_run, as_json)
    except ConfigError as error:
        say_problems(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        output.say("error: interrupted; run it again to remove the rest", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(done.shown, indent=2))
    if not done.ok:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Done:
    ok: bool
    shown: dict[str, Any]


async def _cleanup(settings: Settings, place: Path, dry_run: bool, quiet: bool) -> _Done:
    def say(text: str, *, err: bool = False) -> None:
        if not quiet:
            output.say(text, err=err)

    with survey(place) as found:
        for skipped in found.skipped:
            say(f"skipped {skipped.path}: {skipped.reason}")
        for dead in found.dead:
            if dead.state.repaired:
                files = ", ".join(dead.state.repaired)
                say(f"{dead.path} was damaged; the names come from its file names: {files}")
        for path in others(place):
            say(f"not looked at: {path}, another pool's; if that one is dead: emberpool cleanup --state-dir {path}")
        problem = ""
        if all(dead.empty for dead in found.dead):
            say("nothing to remove")
        else:
            try:
                engine, info = await find_engine(settings.sandbox.binary)
                await examine(engine, found)
            except EmberpoolError as error:
                problem = f"nothing was removed, since only an engine knows which containers there are: {error}"
                say(f"error: {problem}", err=True)
            else:
                for line in _plan(found):
                    say(line)
                if not dry_run:
                    await clean(engine, found)
                    for dead in found.dead:  # the kernel keeps one that is in use
                        remove_parent(shared_profile(settings, info, dead.state.pool_id).cgroup_parent)
                    say(_counted(found))
        failed = {what: why for dead in found.dead for what, why in dead.failed.items()}
        for what, why in failed.items():
            say(f"error: {what} stays: {why}", err=True)
        amiss = [skipped for skipped in found.skipped if not skipped.live or skipped.path == place]
        ok = not (problem or failed or amiss)
        return _Done(
            ok,
            {
                "ok": ok,
                "dry_run": dry_run,
                "error": problem or None,
                **_shown(found, removing=not dry_run and not problem),
            },
        )


def _plan(found: Survey) -> Iterator[str]:
    for dead in found.dead:
        if not dead.empty:
            yield f"{dead.path}" + " (a one-shot pool's, goes too)" * dead.one_shot
        for left in dead.left:
            yield "  " + _SAID[left.found].format(name=left.entry.name, state=left.entry.state)
        for stray in dead.strays:
            yield f"  staging directory {stray.name}, which no entry names"


def _counted(found: Survey) -> str:
    gone = [left for dead in found.dead for left in dead.left if _removed(dead, left)]
    counts = {
        "containers": sum(1 for left in gone if left.found == "ours"),
        "ledger entries": len(gone),
        "staging directories": sum(1 for dead in found.dead for stray in dead.strays if str(stray) not in dead.failed),
        "one-shot directories": sum(1 for dead in found.dead if dead.removed),
    }
    return "removed: " + ", ".join(f"{count} {what}" for what, count in counts.items())


def _removed(dead: DeadPool, left: Leftover) -> bool:
    return left.entry.name not in dead.failed


def _shown(found: Survey, *, removing: bool) -> dict[str, Any]:
    return {
        "pools": [
            {
                "state_dir": str(dead.path),
                "pool": dead.state.pool_id,
                "one_shot": dead.one_shot,
                "entries": [
                    {
                        "name": left.entry.name,
                        "state": left.entry.state,
                        "found": left.found,
                        "container": left.container or None,
                        "removed": removing and _removed(dead, left),
                    }
                    for left in dead.left
                ],
                "staging": [str(stray) for stray in dead.strays],
                "directory_removed": dead.removed,
                "failed": dead.failed,
            }
            for dead in found.dead
        ],
        "skipped": [{"state_dir": str(one.path), "reason": one.reason, "live": one.live} for one in found.skipped],
    }
