"""Percentiles of latencies, by the nearest-rank method: every figure is a latency that was really measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Of ``n`` latencies: milliseconds that half, 95 in 100 and 99 in 100 of them did not exceed."""

    n: int
    p50_ms: float
    p95_ms: float
    p99_ms: float


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of ``values`` that at least ``percent`` (1 to 100) of every hundred do not exceed.

    Raises ``ValueError`` where there are no values or no such percentage.
    """
    if not values:
        raise ValueError("there is no percentile of nothing; measure at least one round")
    if not 1 <= percent <= 100:
        raise ValueError(f"percent must be 1 to 100; it is {percent}")
    # In integers: 0.95 * 20 is a little more than 19 in floats on some roads to it, and its ceiling then 20.
    rank = -(-percent * len(values) // 100)
    return sorted(values)[rank - 1]


def summarise(seconds: Sequence[float]) -> Summary:
    """The summary of latencies given in seconds. Raises ``ValueError`` where there are none."""
    p50, p95, p99 = (round(percentile(seconds, percent) * 1000, 4) for percent in (50, 95, 99))
    return Summary(len(seconds), p50, p95, p99)


@dataclass(frozen=True, slots=True)
class Target:
    """What a ratio of two modes' medians ought to be; people check it, the benchmark only shows it."""

    over: str
    under: str
    least: float | None = None
    most: float | None = None

    @property
    def name(self) -> str:
        return f"{self.over}/{self.under}"

    def __str__(self) -> str:
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"


TARGETS = (
    Target("cold", "warm_exec", least=3),
    Target("cold", "armed", least=120),
    Target("warm_exec", "armed", least=30),
    Target("cold", "resident", least=180),
    Target("resident", "floor", most=1.5),
)


def ratios(modes: Mapping[str, Summary]) -> dict[str, float]:
    """How many times one median goes into another: ``cold/<mode>`` for each mode, and the pairs of ``TARGETS``."""
    pairs = [("cold", name) for name in modes if name != "cold"]
    pairs += [(target.over, target.under) for target in TARGETS if target.over != "cold"]
    return {
        f"{over}/{under}": round(modes[over].p50_ms / modes[under].p50_ms, 2)
        for over, under in pairs
        if over in modes and under in modes
    }
