"""One line of the doctor's report, and how facts become lines. Pure: deciding what a fact means happens here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from executor.common.printable import printable
from executor.engine.protocol import EngineInfo, ImageInfo
from executor.sandbox.mount import Mount, lies_inside, normalized
from pool.config.load import Settings, check_host
from pool.doctor.probe import LIFETIME, Probed
from pool.doctor.runc_cves import GUARDS, Judgement

Status = Literal["ok", "warn", "fail"]

GIB = 1024**3
_LOW, _TOO_LOW = 5 * GIB, 1 * GIB
_ENDLESS = 1 << 62
_MEMORY = "sandbox.memory_mb:"


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it stands, and what helps (``""`` where nothing has to)."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def nested(mounts: Sequence[Mount], *, source: bool = False) -> list[Mount]:
    """The mounts whose target (or ``source``) lies inside that of another one which tool code may write."""

    def path(mount: Mount) -> str:
        return normalized(mount.source if source else mount.target)

    writable = [path(mount) for mount in mounts if not mount.read_only]
    return [mount for mount in mounts if any(lies_inside(path(mount), outer) for outer in writable)]


def host_checks(settings: Settings) -> list[Check]:
    """The configuration against this host: paths and commands. Memory is the engine's to report."""
    problems = [text for text in check_host(settings, _ENDLESS) if not text.startswith(_MEMORY)]
    problems += [
        f"sandbox.mounts: the source of {mount} lies inside a writable mount's; tool code can put a link to any place of "
        "the host there, and the next sandbox mounts that"
        for mount in nested(settings.sandbox.mounts, source=True)
    ]
    if problems:
        return [Check("host", "fail", printable(text), "correct the configuration or the host") for text in problems]
    return [
        Check(
            "host", "ok", "mount sources, seccomp profile, engine command and open files of the configuration are there"
        )
    ]


def tools_check(settings: Settings) -> Check:
    """Where agents' Python tools run."""
    unisolated = sorted(name for name in settings.agents if settings.agent(name).python_tools == "limits")
    if settings.sandbox.python_tools == "limits":
        apart = sorted(name for name in settings.agents if name not in unisolated)
        text = "run on the host under limits, which is no boundary" + (
            f"; but not of: {', '.join(apart)}" * bool(apart)
        )
        return Check("python tools", "warn", text, 'set sandbox.python_tools = "container"')
    if unisolated:
        text = f"run in containers, but of these agents on the host under limits, no boundary: {', '.join(unisolated)}"
        return Check("python tools", "warn", printable(text), 'set their python_tools to "container"')
    return Check("python tools", "ok", "run in containers, of every agent")


def memory_check(settings: Settings, info: EngineInfo) -> Check:
    """What all containers together may use, against the engine's memory."""
    if not info.memory:
        return Check("memory", "warn", "not checked: the engine does not report how much it has")
    for problem in check_host(settings, info.memory):
        if problem.startswith(_MEMORY):
            return Check("memory", "fail", printable(problem), "lower one of them, or set pool.overcommit = true")
    wanted = (settings.pool.max_sandboxes + settings.pool.max_cold) * settings.sandbox.memory_mb / 1024
    text = f"all containers together may use {wanted:.1f} GiB of {info.memory / GIB:.1f} GiB"
    if wanted * GIB > info.memory:
        return Check("memory", "warn", f"{text} (pool.overcommit)", "expect kills when many are busy, or lower a limit")
    return Check("memory", "ok", text)


def crash_check(handler: str) -> Check:
    """``handler``: the program that the host's kernel starts for a process that crashes, in a container too; ``""`` for none."""
    if not handler:
        return Check("crashes", "ok", "what crashes in a sandbox starts no program on the host")
    text = f"what crashes in a sandbox starts {printable(handler)} on the host, as root and outside of every container's limits"
    remedy = "set kernel.core_pattern to a plain file name, or keep that program up to date and what it stores small"
    return Check("crashes", "warn", text, remedy)


def disk_check(what: str, path: Path, free: int) -> Check:
    """``free`` bytes on the filesystem of ``path``."""
    status: Status = "fail" if free < _TOO_LOW else "warn" if free < _LOW else "ok"
    remedy = (
        "" if status == "ok" else f"free some there; {_TOO_LOW // GIB} GiB is the least, {_LOW // GIB} GiB is sound"
    )
    return Check(f"disk ({what})", status, f"{free / GIB:.1f} GiB free at {path}", remedy)


def engine_checks(info: EngineInfo) -> list[Check]:
    """What kind of engine it is, and what it warns of itself."""
    rights = "rootless" if info.rootless else "rootful"
    cgroups = f"cgroup v{info.cgroup_version or '?'} by {info.cgroup_driver or '?'}"
    text = f"{rights}, {cgroups}, {info.cpus} processors, {info.memory / GIB:.1f} GiB of memory"
    remedy = "the check `profile` shows whether a limit is ignored for it"
    return [
        Check("engine facts", "ok", text),
        *(Check("engine facts", "warn", f"the engine says: {printable(warning)}", remedy) for warning in info.warnings),
    ]


def image_check(image: ImageInfo, reference: str) -> Check:
    """The image's ID, and whether it may run."""
    if image.volumes:
        text = f"{reference} declares VOLUME {', '.join(image.volumes)}: a writable place on the host's disk"
        return Check("image", "fail", text, "rebuild it without")
    return Check("image", "ok", f"{reference} is {image.id}, {image.size / 1e6:.0f} MB")


def kernel_checks(settings: Settings, info: EngineInfo | None) -> list[Check]:
    """What guards the kernel that all sandboxes share: the seccomp profile, and what no limit of a container counts."""
    name = settings.sandbox.seccomp
    if name == "strict":
        text = "emberpool's own profile; the check `profile` asks from inside whether it is in force"
        found = [Check("seccomp", "ok", text)]
    else:
        whose = "the engine's default" if name == "engine" else f"that of {name}, which nobody here has compared"
        text = f"the profile is {whose}: socket filters, aio contexts and vsock may be open to tool code"
        found = [Check("seccomp", "warn", printable(text), 'set sandbox.seccomp = "strict"')]
    if info is not None and info.cgroup_version == "1":
        text = "cgroup v1 does not count the buffers of TCP sockets: sandboxes can fill net.ipv4.tcp_mem together"
        found.append(Check("kernel memory", "warn", text, "boot the host with cgroup v2, or lower net.ipv4.tcp_mem"))
    return found


def shared_user_check(user: str) -> Check:
    """All sandboxes' calls have one uid, and with it the kernel's quotas of a user."""
    text = (
        f"calls of all sandboxes run as {user}, and share that user's inotify instances, pipe pages, pending signals and "
        "message queues: one can use them up for the others"
    )
    return Check("user", "warn", text, 'run the gateway as root with sandbox.user = "auto" and no writable mount')


def runc_checks(version: str, judged: Sequence[Judgement]) -> list[Check]:
    """One line for runc, and one for each escape that it is not known to be free of."""
    fixed = sum(judgement.state == "fixed" for judgement in judged)
    name = f"runc {version}" if version else "runc of an unknown version"
    status: Status = "ok" if version else "warn"
    remedy = "" if version else "look with: runc --version"
    checks = [Check("runtime", status, f"{name}: {fixed} of {len(judged)} known escapes are fixed", remedy)]
    for judgement in judged:
        if judgement.state == "fixed":
            continue
        escape = judgement.escape
        text = f"{judgement.state}: {escape.how} ({judgement.why})"
        upgrade = f"upgrade runc ({', '.join(escape.fixed)} or later, or a package that names it)"
        if judgement.blocks:
            text += "; blocked here: " + "; ".join(GUARDS[guard] for guard in judgement.blocks)
        elif "no nested mount" in escape.blocked_by:
            text += "; nothing here blocks it: sandbox.mounts has a target inside a writable mount"
            upgrade += ", or move that target, or mount the outer one with :ro"
        else:
            text += "; nothing here blocks it"
        checks.append(Check(escape.cve, judgement.status, text, upgrade))
    return checks


def probe_checks(found: Probed) -> list[Check]:
    """What the probe sandbox and the probe's cold call showed."""
    checks = []
    for name, said, error in (
        ("profile", found.sandbox, found.sandbox_error),
        ("cold call", found.cold, found.cold_error),
    ):
        if error is None:
            checks.append(Check(name, "ok", said))
        else:
            remedy = "no pool starts a sandbox here until this is mended; it never runs in a weaker one"
            checks.append(Check(name, "fail", printable(error), remedy))
    if found.left:
        names = " ".join(found.left)
        text = f"not confirmed gone: {names}; what runs in it ends by itself within {LIFETIME:g} s"
        checks.append(Check("probe", "warn", text, "look for it with the engine's `ps -a`, and remove it with `rm -f`"))
    return checks
