"""Where a tool directory is, and how it is opened: inside the allowed directories, and never through a symbolic link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from executor.errors import InvalidCall, StagingFailed

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe waits for its other end, and a file under a lease for its holder.
_READ_FILE = _READ | os.O_NONBLOCK
_READ_FOLDER = _READ | os.O_DIRECTORY
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _READ

_MOVED = frozenset(
    getattr(errno, name)
    for name in ("ENOENT", "ENOTDIR", "EISDIR", "ELOOP", "EMLINK", "EINVAL", "ENXIO", "EAGAIN", "ESTALE", "EOPNOTSUPP")
    if hasattr(errno, name)
)
"""What an operation meets where a path has become something else since it was looked at (or is under a lease)."""


class SourceChanged(Exception):
    """Something changed while it was read; ``path`` says what. Whoever reads it tries again."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


@dataclass(frozen=True, slots=True)
class StageLimits:
    """What one tool directory may hold: bytes of all its files, files, directories and links together, and levels below
    it. ``max_versions`` is how many copies a staging place keeps."""

    max_bytes: int = 16 * 1024 * 1024
    max_files: int = 1_000
    max_depth: int = 32
    max_versions: int = 64


def skipped(name: str) -> bool:
    """Whether an entry is never staged: what Python compiles (it is made anew on every change) and git's own records."""
    return name == "__pycache__" or name == ".git" or name.endswith(".pyc")


def resolve_tool_dir(path: Path, allowed: Sequence[Path]) -> Path:
    """The real path of a tool's directory (or file), every link followed, inside one of the ``allowed`` directories.

    The allowed ones are resolved too, so they may be links themselves. Raises ``InvalidCall`` naming the path and the
    setting. What the path means can change afterwards: ``Staging`` opens it without following links.
    """
    return Path(locate(path, allowed)[0])


def locate(path: Path, allowed: Sequence[Path]) -> tuple[str, str]:
    """The same, with the outermost allowed directory that holds it: from there on no link may be followed."""
    try:
        real = os.path.realpath(path, strict=True)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InvalidCall(
            f"the tool directory {shown(path)} cannot be found: {why}; it must exist inside one of sandbox.allowed_tool_dirs"
        ) from error
    roots = []
    for one in allowed:
        with suppress(OSError, ValueError):  # a directory that is not there holds nothing
            root = os.path.realpath(one)
            if _inside(os.path.normcase(real), os.path.normcase(root)):
                roots.append(root)
    if not roots:
        leads = "is" if real == os.fspath(path) else f"leads to {shown(real)}, which is"
        those = ", ".join(map(shown, allowed)) or "it is empty"
        raise InvalidCall(
            f"the tool directory {shown(path)} {leads} outside of sandbox.allowed_tool_dirs ({those:.500}); "
            "move it there, or allow its directory"
        )
    return real, min(roots, key=len)


def _inside(real: str, root: str) -> bool:
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)


def shown(path: str | os.PathLike[str]) -> str:
    """A path as messages show it: quoted, on one line, whatever bytes are in it."""
    return f"{os.fspath(path)!r:.300}"


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what the system says of a source into ``SourceChanged``, ``InvalidCall`` or ``StagingFailed``."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in _MOVED:
            raise SourceChanged(path) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise InvalidCall(f"{shown(path)} cannot be read: {why}; let the gateway's user read it") from error
        if error.errno == errno.ENAMETOOLONG:
            raise InvalidCall(f"{shown(path)} cannot be read: {why}; shorten its path") from error
        raise StagingFailed(
            f"{shown(path)} cannot be read: {why}; look after the host's disk", retry_after=5.0
        ) from error


@contextmanager
def writing(place: str | Path) -> Iterator[None]:
    """Turn what the system says of a staging place into ``StagingFailed``."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise StagingFailed(
            f"the staging place {shown(place)} cannot be written: {why}; look after the disk of pool.state_dir",
            retry_after=5.0,
        ) from error


class Folder:
    """An open directory. What is in it is reached through it, so a link put into its path's way leads nowhere else.

    Raises ``OSError``.
    """

    def __init__(self, path: str, *, name: str = "", within: Folder | None = None) -> None:
        self.path = path
        self._fd: int = os.open(name or path, _READ_FOLDER, dir_fd=within._fd if within is not None else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def folder(self, name: str) -> Folder:
        """Open a directory in it."""
        return Folder(f"{self.path}/{name}", name=name, within=self)

    def names(self, most: int) -> list[str]:
        """The names in it that are staged, in no order; it stops looking after ``most`` and one more."""
        found = []
        with os.scandir(self._fd) as entries:
            for entry in entries:
                if not skipped(entry.name):
                    found.append(entry.name)
                    if len(found) > most:
                        break
        return found

    def stat(self, name: str = "") -> os.stat_result:
        """What it is, or what one thing in it is; a link is not followed."""
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False) if name else os.fstat(self._fd)

    def readlink(self, name: str) -> str:
        """What a link in it says."""
        return os.readlink(name, dir_fd=self._fd)

    def open(self, name: str) -> int:
        """Open a file in it to be read, without waiting for anybody."""
        return os.open(name, _READ_FILE, dir_fd=self._fd)

    def create(self, name: str, mode: int) -> int:
        """Make a file in it, to be written."""
        fd = os.open(name, _NEW_FILE, 0o600, dir_fd=self._fd)
        _set_mode(fd, mode)
        return fd

    def mkdir(self, name: str) -> Folder:
        """Make a directory in it, mode 0755."""
        os.mkdir(name, 0o700, dir_fd=self._fd)
        below = self.folder(name)
        _set_mode(below._fd, 0o755)
        return below

    def symlink(self, target: str, name: str) -> None:
        """Make a symbolic link in it."""
        os.symlink(target, name, dir_fd=self._fd)


def _set_mode(fd: int, mode: int) -> None:
    # Not by the mode at its creation: the umask would change it, and a set-group-id directory above.
    os.fchmod(fd, mode)


def open_source(real: str, root: str) -> Folder:
    """Open the directory that ``locate`` found, step by step from the allowed one. Raises as ``reading`` does."""
    with reading(real):
        mode = os.lstat(real).st_mode
    if not stat.S_ISDIR(mode) and not stat.S_ISLNK(mode):
        raise InvalidCall(f"{shown(real)} is not a directory; stage the directory that it is in")
    with reading(root):
        folder = Folder(root)
    for name in Path(real).relative_to(root).parts:
        with folder, reading(f"{folder.path}/{name}"):
            below = folder.folder(name)
        folder = below
    return folder
