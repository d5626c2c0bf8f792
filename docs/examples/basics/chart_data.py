"""A tool that turns values into what a chart draws: the bins of a histogram, or one series for each group of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

MAX_BINS = 1_000
_COMBINE: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "max": max,
    "count": len,
}


def chart_data(
    values: list[Any] | None = None,
    bins: int = 10,
    rows: list[Any] | None = None,
    x: str = "",
    y: str = "",
    series: str = "",
    combine: str = "sum",
) -> dict[str, Any]:
    """A histogram of ``values`` in ``bins``, or the points of ``rows``: ``y`` over ``x``, a line for each ``series``.

    Rows with the same ``x`` in one series are put together by ``combine``: sum, mean, min, max or count. Raises
    ``ValueError`` for values that are no finite numbers and for rows without the named keys.
    """
    if (values is None) == (rows is None):
        raise ValueError("give either values, for a histogram, or rows with x and y, for series")
    return histogram(values, bins) if values is not None else lines(rows or [], x, y, series, combine)


def histogram(values: list[Any], bins: int) -> dict[str, Any]:
    """``{"kind": "histogram", "edges": [...], "counts": [...]}``: one edge more than counts, the last bin closed."""
    if not isinstance(values, list) or not values:
        raise ValueError("values must be a list of at least one number")
    if isinstance(bins, bool) or not isinstance(bins, int) or not 1 <= bins <= MAX_BINS:
        raise ValueError(f"bins must be a whole number from 1 to {MAX_BINS}")
    numbers = [_number(value, f"values[{index}]") for index, value in enumerate(values)]
    low, high = min(numbers), max(numbers)
    if low == high:  # one value: bins of a width to draw, around it
        around = max(0.5, abs(low) / 100)
        low, high = low - around, high + around
    width = (high - low) / bins
    if not math.isfinite(width) or low + width == low:
        raise ValueError("values lie too far apart, or for their size too close together, to be put into bins")
    counts = [0] * bins
    for number in numbers:
        counts[min(max(int((number - low) / width), 0), bins - 1)] += 1
    return {"kind": "histogram", "edges": [low + index * width for index in range(bins)] + [high], "counts": counts}


def lines(rows: list[Any], x: str, y: str, series: str, combine: str) -> dict[str, Any]:
    """``{"kind": "series", "x": [...], "series": [{"name": ..., "y": [...]}]}``; ``None`` where a series has no point."""
    if not x or not y:
        raise ValueError("rows need x and y: the keys that hold the two axes")
    if combine not in _COMBINE:
        raise ValueError(f"combine must be one of {', '.join(_COMBINE)}; it is {combine!r:.40}")
    if not isinstance(rows, list) or not rows:
        raise ValueError("rows must be a list of at least one object")
    points: dict[str, dict[Any, list[float]]] = {}
    places: dict[Any, None] = {}
    for index, row in enumerate(rows):
        missing = [key for key in (x, y, series) if key and (not isinstance(row, dict) or key not in row)]
        if missing:
            raise ValueError(f"rows[{index}] has no {missing[0]!r}")
        place, name = row[x], row[series] if series else y
        if not isinstance(place, (str, int, float)) or not isinstance(name, (str, int, float)):
            raise ValueError(f"rows[{index}]: {x!r} and the name of a series must be texts or numbers")  # noqa: TRY004
        places[place] = None
        points.setdefault(str(name), {}).setdefault(place, []).append(_number(row[y], f"rows[{index}].{y}"))
    try:
        drawn = [
            {"name": name, "y": [_COMBINE[combine](held[place]) if place in held else None for place in places]}
            for name, held in points.items()
        ]
    except OverflowError:
        raise ValueError("the sums are beyond what a number can hold") from None
    return {"kind": "series", "x": list(places), "series": drawn}


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where} is not a number")  # noqa: TRY004
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{where} is not a finite number")
    return number
