"""The pool's own account of a soak, out of its log: how many calls it ended, which sandboxes it started, and why it
stopped them. It is kept apart from the callers' books, so that one can be held against the other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

import structlog

from benchmarks.soak_books import Oddities
from pool import logs

ENDED = "call.ended"


class LogTap:
    """A structlog processor that counts, and lets through only what is an error. ``starts`` is how many sandboxes the
    pool reported as started; ``stops`` the reasons for which it stopped some; ``warnings`` what it warned of."""

    def __init__(self) -> None:
        self.calls = self.starts = 0
        self.stops: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self.errors = Oddities()
        self._order: dict[str, int] = {}

    def install(self) -> None:
        """Take the whole process's log over; errors go on to stderr."""
        logs.configure("info")
        structlog.configure(processors=[self, *structlog.get_config()["processors"]])

    def __call__(self, logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event, name = str(fields.get("event")), str(fields.get("sandbox"))
        if event == ENDED:
            self.calls += 1
        elif event == "sandbox.started":
            self.starts += 1
            self._order[name] = self.starts
        elif event == "sandbox.stopped":
            self.stops[str(fields.get("why"))] += 1
            self._order.pop(name, None)
        level = logging.getLevelNamesMapping()[method.upper() if method != "exception" else "ERROR"]
        if level < logging.ERROR:
            if level == logging.WARNING:
                self.warnings[event] += 1
            raise structlog.DropEvent
        self.errors.add(f"{event}: {fields.get('error') or fields.get('hint') or name}")
        return fields

    def started_before(self, sandbox: str, mark: int) -> bool:
        """Whether this sandbox, by its full name, had started when ``starts`` was ``mark``."""
        return self._order.get(sandbox, mark + 1) <= mark
