"""Files and directories that nobody but this user may have made, read or replaced, and the lock that a live pool holds."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from executor.common.locks import HeldLock
from executor.errors import PoolUnusable

_HOLDER = re.compile(r"([1-9][0-9]{0,9})(?: ([0-9T:+-]{25}))?\n?\Z", re.ASCII)


class NotOurs(ValueError):
    """A link, a pipe, a directory or another user's file stands where a file of ours should: no fault of a disk."""


class StateLocked(PoolUnusable):
    """Another pool lives in this state directory. ``holder`` says who, as far as its lock file shows."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(
            f"the state directory {path} is in use by a live pool ({holder}); stop it, or choose another pool.state_dir"
        )
        self.holder = holder


def check_private(path: Path) -> None:
    """``PoolUnusable`` unless ``path`` is a directory of this user, closed to all others, where nobody can replace it."""
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise PoolUnusable(f"the state directory {path} is not a directory (links are not followed)")
    if facts.st_uid != os.geteuid():
        raise PoolUnusable(f"the state directory {path} belongs to uid {facts.st_uid}, not to uid {os.geteuid()}")
    if facts.st_mode & 0o077:
        mode = oct(stat.S_IMODE(facts.st_mode))
        raise PoolUnusable(f"the state directory {path} is open to other users (mode {mode}); run: chmod 700 {path}")
    for parent in path.absolute().parents:
        facts = parent.stat()
        if facts.st_uid not in (0, os.geteuid()):
            raise PoolUnusable(
                f"{parent}, above the state directory, belongs to uid {facts.st_uid}, who could replace it; choose another "
                "place"
            )
        # A group of the user's own is the user alone, as distributions set their users up.
        others = stat.S_IWOTH if facts.st_gid in (0, os.getegid()) else stat.S_IWOTH | stat.S_IWGRP
        if facts.st_mode & others and not facts.st_mode & stat.S_ISVTX:
            raise PoolUnusable(f"{parent}, above the state directory, can be written by others; choose another place")


def take_lock(path: Path) -> HeldLock:
    """Lock the file ``path``, made where it is missing; what holds the lock until it is closed.

    Raises ``StateLocked`` where another holds it, ``PoolUnusable`` where it is no file of ours, ``OSError``.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PoolUnusable(f"{path} is a symbolic link; somebody else made it. Remove it") from error
        raise
    lock = HeldLock(fd)
    try:
        if not _ours(fd):
            raise PoolUnusable(f"{path} is not a regular file of this user; somebody else made it. Remove it")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateLocked(path.parent, _holder(path, fd)) from error
    except BaseException:
        lock.close()
        raise
    # For people only: the lock alone decides, whether the process that it names is dead or alive. So a full disk is no reason to refuse.
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {datetime.now(UTC).isoformat(timespec='seconds')}\n".encode(), 0)
    return lock


def read_private(path: Path) -> str:
    """The text of a file of ours. ``NotOurs`` where it is a link, a pipe or another user's: a pool makes none such. Any other
    ``ValueError`` means that it is no UTF-8."""
    try:
        # Without O_NONBLOCK, a pipe in the file's place would be waited for.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs("it is a symbolic link") from None
        raise
    if not _ours(file):
        os.close(file)
        raise NotOurs("it is not a regular file of this user")
    with os.fdopen(file, encoding="utf-8") as text:
        return text.read()


def write_private(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a file of ours anew; a link in its place is not followed (``OSError``). ``sync``: it is on the disk then."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def write_atomically(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a file of ours so that it is there as it was or whole, whenever this process ends; for a loss of power see
    ``write_durably``. Its draft is ``.new-NAME`` beside it."""
    draft = path.with_name(f".new-{path.name}")
    try:
        write_private(draft, text, sync=sync)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_durably(path: Path, text: str) -> None:
    """``write_atomically``, and it is there after a loss of power too, once this has returned."""
    write_atomically(path, text, sync=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Bring to the disk what was made, renamed or removed in a directory."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    except OSError as error:
        # Some network filesystems cannot do this to a directory.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(directory)


def make_private(path: Path) -> None:
    """Make a directory for this user alone, and what is missing above it, so that a loss of power leaves it there."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in reversed(missing):
        sync_directory(place.parent)


def _holder(path: Path, lock: int) -> str:
    """Who holds a lock that another has: whom its file names, unless the system knows better."""
    match = _HOLDER.match(os.pread(lock, 100, 0).decode("ascii", "replace"))
    named = match[1] if match else "unknown"
    having = _having_open(path)
    if having and named not in having:
        dead = f", which has it from pid {named}, a pool's that has ended" if match else ""
        return f"pid {' and '.join(having)}{dead}"
    return f"pid {named}, since {match[2]}" if match and match[2] else f"pid {named}"


def _having_open(path: Path) -> list[str]:
    """The other processes that have a file open, as Linux lists those that this user may look at."""
    found, place = set(), path.resolve()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it has just ended
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    if link.readlink() == place:  # looking at the file behind a link could wait for a network
                        found.add(process.name)
    return sorted(found - {str(os.getpid())}, key=int)


def _ours(file: int) -> bool:
    facts = os.fstat(file)
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
