"""Log configuration for commands. The library never configures logging; the program that embeds the pool does."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from executor.common.printable import printable


def _printable_values(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Make every text of a log line printable: some are words of an engine, or came from inside."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(value, lines=key == "exception")
    return event


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Log to ``stream`` (default stderr, so that stdout is the command's own): readable on a terminal, else JSON lines."""
    target = stream or sys.stderr
    renderer = structlog.dev.ConsoleRenderer() if target.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _printable_values,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
