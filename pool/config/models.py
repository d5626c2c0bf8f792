"""The settings of a pool: all tables together, checked by the rules between their keys.

``pool.config.load.load_settings`` reads them from files and the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pool.config.errors import ConfigError, Known, problems_of
from pool.config.rules import combinations
from pool.config.tables import (
    COMMANDS,
    AgentCall,
    AgentOverrides,
    AgentSettings,
    CallSettings,
    HostSettings,
    PoolSettings,
    PrivilegedSettings,
    SandboxSettings,
    Tables,
    ToolsSettings,
)
from pool.config.types import Section


class Settings(Tables):
    """The configuration of a pool. ``Settings(pool={"max_sandboxes": 4})`` is checked like a file is.

    Raises ``ConfigError`` naming every problem.
    """

    def __init__(self, /, **sections: Section | Mapping[str, Any]) -> None:
        tables: dict[str, Any] = dict(sections)
        try:
            super().__init__(**tables)
        except ValidationError as error:
            raise ConfigError(problems_of(error, known_keys())) from None
        if problems := list(combinations(self)):
            raise ConfigError(problems)
        # A default must not stand in the way of a shorter `max_lifetime`; what was written is judged by `combinations`.
        object.__setattr__(self, "privileged", self.privileged.within(self.pool.max_lifetime))

    def agent(self, name: str) -> AgentSettings:
        """Return what holds for the agent called ``name``, whether or not it has a table of its own."""
        own, sandbox = self.agents.get(name, AgentOverrides()), self.sandbox
        return AgentSettings(
            python_tools=sandbox.python_tools if own.python_tools is None else own.python_tools,
            env=own.env,
            allowed_tool_dirs=sandbox.allowed_tool_dirs if own.allowed_tool_dirs is None else own.allowed_tool_dirs,
            timeout=self.call.timeout if own.call.timeout is None else own.call.timeout,
            max_output=self.call.max_output if own.call.max_output is None else own.call.max_output,
            max_sessions=self.pool.max_sessions_per_agent if own.max_sessions is None else own.max_sessions,
        )


SECTIONS: Mapping[str, type[Section]] = {
    "sandbox": SandboxSettings,
    "pool": PoolSettings,
    "call": CallSettings,
    "tools": ToolsSettings,
    "host": HostSettings,
    **{f"privileged.{name}": section for name, section in COMMANDS.items()},
}
"""The tables that every configuration has, by name (those of agents come on top)."""


def known_keys() -> Known:
    """The keys of each table, in the order of their documentation; ``*`` stands for any agent's name."""
    sections: dict[str, type[Section]] = {
        **SECTIONS,
        "privileged": PrivilegedSettings,
        "agents.*": AgentOverrides,
        "agents.*.call": AgentCall,
    }
    return {name: tuple(section.model_fields) for name, section in sections.items()}
