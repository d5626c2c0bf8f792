"""Read the boundary back: what the engine says and what the inside says, against what the profile asked.

Flags alone prove nothing (a rootless engine was seen to ignore a limit silently). Everything here is pure; a point is
``equal``, ``weaker`` or ``unreadable``, and the last two refuse the sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from executor.engine.protocol import ImageInfo
from executor.errors import ProfileMismatch
from executor.sandbox.mount import normalized
from executor.sandbox.profile import PROXY_VARIABLES, WRITABLE_BESIDES_TMP, ContainerProfile
from executor.sandbox.seccomp import WITNESS_ERRNO, strict_profile

Verdict = Literal["equal", "weaker", "unreadable"]

INSIDE_FILES = (
    "/proc/self/status",
    "/proc/self/mountinfo",
    "/proc/net/dev",
    "/sys/fs/cgroup/pids/pids.max",
    "/sys/fs/cgroup/pids.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory.max",
)
"""What the probe reads inside. Of each cgroup figure one file exists, by the cgroup version."""

_NONCE = "/tool/nonce"
_WRITABLE_SYSTEM = ("/proc", "/dev", "/dev/pts", "/sys/fs/cgroup", *WRITABLE_BESIDES_TMP)


@dataclass(frozen=True, slots=True)
class Finding:
    """One point of the profile: what was asked, what was found, and what that means."""

    point: str
    wanted: object
    found: object
    verdict: Verdict


def require(findings: Sequence[Finding]) -> None:
    """Raise ``ProfileMismatch`` naming every point that is not equal."""
    bad = [
        f"{f.point}: asked {f.wanted!r}, found {_shown(f.found)} ({f.verdict})"
        for f in findings
        if f.verdict != "equal"
    ]
    if bad:
        raise ProfileMismatch("the boundary is weaker than the profile, or cannot be read back: " + "; ".join(bad))


def _shown(found: object) -> str:
    """The beginning of what was found, quoted; it may be anything that can be read from JSON."""
    try:
        return repr(str(found)[:120])
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists
        return "what cannot be shown"


def require_no_volumes(image: ImageInfo) -> None:
    """Raise ``ProfileMismatch`` where an image declares a VOLUME; before anything is made for a container of it."""
    if image.volumes:
        places = ", ".join(image.volumes)
        raise ProfileMismatch(
            f"the image declares VOLUME {places}: a writable place on the host's disk; rebuild it without"
        )


def probe_argv() -> tuple[str, ...]:
    """A ``cat`` of the facts, each between two readings of the nonce file: that parts them and proves the mount at once."""
    argv = ["cat", _NONCE]
    for file in INSIDE_FILES:
        argv += [file, _NONCE]
    return tuple(argv)


def check_inspect(
    facts: Mapping[str, Any],
    profile: ContainerProfile,
    image: ImageInfo,
    *,
    staging: str = "",
    labels: Mapping[str, str],
) -> list[Finding]:
    """Compare an engine's record of a container with the profile it was started from, mounts and environment exactly."""
    try:
        return list(_inspect_points(facts, profile, image, staging, labels))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        return [Finding("inspect", "a record of a known form", repr(error), "unreadable")]


def _inspect_points(
    facts: Mapping[str, Any], profile: ContainerProfile, image: ImageInfo, staging: str, labels: Mapping[str, str]
) -> Iterator[Finding]:
    host, config, limits = facts["HostConfig"], facts["Config"], profile.limits

    def point(name: str, wanted: object, found: object) -> Finding:
        return Finding(name, wanted, found, "equal" if wanted == found else "weaker")

    yield point("image", image.id.removeprefix("sha256:"), str(facts["Image"]).removeprefix("sha256:"))
    yield point("network", profile.network, host["NetworkMode"])
    yield point("read-only root", True, host["ReadonlyRootfs"])
    yield point("privileged", False, host["Privileged"])
    yield point("capabilities added", [], list(host["CapAdd"] or ()))
    dropped = [str(name).upper() for name in host["CapDrop"] or ()]
    # podman lists each capability by name; that they are really gone is read from the inside.
    yield Finding("capabilities dropped", "ALL", dropped, "equal" if "ALL" in dropped or len(dropped) > 8 else "weaker")
    options = [str(option) for option in host["SecurityOpt"] or ()]
    allowed = {"no-new-privileges", "no-new-privileges:true", "no-new-privileges=true"}
    yield point("no-new-privileges", True, bool(allowed.intersection(options)))
    odd = [option for option in options if option not in allowed and not option.startswith("seccomp")]
    filters = [option.partition("=")[2] for option in options if option.startswith("seccomp")]
    if not profile.seccomp_file:
        odd += [f"seccomp={text[:40]}" for text in filters]
    yield point("security options besides", [], odd)
    if profile.seccomp_file:
        yield _seccomp_point(profile, filters)
    yield point("pids limit", profile.pids, host["PidsLimit"])
    yield point("tmpfs", ["/tmp"], sorted(host.get("Tmpfs") or ()))  # noqa: S108 - the container's own /tmp
    if limits.memory_mb is not None:
        yield point("memory", limits.memory_mb * 1024 * 1024, host["Memory"])
        yield point("memory and swap", limits.memory_mb * 1024 * 1024, host["MemorySwap"])
    if profile.cpus is not None:
        yield point("cpus", round(profile.cpus * 1e9), int(host["NanoCpus"]) or _quota(host))
    ulimits = {
        str(row["Name"]).lower().removeprefix("rlimit_"): (row["Soft"], row["Hard"]) for row in host["Ulimits"] or ()
    }
    for name, value in (("nofile", limits.open_files), ("fsize", limits.file_size_mb and limits.file_size_mb << 20)):
        if value is not None:
            yield point(f"ulimit {name}", (value, value), ulimits.get(name))
    yield point("ulimit core", (0, 0), ulimits.get("core"))
    if limits.cpu_seconds is not None and profile.cpu_limit:
        yield point("ulimit cpu", (limits.cpu_seconds, limits.cpu_seconds + 1), ulimits.get("cpu"))
    for key in ("PidMode", "UTSMode"):
        yield Finding(key, "private", host.get(key), "equal" if host.get(key) in ("", "private", None) else "weaker")
    # Shareable is what some engines default to: others may be asked to join it, it joins nobody's.
    ipc = host.get("IpcMode")
    yield Finding("IpcMode", "private", ipc, "equal" if ipc in ("", "private", "shareable", "none", None) else "weaker")
    yield point("devices", [], list(host.get("Devices") or ()) + list(host.get("DeviceRequests") or ()))
    yield point("volumes from others", [], list(host.get("VolumesFrom") or ()))
    yield point("published ports", {}, dict(host.get("PortBindings") or {}))
    yield point("log driver", "none", host["LogConfig"]["Type"])
    if profile.runtime:
        yield point("runtime", profile.runtime, host.get("Runtime"))
    if profile.user:
        yield point("user", profile.user, config["User"])
    wanted_mounts = sorted(mount_facts(profile, staging))
    found_mounts = sorted(
        (str(row["Source"]), str(row["Destination"]), bool(row["RW"]))
        for row in facts["Mounts"]
        if row["Type"] != "tmpfs"
    )
    yield point("mounts", wanted_mounts, found_mounts)
    # A name without a value is one that the container does not have.
    known = {*image.env, *profile.env, *PROXY_VARIABLES}
    foreign = sorted(item.partition("=")[0] for item in config["Env"] or () if item not in known and not _own_env(item))
    yield point("environment besides the image's and the profile's", [], foreign)
    missing = sorted(key for key, value in labels.items() if (config["Labels"] or {}).get(key) != value)
    yield point("labels missing", [], missing)


def _seccomp_point(profile: ContainerProfile, filters: Sequence[str]) -> Finding:
    """What the record says of the seccomp profile: docker keeps its content, podman its path."""
    text = filters[0] if len(filters) == 1 else ""
    equal = text == profile.seccomp_file or text.startswith("{")
    if profile.seccomp == "strict" and text.startswith("{"):
        equal = json.loads(text) == strict_profile()
    return Finding("seccomp profile", profile.seccomp, [one[:40] for one in filters], "equal" if equal else "weaker")


def mount_facts(profile: ContainerProfile, staging: str) -> Iterator[tuple[str, str, bool]]:
    """(source, target, writable) of every mount that the profile asks for."""
    if staging:
        yield normalized(staging), "/tool", False
    for mount in profile.mounts:
        yield normalized(mount.source), normalized(mount.target), not mount.read_only


def _own_env(item: str) -> bool:
    return item.partition("=")[0] in ("HOSTNAME", "container", "TERM")


def _quota(host: Mapping[str, Any]) -> int:
    period, quota = int(host.get("CpuPeriod") or 0), int(host.get("CpuQuota") or 0)
    return round(quota / period * 1e9) if period and quota > 0 else 0


def check_inside(
    output: bytes, profile: ContainerProfile, *, user: str, nonce: str, seccomp: bool = True, witness: object
) -> list[Finding]:
    """Compare what a probe (``probe_argv``) read inside a container with the profile. ``user`` is the calls' ``uid:gid``."""
    parts = output.split(nonce.encode() + b"\n")
    if len(parts) < 3:
        return [Finding("nonce in /tool", nonce, output[:60].decode("utf-8", "replace"), "unreadable")]
    text = [part.decode("utf-8", "replace") for part in parts[1:-1]]
    if len(text) != len(INSIDE_FILES):
        return [Finding("probe", f"{len(INSIDE_FILES)} files", f"{len(text)} parts", "unreadable")]
    files = dict(zip(INSIDE_FILES, text, strict=True))
    return check_files(files, profile, user=user, seccomp=seccomp, witness=witness)


def check_files(
    files: Mapping[str, str], profile: ContainerProfile, *, user: str, seccomp: bool = True, witness: object
) -> list[Finding]:
    """Compare the contents of ``INSIDE_FILES``, as a runner's hello tells them, with the profile.

    ``witness`` is the error number that ``getpriority(WITNESS_WHICH, 0)`` gave inside, ``None`` where nobody could ask.
    ``seccomp`` is false for a runtime that has a kernel of its own and no seccomp to show.
    """
    try:
        return [*_inside_points(files, profile, user, seccomp), *_witness_point(profile, seccomp, witness)]
    except (LookupError, ValueError) as error:
        return [Finding("probe", "files of a known form", repr(error), "unreadable")]


def _witness_point(profile: ContainerProfile, seccomp: bool, witness: object) -> Iterator[Finding]:
    """That the strict profile is in force: "Seccomp: 2" says only that some filter is."""
    if seccomp and profile.seccomp == "strict":
        verdict: Verdict = "equal" if witness == WITNESS_ERRNO else "unreadable" if witness is None else "weaker"
        yield Finding("strict seccomp profile in force", WITNESS_ERRNO, witness, verdict)


def _inside_points(files: Mapping[str, str], profile: ContainerProfile, user: str, seccomp: bool) -> Iterator[Finding]:
    status = dict(line.split(":\t", 1) for line in files["/proc/self/status"].splitlines() if ":\t" in line)

    def point(name: str, wanted: object, found: object) -> Finding:
        verdict: Verdict = "unreadable" if found in (None, "") else "equal" if wanted == found else "weaker"
        return Finding(name, wanted, found, verdict)

    for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        yield point(key, 0, int(status[key], 16) if key in status else None)
    yield point("NoNewPrivs", "1", status.get("NoNewPrivs"))
    if seccomp:
        yield point("Seccomp", "2", status.get("Seccomp"))
    if user:
        uid, _, gid = user.partition(":")
        if uid.isdecimal():
            yield point("uids inside", [uid] * 4, status["Uid"].split())
        if gid.isdecimal():
            yield point("gids inside", [gid] * 4, status["Gid"].split())
    if not user.partition(":")[0].isdecimal():
        # The image's own user, or one that only the image's passwd can tell.
        yield Finding("uid inside", "not 0", status["Uid"], "weaker" if "0" in status["Uid"].split() else "equal")
    mounts = dict(_mount_rows(files["/proc/self/mountinfo"]))
    yield point("root inside", "ro", _mode(mounts.get("/")))
    tmp = mounts.get("/tmp", frozenset())  # noqa: S108 - the container's own /tmp
    yield point("tmpfs inside", ["noexec", "nosuid", "rw"], sorted(tmp & {"noexec", "nosuid", "rw"}))
    yield point("tmpfs size", f"size={profile.tmpfs_mb * 1024}k", next((o for o in tmp if o.startswith("size=")), None))
    # The kernel shows a mode only where it is not the usual one.
    mode = next((option for option in tmp if option.startswith("mode=")), "mode=1777")
    yield point("tmpfs mode", "mode=1777", mode)
    if owner := profile.tmp_owner(user):
        told = dict(option.split("=", 1) for option in tmp if "=" in option)
        yield point("tmpfs owner", owner, (told.get("uid"), told.get("gid")))
    # The root has a point of its own.
    mine = {target for _, target, writable in mount_facts(profile, "") if writable} | {"/tmp", "/"}  # noqa: S108
    writable = sorted(
        place for place, options in mounts.items()
        if "rw" in options and place not in mine and place not in _WRITABLE_SYSTEM and "masked" not in options
    )  # fmt: skip
    yield point("writable places besides", [], writable)
    if profile.network == "none":
        names = [line.split(":")[0].strip() for line in files["/proc/net/dev"].splitlines() if ":" in line]
        # Tunnels that the kernel puts into every new network namespace are down and lead nowhere.
        yield point("interfaces", ["lo"], [name for name in names if name not in _KERNEL_TUNNELS])
    pids = (files["/sys/fs/cgroup/pids/pids.max"] or files["/sys/fs/cgroup/pids.max"]).strip()
    yield point("pids.max", str(profile.pids), pids)
    if profile.limits.memory_mb is not None:
        memory = files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] or files["/sys/fs/cgroup/memory.max"]
        yield point("memory limit", str(profile.limits.memory_mb << 20), memory.strip())


_KERNEL_TUNNELS = frozenset(
    {"tunl0", "sit0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6tnl0", "ip6gre0"}
)


def _mount_rows(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, super_options = left.split(), right.split()[-1]
        place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])  # a space is written \\040
        options = set(fields[5].split(","))
        # The engine masks a file by mounting its /dev/null over it.
        if fields[3] == "/null":
            options.add("masked")
        options |= {
            option for option in super_options.split(",") if option.startswith(("size=", "mode=", "uid=", "gid="))
        }
        yield place, frozenset(options)


def _mode(options: frozenset[str] | None) -> str | None:
    if options is None:
        return None
    return "ro" if "ro" in options else "rw"
