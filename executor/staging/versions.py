"""Tool directories of a session, copied to where its sandbox sees them: ``<place>/<digest>`` is ``/tool/<digest>`` inside.

A warm container cannot gain mounts, so each sandbox is born with a private directory of the host mounted read-only at
``/tool``, and what its session's calls need is copied into it: content-addressed, built aside and renamed in. What is
skipped is named by ``staging_source.skipped``; a link must be relative and stay inside (``staging_links``). A tool that
was edited between two calls has another digest in the second. Copies, never hard links: the inside can lock what it sees.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import string
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from executor.errors import InvalidCall, StagingFailed
from executor.staging.copy import DIGEST_LENGTH, read_tree
from executor.staging.fingerprints import Fingerprints, Look, differing, look
from executor.staging.source import (
    Folder,
    SourceChanged,
    StageLimits,
    locate,
    open_source,
    reading,
    resolve_tool_dir,
    shown,
    writing,
)

__all__ = ["Fingerprints", "StageLimits", "Staging", "StagingFailed", "resolve_tool_dir"]

_NEW, _OLD = ".new-", ".old-"
_PAUSES = (0.01, 0.02, 0.04, 0.08)
"""Seconds before a source that changed while it was read is read again."""


class Staging:
    """One sandbox's staging place; there is one ``Staging`` for a place. ``fingerprints`` is shared by those of a pool.

    All of it but ``forget`` is for worker threads, any number at once: it reads and writes files. Only a copy waits for
    another, and only for one of the same source into the same place. No error has started anything.
    """

    def __init__(
        self, place: Path, limits: StageLimits | None = None, fingerprints: Fingerprints | None = None
    ) -> None:
        self._place, self._limits = place, limits or StageLimits()
        self._fingerprints = fingerprints or Fingerprints()
        # One for each source: a copy that hangs stops no other.
        self._copying: dict[str, threading.Lock] = {}
        self._drafts: set[str] = set()
        # What follows is the bookkeeping, and changes together with the names in the place, under one lock that is held
        # for moments. ``_kept`` is in order of use.
        self._lock = threading.Lock()
        self._kept: dict[str, None] = {}
        self._current: dict[str, str] = {}
        self._former: set[str] = set()
        self._held = Counter[str]()

    def __repr__(self) -> str:
        return f"<Staging {self._place} versions={len(self._kept)} held={sum(self._held.values())}>"

    def stage(self, source: Path, allowed: Sequence[Path], *, hold: bool = False) -> str:
        """Have the directory ``source`` in place as it is now; its digest. It must lie inside one of ``allowed``.

        With ``hold``, the version is held as by ``hold``, and no other call's staging can remove it first. Raises
        ``InvalidCall`` for what is wrong about the source, ``StagingFailed`` for what is wrong about the disk.
        """
        for pause in (0.0, *_PAUSES):
            if pause:
                time.sleep(pause)
            try:
                return self._stage(source, allowed, hold)
            except SourceChanged as changed:
                last: SourceChanged | InvalidCall = changed
            except InvalidCall as refused:
                # A directory that is being replaced by another is not there between the two renames.
                if not isinstance(refused.__cause__, FileNotFoundError):
                    raise
                last = refused
        if isinstance(last, InvalidCall):
            raise last
        raise StagingFailed(
            f"{shown(last.path)} kept changing while it was copied; put a finished directory in place by renaming it",
            retry_after=1.0,
        ) from last

    @contextmanager
    def staged(self, source: Path, allowed: Sequence[Path]) -> Iterator[str]:
        """``stage`` for a block: its version stays in place until the block ends."""
        digest = self.stage(source, allowed, hold=True)
        try:
            yield digest
        finally:
            self.release(digest)

    def hold(self, digest: str) -> None:
        """Keep a version in place until ``release``, which is due once for each ``hold``.

        ``StagingFailed`` where it has been removed since it was staged: stage it again, with ``hold=True``.
        """
        with self._lock:
            if not self._in_place(digest):
                raise StagingFailed(
                    f"version {digest[:DIGEST_LENGTH]!r} of a tool is no longer in place; stage it again"
                )
            self._held[digest] += 1

    def release(self, digest: str) -> None:
        """Give back one ``hold``; the last one removes a version that has been replaced. ``ValueError`` without a hold."""
        remove_all(self.forget(digest))

    def forget(self, digest: str) -> Sequence[Path]:
        """As ``release``, without its removals: it takes moments, and returns what is now to be removed."""
        with self._lock:
            if self._held[digest] < 1:
                raise ValueError(f"version {digest[:DIGEST_LENGTH]!r} is not held")
            self._held[digest] -= 1
            if not self._held[digest]:
                del self._held[digest]
            return self._set_aside()

    # --- reading and copying ------------------------------------------------------------------------------------------

    def _stage(self, source: Path, allowed: Sequence[Path], hold: bool) -> str:
        real, root = locate(source, allowed)
        with suppress(OSError):  # reading it raises a better error
            known = self._fingerprints.digest(real, self._look(real))
            if known and self._take(real, known, hold):
                return known
        with self._lock:
            copying = self._copying.setdefault(real, threading.Lock())
        try:
            with copying:
                return self._refresh(real, root, hold)
        finally:
            with self._lock:
                # Whoever has just taken it out and not locked it yet copies beside the next one, which harms neither.
                if not copying.locked():
                    self._copying.pop(real, None)

    def _refresh(self, real: str, root: str, hold: bool) -> str:
        self._sweep()
        if self._in_place(self._current.get(real, "")):
            # Most likely the content is the same: written anew, touched, or too young for its looks to be trusted.
            digest = self._read(real, root, None)
            if self._take(real, digest, hold):
                return digest
        draft = self._place / f"{_NEW}{secrets.token_hex(8)}"
        with self._lock:
            self._drafts.add(draft.name)
        try:
            with writing(self._place):
                draft.mkdir(0o700)
                out = Folder(os.fspath(draft))
            with out:
                digest = self._read(real, root, out)
            self._take(real, digest, hold, draft)
        finally:
            # By now it has its lasting name, or is of no use: the same version was in place, or something went wrong.
            shutil.rmtree(draft, ignore_errors=True)
            with self._lock:
                self._drafts.discard(draft.name)
        return digest

    def _read(self, real: str, root: str, out: Folder | None) -> str:
        began = self._fingerprints.now()
        with open_source(real, root) as source:
            digest, found = read_tree(source, self._limits, out)
        # All that was read still looks as it did just before it was read, so it was all there at this one moment.
        with reading(real):
            again = self._look(real)
        if again != found:
            raise SourceChanged(f"{real}/{differing(again, found)}")
        self._fingerprints.record(real, found, digest, began=began)
        return digest

    def _look(self, real: str) -> Look:
        return look(real, self._limits.max_files + 1)

    def _sweep(self) -> None:
        """Remove what was cut off, and learn of versions from an earlier life."""
        with self._lock:  # whose drafts are named before they are made
            with writing(self._place):
                found = list(self._place.iterdir())
            cut_off = [path for path in found if path.name.startswith((_NEW, _OLD)) and path.name not in self._drafts]
            for name in (path.name for path in found):
                if len(name) == DIGEST_LENGTH and set(name) <= set(string.hexdigits):
                    self._kept.setdefault(name)
        remove_all(cut_off)

    # --- bookkeeping --------------------------------------------------------------------------------------------------

    def _take(self, real: str, digest: str, hold: bool, draft: Path | None = None) -> bool:
        """Make a version the current one of its source, from ``draft`` where it is not in place; false without either."""
        with self._lock:
            if not self._in_place(digest):
                if not draft:
                    return False
                with writing(self._place):
                    draft.chmod(0o755)
                    draft.rename(self._place / digest)
            before = self._current.get(real, digest)
            self._current[real] = digest
            if before != digest and before not in self._current.values():
                self._former.add(before)
            self._former.discard(digest)
            self._kept.pop(digest, None)
            self._kept[digest] = None
            if hold:
                self._held[digest] += 1
            aside = self._set_aside(but=digest)
        remove_all(aside)
        return True

    def _in_place(self, digest: str) -> bool:
        # Whatever has the name of a digest was made here, whole: it got its name at its end.
        if not digest:
            return False
        try:
            return stat.S_ISDIR(os.lstat(f"{self._place}/{digest}").st_mode)
        except OSError:
            return False

    def _set_aside(self, but: str = "") -> list[Path]:
        """Rename what nobody holds and either no source has any more or is beyond the limit; the paths to remove."""
        excess = len(self._kept) - self._limits.max_versions
        if excess <= 0 and not self._former:
            return []
        free = [digest for digest in self._kept if digest != but and not self._held[digest]]
        gone = [digest for digest in free if digest in self._former]
        gone += [digest for digest in free if digest not in self._former][: max(0, excess - len(gone))]
        aside = []
        for digest in gone:
            del self._kept[digest]
            self._former.discard(digest)
            path = self._place / f"{_OLD}{secrets.token_hex(8)}"
            with suppress(OSError):  # with the place itself, when its sandbox is being destroyed
                aside.append((self._place / digest).rename(path))
        self._current = {real: digest for real, digest in self._current.items() if digest not in gone}
        return aside


def remove_all(paths: Sequence[Path]) -> None:
    """Remove directories, as far as that can be done now."""
    # Inside, nobody can make them anything else: the place is mounted read-only there. What is left is swept later.
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
