"""What one column of texts holds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import date
from typing import Any

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "-"})
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}\Z")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})(?:[eE][+-]?[0-9]{1,3})?\Z")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}\Z")


def summarize_column(cells: list[str]) -> dict[str, Any]:
    """Type, counts and range of a column. A type is given where every cell that is not missing has it, else "text"."""
    present = [cell for cell in cells if cell.lower() not in MISSING]
    summary: dict[str, Any] = {"type": "empty", "missing": len(cells) - len(present), "distinct": len(set(present))}
    if not present:
        return summary
    for name, read in _KINDS:
        values = [read(cell) for cell in present]
        if None not in values:
            return {**summary, "type": name, **_range(name, values)}
    lengths = [len(cell) for cell in present]
    return {**summary, "type": "text", "shortest": min(lengths), "longest": max(lengths)}


def _range(name: str, values: list[Any]) -> dict[str, Any]:
    if name == "boolean":
        return {"true": sum(values)}
    if name == "date":
        return {"min": min(values).isoformat(), "max": max(values).isoformat()}
    try:
        mean = math.fsum(values) / len(values)
    except OverflowError:  # the sum is beyond what a float holds, the mean is not
        mean = math.fsum(value / len(values) for value in values)
    return {"min": min(values), "max": max(values), "mean": mean}


def _integer(cell: str) -> int | None:
    return int(cell) if _INTEGER.match(cell) else None


def _number(cell: str) -> float | None:
    value = float(cell) if _NUMBER.match(cell) else math.inf
    return value if math.isfinite(value) else None


def _date(cell: str) -> date | None:
    try:
        return date.fromisoformat(cell) if _DATE.match(cell) else None
    except ValueError:
        return None


def _boolean(cell: str) -> bool | None:
    return {"true": True, "yes": True, "false": False, "no": False}.get(cell.lower())


_KINDS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("integer", _integer),
    ("number", _number),
    ("date", _date),
    ("boolean", _boolean),
)
