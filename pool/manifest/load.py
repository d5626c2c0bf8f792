"""Manifests: which agents there are and which Python tools each has, out of a TOML file.

A manifest only narrows what the configuration allows. ``resolve`` puts the two together for one tool, ``problems`` finds
everything by which a manifest asks for more. Nothing here looks at a tool's files.
"""

from __future__ import annotations

import difflib
import keyword
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from executor.common.printable import printable
from pool.config.errors import dotted, problems_of
from pool.config.load import ConfigError, Problem, Settings, read_file
from pool.config.types import PythonTools, format_duration
from pool.manifest.models import KNOWN, PLUGIN_PREFIX, AgentTable, ManifestTables, ToolTable, tables_of

__all__ = ["Manifest", "ManifestError", "Resolved", "ToolEntry", "load_manifest", "problems", "resolve"]

_MOST_NAMES = 20
"""Names that an error lists before it only counts them."""


class ManifestError(ConfigError):
    """The manifest cannot be used, or has not what was asked for; its text has one line for each of ``problems``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEntry:
    """One tool of one agent. ``name`` is what it is called by: ``plugin__<id>__<tool>`` for a plugin's.

    Either ``file`` or ``inline`` is set. ``file`` and a plugin's ``directory`` are absolute, but as they are written: links
    and ``..`` are followed when the tool is staged, against the allowed directories. ``base`` is the manifest's directory.
    ``timeout`` and ``backoff`` are seconds. ``env`` and ``python_tools`` are the tool's own or its agent's, ``None`` where
    the manifest leaves both to the configuration; ``key``, ``env_key`` and ``python_tools_key`` say where in the manifest
    the tool and the two stand.
    """

    agent: str
    name: str
    base: Path
    file: Path | None = None
    directory: Path | None = None
    inline: str | None = None
    function: str = ""
    timeout: float | None = None
    retries: int = 0
    backoff: float = 0.2
    env: tuple[str, ...] | None = None
    python_tools: PythonTools | None = None
    description: str = ""
    plugin: str | None = None
    key: str = ""
    env_key: str = ""
    python_tools_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What holds for a tool's calls once the configuration and the manifest are put together.

    ``env`` holds names of variables, ``timeout`` is seconds, ``max_output`` bytes of each stream. The tool's files must
    lie in one of ``allowed_tool_dirs``.
    """

    python_tools: PythonTools
    env: tuple[str, ...]
    timeout: float
    max_output: int
    allowed_tool_dirs: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checked manifest. ``Manifest.from_tables({"agents": {...}}, base)`` is checked like a file in ``base`` is."""

    base: Path
    agents: Mapping[str, AgentTable]
    entries: tuple[ToolEntry, ...]

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], base: Path) -> Manifest:
        """The manifest that ``tables`` describe, with relative paths below ``base``, an absolute path.

        Raises ``ManifestError`` naming every problem.
        """
        if not base.is_absolute():
            raise ManifestError([Problem("base", f"{printable(base, name=True, limit=300)} is not an absolute path")])
        try:
            agents = ManifestTables.model_validate(dict(tables)).agents
        except ValidationError as error:
            raise ManifestError(problems_of(error, KNOWN)) from None
        if found := [problem for name, agent in agents.items() for problem in _inside(name, agent)]:
            raise ManifestError(found)
        entries = (_entry(base, name, agent, *found) for name, agent in agents.items() for found in tables_of(agent))
        return cls(base, agents, tuple(entries))

    def tools(self, agent: str | None = None) -> list[ToolEntry]:
        """The tools of ``agent``, or of all agents, in the order of the file.

        Raises ``ManifestError`` for an unknown agent.
        """
        if agent is None:
            return list(self.entries)
        if agent not in self.agents:
            raise _unknown(agent, "agent", list(self.agents))
        return [entry for entry in self.entries if entry.agent == agent]

    def find(self, tool: str, agent: str | None = None) -> ToolEntry:
        """The tool called ``tool``, of ``agent`` where several have one of that name.

        Raises ``ManifestError`` that names the nearest tools, or the agents to choose from.
        """
        entries = self.tools(agent)
        found = [entry for entry in entries if entry.name == tool]
        if not found:
            raise _unknown(tool, "tool", list(dict.fromkeys(entry.name for entry in entries)))
        if len(found) > 1:
            agents = _listed([entry.agent for entry in found])
            where = printable(tool, name=True, limit=80)
            raise ManifestError([Problem(where, f"several agents have this tool: {agents}; pass --agent")])
        return found[0]


def load_manifest(path: Path) -> Manifest:
    """The manifest in the TOML file ``path``; relative paths in it are below the file's directory.

    Raises ``ManifestError`` naming every problem, with the line and column of a syntax error.
    """
    try:
        tables = read_file(path, "manifest")
    except ConfigError as error:
        raise ManifestError(error.problems) from None
    return Manifest.from_tables(tables, path.absolute().parent)


def _entry(base: Path, agent: str, of: AgentTable, place: tuple[str, ...], plugin: str, tool: ToolTable) -> ToolEntry:
    directory = base / of.plugins[plugin].directory if plugin else None
    path, function = tool.source()
    key, of_agent = dotted(("agents", agent, *place)), dotted(("agents", agent))
    return ToolEntry(
        agent=agent,
        name=f"{PLUGIN_PREFIX}{plugin}__{place[-1]}" if plugin else place[-1],
        base=base,
        file=(directory or base) / path if path else None,
        directory=directory if path else None,
        inline=tool.inline,
        function=(function or tool.function or place[-1]) if path else "",
        timeout=tool.timeout,
        retries=tool.retries,
        backoff=tool.backoff,
        env=of.env if tool.env is None else tool.env,
        python_tools=of.python_tools if tool.python_tools is None else tool.python_tools,
        description=tool.description,
        plugin=plugin or None,
        key=key,
        env_key=f"{of_agent if tool.env is None else key}.env",
        python_tools_key=f"{of_agent if tool.python_tools is None else key}.python_tools",
    )


def resolve(entry: ToolEntry, settings: Settings) -> Resolved:
    """What holds for the calls of ``entry``. Raises ``ManifestError`` where it asks for more than ``settings`` allow."""
    if found := list(_beyond(entry, settings)):
        raise ManifestError(found)
    agent = settings.agent(entry.agent)
    return Resolved(
        python_tools=agent.python_tools if entry.python_tools is None else entry.python_tools,
        env=agent.env if entry.env is None else entry.env,
        timeout=agent.timeout if entry.timeout is None else entry.timeout,
        max_output=agent.max_output,
        allowed_tool_dirs=agent.allowed_tool_dirs or (entry.base,),
    )


def problems(manifest: Manifest, settings: Settings) -> list[Problem]:
    """Everything by which ``manifest`` asks for more than ``settings`` allow, each once, in the order of the file."""
    found: list[Problem] = []
    for name, agent in manifest.agents.items():
        found += _widened(name, settings, agent.env, dotted(("agents", name, "env")))
        found += _unisolated(name, settings, agent.python_tools, dotted(("agents", name, "python_tools")))
        found += [problem for entry in manifest.tools(name) for problem in _beyond(entry, settings)]
    return list(dict.fromkeys(found))


def _beyond(entry: ToolEntry, settings: Settings) -> Iterator[Problem]:
    yield from _widened(entry.agent, settings, entry.env, entry.env_key)
    yield from _unisolated(entry.agent, settings, entry.python_tools, entry.python_tools_key)
    allowed = settings.agent(entry.agent).timeout
    if entry.timeout is not None and entry.timeout > allowed:
        own = entry.agent in settings.agents and settings.agents[entry.agent].call.timeout is not None
        ceiling = dotted(("agents", entry.agent, "call", "timeout")) if own else "call.timeout"
        text = f"{format_duration(entry.timeout)} is above the configuration's {ceiling} ({format_duration(allowed)})"
        yield Problem(f"{entry.key}.timeout", f"{text}; lower it, or raise {ceiling}")


def _widened(agent: str, settings: Settings, env: tuple[str, ...] | None, key: str) -> Iterator[Problem]:
    for index, name in enumerate(env or ()):
        if name not in settings.agent(agent).env:
            allowing = dotted(("agents", agent, "env"))
            shown = printable(name, name=True, limit=80)
            text = f"{shown} is not in the configuration's {allowing}; add it there, or leave it out here"
            yield Problem(f"{key}[{index}]", text)


def _unisolated(agent: str, settings: Settings, python_tools: PythonTools | None, key: str) -> Iterator[Problem]:
    if python_tools == "limits" and settings.agent(agent).python_tools == "container":
        own = dotted(("agents", agent, "python_tools"))
        stands = agent in settings.agents and settings.agents[agent].python_tools is not None
        text = (
            f'"limits" would run it on the host, and the configuration\'s {own if stands else "sandbox.python_tools"} is '
            f'"container"; leave it out here, or set {own} = "limits" in the configuration'
        )
        yield Problem(key, text)


def _inside(name: str, agent: AgentTable) -> Iterator[Problem]:
    """What is wrong between the keys of one agent's tables."""
    for place, _, tool in tables_of(agent):
        key = dotted(("agents", name, *place))
        wider = [one for one in tool.env or () if agent.env is not None and one not in agent.env]
        if wider:
            own = dotted(("agents", name, "env"))
            text = f"{_listed(wider)}: not in {own}, and a tool only narrows it; add it there, or leave it out here"
            yield Problem(f"{key}.env", text)
        if tool.python_tools == "limits" and agent.python_tools == "container":
            own = dotted(("agents", name, "python_tools"))
            yield Problem(f"{key}.python_tools", f'"limits" is weaker than {own}, "container"; leave one of them out')
        path, function = tool.source()
        if path and not (function or tool.function) and keyword.iskeyword(place[-1]):
            yield Problem(key, f"no function can be called {place[-1]}; name the tool's function with function = ...")


def _unknown(name: str, kind: str, known: list[str]) -> ManifestError:
    text, end = f"there is no such {kind} in the manifest", "; it has"
    near = [other for other in known if other.endswith(f"__{name}")]
    near = near or difflib.get_close_matches(name, known, n=3)
    if near:
        meant = " or ".join(printable(other, name=True, limit=200) for other in near[:3])
        text, end = f"{text}; did you mean {meant}", "? It has"
    where = printable(name, name=True, limit=80)
    return ManifestError([Problem(where, f"{text}{end} {_listed(known) if known else 'none'}")])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(printable(name, name=True, limit=200) for name in names[:_MOST_NAMES]) + more
