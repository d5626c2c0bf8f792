"""What a soak writes down: every request that was begun and what became of it, and how long each kill hurt. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.stats import percentile
from executor.errors import EmberpoolError
from executor.result import CallResult

MOST_KEPT = 10
"""Descriptions kept of things that must never happen: the first ones are kept, the others only counted."""

ErrorKind = tuple[str, str, bool]
"""An error's ``reason``, the ``cause`` of a sandbox's death (else ``""``), and whether it is ``retryable``."""


@dataclass(slots=True)
class Oddities:
    """Things that must never happen: how many, and the first of them in words."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.first) < MOST_KEPT:
            self.first.append(text)


@dataclass(slots=True)
class Tally:
    """Requests of one kind. Each is ``accepted`` once, and must end in exactly one of the three. ``first`` is the message
    of the first error of each kind."""

    accepted: int = 0
    results: Counter[str] = field(default_factory=Counter)
    errors: Counter[ErrorKind] = field(default_factory=Counter)
    cancelled: int = 0
    first: dict[ErrorKind, str] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        return self.results.total() + self.errors.total() + self.cancelled

    def error(self, error: EmberpoolError) -> None:
        kind = (error.reason, str(getattr(error, "cause", "")), error.retryable)
        self.errors[kind] += 1
        self.first.setdefault(kind, str(error))

    def as_json(self) -> dict[str, Any]:
        """``{"accepted", "results": {kind: n}, "errors": [{"reason", "cause", "retryable", "n", "first"}], ...}``."""
        return {
            "accepted": self.accepted,
            "results": dict(sorted(self.results.items())),
            "errors": [
                {"reason": kind[0], "cause": kind[1], "retryable": kind[2], "n": n, "first": self.first.get(kind, "")}
                for kind, n in sorted(self.errors.items())
            ],
            "cancelled": self.cancelled,
        }


@dataclass(slots=True)
class Share:
    """How many of how many."""

    n: int = 0
    of: int = 0

    def add(self, counts: bool) -> None:
        self.n += counts
        self.of += 1

    @property
    def rate(self) -> float | None:
        """``None`` of nothing."""
        return self.n / self.of if self.of else None

    def as_json(self) -> dict[str, Any]:
        return {"n": self.n, "of": self.of, "rate": None if self.rate is None else round(self.rate, 4)}


@dataclass(frozen=True, slots=True)
class Wound:
    """A session's sandbox that was killed: when (seconds of the event loop's clock), which, and by whom."""

    at: float
    generation: str
    by: str


@dataclass(slots=True)
class PoolState:
    """One soak. ``calls`` are those on sessions and cold ones; ``acquires`` end in where the sandbox came from.

    ``wrong`` are results that are not what the code must have done, ``strange`` ends that are neither result nor error.
    ``warm`` are the calls on a session that had a sandbox when they were made, and ran in that very one.
    """

    calls: Tally = field(default_factory=Tally)
    acquires: Tally = field(default_factory=Tally)
    steps: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    warm: Share = field(default_factory=Share)
    wrong: Oddities = field(default_factory=Oddities)
    strange: Oddities = field(default_factory=Oddities)
    kills: Counter[str] = field(default_factory=Counter)
    wounds: dict[str, Wound] = field(default_factory=dict)
    recoveries: list[float] = field(default_factory=list)
    resizes: int = 0

    def result(self, result: CallResult) -> None:
        """A call had a result."""
        kind = "timed_out" if result.timed_out else "ok" if result.ok else "failed"
        self.calls.results[kind] += 1
        marks = (("oom_killed", result.oom_killed), ("cpu_limit", result.cpu_limit), ("truncated", result.truncated))
        self.marks.update(name for name, is_so in marks if is_so)

    def wound(self, session: str, wound: Wound) -> None:
        """A session's sandbox is being killed; a kill of one that hurts already is counted, and heals with it."""
        self.kills[wound.by] += 1
        self.wounds.setdefault(session, wound)

    def missed(self, session: str, wound: Wound) -> None:
        """What was to be killed was gone already."""
        self.kills[wound.by] -= 1
        self.kills["missed"] += 1
        if self.wounds.get(session) is wound:
            del self.wounds[session]

    def closed(self, session: str) -> None:
        """The session was closed; if it hurt, nobody will see it recover."""
        if self.wounds.pop(session, None) is not None:
            self.kills["closed first"] += 1

    def answered(self, session: str, result: CallResult, now: float) -> None:
        """A call of the session had a result: a good one out of another sandbox than the killed one is its recovery."""
        wound = self.wounds.get(session)
        if wound is not None and result.ok and result.generation != wound.generation:
            self.recoveries.append(now - wound.at)
            del self.wounds[session]

    def recovery(self) -> dict[str, float | int]:
        """``{"n", "p50_s", "p99_s", "max_s"}``; only ``n`` of none."""
        times = self.recoveries
        if not times:
            return {"n": 0}
        figures = {"p50_s": percentile(times, 50), "p99_s": percentile(times, 99), "max_s": max(times)}
        return {"n": len(times), **{name: round(value, 3) for name, value in figures.items()}}
