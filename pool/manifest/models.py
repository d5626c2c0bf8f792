"""The tables of a manifest: every key, its default and its rule.

Plain frozen models that look at no file: whether a tool's file exists, and lies where it may, is seen when it is staged.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, model_validator

from pool.config.errors import Known
from pool.config.types import AgentName, Duration, PythonTools, Section, VariableNames, shown

PLUGIN_PREFIX: Final = "plugin__"
MAX_TOOLS: Final = 1_000
"""Tools of one agent, those of its plugins counted too."""
MAX_INLINE: Final = 1_000_000
"""Bytes of inline code."""

_TOOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z", re.ASCII)
_PLUGIN = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?\Z", re.ASCII)


def _tool_name(value: str) -> str:
    if not _TOOL.match(value):
        raise ValueError(
            f"{shown(value)} is not the name of a tool: 1 to 64 letters, digits and underscores, and no digit first"
        )
    if value.startswith(PLUGIN_PREFIX):
        raise ValueError(
            f"{shown(value)} is the name of a plugin's tool; put it into [agents.<name>.plugins.<id>.tools]"
        )
    return value


def _plugin_id(value: str) -> str:
    # Two underscores divide plugin__<id>__<tool>: an id that had them, or one at an end, could be read in two ways.
    if not _PLUGIN.match(value) or "__" in value:
        raise ValueError(
            f"{shown(value)} is not the id of a plugin: 1 to 64 lower-case letters, digits, hyphens and single underscores, "
            "a letter or digit at both ends"
        )
    return value


def _path(value: str) -> str:
    if not value or "\0" in value:
        raise ValueError(f"{shown(value)} is not a path")
    return value


def _function(value: str) -> str:
    if not value.isidentifier() or keyword.iskeyword(value):
        raise ValueError(f"{shown(value)} is not the name of a Python function")
    return value


def _inline(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty; give the code, or a file")
    if "\0" in value:
        raise ValueError("holds a NUL character, which Python code cannot")
    if (size := len(value.encode("utf-8", "surrogatepass"))) > MAX_INLINE:
        raise ValueError(f"is {size:,} bytes; at most {MAX_INLINE:,} are taken, put the code into a file")
    return value


ToolName = Annotated[str, AfterValidator(_tool_name)]
PluginId = Annotated[str, AfterValidator(_plugin_id)]


class ToolTable(Section):
    """``[agents.<name>.tools.<tool>]``: one tool, out of a file or inline. ``timeout`` and ``backoff`` are seconds.

    ``env`` and ``python_tools`` narrow what the tool's agent has; ``None`` takes all of it. ``retries`` is how often a call
    that never started is tried again, ``backoff`` the first wait before that, doubled each time.
    """

    description: str = ""
    file: Annotated[str, AfterValidator(_path)] | None = None
    function: Annotated[str, AfterValidator(_function)] | None = None
    inline: Annotated[str, AfterValidator(_inline)] | None = None
    timeout: Duration | None = None
    retries: int = Field(default=0, ge=0, le=10)
    backoff: Duration = 0.2
    env: VariableNames | None = None
    python_tools: PythonTools | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.file is None) == (self.inline is None):
            raise ValueError("a tool has either a file or inline code" + (", not both" if self.file else "; give one"))
        if self.inline is not None and self.function is not None:
            raise ValueError(
                "inline code runs as it is and has no function to call; leave function out, or give a file"
            )
        _, named = self.source()
        if named and self.function not in (None, named):
            raise ValueError(f"file names the function {shown(named)} and function {shown(self.function)}; keep one")
        return self

    def source(self) -> tuple[str, str]:
        """The path in ``file``, and the function that stands behind it (``dir/file.py:function``), ``""`` without."""
        path, sign, named = (self.file or "").rpartition(":")
        if not sign or re.search(r"[/\\]", named):  # the colon is in a directory's name
            return self.file or "", ""
        return _path(path), _function(named)


class PluginTable(Section):
    """``[agents.<name>.plugins.<id>]``: a plugin's directory, staged as a whole, and the tools in it."""

    directory: Annotated[str, AfterValidator(_path)]
    tools: dict[ToolName, ToolTable] = Field(default_factory=dict)


class AgentTable(Section):
    """``[agents.<name>]``: an agent's tools. ``env`` and ``python_tools`` narrow what the configuration allows it."""

    env: VariableNames | None = None
    python_tools: PythonTools | None = None
    tools: dict[ToolName, ToolTable] = Field(default_factory=dict)
    plugins: dict[PluginId, PluginTable] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _few_enough(self) -> Self:
        count = len(self.tools) + sum(len(plugin.tools) for plugin in self.plugins.values())
        if count > MAX_TOOLS:
            raise ValueError(f"has {count} tools; one agent may have {MAX_TOOLS}")
        return self


class ManifestTables(Section):
    """A whole manifest, as its file says it."""

    agents: dict[AgentName, AgentTable] = Field(default_factory=dict)


_TABLES: Mapping[str, type[Section]] = {
    "agents.*": AgentTable,
    "agents.*.tools.*": ToolTable,
    "agents.*.plugins.*": PluginTable,
    "agents.*.plugins.*.tools.*": ToolTable,
}
KNOWN: Known = {name: tuple(table.model_fields) for name, table in _TABLES.items()}
"""The keys of each table; ``*`` stands for a name."""


def tables_of(agent: AgentTable) -> Iterator[tuple[tuple[str, ...], str, ToolTable]]:
    """An agent's tools: the path of each one's table below the agent's, its plugin's id (or ``""``), and the table."""
    for name, tool in agent.tools.items():
        yield ("tools", name), "", tool
    for plugin, table in agent.plugins.items():
        for name, tool in table.tools.items():
            yield ("plugins", plugin, "tools", name), plugin, tool
