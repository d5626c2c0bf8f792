"""Read a configuration: a TOML file, with the environment (``EMBERPOOL_POOL__MAX_SANDBOXES=4``) on top of it.

A value in the environment is written as in the file; the quotes of a text may be left out.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from executor.common.printable import printable
from pool.config.errors import ConfigError, Problem, dotted
from pool.config.host import check_host
from pool.config.links import is_service_link
from pool.config.models import SECTIONS, Settings
from pool.config.tables import AgentSettings, CallSettings, PoolSettings, SandboxSettings
from pool.config.toml import parse_toml
from pool.config.types import Section

__all__ = [
    "AgentSettings", "CallSettings", "ConfigError", "Loaded", "PoolSettings", "Problem", "SandboxSettings", "Settings",
    "check_host", "load", "load_settings",
]  # fmt: skip

PREFIX = "EMBERPOOL_"
FILE_VARIABLE = "EMBERPOOL_CONFIG"
_NOT_SETTINGS = frozenset({FILE_VARIABLE, "EMBERPOOL_CI", "EMBERPOOL_ENGINE_HOME"})
_MAX_FILE = 1_000_000

Origin = Literal["default", "file", "environment"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checked settings, and where each key (``pool.name``, ``privileged.shell_exec.timeout``) came from.

    Of an agent only the keys of its table are there: the others are those of the pool.
    """

    settings: Settings
    origins: Mapping[str, Origin]


def load_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of the file ``path`` (or the one that ``EMBERPOOL_CONFIG`` names, or none) under those of the
    environment. Raises ``ConfigError`` naming every problem."""
    return load(path, environ).settings


def load(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """``load_settings``, with the origin of every key."""
    environ = os.environ if environ is None else environ
    if path is None and environ.get(FILE_VARIABLE):
        path = Path(environ[FILE_VARIABLE])
    from_file = read_file(path) if path is not None else {}
    from_environment, problems = read_environment(environ)
    settings = None
    try:
        settings = Settings(**_merge(from_file, from_environment))
    except ConfigError as error:
        problems += [_with_variable(problem, from_environment) for problem in error.problems]
    if problems or settings is None:
        raise ConfigError(problems)
    return Loaded(settings, _origins(settings, from_file, from_environment))


def read_file(path: Path, kind: str = "configuration file") -> dict[str, Any]:
    """The tables of a TOML file, unchecked. Raises ``ConfigError`` with the line and column of a syntax error."""
    where = printable(path, name=True, limit=300)

    def fail(text: str) -> ConfigError:
        return ConfigError([Problem(where, text)])

    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except FileNotFoundError:
        raise fail("there is no such file") from None
    except IsADirectoryError:
        raise fail("is a directory; name the file in it") from None
    except (OSError, ValueError) as error:
        raise fail(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MAX_FILE:
        raise fail(f"is larger than {_MAX_FILE:,} bytes; this is not a {kind}")
    try:
        return parse_toml(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise fail(f"is not UTF-8: line {line} holds the byte 0x{data[error.start]:02x}") from None
    except tomllib.TOMLDecodeError as error:
        raise fail(f"is not TOML: {error}") from None
    except ValueError as error:
        raise fail(f"is not usable TOML: {error}") from None


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """The tables in ``environ``, unchecked, and a problem (names, no values) for each unknown variable."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    variables = {_variable(f"{section}.{key}"): (section, key) for section, key in _keys()}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in _NOT_SETTINGS:
            continue
        if name not in variables:
            if is_service_link(name, environ[name]):
                continue
            problems.append(Problem(printable(name, name=True, limit=80), _unknown_variable(name, variables)))
            continue
        section, key = variables[name]
        text = environ[name]
        is_text = SECTIONS[section].model_fields[key].annotation in (str, Path)
        table = values
        for part in section.split("."):
            table = table.setdefault(part, {})
        table[key] = text if is_text else _toml_value(text)
    return values, problems


def _keys() -> Iterator[tuple[str, str]]:
    for section, model in SECTIONS.items():
        for key in model.model_fields:
            yield section, key


def _variable(where: str) -> str:
    return PREFIX + where.replace(".", "__").upper()


def _unknown_variable(name: str, variables: Mapping[str, tuple[str, str]]) -> str:
    rest = name.removeprefix(PREFIX).lower()
    if re.match(r"agents?(_|$)", rest):
        return "unknown setting; what holds for one agent is set in the file, in [agents.<name>]"
    section = next((one for one in SECTIONS if f"{rest}__".startswith(f"{one.replace('.', '__')}__")), "")
    if section:
        keys = list(SECTIONS[section].model_fields)
        key = rest[len(section.replace(".", "__")) + 2 :]
        near = [_variable(f"{section}.{match}") for match in difflib.get_close_matches(key, keys, n=1)]
    else:
        near = difflib.get_close_matches(name.upper(), variables, n=1, cutoff=0.85)
    if near:
        return f"unknown setting; did you mean {near[0]}?"
    if section:
        return f"unknown setting; [{section}] has {', '.join(keys)}"
    return f"unknown setting; settings are named {PREFIX}<SECTION>__<KEY>, for example {PREFIX}POOL__NAME"


def _toml_value(text: str) -> Any:
    """What ``key = <text>`` holds in TOML, or ``text`` itself where that is no TOML (``10m``, ``off``)."""
    if re.search(r"[\r\n]", text):
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _merge(from_file: dict[str, Any], from_environment: dict[str, Any]) -> dict[str, Any]:
    from_environment = _beside(from_file, from_environment)

    class Merged(BaseSettings):
        model_config = SettingsConfigDict(extra="allow")

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            *_: PydanticBaseSettingsSource,
            **__: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return InitSettingsSource(settings_cls, from_environment), InitSettingsSource(settings_cls, from_file)

    return Merged().model_extra or {}


def _beside(from_file: Mapping[str, Any], from_environment: Mapping[str, Any]) -> dict[str, Any]:
    # A section that is no table in the file stays as it is, to be refused, instead of vanishing under the environment.
    kept: dict[str, Any] = {}
    for key, value in from_environment.items():
        if not isinstance(value, dict):
            kept[key] = value
        elif isinstance(below := from_file.get(key, {}), dict):
            kept[key] = _beside(below, value)
    return kept


def _holds(tables: Mapping[str, Any], where: str) -> bool:
    table: Any = tables
    for part in where.split("."):
        if not isinstance(table, dict) or part not in table:
            return False
        table = table[part]
    return True


def _with_variable(problem: Problem, from_environment: Mapping[str, Any]) -> Problem:
    where = re.sub(r"\[.*", "", problem.where)
    if where not in {f"{section}.{key}" for section, key in _keys()} or not _holds(from_environment, where):
        return problem
    return Problem(problem.where, f"{problem.text} (set by {_variable(where)})")


def _origins(
    settings: Settings, from_file: Mapping[str, Any], from_environment: Mapping[str, Any]
) -> dict[str, Origin]:
    return {
        where: (
            "environment" if _holds(from_environment, where)
            # An agent's keys are only listed where its table has them, and that is in the file.
            else "file" if _holds(from_file, where) or where.startswith("agents.")
            else "default"
        )
        for where, _, _ in each_setting(settings)
    }  # fmt: skip


def each_setting(settings: Settings) -> Iterator[tuple[str, FieldInfo, object]]:
    """Every key that has a value of its own, in the order of the documentation: its path, its field and its value."""
    for section, key in _keys():
        table = attrgetter(section)(settings)
        yield f"{section}.{key}", type(table).model_fields[key], getattr(table, key)
    for name, agent in settings.agents.items():
        parts: list[tuple[tuple[str, ...], Section]] = [
            (("agents", name), agent),
            (("agents", name, "call"), agent.call),
        ]
        for path, part in parts:
            for key, field in type(part).model_fields.items():
                value = getattr(part, key)
                if key in part.model_fields_set and value is not None and not isinstance(value, Section):
                    yield dotted((*path, key)), field, value
