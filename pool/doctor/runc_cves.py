"""The known ways out of a container through runc: where each was fixed, and what in the shared profile blocks it.

Pure: version strings and a package's changelog in, a judgement out. The facts are the advisories' own
(github.com/opencontainers/runc/security); docs/doctor.md says how each was weighed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["fixed", "open", "unknown"]
Guard = Literal["non-root", "workdir", "no terminal", "no nested mount", "trusted image", "docker", "rootless"]

GUARDS: Mapping[Guard, str] = {
    "non-root": "PID 1 and calls have a uid that is not 0, no capabilities and no-new-privileges",
    "workdir": "the working directory is the profile's own /tmp and `exec -w` is never used",
    "no terminal": "no container gets a terminal, so nothing is mounted at /dev/console",
    "no nested mount": "nothing is mounted inside a writable mount, so tool code can move no mount target",
    "trusted image": "the image is the operator's own, run by its ID and never pulled for a call",
    "docker": "docker puts a layer of its own over the image's /dev",
    "rootless": "the engine is rootless, so runc itself cannot write the host's /proc",
}
"""What each guard says to the operator."""


@dataclass(frozen=True, slots=True)
class Escape:
    """One advisory. ``fixed`` holds the first fixed release of each upstream branch that got one, ``since`` the first
    affected one (``""``: all before); any one of ``blocked_by`` that holds is enough to block it."""

    cve: str
    how: str
    fixed: tuple[str, ...]
    blocked_by: tuple[Guard, ...]
    since: str = ""


ESCAPES: Sequence[Escape] = (
    Escape("CVE-2019-5736", "root in a container overwrites the host's runc", ("1.0.0-rc7",), ("non-root",)),
    Escape("CVE-2021-30465", "a mount target is swapped for a link", ("1.0.0-rc95",), ("no nested mount",)),
    Escape(
        "CVE-2023-27561", "a linked /proc misplaces runc's own setup", ("1.1.5",),
        ("trusted image", "no nested mount"), since="1.0.0-rc95",
    ),
    Escape(
        "CVE-2023-28642", "a linked /proc turns AppArmor off", ("1.1.5",),
        ("trusted image", "no nested mount"),
    ),
    Escape(
        "CVE-2024-21626", "a working directory under /proc/self/fd leads to the host", ("1.1.12",), ("workdir",),
        since="1.0.0-rc93",
    ),
    Escape(
        "CVE-2024-45310", "a race makes empty files on the host", ("1.1.14", "1.2.0-rc.3"), ("no nested mount",)
    ),
    Escape(
        "CVE-2025-31133", "a linked /dev/null unmasks /proc", ("1.2.8", "1.3.3", "1.4.0-rc.3"),
        ("non-root", "no nested mount"),
    ),
    Escape(
        "CVE-2025-52565", "a linked /dev/pts entry is mounted at /dev/console", ("1.2.8", "1.3.3", "1.4.0-rc.3"),
        ("non-root", "no terminal", "no nested mount"), since="1.0.0-rc3",
    ),
    Escape(
        "CVE-2025-52881", "runc's own writes to /proc are redirected", ("1.2.8", "1.3.3", "1.4.0-rc.3"),
        ("no nested mount", "rootless"),
    ),
    Escape(
        "CVE-2026-41579", "a linked /dev makes and removes links on the host", ("1.3.6", "1.4.3", "1.5.0-rc.3"),
        ("docker", "trusted image"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution's package of runc: its ``version`` and the CVEs that its changelog names.

    Distributions cut old entries off. ``oldest`` is the year of the oldest entry that is left, 0 where none was cut;
    only for a CVE of a later year does silence mean that it is open.
    """

    version: str
    cves: frozenset[str]
    oldest: int = 0

    def silent(self, cve: str) -> bool:
        """Whether the changelog would name ``cve`` if it were fixed, and does not."""
        return cve not in self.cves and int(cve.split("-")[1]) > self.oldest


@dataclass(frozen=True, slots=True)
class Judgement:
    """One escape against one runc. ``why`` says what ``state`` rests on; ``blocks`` are the guards that hold."""

    escape: Escape
    state: State
    why: str
    blocks: tuple[Guard, ...]

    @property
    def status(self) -> Literal["ok", "warn", "fail"]:
        if self.state == "fixed":
            return "ok"
        return "warn" if self.blocks else "fail"


def guards(*, nested_mounts: bool, kind: str, rootless: bool) -> frozenset[Guard]:
    """The guards that hold for an engine of ``kind``, and settings that mount inside a writable mount or do not."""
    held: set[Guard] = {"non-root", "workdir", "no terminal", "trusted image"}
    if not nested_mounts:
        held.add("no nested mount")
    if kind == "docker":
        held.add("docker")
    if rootless:
        held.add("rootless")
    return frozenset(held)


def judge(version: str, package: Package | None, held: frozenset[Guard]) -> list[Judgement]:
    """Every known escape against a runc that calls itself ``version`` (as ``runc_version`` returns it).

    ``package`` is the distribution's package on this host; it counts where its version is this very one.
    """
    numbers = _numbers(version)
    mine = package if package is not None and package.version == version else None
    judged = []
    for escape in ESCAPES:
        state, why = _state(escape, version, numbers, mine)
        judged.append(Judgement(escape, state, why, tuple(guard for guard in escape.blocked_by if guard in held)))
    return judged


def _state(
    escape: Escape, version: str, numbers: tuple[int, int, int, int] | None, package: Package | None
) -> tuple[State, str]:
    if numbers is None:
        return "unknown", "the engine does not report runc's version"
    if escape.since and numbers < _known(escape.since):
        return "fixed", f"releases before {escape.since} do not have it"
    if _released(escape, numbers):
        return "fixed", "by the release"
    if package is not None and escape.cve in package.cves:
        return "fixed", "by the package's revision"
    if _UPSTREAM.fullmatch(version):
        return "open", f"first fixed in {' and '.join(escape.fixed)}"
    if package is not None and package.silent(escape.cve):
        return "open", "the package's changelog does not name it"
    return "unknown", "the distribution may have fixed it; no changelog of this revision is here to show it"


def _released(escape: Escape, numbers: tuple[int, int, int, int]) -> bool:
    """Whether a release holds the fix: in its own branch from the fixed release on, in every branch that is younger."""
    firsts = [_known(first) for first in escape.fixed]
    same = [first for first in firsts if first[:2] == numbers[:2]]
    return numbers >= same[0] if same else numbers[:2] > max(firsts)[:2]


_UPSTREAM = re.compile(r"v?\d+\.\d+\.\d+(-rc\.?\d+)?(\+dev)?(-\d+-g[0-9a-f]+)?(-dirty)?")
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?:[-~._]?rc\.?(\d+))?")
_RELEASE = 1_000_000  # sorts a release behind all its candidates


def _numbers(version: str) -> tuple[int, int, int, int] | None:
    match = _NUMBERS.match(version)
    if match is None:
        return None
    major, minor, patch, candidate = match.groups()
    return int(major), int(minor), int(patch), _RELEASE if candidate is None else int(candidate)


def _known(version: str) -> tuple[int, int, int, int]:
    numbers = _numbers(version)
    assert numbers is not None, version  # noqa: S101 - the table above
    return numbers


def runc_version(said: str) -> str:
    """runc's version out of what an engine says: docker a commit or version, podman the output of ``runc --version``.

    ``""`` where there is none in it (some builds of docker name a commit only).
    """
    line = said.strip().partition("\n")[0]
    word = re.sub(r"^runc version ", "", line).strip()
    return word if _NUMBERS.match(word) else ""


_HEADING = re.compile(r"[a-z0-9][a-z0-9.+-]* \(([^()\s]+)\) ")
_SIGNED = re.compile(r"(?m)^ -- .*>  \w{3}, +\d{1,2} \w{3} (\d{4}) ")
_CVE = re.compile(r"CVE-\d{4}-\d{4,}")


def read_changelog(text: str) -> Package | None:
    """The package that a Debian changelog describes; ``None`` where the text is none."""
    heading = _HEADING.match(text)
    if heading is None:
        return None
    years = [int(year) for year in _SIGNED.findall(text)]
    cut = any(mark in text for mark in ("Older entries have been removed", "For older changelog entries"))
    return Package(heading[1], frozenset(_CVE.findall(text)), oldest=min(years, default=9999) if cut else 0)
