"""A tool that reckons with dates: add days, months or business days, and tell how far two dates lie apart."""

from __future__ import annotations

import calendar
import re
from datetime import date, timedelta
from typing import Any

MAX_DAYS = 100_000
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}\Z")
_SATURDAY = 5


def date_math(
    start: str,
    end: str = "",
    days: int = 0,
    months: int = 0,
    business_days: int = 0,
    holidays: list[str] | None = None,
) -> dict[str, Any]:
    """Count from ``start`` to ``end``, or add to ``start``: first ``months``, then ``days``, then ``business_days``.

    Dates are ``YYYY-MM-DD``. Business days are Monday to Friday without ``holidays``. A month that is too short gives its
    last day. Raises ``ValueError`` naming what is no date, or no reasonable number.
    """
    first = _date("start", start)
    if holidays is not None and not isinstance(holidays, list):
        raise ValueError("holidays must be a list of dates")
    off = {_date(f"holidays[{index}]", text) for index, text in enumerate(holidays or [])}
    for name, count in (("days", days), ("months", months), ("business_days", business_days)):
        if isinstance(count, bool) or not isinstance(count, int) or abs(count) > MAX_DAYS:
            raise ValueError(f"{name} must be a whole number from -{MAX_DAYS} to {MAX_DAYS}")
    if end:
        if days or months or business_days:
            raise ValueError("give either end, to count the days between, or what to add to start, not both")
        return _between(first, _date("end", end), off)
    try:
        day = _add_business_days(_add_months(first, months) + timedelta(days=days), business_days, off)
    except (OverflowError, ValueError):
        raise ValueError("the result lies outside the years 1 to 9999") from None
    return {"date": day.isoformat(), "weekday": calendar.day_name[day.weekday()]}


def _between(first: date, last: date, off: set[date]) -> dict[str, Any]:
    # As when adding: the first day is not counted and the last one is. Whole weeks have five workdays each.
    sign = 1 if last >= first else -1
    total = abs((last - first).days)
    weeks, rest = divmod(total, 7)
    count = weeks * 5 + sum((last - timedelta(days=sign * back)).weekday() < _SATURDAY for back in range(rest))
    count -= sum(0 < sign * (day - first).days <= total and day.weekday() < _SATURDAY for day in off)
    return {"days": sign * total, "weeks": round(sign * total / 7, 2), "business_days": sign * count}


def _add_months(day: date, months: int) -> date:
    years, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    if not 1 <= years <= 9999:
        raise OverflowError
    return date(years, month + 1, min(day.day, calendar.monthrange(years, month + 1)[1]))


def _add_business_days(day: date, count: int, off: set[date]) -> date:
    step = timedelta(days=1 if count > 0 else -1)
    while count:
        day += step
        if day.weekday() < _SATURDAY and day not in off:
            count -= 1 if count > 0 else -1
    return day


def _date(name: str, text: object) -> date:
    # Newer Pythons read other forms of ISO 8601 too; the tool means the same on each.
    try:
        if isinstance(text, str) and _DATE.match(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise ValueError(f"{name} must be a date such as 2024-02-29; it is {text!r:.40}")
