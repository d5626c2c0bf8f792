"""The only way in which this library logs: loggers that cannot raise, and a count of the lines that were lost.

A line goes to structlog where the program has configured it, else to the standard library's logger of the same name
(``emberpool.pool`` and so on), so that nothing is ever written to stdout by default. What a sink raises (a full disk, a
broken pipe) costs that line and nothing else. A ``BaseException`` that is no ``Exception`` (``KeyboardInterrupt``, a
cancellation) is not a sink's failure and passes through: callers log last, when everything else has been done.
"""

from __future__ import annotations

import logging
from threading import Lock
from typing import Any

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_DEPTH = 4
"""Frames between ``logging``'s own code and the caller that logged, so that a record names that place."""


class _Count:
    """A count that threads may add to."""

    def __init__(self) -> None:
        self.value, self._lock = 0, Lock()

    def add(self) -> None:
        with self._lock:
            self.value += 1


_lost = _Count()


def lost_lines() -> int:
    """The number of lines that this process could not log, since its start."""
    return _lost.value


class Logger:
    """A logger whose ``debug``, ``info``, ``warning`` and ``error`` take a dotted event name and fields, and cannot raise."""

    def __init__(self, name: str, /, **fields: Any) -> None:
        self._name, self._fields = name, fields
        # Lazy: it looks at the configuration when it is used, not now.
        self._structlog = structlog.get_logger(name, **fields)

    def bind(self, /, **fields: Any) -> Logger:
        """A logger of the same name whose lines have these fields too."""
        return Logger(self._name, **{**self._fields, **fields})

    def debug(self, event: str, /, **fields: Any) -> None:
        self._log("debug", event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        self._log("info", event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self._log("warning", event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self._log("error", event, fields)

    def _log(self, level: str, event: str, fields: dict[str, Any]) -> None:
        try:
            if structlog.is_configured():
                getattr(self._structlog, level)(event, **fields)
            else:
                self._log_plainly(_LEVELS[level], event, {**self._fields, **fields})
        except Exception:  # whatever a sink raises: there is no other place to report it
            _lost.add()

    def _log_plainly(self, level: int, event: str, fields: dict[str, Any]) -> None:
        logger = logging.getLogger(self._name)
        if logger.isEnabledFor(level):
            error = fields.pop("exc_info", None)
            text = " ".join([event, *(f"{key}={value!r}" for key, value in fields.items())])
            # The fields once more, as they are, for formatters that write JSON.
            extra = {"emberpool": {"event": event, **fields}}
            logger.log(level, "%s", text, exc_info=error, stacklevel=_DEPTH, extra=extra)


def get_logger(name: str) -> Logger:
    """The logger ``name``; every module of this library has one, and no other."""
    return Logger(name)
