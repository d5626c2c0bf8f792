"""A tool that looks a value up in a JSON document by a path such as ``orders[0].lines[*].price``."""

from __future__ import annotations

import json
import re
from typing import Any

_STEP = re.compile(
    r"""
    \.?(?P<name>[A-Za-z_$][\w$-]*)              # name or .name
    | \[(?P<index>-?[0-9]{1,9})\]               # [0], [-1]
    | (?P<every>\[\*\]|\.\*)                    # [*] or .*
    | \[(?P<quoted>"(?:[^"\\]|\\.)*")\]         # ["any key"]
    """,
    re.VERBOSE,
)


def json_query(document: Any, path: str) -> Any:
    """The value at ``path``; with ``[*]`` in it, the list of all that match.

    ``document`` is a JSON value, or a text that holds one. Raises ``ValueError`` that says where the path leaves the document.
    """
    if isinstance(document, str):
        try:
            document = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"document is not JSON: {error}") from None
    steps = parse_path(path)
    found = [document]
    walked = "$"
    for kind, key in steps:
        walked += f"[{json.dumps(key)}]" if kind == "key" else f"[{key}]"
        found = [below for value in found for below in _below(value, kind, key, walked)]
    return found if any(kind == "every" for kind, _ in steps) else found[0]


def parse_path(path: str) -> list[tuple[str, Any]]:
    """The steps of a path: ``("key", name)``, ``("index", number)`` or ``("every", "*")``."""
    if not isinstance(path, str):
        raise ValueError(f"path must be a text such as orders[0].price, not {type(path).__name__}")  # noqa: TRY004
    position = 1 if re.match(r"\$(?![\w$-])", path) else 0
    steps: list[tuple[str, Any]] = []
    while position < len(path):
        match = _STEP.match(path, position)
        if not match or (match.group("name") and steps and path[position] != "."):
            raise ValueError(
                f'path has no step at {path[position : position + 20]!r}; steps are .name, [0], [*], ["key"]'
            )
        if match.group("index"):
            steps.append(("index", int(match.group("index"))))
        elif match.group("every"):
            steps.append(("every", "*"))
        else:
            steps.append(("key", match.group("name") or _unquoted(match.group("quoted"))))
        position = match.end()
    return steps


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        raise ValueError(f"path holds {text[:40]}, which is no text as JSON writes it") from None


def _below(value: Any, kind: str, key: Any, walked: str) -> list[Any]:
    if kind == "every":
        if isinstance(value, dict):
            return list(value.values())
        if isinstance(value, list):
            return value
        raise ValueError(f"{walked}: a {_word(value)} has nothing to go through")
    if kind == "index":
        if not isinstance(value, list):
            raise ValueError(f"{walked}: a {_word(value)} has no positions")
        if not -len(value) <= key < len(value):
            raise ValueError(f"{walked}: the list has {len(value)} items")
        return [value[key]]
    if not isinstance(value, dict):
        raise ValueError(f"{walked}: a {_word(value)} has no keys")  # noqa: TRY004
    if key not in value:
        raise ValueError(f"{walked}: there is no such key; the object has {', '.join(list(value)[:20]) or 'none'}")
    return [value[key]]


def _word(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    words = ((str, "text"), ((int, float), "number"), (list, "list"), (dict, "object"))
    return next((word for kind, word in words if isinstance(value, kind)), type(value).__name__)
