"""The hardened container profile: every docker flag that emberpool ever emits is written in this file, and nowhere else.

The shared profile and the order of its flags come from the container-sandbox memo (docs/security.md). Additions only
tighten and stand after the memo's flags. Everything here is pure: strings in, argv out, ``ValueError`` on bad input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from executor.common.printable import has_control
from executor.sandbox.mount import Mount
from executor.sandbox.seccomp import STRICT_PROFILE, WITNESS_ERRNO

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}\Z")
_USER = re.compile(r"[0-9]{1,10}(:[0-9]{1,10})?\Z|[a-z_][a-z0-9_-]{0,31}(:[a-z_][a-z0-9_-]{0,31})?\Z")
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_LABEL_KEY = re.compile(r"[a-z0-9][a-z0-9._-]*\Z")
_IMAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.:/@-]*\Z")
_WORD = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.:-]*\Z")

WRITABLE_BESIDES_TMP = ("/dev/shm", "/dev/mqueue")  # noqa: S108 - names, not a use of them
"""Writable under a read-only root in every container; multiprocessing needs the first. Counted in the memory limit."""

BASE_ENV = {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}  # noqa: S108 - the container's own /tmp
"""What every container's environment holds besides the image's own. ``LANG``: an interpreter takes its encodings from the
locale that it starts in."""

PROXY_VARIABLES = tuple(
    form(f"{kind}_proxy") for kind in ("http", "https", "ftp", "no", "all") for form in (str.upper, str.lower)
)
"""What a docker client adds to every container that it starts, where ``proxies`` in its ``config.json`` says so."""

CALL_ENV = {**BASE_ENV, "USER": "sandbox", "LOGNAME": "sandbox"}
"""What every call's environment starts from: the calls' uid has no passwd entry, and ``getpass.getuser()`` needs one."""

LABEL_POOL, LABEL_INSTANCE, LABEL_CONFIG, LABEL_KIND = (
    "emberpool.pool",
    "emberpool.instance",
    "emberpool.config",
    "emberpool.kind",
)
ContainerKind = Literal["sandbox", "cold", "probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits; ``None`` leaves the flag out. Seconds, MiB, descriptors, MiB."""

    cpu_seconds: int | None = 30
    memory_mb: int | None = 512
    open_files: int | None = 256
    file_size_mb: int | None = 64

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "memory_mb", "open_files", "file_size_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or left out for no limit; it is {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """How a container is found again: its name and labels. Hints, not proof of ownership (anyone can copy them)."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(f"container name {self.name[:40]!r} must match {_NAME.pattern}")
        for key, value in self.labels.items():
            if not _LABEL_KEY.match(key) or has_control(value):
                raise ValueError(f"label {key[:40]!r}: keys match {_LABEL_KEY.pattern}, values are one printable line")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerProfile:
    """The shared profile: the memo's fields, order and defaults, then the additions that tighten it.

    ``user`` is ``""`` for the image's own or a numeric ``uid:gid``. Nothing but
    ``mounts`` is mounted (and a sandbox's ``/tool``). ``env`` holds ``KEY=VALUE`` that the caller has already
    filtered; it shows in the engine's client argv, so it is for the profile's own variables: a call's environment travels
    by stdin. ``seccomp`` is ``"strict"`` (our own profile, see ``executor.sandbox.seccomp``), ``"engine"`` (the engine's default), or
    the absolute path of another profile. ``tmp_owned``: the engine can give ``/tmp`` to a uid.
    Source: memo 3.1 and 3.2.
    """

    network: str = "none"
    limits: Limits = field(default_factory=Limits)
    pids: int = 128
    tmpfs_mb: int = 64
    user: str = ""
    workdir: str = "/tmp"  # noqa: S108 - the container's own /tmp
    mounts: tuple[Mount, ...] = ()
    env: tuple[str, ...] = tuple(f"{key}={value}" for key, value in BASE_ENV.items())
    cpus: float | None = 1.0
    cpu_limit: bool = True
    runtime: str = ""
    seccomp: str = "strict"
    cgroup_parent: str = ""
    tmp_owned: bool = True

    def __post_init__(self) -> None:
        if not _WORD.match(self.network):
            raise ValueError(f"network {self.network[:40]!r} must match {_WORD.pattern}")
        if self.network == "host" or self.network.startswith(("container:", "ns:")):
            raise ValueError(f"network {self.network[:40]!r} would share another network namespace; use none")
        for name in ("pids", "tmpfs_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; it is {getattr(self, name)}")
        if self.cpus is not None and not 0 < self.cpus < 10_000:
            raise ValueError(f"cpus must be above 0, or left out for no limit; it is {self.cpus}")
        check_user(self.user)
        if not self.workdir.startswith("/") or has_control(self.workdir):
            raise ValueError(f"workdir {self.workdir[:40]!r} must be an absolute path")
        for item in self.env:
            key, sign, value = item.partition("=")
            if not sign or not _ENV_KEY.match(key) or "\0" in value:
                raise ValueError(f"env entry {key[:40]!r} must be KEY=VALUE with a key that matches {_ENV_KEY.pattern}")
        if self.runtime and not _WORD.match(self.runtime):
            raise ValueError(f"runtime {self.runtime[:40]!r} must match {_WORD.pattern}")
        if self.seccomp not in ("strict", "engine") and (not self.seccomp.startswith("/") or has_control(self.seccomp)):
            raise ValueError(
                f'seccomp {self.seccomp[:40]!r} must be "strict", "engine" (its default profile) or the absolute path of a '
                "profile; it cannot be turned off"
            )
        if self.cgroup_parent and not re.match(r"/?[a-zA-Z0-9][a-zA-Z0-9_.-]*\Z", self.cgroup_parent):
            raise ValueError(f"cgroup_parent {self.cgroup_parent[:40]!r} must be one plain name")

    @property
    def seccomp_file(self) -> str:
        """The path of the seccomp profile that the engine's client reads; empty for the engine's own default."""
        if self.seccomp == "strict":
            return str(STRICT_PROFILE)
        return "" if self.seccomp == "engine" else self.seccomp

    @property
    def witness(self) -> str:
        """The error number that shows the strict seccomp profile from inside; empty where another one is asked for."""
        return str(WITNESS_ERRNO) if self.seccomp == "strict" else ""

    def run_args(self, image: str, *argv: str, identity: Identity | None = None, env_file: str = "") -> list[str]:
        """The argv (without the engine's binary) of a disposable container that runs ``argv`` attached to stdin."""
        # The kernel spares a namespace's PID 1 the signals that it does not handle, SIGXCPU among them: code needs an init.
        additions = ["--entrypoint", "", *_identity_args(identity), "--init"]
        if env_file:
            additions += ["--env-file", env_file]
        return [*self._flags(self.user), *additions, *self._tail(image, argv)]

    def sandbox_args(
        self, image: str, *, identity: Identity, staging: str, lifetime: float, calls: str = ""
    ) -> list[str]:
        """The argv of a detached session sandbox whose PID 1 ends by itself after ``lifetime`` seconds.

        ``calls`` is the calls' ``uid:gid``, who own ``/tmp``.
        ``staging`` is the host directory that appears read-only at ``/tool``; it must exist (``--mount`` refuses a
        missing source, where ``-v`` would create one silently).
        """
        if not staging.startswith("/") or has_control(staging):
            raise ValueError(f"staging {staging[:40]!r} must be an absolute path")
        source = staging.replace('"', '""')
        additions = [
            "--entrypoint",
            "",
            *_identity_args(identity),
            "-d",
            "--init",
            "--mount",
            f'type=bind,"source={source}",target=/tool,readonly',
        ]
        return [*self._flags(calls), *additions, *self._tail(image, ("sleep", str(max(1, round(lifetime)))))]

    def tmp_owner(self, calls: str) -> tuple[str, str] | None:
        """The uid and gid that own ``/tmp``, where the calls' user is numeric and the engine can set an owner."""
        uid, _, gid = calls.partition(":")
        return (uid, gid) if self.tmp_owned and uid.isdecimal() and gid.isdecimal() else None

    def _flags(self, calls: str) -> list[str]:
        limits = self.limits
        args = ["run", "--rm", "-i", "--network", self.network, "--read-only", "--cap-drop", "ALL"]
        args += ["--security-opt", "no-new-privileges", "--pids-limit", str(self.pids)]
        tmpfs = f"/tmp:rw,noexec,nosuid,size={self.tmpfs_mb}m,mode=1777"  # noqa: S108 - the container's own /tmp
        # An older runc gives it the mode of the image's directory all the same, and the engine makes a missing one with
        # 0755 for the sake of `--workdir`: so it belongs to the calls.
        if owner := self.tmp_owner(calls):
            tmpfs += ",uid={},gid={}".format(*owner)
        args += ["--tmpfs", tmpfs]
        for mount in self.mounts:
            args += ["-v", str(mount)]
        args += ["--workdir", self.workdir]
        if self.user:
            args += ["--user", self.user]
        if limits.memory_mb is not None:
            args += ["--memory", f"{limits.memory_mb}m"]
        if self.cpus is not None:
            args += ["--cpus", _decimal(self.cpus)]
        if limits.open_files is not None:
            args += ["--ulimit", f"nofile={limits.open_files}"]
        if limits.file_size_mb is not None:
            args += ["--ulimit", f"fsize={limits.file_size_mb * 1024 * 1024}"]
        if limits.cpu_seconds is not None and self.cpu_limit:
            # Soft below hard, so that the limit sends SIGXCPU first, which no other kill does.
            args += ["--ulimit", f"cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}"]
        if limits.memory_mb is not None:
            args += ["--memory-swap", f"{limits.memory_mb}m"]
        # What a crash of tool code leaves behind would fill the session's /tmp, and count as its memory.
        args += ["--ulimit", "core=0"]
        # Tool code can write to PID 1's stdout; a logging driver would put that on the host's disk.
        args += ["--log-driver", "none", "--pull", "never", "--no-healthcheck"]
        if self.runtime:
            args += ["--runtime", self.runtime]
        if self.seccomp_file:
            args += ["--security-opt", f"seccomp={self.seccomp_file}"]
        if self.cgroup_parent:
            args += ["--cgroup-parent", self.cgroup_parent]
        return args

    def _tail(self, image: str, argv: Sequence[str]) -> list[str]:
        if not _IMAGE.match(image):
            raise ValueError(f"image {image[:40]!r} must match {_IMAGE.pattern}")
        check_argv(argv)
        args: list[str] = []
        for item in self.env:
            args += ["--env", item]
        own = {item.partition("=")[0] for item in self.env}
        for name in PROXY_VARIABLES:
            if name not in own:
                # A name without a value takes away what the client's own configuration would add, a password perhaps.
                args += ["--env", name]
        return [*args, image, *argv]


def exec_args(name: str, argv: Sequence[str], *, user: str, env_file: str = "", lang: str = "") -> list[str]:
    """The argv of an exec in the container ``name``; ``lang`` is the locale it starts in.

    The working directory is never set here: ``exec -w`` is a known escape (CVE-2024-21626), so the program inside sets its
    own.
    """
    if not _NAME.match(name):
        raise ValueError(f"container name {name[:40]!r} must match {_NAME.pattern}")
    check_user(user)
    check_argv(argv)
    args = ["exec", "-i"]
    if user:
        args += ["-u", user]
    if env_file:
        args += ["--env-file", env_file]
    if lang:
        args += ["-e", f"LANG={lang}"]
    return [*args, name, *argv]


def check_user(user: str) -> None:
    """``ValueError`` unless ``user`` is empty (the image's own) or a numeric ``uid:gid``."""
    if user and not _USER.match(user):
        raise ValueError(f"user {user[:40]!r} must be numeric uid:gid, for example 1000:1000")


def check_argv(argv: Sequence[str]) -> None:
    """``ValueError`` unless ``argv`` is a non-empty list of strings that a kernel can take."""
    if not argv:
        raise ValueError("argv must name a program; it is empty")
    if not argv[0]:
        raise ValueError("argv[0] must name a program; it is an empty string")
    for index, word in enumerate(argv):
        if "\0" in word:
            raise ValueError(f"argv[{index}] holds a NUL byte, which no kernel accepts")


def _identity_args(identity: Identity | None) -> list[str]:
    if identity is None:
        return []
    args = ["--name", identity.name]
    for key, value in sorted(identity.labels.items()):
        args += ["--label", f"{key}={value}"]
    return args


def _decimal(cpus: float) -> str:
    """CPUs to the nanosecond that engines count in, without an exponent."""
    return f"{cpus:.9f}".rstrip("0").rstrip(".")
