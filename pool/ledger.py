"""A pool's state directory: its identity, its lock, and the ledger of every container that it may have made.

A container's name is entered before its start and dropped only after its absence is confirmed, so a pool that was killed
leaves nothing that its next start does not find. Entries are one small file each; a file's name carries its state, so the
move from standby to bound is one rename. Nothing is synced to the platter: a machine that loses power has also lost the
containers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from executor.result import PoolUnusable
from pool.private_files import check_private, read_private, take_lock, write_private

EntryState = Literal["standby", "bound", "cold", "probe"]
_STATES: tuple[EntryState, ...] = ("standby", "bound", "cold", "probe")
_IDENTITY_VERSION = 1
_KNOWN_IDS = 1_024
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*\Z", re.ASCII)
_CONTAINER = re.compile(r"([0-9a-f]{64})?\Z", re.ASCII)
_NONCE = re.compile(r"([0-9a-f]{32})\n\Z", re.ASCII)
_PARTS = frozenset({"lock", "ledger", "staging", "pool.json", ".new-pool.json"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One container in the ledger. ``container`` is its full ID, ``""`` until the start has answered; ``created`` is wall
    clock seconds."""

    name: str
    state: EntryState
    container: str = ""
    user: str = ""
    created: float = 0.0


class StateDirectory:
    """An open, locked state directory. Make one with ``StateDirectory.open``; ``close`` gives the lock back."""

    def __init__(self, path: Path, lock: int, pool_id: str, secret: bytes) -> None:
        self.path, self.pool_id, self._secret, self._lock = path, pool_id, secret, lock
        self._ledger, self._staging = path / "ledger", path / "staging"
        self._ids: dict[tuple[str, str], str] = {}

    @classmethod
    def open(cls, path: Path) -> StateDirectory:
        """Create or open ``path`` and lock it. Raises ``PoolUnusable``, having touched nothing, unless it is ours alone;
        ``StateLocked`` where a pool lives in it."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(path)
            lock = take_lock(path / "lock")
        except OSError as error:
            raise PoolUnusable(f"the state directory {path} cannot be used: {error.strerror or error}") from error
        try:
            for part in ("ledger", "staging"):
                with suppress(FileExistsError):  # a link, too, which is refused below
                    (path / part).mkdir(mode=0o700)
                check_private(path / part)
            pool_id, secret = _identity(path / "pool.json")
            directory = cls(path, lock, pool_id, secret)
            directory.entries()
            return directory
        except OSError as error:
            os.close(lock)
            raise PoolUnusable(f"the state directory {path} cannot be used: {error.strerror or error}") from error
        except BaseException:
            os.close(lock)
            raise

    def close(self) -> None:
        """Give the lock back; twice is harmless."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

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
        """Every container that may exist. Raises ``PoolUnusable`` on an entry that cannot be read."""
        found: list[Entry] = []
        with self._writing():
            files = sorted(self._ledger.iterdir())
        for file in files:
            if file.name.startswith(".new-"):
                # A write that was cut off: its entry, if there was one, stands beside it.
                with self._writing():
                    file.unlink()
                continue
            name, _, state = file.name.rpartition(".")
            try:
                with self._writing():
                    text = read_private(file)
                content = json.loads(text)
                if state not in _STATES or content["name"] != name:
                    raise ValueError("its name and its content differ")
                # The name becomes a path below `staging`, and both become words to an engine.
                if not _NAME.match(name) or not _CONTAINER.match(content["container"]):
                    raise ValueError("its name or its ID is no container's")
                found.append(Entry(name, state, content["container"], str(content["user"]), float(content["created"])))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                message = f"the ledger entry {file} is damaged ({error}); look at it, and remove it if it names nothing"
                raise PoolUnusable(message) from error
        return found

    def enter(self, entry: Entry) -> None:
        """Write an entry, or replace it with more facts; atomic."""
        content = {"name": entry.name, "container": entry.container, "user": entry.user, "created": entry.created}
        target = self._ledger / f"{entry.name}.{entry.state}"
        draft = self._ledger / f".new-{target.name}"
        with self._writing():
            write_private(draft, json.dumps(content))
            draft.replace(target)

    def bind(self, name: str) -> None:
        """Move an entry from standby to bound; atomic."""
        with self._writing():
            (self._ledger / f"{name}.standby").rename(self._ledger / f"{name}.bound")

    def drop(self, name: str) -> None:
        """Remove an entry, whatever its state, and its staging directory. Only after the container is known to be gone."""
        shutil.rmtree(self._staging / name, ignore_errors=True)
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
            unknown = sorted(file.name for file in self.path.iterdir() if file.name not in _PARTS)
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


def _identity(path: Path) -> tuple[str, bytes]:
    try:
        content = json.loads(read_private(path))
        if content["version"] != _IDENTITY_VERSION:
            raise ValueError(f"version {content['version']} is not {_IDENTITY_VERSION}")
        pool_id, secret = str(content["pool_id"]), bytes.fromhex(content["secret"])
        if len(pool_id) != 12 or len(secret) != 32 or not pool_id.isalnum():
            raise ValueError("its fields have unknown forms")
        return pool_id, secret
    except FileNotFoundError:
        if any((path.parent / "ledger").iterdir()):
            message = f"{path} is missing although the ledger beside it names containers; restore it, or remove both"
            raise PoolUnusable(message) from None
        pool_id, secret = secrets.token_hex(6), secrets.token_bytes(32)
        draft = path.with_name(".new-pool.json")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"version": _IDENTITY_VERSION, "pool_id": pool_id, "secret": secret.hex()}, file)
        draft.rename(path)
        return pool_id, secret
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PoolUnusable(f"{path} is damaged ({error}); restore it, or remove the state directory") from error
