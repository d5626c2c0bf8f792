"""Read a configuration: a TOML file, with the environment (``EMBERPOOL_POOL__MAX_SANDBOXES=4``) on top of it.

A value in the environment is written as in the file; the quotes of a text may be left out.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from pool.config_errors import ConfigError, Problem, plain
from pool.config_host import check_host
from pool.config_models import SECTIONS, CallSettings, PoolSettings, SandboxSettings, Settings, known_keys

__all__ = [
    "CallSettings", "ConfigError", "Loaded", "PoolSettings", "Problem", "SandboxSettings", "Settings", "check_host",
    "load", "load_settings",
]  # fmt: skip

PREFIX = "EMBERPOOL_"
FILE_VARIABLE = "EMBERPOOL_CONFIG"
_NOT_SETTINGS = frozenset({FILE_VARIABLE, "EMBERPOOL_CI", "EMBERPOOL_ENGINE_HOME"})
_MAX_FILE = 1_000_000

Origin = Literal["default", "file", "environment"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checked settings, and where each key (``pool.name``) came from."""

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
    return Loaded(settings, _origins(from_file, from_environment))


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, unchecked. Raises ``ConfigError`` with the line and column of a syntax error."""
    where = plain(path, 300)

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
        raise fail(f"is larger than {_MAX_FILE:,} bytes; this is not a configuration file")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise fail(f"is not UTF-8: line {line} holds the byte 0x{data[error.start]:02x}") from None
    except tomllib.TOMLDecodeError as error:
        raise fail(f"is not TOML: {error}") from None
    except (RecursionError, ValueError) as error:
        raise fail(f"is not usable TOML: {error}") from None


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """The settings in ``environ`` by section, unchecked, and a problem (names, no values) for each unknown variable."""
    values: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    variables = {
        f"{PREFIX}{section}__{key}".upper(): (section, key) for section, keys in known_keys().items() for key in keys
    }
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in _NOT_SETTINGS:
            continue
        if name not in variables:
            problems.append(Problem(plain(name), _unknown_variable(name, variables)))
            continue
        section, key = variables[name]
        text = environ[name]
        is_text = SECTIONS[section].model_fields[key].annotation in (str, Path)
        values.setdefault(section, {})[key] = text if is_text else _toml_value(text)
    return values, problems


def _unknown_variable(name: str, variables: Mapping[str, tuple[str, str]]) -> str:
    section, _, key = name.removeprefix(PREFIX).lower().partition("__")
    if section in SECTIONS:
        keys = known_keys()[section]
        near = [f"{PREFIX}{section}__{match}".upper() for match in difflib.get_close_matches(key, keys, n=1)]
    else:
        near = difflib.get_close_matches(name.upper(), variables, n=1, cutoff=0.85)
    if near:
        return f"unknown setting; did you mean {near[0]}?"
    if section in SECTIONS:
        return f"unknown setting; [{section}] has {', '.join(keys)}"
    return f"unknown setting; settings are named {PREFIX}<SECTION>__<KEY>, for example {PREFIX}POOL__NAME"


def _toml_value(text: str) -> Any:
    """What ``key = <text>`` holds in TOML, or ``text`` itself where that is no TOML (``10m``, ``off``)."""
    if re.search(r"[\r\n]", text):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _merge(from_file: dict[str, Any], from_environment: dict[str, Any]) -> dict[str, Any]:
    # A section that is no table in the file stays as it is, to be refused, instead of vanishing under the environment.
    from_environment = {
        key: value for key, value in from_environment.items() if isinstance(from_file.get(key, {}), dict)
    }

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


def _with_variable(problem: Problem, from_environment: Mapping[str, Mapping[str, Any]]) -> Problem:
    section, _, key = re.sub(r"\[.*", "", problem.where).partition(".")
    if key not in from_environment.get(section, {}):
        return problem
    return Problem(problem.where, f"{problem.text} (set by {PREFIX}{section.upper()}__{key.upper()})")


def _origins(from_file: Mapping[str, Any], from_environment: Mapping[str, Any]) -> dict[str, Origin]:
    origins: dict[str, Origin] = {}
    for section, keys in known_keys().items():
        for key in keys:
            origins[f"{section}.{key}"] = (
                "environment" if key in from_environment.get(section, {})
                else "file" if key in from_file.get(section, {})
                else "default"
            )  # fmt: skip
    return origins
