"""A pool's state directory: its identity, its lock, and the ledger of every container that it may have made.

A container's name is entered before its start and dropped only after its absence is confirmed, so a pool that was killed,
or whose machine lost power, leaves nothing that its next start does not find. Entries are one small file each. A file's
name carries the container's name and its state: the move from standby to bound is one rename, and an entry whose content
was lost still names its container. The identity and an entry before its start are synced to the disk. What follows (the
container's ID, the move to bound, the drop) is not: a loss of power may undo it, so that a standby of an earlier boot of
this machine counts as used (``Entry.boot``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from executor.common.locks import HeldLock
from executor.common.proc import boot_id
from executor.errors import PoolUnusable
from pool.ledger.identity import UNREADABLE, load_identity
from pool.ledger.private_files import (
    NotOurs,
    check_private,
    make_private,
    read_private,
    sync_directory,
    take_lock,
    write_atomically,
    write_durably,
)

EntryState = Literal["standby", "bound", "cold", "probe"]
_STATES: tuple[EntryState, ...] = ("standby", "bound", "cold", "probe")
_KNOWN_IDS = 1_024
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*\Z", re.ASCII)
_DRAFT = ".new-"
_CONTAINER = re.compile(r"([0-9a-f]{64})?\Z", re.ASCII)
_NONCE = re.compile(r"([0-9a-f]{32})\n\Z", re.ASCII)
_PARTS = frozenset({"lock", "ledger", "staging", "pool.json", ".new-pool.json"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One container in the ledger. ``container`` is its full ID, ``""`` until the start has answered; ``created`` is wall
    clock seconds. ``boot`` is the boot of the machine in which the entry was written, ``""`` where that is not known."""

    name: str
    state: EntryState
    container: str = ""
    user: str = ""
    created: float = 0.0
    boot: str = field(default="", compare=False)


class StateDirectory:
    """An open, locked state directory. Make one with ``StateDirectory.open``; ``close`` gives the lock back.

    ``repaired`` are the files that were damaged when it was opened, and ``foreign`` those in the ledger that no pool makes,
    which are left alone. ``boot`` is the boot whose entries are complete; ``""`` where none are.
    """

    def __init__(self, path: Path, lock: HeldLock, pool_id: str, secret: bytes) -> None:
        self.path, self.pool_id, self._secret, self._lock = path, pool_id, secret, lock
        self.repaired: list[str] = []
        self.foreign: list[str] = []
        self._ledger, self._staging, self._boot = path / "ledger", path / "staging", boot_id()
        self._ids: dict[tuple[str, str], str] = {}

    @property
    def boot(self) -> str:
        return "" if self.repaired else self._boot

    @classmethod
    def open(cls, path: Path) -> StateDirectory:
        """Create or open ``path`` and lock it. Raises ``PoolUnusable``, having touched nothing, unless it is ours alone;
        ``StateLocked`` where a pool lives in it."""
        try:
            make_private(path)
            check_private(path)
            lock = take_lock(path / "lock")
        except OSError as error:
            raise PoolUnusable(f"the state directory {path} cannot be used: {error.strerror or error}") from error
        try:
            for part in ("ledger", "staging"):
                with suppress(FileExistsError):  # a link, too, which is refused below
                    (path / part).mkdir(mode=0o700)
                check_private(path / part)
            sync_directory(path)
            names = [name for file in (path / "ledger").iterdir() if (name := _meaning(file)[0])]
            identity = load_identity(path / "pool.json", names)
            directory = cls(path, lock, identity.pool_id, identity.secret)
            directory._look_through(identity.repaired)
            return directory
        except OSError as error:
            lock.close()
            raise PoolUnusable(f"the state directory {path} cannot be used: {error.strerror or error}") from error
        except BaseException:
            lock.close()
            raise

    def close(self) -> None:
        """Give the lock back; twice is harmless."""
        self._lock.close()

    def session_id(self, agent: str, session: str) -> str:
        """The only form in which a session's key leaves the pool: an HMAC under the pool's secret, 16 hex digits."""
        known = self._ids.get((agent, session))
        if known is None:
            parts = [part.encode("utf-8", "surrogatepass") for part in (agent, session)]
            message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
            known = hmac.new(self._secret, message, hashlib.sha256).hexdigest()[:16]
            if len(self._ids) >= _KNOWN_IDS:
                self._ids.clear()
            self._ids[agent, session] = known
        return known

    # --- the ledger ---------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Every container that may exist. An entry whose content is damaged is one whose ID is unknown, made when its file
        was written. Raises ``PoolUnusable`` where a link or another user's file has an entry's place."""
        return [entry for entry, _ in self._read()]

    def enter(self, entry: Entry) -> None:
        """Write an entry; once this has returned it is there whatever ends this process or this machine. Waits for the
        disk."""
        with self._writing():
            write_durably(self._ledger / f"{entry.name}.{entry.state}", self._content(entry))

    def note(self, entry: Entry) -> None:
        """Replace an entry with more facts; atomic. A loss of power may take the facts, but not the entry."""
        with self._writing():
            write_atomically(self._ledger / f"{entry.name}.{entry.state}", self._content(entry))

    def _content(self, entry: Entry) -> str:
        facts = {"name": entry.name, "container": entry.container, "user": entry.user, "created": entry.created}
        return json.dumps({**facts, "boot": self._boot})

    def _read(self) -> Iterator[tuple[Entry, bool]]:
        """Every entry, and whether its content was damaged."""
        with self._writing():
            files = sorted(self._ledger.iterdir())
        for file in files:
            name, state = _meaning(file)
            if state is None:
                continue
            plain = Entry(name, state)
            try:
                with self._writing():
                    entry = _told(plain, file)
                yield (entry or replace(plain, created=_written(file)), entry is None)
            except NotOurs as error:
                message = (
                    f"the ledger entry {file} is damaged ({error}); somebody else made it. Look at it, and remove it"
                )
                raise PoolUnusable(message) from error

    def _look_through(self, repaired: bool) -> None:
        """See what the directory is like as it is opened, and clear drafts away: writes that were cut off, whose entries, if
        there were any, stand beside them."""
        self.repaired = ["pool.json"] * repaired
        self.repaired += [f"ledger/{entry.name}.{entry.state}" for entry, damaged in self._read() if damaged]
        with self._writing():
            for file in sorted(self._ledger.iterdir()):
                if file.name.startswith(_DRAFT):
                    file.unlink()
                elif _meaning(file)[1] is None:
                    self.foreign.append(f"ledger/{file.name}")

    def bind(self, name: str) -> None:
        """Move an entry from standby to bound; atomic."""
        with self._writing():
            (self._ledger / f"{name}.standby").rename(self._ledger / f"{name}.bound")

    def has_copies(self, name: str) -> bool:
        """Whether a container's staging directory holds copies of tool directories, so that its removal may take a while."""
        try:
            with os.scandir(self._staging / name) as entries:
                return any(entry.is_dir(follow_symlinks=False) for entry in entries)
        except OSError:
            return False

    def clear(self, name: str) -> None:
        """Remove a container's staging directory. Only after the container is known to be gone."""
        shutil.rmtree(self._staging / name, ignore_errors=True)

    def drop(self, name: str) -> None:
        """Remove an entry, whatever its state, and what is left of its staging directory. Only after the container is known
        to be gone."""
        self.clear(name)
        with self._writing():
            for state in _STATES:
                (self._ledger / f"{name}.{state}").unlink(missing_ok=True)

    def stage(self, name: str) -> tuple[Path, str]:
        """Make the private directory that a sandbox mounts at ``/tool``; its path and the nonce that stands in it."""
        place, nonce = self._staging / name, secrets.token_hex(16)
        with self._writing():
            place.mkdir(mode=0o755)
            place.chmod(0o755)
            file = place / "nonce"
            file.write_text(nonce + "\n", "ascii")
            file.chmod(0o644)
        return place, nonce

    def staged(self, name: str) -> tuple[Path, str]:
        """What ``stage`` made for a sandbox of an earlier start: its path and its nonce.

        Raises ``PoolUnusable`` where it is not as ``stage`` left it: then somebody has had that sandbox, or it is not ours.
        """
        place, nonce = self._staging / name, None
        try:
            with self._writing():
                # Tool directories are put beside the nonce, so that it stands alone before a sandbox's first use only.
                if not place.is_symlink() and os.listdir(place) == ["nonce"]:  # noqa: PTH208 - names, not paths
                    nonce = _NONCE.match(read_private(place / "nonce"))
        except ValueError:
            nonce = None
        if nonce is None:
            raise PoolUnusable(f"{place} is not as a sandbox that nobody has used leaves it")
        return place, nonce[1]

    # --- what is left of a dead pool ----------------------------------------------------------------------------------

    def strays(self) -> list[Path]:
        """What stands in the staging place of containers that no entry names: a removal of it was cut off, or failed."""
        named = {entry.name for entry in self.entries()}
        with self._writing():
            return sorted(place for place in self._staging.iterdir() if place.name not in named)

    def remove_stray(self, place: Path) -> None:
        """Remove one of ``strays``; links are removed and not followed."""
        with self._writing():
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

    def destroy(self) -> None:
        """Remove the whole directory, its lock last held by us. Raises ``PoolUnusable`` while it names or holds anything
        that would be lost with it."""
        with self._writing():
            unknown = sorted(file.name for file in self.path.iterdir() if file.name not in _PARTS) + self.foreign
        if unknown:
            raise PoolUnusable(
                f"{self.path} holds {unknown[0]!r}, which no pool made; look at it, and remove it by hand"
            )
        if self.entries():
            raise PoolUnusable(f"the ledger of {self.path} still names containers", retry_after=5.0)
        with self._writing():
            shutil.rmtree(self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"the state directory {self.path} cannot be used: {error.strerror or error}"
            raise PoolUnusable(message, retry_after=5.0) from error


def _meaning(file: Path) -> tuple[str, EntryState | None]:
    """Return the container's name and the state in an entry's file name; no state where no pool makes such a file."""
    name, _, state = file.name.rpartition(".")
    # The name becomes a path below `staging`, and a word to an engine.
    if _NAME.match(name):
        for known in _STATES:
            if state == known:
                return name, known
    return "", None


def _told(plain: Entry, file: Path) -> Entry | None:
    """What the content of an entry's file says; ``None`` where it is damaged. Raises ``NotOurs`` and ``OSError``."""
    try:
        content = json.loads(read_private(file))
        container, created = content["container"], float(content["created"])
        if content["name"] != plain.name or not _CONTAINER.match(container) or not math.isfinite(created):
            return None
        user, boot = str(content["user"]), str(content.get("boot", ""))
        return replace(plain, container=container, user=user, created=created, boot=boot)
    except NotOurs:
        raise
    except OSError as error:
        if error.errno in UNREADABLE:
            return None
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _written(file: Path) -> float:
    """When a file was written last, wall clock seconds."""
    with suppress(OSError):
        return file.lstat().st_mtime
    return 0.0
