"""The settings of a pool: every key, its default and the rules that it has to keep, alone and with the others.

Plain frozen models: making one reads no file and no environment (but the default of ``state_dir`` is a place of the
user who runs the pool). ``pool.config.load.load_settings`` is what reads files and environments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from executor.machine.image import DEFAULT_IMAGE
from executor.sandbox.mount import Mount, normalized
from executor.sandbox.profile import ContainerProfile
from pool.config.errors import ConfigError, Known, problems_of
from pool.config.rules import combinations
from pool.config.tools import (
    COMMANDS,
    WORKSPACE,
    AgentCall,
    AgentOverrides,
    AgentSettings,
    HostSettings,
    PrivilegedSettings,
    ToolsSettings,
)
from pool.config.types import (
    MAX_UID,
    AbsolutePath,
    AgentName,
    Duration,
    DurationOrOff,
    MountList,
    PathList,
    PythonTools,
    Section,
    Size,
    StringList,
    UidRange,
    UidRangeField,
    absolute,
    own_network,
    shown,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
_USER = re.compile(r"[0-9]{1,10}:[0-9]{1,10}\Z", re.ASCII)


def default_state_dir(name: str) -> Path:
    """Where the pool called ``name`` keeps its state by default: the machine's place for root, else the user's."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/emberpool/pools") / name
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    # XDG: a relative path there is invalid and has to be ignored.
    home = base if base.is_absolute() else Path.home() / ".local" / "state"
    return home / "emberpool" / "pools" / name


class SandboxSettings(Section):
    """``[sandbox]``: what every sandbox of the pool is made of. MiB, CPU seconds, descriptors."""

    image: str = DEFAULT_IMAGE
    binary: str = ""
    runtime: str = ""
    user: str = "auto"
    uid_range: UidRangeField = UidRange(1_879_048_192, 65_536)
    network: str = "none"
    mounts: MountList = ()
    cpus: float = Field(default=1.0, ge=0.01, le=1_024, allow_inf_nan=False)
    cpu_seconds: int = Field(default=30, ge=1, le=31_536_000)
    memory_mb: int = Field(default=512, ge=16, le=16_777_216)
    open_files: int = Field(default=256, ge=64, le=1_048_576)
    file_size_mb: int = Field(default=64, ge=1, le=1_048_576)
    pids: int = Field(default=128, ge=16, le=4_194_304)
    tmpfs_mb: int = Field(default=64, ge=1, le=1_048_576)
    seccomp: str = "strict"
    preload: StringList = ()
    python_tools: PythonTools = "container"
    limits_strict: bool = True
    allowed_tool_dirs: PathList = ()
    workspace: str = ""

    @field_validator("preload")
    @classmethod
    def _preload(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{shown(name)} is not the name of a Python module, such as json or xml.dom")
        return value

    @field_validator("image")
    @classmethod
    def _image(cls, value: str) -> str:
        ContainerProfile().run_args(value, "true")
        return value

    @field_validator("binary")
    @classmethod
    def _binary(cls, value: str) -> str:
        if value and (value.startswith("-") or not value.isprintable() or ("/" in value and not value.startswith("/"))):
            raise ValueError(f"{shown(value)} must be the name of a command, or its absolute path")
        return value

    @field_validator("runtime")
    @classmethod
    def _runtime(cls, value: str) -> str:
        return ContainerProfile(runtime=value).runtime

    @field_validator("seccomp")
    @classmethod
    def _seccomp(cls, value: str) -> str:
        return ContainerProfile(seccomp=value).seccomp

    @field_validator("network")
    @classmethod
    def _network(cls, value: str) -> str:
        return own_network(value)

    @field_validator("user")
    @classmethod
    def _user(cls, value: str) -> str:
        if value in ("auto", "image"):
            return value
        if not _USER.match(value):
            raise ValueError(f'{shown(value)} must be "auto", "image", or a numeric uid:gid such as "1000:1000"')
        uid, gid = (int(part) for part in value.split(":"))
        if uid == 0:
            raise ValueError(
                f"{shown(value)} is root; known escapes from a container start there, so calls never run as uid 0"
            )
        if max(uid, gid) > MAX_UID:
            raise ValueError(f"{shown(value)} is above {MAX_UID}, the highest uid and gid that docker accepts")
        return value

    @field_validator("mounts")
    @classmethod
    def _mounts(cls, value: tuple[Mount, ...]) -> tuple[Mount, ...]:
        targets: set[str] = set()
        for mount in value:
            target = normalized(mount.target)
            if target in targets:
                raise ValueError(f"two mounts have the target {shown(target)}; keep one")
            targets.add(target)
        return value

    @field_validator("workspace")
    @classmethod
    def _workspace(cls, value: str) -> str:
        if value:
            absolute(value)
            try:
                Mount(f"{value}/data/sandbox", WORKSPACE)
            except ValueError:
                raise ValueError(f"{shown(value)} cannot be mounted; it must hold no colon, . or .. part") from None
        return value


def _default_state_dir(values: dict[str, Any]) -> Path:
    # Without a name the name itself was refused, and that is the problem that is told.
    return default_state_dir(values.get("name", ""))


class PoolSettings(Section):
    """``[pool]``: how many sandboxes there are, and for how long. Durations are seconds."""

    name: str = "default"
    state_dir: AbsolutePath = Field(default_factory=_default_state_dir)
    min_standby: int = Field(default=2, ge=0, le=10_000)
    max_sandboxes: int = Field(default=8, ge=1, le=10_000)
    overcommit: bool = False
    max_starting: int = Field(default=2, ge=1, le=10_000)
    max_cold: int = Field(default=2, ge=0, le=10_000)
    max_cold_waiters: int = Field(default=32, ge=0, le=1_000_000)
    idle_timeout: Duration = 600.0
    standby_max_age: Duration = 3_600.0
    max_lifetime: Duration = 7_200.0
    max_calls: int = Field(default=0, ge=0, le=1_000_000_000)
    acquire_timeout: Duration = 30.0
    max_waiters: int = Field(default=100, ge=0, le=1_000_000)
    reclaim_idle_after: DurationOrOff = 60.0
    max_sessions_per_agent: int = Field(default=0, ge=0, le=1_000_000)
    restart_limit: int = Field(default=5, ge=1, le=1_000)
    restart_window: Duration = 60.0
    resync_interval: Duration = 30.0
    drain_timeout: Duration = 10.0

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _NAME.match(value):
            raise ValueError(
                f"{shown(value)} must be 1 to 64 letters, digits, dots, underscores and hyphens, "
                "and start with a letter or digit"
            )
        return value


class CallSettings(Section):
    """``[call]``: ceilings that hold for every call. Seconds and bytes."""

    timeout: Duration = 60.0
    grace: Duration = 2.0
    calls_per_exec: int = Field(default=1, ge=0, le=1_000_000_000)
    parallel: int = Field(default=1, ge=1, le=64)
    max_input: Size = 32_000_000
    max_output: Size = 1_048_576
    unbuffered: bool = False


class Settings(Section):
    """Everything that a pool is told. ``Settings(pool={"max_sandboxes": 4})`` is checked like a file is.

    Raises ``ConfigError`` naming every problem.
    """

    sandbox: SandboxSettings = Field(default_factory=lambda: SandboxSettings())
    pool: PoolSettings = Field(default_factory=lambda: PoolSettings())
    call: CallSettings = Field(default_factory=lambda: CallSettings())
    tools: ToolsSettings = Field(default_factory=lambda: ToolsSettings())
    host: HostSettings = Field(default_factory=lambda: HostSettings())
    privileged: PrivilegedSettings = Field(default_factory=lambda: PrivilegedSettings())
    agents: dict[AgentName, AgentOverrides] = Field(default_factory=dict)

    def __init__(self, /, **sections: Section | Mapping[str, Any]) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError(problems_of(error, known_keys())) from None
        if problems := list(combinations(self)):
            raise ConfigError(problems)
        # A default must not stand in the way of a shorter `max_lifetime`; what was written is judged by `combinations`.
        object.__setattr__(self, "privileged", self.privileged.within(self.pool.max_lifetime))

    def agent(self, name: str) -> AgentSettings:
        """What holds for the agent called ``name``, whether or not it has a table of its own."""
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
