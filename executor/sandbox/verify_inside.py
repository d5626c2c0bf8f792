"""Check the boundary from inside a container: what a probe or a runner's hello read there, against the profile. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from executor.common.printable import printable
from executor.errors import ImageUnfit, SandboxDied
from executor.sandbox.profile import WRITABLE_BESIDES_TMP, ContainerProfile
from executor.sandbox.seccomp import WITNESS_ERRNO
from executor.sandbox.verify import Finding, Verdict, mount_facts, require

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


def probe_argv() -> tuple[str, ...]:
    """A ``cat`` of the facts, each between two readings of the nonce file: that parts them and proves the mount at once."""
    argv = ["cat", _NONCE]
    for file in INSIDE_FILES:
        argv += [file, _NONCE]
    return tuple(argv)


def check_inside(output: bytes, profile: ContainerProfile, *, user: str, nonce: str, witness: object) -> list[Finding]:
    """Compare what a probe (``probe_argv``) read inside a container with the profile. ``user`` is the calls' ``uid:gid``."""
    parts = output.split(nonce.encode() + b"\n")
    if len(parts) < 3:
        return [Finding("nonce in /tool", nonce, output[:60].decode("utf-8", "replace"), "unreadable")]
    text = [part.decode("utf-8", "replace") for part in parts[1:-1]]
    if len(text) != len(INSIDE_FILES):
        return [Finding("probe", f"{len(INSIDE_FILES)} files", f"{len(text)} parts", "unreadable")]
    files = dict(zip(INSIDE_FILES, text, strict=True))
    return check_files(files, profile, user=user, witness=witness)


def check_hello(facts: Mapping[str, object], profile: ContainerProfile, *, user: str, nonce: str) -> None:
    """Compare a runner's hello (``facts``) with the profile. ``user`` is the calls' ``uid:gid``, ``nonce`` stands in ``/tool``.

    Raises ``ImageUnfit`` where the image cannot carry calls, ``ProfileMismatch`` for a weaker boundary, ``SandboxDied`` where
    other processes run in the sandbox.
    """
    # First, and before any call of the session: an image that lacks these cannot protect its runner either.
    if isinstance(problem := facts.get("problem"), str) and problem:
        raise ImageUnfit(f"the image cannot run calls as it is configured: {printable(problem, limit=600)}")
    if isinstance(parent := facts.get("parent"), str) and parent:
        raise ImageUnfit(
            f"the image's python3 is a wrapper that keeps running beside the interpreter ({printable(parent, limit=200)}); "
            "let it exec the interpreter, or put the interpreter itself on the PATH"
        )
    own = [
        Finding(point, wanted, found, "equal" if type(found) is type(wanted) and found == wanted else "weaker")
        for point, key, wanted in (
            ("nonce in /tool", "nonce", nonce),
            ("runner protected from tool code", "undumpable", True),
            ("runner adopts orphaned processes", "subreaper", True),
            ("runner's own problem", "problem", ""),
        )
        for found in (facts.get(key),)
    ]
    if not isinstance(facts.get("alone"), bool):
        own.append(Finding("no other process in the sandbox", "known", facts.get("alone"), "unreadable"))
    files = facts.get("files")
    texts = {key: value for key, value in files.items() if isinstance(value, str)} if isinstance(files, dict) else {}
    inside = check_files(texts, profile, user=user, witness=facts.get("witness"))
    require([*own, *inside])
    if facts["alone"] is not True:
        # Somebody's exec by hand, or what an earlier call left: the boundary stands, but this sandbox is not fit.
        raise SandboxDied("a process of unknown origin was found in the sandbox", cause="runner", started=False)


def check_files(files: Mapping[str, str], profile: ContainerProfile, *, user: str, witness: object) -> list[Finding]:
    """Compare the contents of ``INSIDE_FILES``, as a runner's hello gives them, with the profile.

    ``witness`` is the error number that ``getpriority(WITNESS_WHICH, 0)`` gave inside, ``None`` where it could not be read.
    """
    try:
        return [*_inside_points(files, profile, user), *_witness_point(profile, witness)]
    except (LookupError, ValueError) as error:
        return [Finding("probe", "files of a known form", repr(error), "unreadable")]


def _witness_point(profile: ContainerProfile, witness: object) -> Iterator[Finding]:
    """That the strict profile is in force: "Seccomp: 2" says only that some filter is."""
    if profile.seccomp == "strict":
        verdict: Verdict = "equal" if witness == WITNESS_ERRNO else "unreadable" if witness is None else "weaker"
        yield Finding("strict seccomp profile in force", WITNESS_ERRNO, witness, verdict)


def _inside_points(files: Mapping[str, str], profile: ContainerProfile, user: str) -> Iterator[Finding]:
    status = dict(line.split(":\t", 1) for line in files["/proc/self/status"].splitlines() if ":\t" in line)

    def point(name: str, wanted: object, found: object) -> Finding:
        verdict: Verdict = "unreadable" if found in (None, "") else "equal" if wanted == found else "weaker"
        return Finding(name, wanted, found, verdict)

    for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        yield point(key, 0, int(status[key], 16) if key in status else None)
    yield point("NoNewPrivs", "1", status.get("NoNewPrivs"))
    yield point("Seccomp", "2", status.get("Seccomp"))
    if user:
        uid, _, gid = user.partition(":")
        if uid.isdecimal():
            yield point("uids inside", [uid] * 4, status["Uid"].split())
        if gid.isdecimal():
            yield point("gids inside", [gid] * 4, status["Gid"].split())
    if not user.partition(":")[0].isdecimal():
        # The image's own user, or a name that only the image's passwd can resolve.
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
        given = dict(option.split("=", 1) for option in tmp if "=" in option)
        yield point("tmpfs owner", owner, (given.get("uid"), given.get("gid")))
    # The root has a point of its own.
    mine = {target for _, target, writable in mount_facts(profile) if writable} | {"/tmp", "/"}  # noqa: S108
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
