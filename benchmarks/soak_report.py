"""A soak's result: as JSON for machines and as tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.soak_books import PoolState, Share, Tally
from benchmarks.soak_judge import LIMITS, MIB, Limit, Reading, growth, is_judged
from benchmarks.soak_run import Soak

NOT_READ = "-"


def as_json(soak: Soak) -> dict[str, Any]:
    """``{"seed", "ok", "faults", "load", "calls", "acquires", "warm", "kills", "sandboxes", "growth", "machine"}``.

    ``faults`` is empty exactly where the soak passed. ``growth`` has by name ``before``, ``after``, ``more`` and, where
    it is judged, ``may_grow``; bytes and counts, ``null`` for what could not be read.
    """
    books, scale, tap = soak.books, soak.scale, soak.tap
    return {
        "seed": scale.seed,
        "ok": not soak.faults,
        "faults": soak.faults,
        "load": {
            "minutes": soak.minutes,
            "seconds": round(soak.seconds, 1),
            "interrupted": soak.interrupted,
            "clients": scale.clients,
            "sessions": scale.sessions,
            "min_standby": scale.min_standby,
            "max_sandboxes": scale.max_sandboxes,
            "resized": books.resizes,
            "steps": dict(sorted(books.steps.items())),
        },
        "calls": {**books.calls.as_json(), "told_by_the_pool": tap.calls, **dict(sorted(books.marks.items()))},
        "acquires": books.acquires.as_json(),
        "warm": {
            "calls": books.warm.as_json(),
            "acquires": _ready(books).as_json(),
            "standbys": _standby(books).as_json(),
        },
        "kills": {**dict(sorted(books.kills.items())), "recovery": books.recovery()},
        "sandboxes": {
            "created": soak.created,
            "destroyed": soak.destroyed,
            "started": tap.starts,
            "stopped": dict(sorted(tap.stops.items())),
            "warnings": dict(sorted(tap.warnings.items())),
        },
        "growth": {limit.name: _grown(limit, soak.before, soak.after) for limit in LIMITS},
        "others": {name: it and it.others for name, it in (("before", soak.before), ("after", soak.after))},
        "machine": dict(soak.machine),
    }


def _ready(books: PoolState) -> Share:
    """Of the granted acquires, those that waited for no start: their session had a sandbox, or a standby was there."""
    found = books.acquires.results
    return Share(found["own"] + found["standby"], found.total())


def _standby(books: PoolState) -> Share:
    """Of the acquires that had to be given a sandbox, those that were given a standby."""
    found = books.acquires.results
    return Share(found["standby"], found["standby"] + found["started"])


def _grown(limit: Limit, before: Reading | None, after: Reading | None) -> dict[str, int | None]:
    old, new = before or Reading(), after or Reading()
    shown: dict[str, int | None] = {
        "before": getattr(old, limit.name) if before else None,
        "after": getattr(new, limit.name) if after else None,
        "more": growth(limit, old, new) if before and after else None,
    }
    if before and after and is_judged(limit, before, after):
        shown["may_grow"] = limit.may_grow
    return shown


def show(soak: Soak, console: Console) -> None:
    """The tables, and the verdict as the last thing."""
    books = soak.books
    for title, tally in (("call", books.calls), ("acquire", books.acquires)):
        console.print(_ends(title, tally))
    console.print(_facts(soak))
    console.print(_growth_table(soak))
    it = soak.machine
    console.print(
        Text(
            f"{it['engine']}, {it['runtime']}, {it['image']}; {it['cpu']}, {it['cores']} cores, {it['kernel']}; "
            f"Python {it['python']} on {it['backend']}; load {it['load_1m']} at the start; {it['date']}; seed {soak.scale.seed}"
        ),
        soft_wrap=True,
    )
    for fault in soak.faults:
        console.print(Text(f"FAILED: {fault}"), soft_wrap=True)
    if not soak.faults:
        early = ", though it was ended early" if soak.interrupted else ""
        unjudged = "" if soak.before is not None else "; growth was not judged, for it was not warm yet"
        console.print(Text(f"passed{early}{unjudged}"))


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=number == 0)
    return table


def _ends(title: str, tally: Tally) -> Table:
    """How requests of a kind ended; the last row is their sum."""
    table = _table(f"{title} ended in", "retryable", "n")
    for kind, n in sorted(tally.results.items()):
        table.add_row(f"result: {kind}" if title == "call" else f"granted: {kind}", "", f"{n:,}")
    for (reason, cause, retryable), n in sorted(tally.errors.items()):
        named = f"error: {reason} ({cause})" if cause else f"error: {reason}"
        table.add_row(named, "yes" if retryable else "no", f"{n:,}")
    table.add_row("cancelled", "", f"{tally.cancelled:,}", end_section=True)
    table.add_row(f"all of {tally.accepted:,} accepted", "", f"{tally.ended:,}")
    return table


def _facts(soak: Soak) -> Table:
    table = _table("what", "figure")
    books = soak.books
    for name, share in (
        ("warm calls", books.warm),
        ("warm acquires", _ready(books)),
        ("standbys found", _standby(books)),
    ):
        rate = NOT_READ if share.rate is None else f"{100 * share.rate:.1f} %"
        table.add_row(name, f"{share.n:,} of {share.of:,} ({rate})")
    table.add_row("kills", _words(books.kills.items()))
    recovery = books.recovery()
    for name in ("p50_s", "p99_s", "max_s"):
        if name in recovery:
            table.add_row(f"recovery, {name[:-2]} of {recovery['n']}", f"{recovery[name]:.3f} s")
    table.add_row("out of memory; output cut", f"{books.marks['oom_killed']:,}; {books.marks['truncated']:,}")
    table.add_row("changes of size", f"{books.resizes:,}")
    table.add_row("sandboxes started", f"{soak.tap.starts:,}")
    table.add_row("sandboxes stopped", _words(soak.tap.stops.items()))
    table.add_row("containers made, unmade", f"{soak.created:,}; {soak.destroyed:,}")
    return table


def _growth_table(soak: Soak) -> Table:
    table = _table("at rest", "warm", "end", "more", "allowed")
    before, after = soak.before or Reading(), soak.after or Reading()
    for limit in LIMITS:
        shown = [getattr(before, limit.name), getattr(after, limit.name), growth(limit, before, after)]
        if soak.before is None:
            shown[0] = shown[2] = None
        in_bytes = limit.name.endswith("memory")
        figures = [NOT_READ if n is None else f"{n / MIB:,.1f} MiB" if in_bytes else f"{n:,}" for n in shown]
        judged = limit.may_grow is not None and is_judged(limit, before, after)
        allowed = f"{(limit.may_grow or 0) / MIB:,.0f} MiB" if in_bytes else f"{limit.may_grow}"
        table.add_row(limit.about, *figures, allowed if judged else "not judged")
    return table


def _words(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts) if n) or "none"
