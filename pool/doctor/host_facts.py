"""What this host says of the things around a pool: package changelogs, users, free space, the state directory.

Plain blocking look-ups; the doctor runs them in threads, since a directory service or a network disk can hang.
"""

from __future__ import annotations

import gzip
import os
import pwd
import shutil
from collections.abc import Iterable
from pathlib import Path

from executor.errors import PoolUnusable
from pool.config.types import UidRange
from pool.doctor.runc_cves import Package, read_changelog
from pool.ledger.ledger import StateDirectory

CHANGELOGS = tuple(
    Path("/usr/share/doc") / package / "changelog.Debian.gz" for package in ("runc", "runc-app", "runc-stable")
)
"""Where Debian and Ubuntu say what their package of runc fixed; containerd.io and others have none there."""

CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
SUBORDINATE_UIDS = Path("/etc/subuid")
_MAX_CHANGELOG = 4_000_000


def runc_package(version: str, changelogs: Iterable[Path] = CHANGELOGS) -> Package | None:
    """This host's package of runc, if it is of this very ``version``. A version names its fixes wherever it runs."""
    for path in changelogs:
        try:
            with gzip.open(path) as file:
                text = file.read(_MAX_CHANGELOG).decode("utf-8", "replace")
        except (OSError, EOFError):
            continue
        package = read_changelog(text)
        if package is not None and package.version == version:
            return package
    return None


def users_of(uids: UidRange, subordinate: Path = SUBORDINATE_UIDS) -> list[str]:
    """The host's users with a uid in ``uids``, and those that have subordinate uids there."""
    wanted = range(uids.start, uids.start + uids.count)
    found = [f"{user.pw_name} ({user.pw_uid})" for user in pwd.getpwall() if user.pw_uid in wanted]
    try:
        lines = subordinate.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, numbers = line.partition(":")
        start, _, count = numbers.partition(":")
        if start.isdigit() and count.isdigit() and int(count):
            first, last = int(start), int(start) + int(count) - 1
            if first < wanted.stop and last >= wanted.start:
                found.append(f"{name} (subordinate uids from {first})")
    return found


def crash_handler(pattern: Path = CORE_PATTERN) -> str | None:
    """The program that the kernel starts on this host when a process crashes, ``""`` for none; ``None`` where the system
    does not say."""
    try:
        text = pattern.read_text("utf-8", "replace").strip()
    except OSError:
        return None
    return text.removeprefix("|").strip().partition(" ")[0] if text.startswith("|") else ""


def existing(path: Path) -> Path:
    """``path``, or the nearest directory above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def free_bytes(path: Path) -> int:
    """The bytes that this user may still write on the filesystem of ``path`` or of what exists above it."""
    return shutil.disk_usage(existing(path)).free


def state_directory(path: Path) -> str:
    """How a pool's state directory stands. Makes nothing where there is none; raises ``PoolUnusable``."""
    if not os.path.lexists(path):
        above = existing(path.parent)
        if not os.access(above, os.W_OK | os.X_OK):
            raise PoolUnusable(f"the state directory {path} does not exist, and this user may not make it in {above}")
        return f"{path} does not exist yet; the pool makes it"
    try:
        state = StateDirectory.open(path)
    except PoolUnusable as error:
        if "in use by a live pool" in str(error):
            return str(error).partition(";")[0]
        raise
    try:
        left = len(state.entries())
    finally:
        state.close()
    return f"{path} is private and free" + (
        f"; the next start deals with {left} containers of an earlier one" * (left > 0)
    )
