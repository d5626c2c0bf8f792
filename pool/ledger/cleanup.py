"""Removes what pools have left on an engine: one ledger entry's container, and all that dead pools' directories name.

Every removal, of a living pool's sweep too, goes through ``look`` and ``remove``, so that none is less careful.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from executor.common.log import get_logger
from executor.common.threads import in_thread
from executor.engine.protocol import ContainerGone, Engine
from executor.errors import EmberpoolError, EngineFailed, PoolUnusable
from executor.sandbox.profile import LABEL_POOL
from pool.ledger.ledger import Entry, StateDirectory
from pool.ledger.private_files import StateLocked

log = get_logger("emberpool.pool")

LATE_START = 120.0
"""Seconds for which a start of unknown result stays in the ledger although its container is not there: a daemon that
hung may carry it out after all."""

JUST_MADE = 60.0
"""Seconds for which a one-shot directory without an identity is left to the process that creates it."""

_ONE_SHOT = re.compile(r"one-shot-[0-9a-f]{12}\Z", re.ASCII)
"""As `emberpool call` names its directories; a pool that somebody calls one-shot-something is none."""

# --- one entry --------------------------------------------------------------------------------------------------------

Found = Literal["ours", "gone", "foreign", "late"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """A ledger entry and what the engine has of it: our container (``container`` is its full ID, ``facts`` the engine's
    record), nothing, another's container under this name, or nothing although a start may still arrive (``late``). ``seen``
    is when it was looked for, wall clock seconds."""

    entry: Entry
    found: Found
    container: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    seen: float = 0.0


async def look(engine: Engine, pool_id: str, entry: Entry, now: float) -> Leftover:
    """Whose container stands under an entry's name; ``now`` is wall clock seconds. Raises the engine's error.

    An entry that knows its container's full ID means only that; one that does not (its start was cut off) means the
    container of its name if that carries the pool's label.
    """
    try:
        facts = await engine.inspect(entry.name)
    except ContainerGone:
        late = not entry.container and now - entry.created < LATE_START
        return Leftover(entry, "late" if late else "gone", seen=now)
    try:
        container, labels = str(facts["Id"]), dict(facts["Config"]["Labels"] or {})
    except (LookupError, TypeError, ValueError) as error:
        raise EngineFailed(f"the engine's record of {entry.name} has an unknown form") from error
    ours = container == entry.container if entry.container else labels.get(LABEL_POOL) == pool_id
    return Leftover(entry, "ours", container, facts) if ours else Leftover(entry, "foreign")


async def remove(engine: Engine, state: StateDirectory, left: Leftover) -> None:
    """Remove the container if it is ours, and its entry with the staging directory once it is gone.

    Raises the engine's error, ``ContainerGone`` for a start that may still arrive, or ``PoolUnusable``: then the entry
    stands, for the next time.
    """
    name = left.entry.name
    if left.found == "late":
        if left.entry.created > left.seen:
            # The clock was set back. From now on it ages by the new time, or it would stay until the old one comes again.
            state.note(replace(left.entry, created=left.seen))
        raise ContainerGone(
            f"the start of {name} was given up and may still be carried out; its entry stays for a while"
        )
    if left.found == "ours":
        await engine.remove(left.container)
    await drop(state, name)
    if left.found == "foreign":
        log.warning("pool.foreign_container", sandbox=name, pool=state.pool_id)


async def drop(state: StateDirectory, name: str) -> None:
    """Drop an entry whose container is gone, with its staging directory: in a thread, where many files may be in it."""
    if state.has_copies(name):
        await in_thread(state.clear, name)
    state.drop(name)


# --- dead pools -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DeadPool:
    """A state directory whose pool is dead, locked by us, and all that it left. ``failed`` are the reasons of what stays,
    by container name or path; ``removed`` says whether the directory itself is gone (only a one-shot's goes)."""

    path: Path
    state: StateDirectory
    one_shot: bool
    left: list[Leftover] = field(default_factory=list)
    strays: list[Path] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    removed: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to remove."""
        return not (self.left or self.strays or self.one_shot)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A state directory that is not touched, and why. ``live``: a pool lives in it, which is as it should be."""

    path: Path
    reason: str
    live: bool = False


@dataclass(slots=True)
class Survey:
    """What there is of a pool and of the one-shot pools beside it."""

    dead: list[DeadPool] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


@contextmanager
def survey(place: Path) -> Iterator[Survey]:
    """Lock the state directory ``place`` and every one-shot directory beside it that no pool lives in, for the block.

    Makes no directory (one-shot's that was left half-made gets what it lacks, to be removed like the others); what cannot be
    locked, or is no state directory of ours, is in ``skipped``.
    """
    found = Survey()
    with ExitStack() as locks:
        if os.path.lexists(place):
            _lock(place, found, locks, one_shot=False)
        for path in sorted(place.parent.glob("one-shot-*")):
            if path != place and _ONE_SHOT.match(path.name):
                _lock(path, found, locks, one_shot=True)
        yield found


def others(place: Path) -> list[Path]:
    """The state directories of other pools beside ``place`` whose ledgers name containers, dead or alive."""
    found = []
    for path in sorted(place.parent.glob("*")):
        if path != place and not _ONE_SHOT.match(path.name):
            with suppress(OSError):  # another user's
                if (path / "pool.json").is_file() and any((path / "ledger").iterdir()):
                    found.append(path)
    return found


def _lock(path: Path, found: Survey, locks: ExitStack, *, one_shot: bool) -> None:
    try:
        if not (path / "pool.json").exists():
            # Opening would make a state directory of whatever this is.
            if not one_shot and not any((path / "ledger").glob("emberpool-*")):
                raise PoolUnusable(f"{path} is not a pool's state directory; name the one that holds its pool.json")
            if one_shot and time.time() - path.lstat().st_mtime < JUST_MADE:
                found.skipped.append(Skipped(path, f"{path} has just been made", live=True))
                return
        state = StateDirectory.open(path)
        locks.callback(state.close)
        left = [Leftover(entry, "gone") for entry in state.entries()]
        found.dead.append(DeadPool(path, state, one_shot, left, state.strays()))
    except StateLocked as error:
        found.skipped.append(Skipped(path, str(error).partition(";")[0], live=True))
    except (PoolUnusable, OSError) as error:
        # The command that made a one-shot directory may be removing it at this very moment.
        if not one_shot or os.path.lexists(path):
            found.skipped.append(Skipped(path, str(error)))


async def examine(engine: Engine, found: Survey) -> None:
    """Ask the engine for every container that the ledgers name. Raises the engine's error, having touched nothing."""
    for dead in found.dead:
        dead.left = [await look(engine, dead.state.pool_id, left.entry, time.time()) for left in dead.left]


async def clean(engine: Engine, found: Survey) -> None:
    """Remove all that ``examine`` has seen; what cannot be removed stays, and its reason is in ``failed``."""
    for dead in found.dead:
        for left in dead.left:
            try:
                await remove(engine, dead.state, left)
            except EmberpoolError as error:
                dead.failed[left.entry.name] = str(error)
        for stray in dead.strays:
            try:
                await in_thread(dead.state.remove_stray, stray)
            except PoolUnusable as error:
                dead.failed[str(stray)] = str(error)
        if dead.one_shot and not dead.failed:
            try:
                dead.state.destroy()
                dead.removed = True
            except PoolUnusable as error:
                dead.failed[str(dead.path)] = str(error)
