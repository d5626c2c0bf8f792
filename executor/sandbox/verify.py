"""Check a container's boundary against its profile: the findings, and the engine's own record of the container.

Flags alone prove nothing (a rootless engine was seen to ignore a limit silently), so ``executor.sandbox.verify_inside``
checks from the inside too. Pure; a point is ``equal``, ``weaker`` or ``unreadable``, and the last two refuse the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from executor.engine.protocol import ImageInfo
from executor.errors import ProfileMismatch
from executor.sandbox.mount import normalized
from executor.sandbox.profile import PROXY_VARIABLES, ContainerProfile
from executor.sandbox.seccomp import strict_profile

Verdict = Literal["equal", "weaker", "unreadable"]


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
    # podman lists each capability by name; the check from the inside shows that they are really gone.
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
    # Shareable is some engines' default: other containers may join it, but it joins none.
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
    # A name without a value is a variable that the container does not have.
    known = {*image.env, *profile.env, *PROXY_VARIABLES}
    foreign = sorted(item.partition("=")[0] for item in config["Env"] or () if item not in known and not _own_env(item))
    yield point("environment besides the image's and the profile's", [], foreign)
    missing = sorted(key for key, value in labels.items() if (config["Labels"] or {}).get(key) != value)
    yield point("labels missing", [], missing)


def _seccomp_point(profile: ContainerProfile, filters: Sequence[str]) -> Finding:
    """Check the record's seccomp profile: docker keeps its content, podman its path."""
    text = filters[0] if len(filters) == 1 else ""
    equal = text == profile.seccomp_file or text.startswith("{")
    if profile.seccomp == "strict" and text.startswith("{"):
        equal = json.loads(text) == strict_profile()
    return Finding("seccomp profile", profile.seccomp, [one[:40] for one in filters], "equal" if equal else "weaker")


def mount_facts(profile: ContainerProfile, staging: str = "") -> Iterator[tuple[str, str, bool]]:
    """Yield (source, target, writable) of every mount that the profile asks for, and of ``/tool`` where there is ``staging``."""
    if staging:
        yield normalized(staging), "/tool", False
    for mount in profile.mounts:
        yield normalized(mount.source), normalized(mount.target), not mount.read_only


def _own_env(item: str) -> bool:
    return item.partition("=")[0] in ("HOSTNAME", "container", "TERM")


def _quota(host: Mapping[str, Any]) -> int:
    period, quota = int(host.get("CpuPeriod") or 0), int(host.get("CpuQuota") or 0)
    return round(quota / period * 1e9) if period and quota > 0 else 0
