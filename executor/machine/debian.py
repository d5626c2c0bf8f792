"""Packages of the distribution, on Debian and Ubuntu as root, installed without starting any service."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from executor.common.locks import exclusive
from executor.common.log import get_logger
from executor.common.printable import printable
from executor.engine import process
from executor.errors import EngineFailed

log = get_logger("emberpool.engine")

Report = Callable[[str], None]
"""Where progress goes: one short line at a time, for a person."""

POLICY = Path("/usr/sbin/policy-rc.d")
"""The program that a package asks before it starts its service; exit status 101 means no."""

_PACKAGES_LOCK = Path("/run/emberpool/engine/packages.lock")
_MARK = "# written by emberpool"
_DENY = f"#!/bin/sh\n{_MARK} while it installs a package; the file that was here comes back afterwards\nexit 101\n"
_INSTALL_TIMEOUT, _UPDATE_TIMEOUT = 1800.0, 600.0
_FORWARDED = ("TMPDIR", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_SBIN = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


@dataclass(frozen=True, slots=True)
class Release:
    """Which system this is, by ``/etc/os-release``."""

    id: str
    like: tuple[str, ...] = ()
    codename: str = ""

    @property
    def is_debian(self) -> bool:
        """Whether packages can be installed here by ``install``."""
        return self.id in ("debian", "ubuntu") and shutil.which("apt-get") is not None


def release() -> Release:
    """This system's release; on what has no such file, its id is ``""``."""
    try:
        raw = platform.freedesktop_os_release()
    except OSError:
        return Release("")
    return Release(raw.get("ID", ""), tuple(raw.get("ID_LIKE", "").split()), raw.get("VERSION_CODENAME", ""))


def is_root() -> bool:
    """Whether this process may change the system."""
    return os.geteuid() == 0


def system_environment() -> dict[str, str]:
    """What system tools and the daemon run with: the system's own PATH, the proxies, nothing else of this process."""
    env = {key: os.environ[key] for key in _FORWARDED if key in os.environ}
    return {**env, "PATH": ":".join(_SBIN), "HOME": "/root", "LC_ALL": "C.UTF-8"}


async def install(packages: Sequence[str], report: Report) -> None:
    """Install packages with apt, no recommended ones, removing none, and start no service. Raises ``EngineFailed``.

    Once begun it runs to its end whatever is cancelled: a dpkg that is killed half-way leaves the system broken.
    """
    names = " ".join(packages)
    async with exclusive(_PACKAGES_LOCK, timeout=_INSTALL_TIMEOUT, doing="installing packages"):
        report(f"installing {names} with apt-get (Ctrl-C takes effect once that is done)")
        with anyio.CancelScope(shield=True), no_service_starts():
            tail = await _apt("install", *_INSTALL_FLAGS, "--", *packages, timeout=_INSTALL_TIMEOUT)
            if tail is not None:
                report("updating the package lists, since that did not work without")
                await _apt("update", timeout=_UPDATE_TIMEOUT)
                report(f"installing {names} with apt-get")
                tail = await _apt("install", *_INSTALL_FLAGS, "--", *packages, timeout=_INSTALL_TIMEOUT)
    if tail is not None:
        raise EngineFailed(f"apt-get could not install {names}: {tail}; run `apt-get install {names}` to see all of it")


# Never at the price of another package: docker.io conflicts with Docker's own, which somebody here may depend on.
_INSTALL_FLAGS = ("-y", "--no-install-recommends", "--no-remove")


async def _apt(*words: str, timeout: float) -> str | None:
    """Run apt-get; ``None`` where it succeeded, else the end of what it said."""
    env = {**system_environment(), "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    argv = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", *words]
    done = await process.run(argv, env, timeout=timeout)
    log.debug("engine.apt", words=words, code=done.code)
    if done.code == 0:
        return None
    return printable(done.stderr or done.stdout)[-300:] or f"exit status {done.code} and no message"


@contextmanager
def no_service_starts(policy: Path = POLICY) -> Iterator[None]:
    """Have packages start no service inside the block; then the former policy is back exactly as it was, or absent."""
    saved = policy.with_name(policy.name + ".emberpool-saved")
    aside = policy.with_name(policy.name + ".emberpool-new")
    _restore(policy, saved)  # what a run that was killed left behind
    if os.path.lexists(policy):
        # A second name for the former file, symlink or not: content, mode, owner and times stay what they are, and
        # there is no moment without a policy.
        os.link(policy, saved, follow_symlinks=False)
    try:
        aside.write_text(_DENY)
        aside.chmod(0o755)
        aside.replace(policy)
        yield
    finally:
        aside.unlink(missing_ok=True)
        _restore(policy, saved)


def _restore(policy: Path, saved: Path) -> None:
    ours = policy.is_file() and not policy.is_symlink() and _MARK in policy.read_text(errors="replace")
    if not os.path.lexists(saved):
        if ours:
            policy.unlink()
    elif ours or not os.path.lexists(policy):
        saved.replace(policy)
    else:
        # Still the former file (rename between two names of one file does nothing), or one that somebody wrote since.
        saved.unlink()
