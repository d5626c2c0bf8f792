"""Where the private engine keeps its files: names only, nothing is read or made here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ENGINE_HOME = "EMBERPOOL_ENGINE_HOME"
"""Environment variable: the private engine lives below this one directory, and no other engine is looked for."""

_SOCKET_PATH_LIMIT = 104
"""Bytes of a Unix socket's path that every kernel of interest takes (Linux 107, macOS 103 and a NUL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePaths:
    """The private engine's places. ``root`` outlives a reboot, ``run`` need not.

    ``users_file`` is locked shared by every pool that lives on the engine; ``lock_file`` is held while the engine is
    being started or stopped; ``started_file`` says which process was started, as ``executor.machine.daemon`` writes it.
    """

    root: Path
    data: Path
    run: Path
    socket: Path
    pid_file: Path
    log_file: Path
    lock_file: Path
    users_file: Path
    started_file: Path

    @property
    def exec_root(self) -> Path:
        """The daemon's own runtime directory, where its containerd listens."""
        return self.run / "exec"

    @property
    def config_file(self) -> Path:
        """The daemon's configuration: empty, so that the one of a system daemon is never read."""
        return self.root / "daemon.json"

    @property
    def containerd_config(self) -> Path:
        """The configuration that the daemon writes for its containerd; it names that process among all others."""
        return self.exec_root / "containerd" / "containerd.toml"

    @property
    def containerd_socket(self) -> Path:
        """Where that containerd listens; each of its shims has this path in its argv."""
        return self.exec_root / "containerd" / "containerd.sock"

    @property
    def build(self) -> Path:
        """Where an image is built before it is imported; empty at all other times."""
        return self.root / "build"

    @property
    def url(self) -> str:
        """The socket as ``DOCKER_HOST`` and ``--host`` take it."""
        return f"unix://{self.socket}"

    def check(self) -> None:
        """``ValueError`` where a socket of the engine would have a path that no kernel binds."""
        longest = self.exec_root / "containerd" / "containerd-debug.sock"
        size = len(os.fsencode(longest))
        if size > _SOCKET_PATH_LIMIT:
            raise ValueError(
                f"the engine's socket {longest} has a path of {size} bytes, and sockets take {_SOCKET_PATH_LIMIT}; "
                f"choose a directory at least {size - _SOCKET_PATH_LIMIT} bytes shorter ({ENGINE_HOME} names it)"
            )


def engine_home() -> str:
    """The directory that ``EMBERPOOL_ENGINE_HOME`` names, ``""`` where it is not set. Raises ``ValueError``."""
    home = os.environ.get(ENGINE_HOME, "")
    if home and not Path(home).is_absolute():
        raise ValueError(f"{ENGINE_HOME} must be an absolute path; it is {home[:80]!r}")
    return home


def engine_paths() -> EnginePaths:
    """The places of this user's private engine: the system's directories for root, XDG's for everyone else."""
    if home := engine_home():
        root = Path(home)
        run = root / "run"
    elif os.geteuid() == 0:
        root, run = Path("/var/lib/emberpool/engine"), Path("/run/emberpool/engine")
    else:
        root = _xdg("XDG_STATE_HOME", Path.home() / ".local" / "state") / "emberpool" / "engine"
        run = _xdg("XDG_RUNTIME_DIR", root / "run") / "emberpool" / "engine"
    return EnginePaths(
        root=root,
        data=root / "data",
        run=run,
        socket=run / "docker.sock",
        pid_file=run / "docker.pid",
        log_file=root / "dockerd.log",
        lock_file=run / "lock",
        users_file=run / "users",
        started_file=run / "started.json",
    )


def _xdg(name: str, default: Path) -> Path:
    # The XDG specification has relative values ignored.
    value = Path(os.environ.get(name, ""))
    return value if value.is_absolute() else default
