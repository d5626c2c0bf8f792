"""What is wrong with a configuration, in one line for each problem, and the one exception that carries them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from executor.common.printable import printable
from pool.config.types import shown

Known = Mapping[str, tuple[str, ...]]
"""The keys that each section has, by the section's dotted name in which ``*`` is any name: ``agents.*.call``."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. ``where`` is a key (``pool.min_standby``), an environment variable or a file."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class ConfigError(ValueError):
    """The configuration cannot be used; its text has one line for each of ``problems``."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def dotted(parts: Iterable[int | str]) -> str:
    """The path of a key as it is written in a file: ``agents."my agent".env[0]``, safe to print."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != "[key]":  # pydantic's word for "the name itself"
            name = printable(part, name=True, limit=200)
            text += ("." if text else "") + (name if name and not re.search(r"[. ]", name) else f'"{name}"')
    return text


def unknown_key(section: tuple[str, ...], key: str, known: Known) -> str:
    """The sentence about a key that its section does not have, with the nearest one that exists.

    ``section`` is the section's path, with the names that stand in the file."""
    pattern = next(name for name in known if _is(section, name))
    for other, keys in sorted(known.items(), key=lambda item: item[0].split(".")[0] != section[0]):
        if key not in keys or other == pattern or (other.startswith("agents.") and section[0] != "agents"):
            continue
        if section[0] == "agents" and not other.startswith("agents."):
            return f"unknown key; {key} belongs to [{other}] and cannot differ from agent to agent"
        return f"unknown key; {key} belongs to [{_named(other, section)}]"
    if near := difflib.get_close_matches(key, known[pattern], n=1):
        return f"unknown key; did you mean {dotted((*section, near[0]))}?"
    return f"unknown key; [{dotted(section)}] has {', '.join(known[pattern])}"


def unknown_section(name: str, known: Known) -> str:
    """The sentence about a section that does not exist; for a key outside its section it names that section."""
    sections = list(dict.fromkeys(section.split(".")[0] for section in known))
    owners = [section for section, keys in known.items() if name in keys]
    if owners:
        owner = min(owners, key=lambda section: section.count("*"))
        return f"unknown section; {name} is a key of [{_named(owner, ())}]"
    if near := difflib.get_close_matches(name, sections, n=1):
        return f"unknown section; did you mean [{near[0]}]?"
    return f"unknown section; the sections are {', '.join(f'[{section}]' for section in sections)}"


def _is(section: tuple[str, ...], pattern: str) -> bool:
    parts = pattern.split(".")
    return len(parts) == len(section) and all(part in ("*", name) for part, name in zip(parts, section, strict=True))


def _named(pattern: str, section: tuple[str, ...]) -> str:
    """``pattern`` with the names of ``section`` in the place of its ``*``, as far as they go."""
    parts = pattern.split(".")
    names = [*section, *["<name>"] * len(parts)]
    return ".".join(dotted([name]) if part == "*" else part for part, name in zip(parts, names, strict=False))


def problems_of(error: ValidationError, known: Known) -> list[Problem]:
    """Pydantic's findings in this project's words."""
    found: list[Problem] = []
    for item in error.errors(include_url=False):
        # A default that depends on a value that is itself wrong; the wrong value has its own entry.
        if item["type"] == "default_factory_not_called":
            continue
        found.append(Problem(dotted(item["loc"]), _sentence(dict(item), known)))
    return found


def _sentence(item: Mapping[str, Any], known: Known) -> str:
    kind, loc, context = item["type"], item["loc"], item.get("ctx") or {}
    value = shown(item["input"])
    if kind == "extra_forbidden":
        key = printable(loc[-1], name=True, limit=80)
        return unknown_key(loc[:-1], key, known) if len(loc) > 1 else unknown_section(key, known)
    if kind in _TYPE_WORDS:
        return f"{value} is not {_TYPE_WORDS[kind]}"
    if kind in _BOUND_WORDS:
        name, words = _BOUND_WORDS[kind]
        return f"{value} must be {words} {context[name]}"
    if kind == "missing":
        return "is missing; every table of this kind needs it"
    if kind == "literal_error":
        return f"{value} must be {context['expected']}"
    if kind == "value_error":
        return str(context["error"])
    message = str(item["msg"])
    return f"{value} cannot be used: {message[:1].lower()}{message[1:]}"


_TYPE_WORDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "tuple_type": "a list",
    "dict_type": "a table of tables",
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
}
_BOUND_WORDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
