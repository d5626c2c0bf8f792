"""Read a tool directory once: its digest, what it looked like, and on the way a copy of it."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Container, Iterator, Mapping

from executor.errors import InvalidCall
from executor.staging.fingerprints import Look, facts
from executor.staging.source import Folder, SourceChanged, StageLimits, reading, shown, writing

DIGEST_LENGTH = 32
_CHUNK = 1 << 18
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

MAX_LINKS = 40
"""Links that Linux follows in one path (MAXSYMLINKS)."""
_MAX_STEPS = 1_000
"""Names that one link may lead through; a thousand links of thousands of names each would take minutes."""


def read_tree(source: Folder, limits: StageLimits, out: Folder | None = None) -> tuple[str, Look]:
    """The digest of an open directory and what it looked like while it was read; a copy goes into ``out``, if given.

    The digest is 32 hex digits over every path, kind, execute bit, content and link, and over nothing else: owners and
    times are not in it, and the copy does not keep them. Raises ``InvalidCall`` for what must not be staged,
    ``SourceChanged`` where it changed meanwhile, ``StagingFailed`` for the disk's own problems.
    """
    reader = _Reader(source.path, limits)
    reader.folder(source, "", 0, out)
    reader.check_links()
    return reader.sha.hexdigest()[:DIGEST_LENGTH], reader.look


class _Reader:
    def __init__(self, top: str, limits: StageLimits) -> None:
        self.sha = hashlib.sha256()
        self.look: Look = {}
        self._top, self._limits = top, limits
        self._folders, self._files, self._links = {""}, set[str](), dict[str, str]()
        self._bytes = self._count = 0

    def folder(self, here: Folder, path: str, depth: int, out: Folder | None) -> None:
        """Read one directory and all below it; ``path`` is from the tool directory."""
        limits = self._limits
        if depth > limits.max_depth:
            raise InvalidCall(
                f"{shown(here.path)} lies more than {limits.max_depth} directories deep in its tool directory; make it flatter"
            )
        with reading(here.path):
            # Before its names are read: what is added later then shows in the look that follows.
            self.look[path] = facts(here.stat())
            names = here.names(limits.max_files - self._count)
        self._count += len(names)
        if self._count > limits.max_files:
            raise InvalidCall(
                f"the tool directory {shown(self._top)} holds more than {limits.max_files} files and directories "
                "(tools.max_files); remove what the tool does not need, or raise the limit"
            )
        for name in sorted(names, key=os.fsencode):
            self._entry(here, name, f"{path}/{name}" if path else name, depth, out)

    def _entry(self, here: Folder, name: str, path: str, depth: int, out: Folder | None) -> None:
        full = f"{here.path}/{name}"
        with reading(full):
            about = here.stat(name)
        if stat.S_ISDIR(about.st_mode):
            self._folders.add(path)
            self._record(b"d", path)
            with reading(full):
                below = here.folder(name)
            with below:
                if out is None:
                    self.folder(below, path, depth + 1, None)
                else:
                    with writing(out.path):
                        copy = out.mkdir(name)
                    with copy:
                        self.folder(below, path, depth + 1, copy)
        elif stat.S_ISREG(about.st_mode):
            self._files.add(path)
            self._file(here, name, path, out)
        elif stat.S_ISLNK(about.st_mode):
            self._link(here, name, path, about, out)
        else:
            kind = next((kind for test, kind in _KINDS if test(about.st_mode)), "of an unknown kind")
            raise InvalidCall(
                f"{shown(full)} is {kind}; a tool directory may hold files, directories and relative links"
            )

    def _file(self, here: Folder, name: str, path: str, out: Folder | None) -> None:
        full = f"{here.path}/{name}"
        with reading(full):
            fd = here.open(name)
        try:
            with reading(full):
                about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise SourceChanged(full)
            self.look[path] = facts(about)
            self._bytes += about.st_size
            if self._bytes > self._limits.max_bytes:
                raise InvalidCall(
                    f"the tool directory {shown(self._top)} holds more than {self._limits.max_bytes} bytes "
                    f"(tools.max_bytes; {shown(path)} has {about.st_size}); keep data elsewhere, or raise the limit"
                )
            runs = about.st_mode & 0o111 != 0
            self._record(b"x" if runs else b"f", path, about.st_size)
            data = _content(fd, about.st_size, full)
            if out is None:
                for chunk in data:
                    self.sha.update(chunk)
            else:
                self._copy(data, out, name, 0o755 if runs else 0o644)
        finally:
            os.close(fd)

    def _copy(self, data: Iterator[bytes], out: Folder, name: str, mode: int) -> None:
        with writing(out.path):
            sink = out.create(name, mode)
        try:
            for chunk in data:
                self.sha.update(chunk)
                with writing(out.path):
                    rest = memoryview(chunk)
                    while rest:
                        rest = rest[os.write(sink, rest) :]
        finally:
            os.close(sink)

    def _link(self, here: Folder, name: str, path: str, about: os.stat_result, out: Folder | None) -> None:
        with reading(f"{here.path}/{name}"):
            target = here.readlink(name)
        self.look[path] = facts(about)
        self._links[path] = target
        self._record(b"l", path, len(os.fsencode(target)))
        self.sha.update(os.fsencode(target))
        if out is not None:
            with writing(out.path):
                out.symlink(target, name)

    def _record(self, kind: bytes, path: str, size: int = 0) -> None:
        # Lengths first: no two trees may give the same bytes.
        name = os.fsencode(path)
        self.sha.update(struct.pack(">cQQ", kind, len(name), size) + name)

    def check_links(self) -> None:
        """``InvalidCall`` for a link that leads anywhere but to something that was read. Afterwards: all names are known."""
        for path in self._links:
            if why := link_fault(path, self._folders, self._files, self._links):
                raise InvalidCall(f"the link {shown(f'{self._top}/{path}')} {why}")


def _content(fd: int, size: int, full: str) -> Iterator[bytes]:
    left = size
    while left:
        with reading(full):
            data = os.read(fd, min(left, _CHUNK))
        if not data:
            raise SourceChanged(full)
        left -= len(data)
        yield data
    with reading(full):
        if os.read(fd, 1):
            raise SourceChanged(full)


def link_fault(path: str, folders: Container[str], files: Container[str], links: Mapping[str, str]) -> str:
    """Return why a link must not be staged, ``""`` if it leads to something that is staged with it. Pure.

    All paths are relative to the tool directory, which is ``""`` itself; ``links`` maps each link to what it says. A path
    is followed name by name as the kernel does: ``..`` after a link goes up from where the link led.
    """
    here = path.split("/")[:-1]
    names = [links[path]]
    followed = 1
    for _ in range(_MAX_STEPS):
        if "/" in names[-1]:
            if names[-1].startswith("/"):
                return f"is absolute ({links[path]!r:.100}); make it relative"
            names[-1:] = names[-1].split("/")[::-1]
        name = names.pop()
        below = "/".join((*here, name))
        if name == "..":
            if not here:
                return f"leads out of the tool directory ({links[path]!r:.100})"
            here.pop()
        elif below in links and name not in ("", "."):
            followed += 1
            if followed > MAX_LINKS:
                return "leads in a circle, or through too many other links"
            names.append(links[below])
        elif below in files and not names:
            return ""
        elif name not in ("", "."):
            if below not in folders:
                return f"leads to nothing that is staged with it ({links[path]!r:.100})"
            here.append(name)
        if not names:
            return ""
    return "leads in a circle, or through too many other names"
