"""The settings of what agents run: staged tools, privileged commands, and what holds for one agent alone.

An agent may override only what is decided anew for each call. What is fixed when a sandbox is made cannot differ between
agents: the standbys are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, field_validator

from pool.config.types import Duration, PathList, PythonTools, Section, Size, VariableNames, own_network

WORKSPACE = "/workspace"
"""Where a privileged command finds the workspace's ``data/sandbox``."""


class ToolsSettings(Section):
    """``[tools]``: how much one tool's directory may hold. Bytes and files."""

    max_bytes: Size = 16_777_216
    max_files: int = Field(default=1_000, ge=1, le=1_000_000)


class HostSettings(Section):
    """``[host]``: the calls of tools that run on the host, under limits (``python_tools = "limits"``)."""

    max_calls: int = Field(default=8, ge=1, le=10_000)
    max_waiters: int = Field(default=100, ge=0, le=1_000_000)


class CommandSettings(Section):
    """``[privileged.<command>]``: one privileged command; each call of it has a disposable container. Seconds, bytes.

    ``network`` is the engine's; ``""`` is none, whatever ``sandbox.network`` says.
    """

    timeout: Duration = 60.0
    max_output: Size = 1_048_576
    network: str = ""

    @field_validator("network")
    @classmethod
    def _network(cls, value: str) -> str:
        return own_network(value) if value else value


class PythonEvalSettings(CommandSettings):
    """``[privileged.python_eval]``."""

    timeout: Duration = 30.0


class InstallLibrarySettings(CommandSettings):
    """``[privileged.install_library]``; without a network it has nothing to install from, and is refused when called."""

    timeout: Duration = 300.0


class PrivilegedSettings(Section):
    """``[privileged]``: a table for each privileged command."""

    shell_exec: CommandSettings = Field(default_factory=lambda: CommandSettings())
    run_script: CommandSettings = Field(default_factory=lambda: CommandSettings())
    python_eval: PythonEvalSettings = Field(default_factory=lambda: PythonEvalSettings())
    install_library: InstallLibrarySettings = Field(default_factory=lambda: InstallLibrarySettings())

    def within(self, longest: float) -> PrivilegedSettings:
        """The same with no timeout above ``longest`` seconds."""
        cut = {
            name: command.model_copy(update={"timeout": longest}) for name, command in self if command.timeout > longest
        }
        return self.model_copy(update=cut) if cut else self


COMMANDS: Mapping[str, type[CommandSettings]] = {
    "shell_exec": CommandSettings,
    "run_script": CommandSettings,
    "python_eval": PythonEvalSettings,
    "install_library": InstallLibrarySettings,
}
"""The privileged commands, and the settings of each."""


class AgentCall(Section):
    """``[agents.<name>.call]``: ceilings for the calls of one agent, at most those of ``[call]``. Seconds and bytes."""

    timeout: Duration | None = None
    max_output: Size | None = None


class AgentOverrides(Section):
    """``[agents.<name>]``: what differs for one agent; ``None`` is what holds for all of them.

    ``env`` names variables of the gateway's environment; their values are read at each call. ``allowed_tool_dirs``
    replaces the pool's list, ``max_sessions`` (0 is no limit) replaces ``pool.max_sessions_per_agent``.
    """

    python_tools: PythonTools | None = None
    env: VariableNames = ()
    allowed_tool_dirs: PathList | None = None
    max_sessions: int | None = Field(default=None, ge=0, le=1_000_000)
    call: AgentCall = Field(default_factory=lambda: AgentCall())


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What holds for one agent, its own settings and the pool's put together.

    ``env`` holds names of variables. An empty ``allowed_tool_dirs`` means the directory of the tool's manifest.
    ``timeout`` is seconds, ``max_output`` bytes of each stream, ``max_sessions`` a count with 0 for no limit.
    """

    python_tools: PythonTools
    env: tuple[str, ...]
    allowed_tool_dirs: tuple[Path, ...]
    timeout: float
    max_output: int
    max_sessions: int
