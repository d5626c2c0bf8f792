"""Log configuration for commands. The library never configures logging; whoever embeds the pool does, as it likes."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Log to ``stream`` (default stderr, so that stdout is the command's own): readable on a terminal, else JSON lines."""
    target = stream or sys.stderr
    renderer = structlog.dev.ConsoleRenderer() if target.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
