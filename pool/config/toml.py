"""Parse TOML within a bound on its depth: neither the parser nor what reads its tables goes round for ever, or too deep."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_DEPTH = 64
"""Tables and lists inside one another; the deepest key of a configuration or a manifest has seven."""

# Every string or comment is one token, closed or not, so that this takes time in proportion to the text.
_TOKEN = re.compile(
    # Before its end, a string of several lines may have one or two quotes of its own.
    r'"""(?:\\.|[^\\])*?(?:"""(?:"{0,2})|\Z)'
    r"|'''.*?(?:'''(?:'{0,2})|\Z)"
    r'|"(?:\\.|[^"\\\n])*"?'
    r"|'[^'\n]*'?"
    r"|\#[^\n]*"
    r"|(?P<part>\.)"
    r"|(?P<end>[\n=,\[\]{}])",
    re.DOTALL,
)


class TooDeep(ValueError):
    """Names or values are nested more than ``MAX_DEPTH`` deep."""

    def __init__(self, where: str = "") -> None:
        super().__init__(f"names and values are nested more than {MAX_DEPTH} deep{where}")


def parse_toml(text: str) -> dict[str, Any]:
    """The tables that ``text`` holds. Raises ``tomllib.TOMLDecodeError``, ``TooDeep`` or another ``ValueError``."""
    # The time that `tomllib` takes for a name grows with the square of its parts: 20,000 take it ten seconds.
    _check_names(text)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise TooDeep from None
    _check_depth(tables)
    return tables


def _check_names(text: str) -> None:
    parts = 0
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "part":
            parts += 1
            if parts >= MAX_DEPTH:
                raise TooDeep(f" (at line {text.count(chr(10), 0, token.start()) + 1})")
        elif token.lastgroup == "end":
            parts = 0


def _check_depth(tables: dict[str, Any]) -> None:
    level: list[Any] = [tables]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for one in level
            for value in (one.values() if isinstance(one, dict) else one)
            if isinstance(value, dict | list)
        ]
        if not level:
            return
    raise TooDeep
