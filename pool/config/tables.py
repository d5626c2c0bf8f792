"""The tables of the configuration: every key, its default and its own rule. The rules between keys are in ``rules``.

Plain frozen models: making one reads no file and no environment (but the default of ``state_dir`` is a place of the
user who runs the pool).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from executor.machine.image import DEFAULT_IMAGE
from executor.sandbox.mount import Mount, normalized
from executor.sandbox.profile import ContainerProfile
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
    VariableNames,
    absolute,
    own_network,
    shown,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
_USER = re.compile(r"[0-9]{1,10}:[0-9]{1,10}\Z", re.ASCII)


def default_state_dir(name: str) -> Path:
    """Where the pool called ``name`` keeps its state by default: the machine's place for root, else the user's."""
    if os.geteuid() == 0:
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
    # Without a name the name itself was refused, and that problem is reported.
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


class Tables(Section):
    """All tables of one configuration, each checked by itself."""

    sandbox: SandboxSettings = Field(default_factory=lambda: SandboxSettings())
    pool: PoolSettings = Field(default_factory=lambda: PoolSettings())
    call: CallSettings = Field(default_factory=lambda: CallSettings())
    tools: ToolsSettings = Field(default_factory=lambda: ToolsSettings())
    host: HostSettings = Field(default_factory=lambda: HostSettings())
    privileged: PrivilegedSettings = Field(default_factory=lambda: PrivilegedSettings())
    agents: dict[AgentName, AgentOverrides] = Field(default_factory=dict)
