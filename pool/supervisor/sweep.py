"""Containers that the ledger names and that this instance does not use, mostly those of an earlier start: adopt or remove them.

Only a standby is ever adopted: its entry moves to bound before any session has it, so the ledger proves that nobody has used
it. Everything else is verified again, as for a sandbox that this instance made. In doubt a container is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from executor.common.log import get_logger
from executor.common.threads import in_thread
from executor.engine.protocol import ImageInfo
from executor.errors import EmberpoolError, PoolUnusable, ProfileMismatch
from executor.sandbox.profile import LABEL_CONFIG, LABEL_KIND, LABEL_POOL
from pool.config.load import Settings
from pool.ledger.cleanup import Leftover, look, remove
from pool.ledger.ledger import Entry, StateDirectory
from pool.supervisor.connection import Connection
from pool.supervisor.users import UserPolicy

log = get_logger("emberpool.pool")

AT_ONCE = 4
"""Containers that are looked at or removed at the same time: fewer than what an engine is asked at once, so that starts
find their turn."""
LOOK_PATIENCE = 5.0
"""Seconds for which a pool's start waits for what it may adopt."""
REMOVE_PATIENCE = 60.0
"""Seconds after which a container that will not go is left to the next sweep."""


@dataclass(slots=True)
class Adoptions:
    """Standbys of an earlier instance: ``offered`` may be adopted, ``taken`` are sandboxes of this instance by now, by number.
    They keep their names."""

    offered: list[Entry] = field(default_factory=list)
    taken: dict[int, Entry] = field(default_factory=dict)

    def claim(self, n: int) -> bool:
        """Let sandbox ``n`` be one of the offered, if there is one."""
        if self.offered:
            self.taken[n] = self.offered.pop(0)
            return True
        return False

    def number(self, name: str) -> int | None:
        """The sandbox that has the container ``name`` of an earlier instance."""
        return next((n for n, entry in self.taken.items() if entry.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a standby must match to be adopted. ``now`` is wall clock seconds, ``max_age`` seconds; ``taken`` are the
    users of this instance's other sandboxes; ``boot`` is the boot whose entries can be trusted, ``""`` for none."""

    pool_id: str
    config_hash: str
    image: ImageInfo
    users: UserPolicy
    taken: frozenset[str]
    now: float
    max_age: float
    boot: str


class Sweeper:
    """Removes them, or offers them for adoption (``adoptions``). ``users`` are the containers in use and the users of
    their calls, shared with the container manager: what is on offer counts as in use. ``left`` are those that are to be
    removed, and the users of their calls. Times are wall clock seconds."""

    def __init__(self, settings: Settings, state: StateDirectory, users: dict[str, str], policy: UserPolicy) -> None:
        self.adoptions = Adoptions()
        self.left: dict[str, str] = {}
        self._pool, self._state, self._users, self._policy = settings.pool, state, users, policy
        self._first, self._busy = True, set[str]()

    async def survey(self, link: Connection, now: float) -> list[Entry]:
        """Every entry of the ledger that is not in use, for ``sweep``.

        The first survey spares the youngest standbys, ``min_standby`` at most, that are fit to be adopted and of which the
        engine describes in time; what has not been claimed by the next one is found by it. Raises ``PoolUnusable``.
        """
        self.withdraw()
        entries = sorted(self._state.entries(), key=lambda entry: -entry.created)
        unused = [entry for entry in entries if entry.name not in self._users and entry.name not in self._busy]
        if self._first:
            await self._offer(link, unused, now)
            await self._remove_strays()
            unused = [entry for entry in unused if entry.name not in self._users]
        self._first = False
        self.left = {entry.name: entry.user for entry in entries if entry.name not in self._users}
        return unused

    async def sweep(self, link: Connection, found: list[Entry], now: float) -> int:
        """Remove the containers that a survey found; how many are gone.

        What the engine will not remove now stays in the ledger for the next time: one stuck container must not close the pool
        for all, nor keep the others standing.
        """
        swept, places = 0, anyio.CapacityLimiter(AT_ONCE)

        async def one(entry: Entry) -> None:
            nonlocal swept
            async with places:
                with anyio.move_on_after(REMOVE_PATIENCE):
                    swept += await self.remove(link, entry, now)

        names = {entry.name for entry in found}
        self._busy |= names
        try:
            async with anyio.create_task_group() as tasks:
                for entry in found:
                    tasks.start_soon(one, entry)
        finally:
            self._busy -= names
        return swept

    def withdraw(self) -> None:
        """Withdraw what is still on offer: it will be removed."""
        for entry in self.adoptions.offered:
            del self._users[entry.name]
        self.adoptions.offered.clear()

    async def remove(self, link: Connection, entry: Entry, now: float) -> bool:
        """Remove an entry's container and the entry; ``False`` where they stay for the next sweep."""
        self.left[entry.name] = entry.user
        try:
            await remove(link.engine, self._state, await look(link.engine, self._state.pool_id, entry, now))
        except (EmberpoolError, OSError) as error:
            log.warning("pool.not_swept", sandbox=entry.name, pool=self._state.pool_id, error=str(error))
            return False
        self.left.pop(entry.name, None)
        return True

    async def _offer(self, link: Connection, unused: list[Entry], now: float) -> None:
        """Offer what is fit for adoption, the youngest first."""
        standbys = [entry for entry in unused if entry.state == "standby"][: 2 * self._pool.min_standby]
        looks: dict[str, Leftover | str] = {}
        if not standbys:
            return
        places = anyio.CapacityLimiter(AT_ONCE)

        async def one(entry: Entry) -> None:
            async with places:
                try:
                    looks[entry.name] = await look(link.engine, self._state.pool_id, entry, now)
                except (EmberpoolError, OSError) as error:
                    looks[entry.name] = str(error)

        with anyio.move_on_after(LOOK_PATIENCE):
            async with anyio.create_task_group() as tasks:
                for entry in standbys:
                    tasks.start_soon(one, entry)
        for entry in standbys:
            if len(self.adoptions.offered) >= self._pool.min_standby:
                return
            seen = looks.get(entry.name, "the engine did not describe it in time")
            why = seen if isinstance(seen, str) else unfit(seen, self._requirements(link, now))
            if why:
                log.info("sandbox.not_adopted", sandbox=entry.name, pool=self._state.pool_id, error=why)
            else:
                self.adoptions.offered.append(entry)
                self._users[entry.name] = entry.user

    def _requirements(self, link: Connection, now: float) -> Requirements:
        return Requirements(
            pool_id=self._state.pool_id,
            config_hash=link.config_hash,
            image=link.image,
            users=self._policy,
            taken=frozenset(self._users.values()),
            now=now,
            max_age=self._pool.standby_max_age,
            boot=self._state.boot,
        )

    async def _remove_strays(self) -> None:
        try:
            for stray in self._state.strays():
                await in_thread(self._state.remove_stray, stray)
        except PoolUnusable as error:  # the next start's, then: they are in nobody's way
            log.warning("pool.staging_stays", pool=self._state.pool_id, error=str(error))


# --- what may be adopted (pure) ---------------------------------------------------------------------------------------


def unfit(left: Leftover, required: Requirements) -> str:
    """Return why a leftover may not be adopted, as far as the ledger and the engine's record say; ``""`` where it may."""
    entry, facts = left.entry, left.facts
    if left.found != "ours" or entry.state != "standby":
        return "it is no standby of ours"
    if not entry.container:
        return "its start was cut off"
    # A loss of power may have undone the move to bound.
    if not required.boot or entry.boot != required.boot:
        return "the ledger may have lost what came last: the machine was started anew since, or a file was damaged"
    # A clock that was set back says nothing of its age.
    if not 0 <= required.now - entry.created < required.max_age:
        return "it is older than pool.standby_max_age"
    try:
        labels, image = dict(facts["Config"]["Labels"]), str(facts["Image"])
    except (LookupError, TypeError, ValueError):
        return "the engine's record of it has an unknown form"
    if not _runs(facts):
        return "it does not run"
    if any(labels.get(key) != value for key, value in labels_of(required.pool_id, required.config_hash).items()):
        return "it was made from other settings"
    if image.removeprefix("sha256:") != required.image.id.removeprefix("sha256:"):
        return "it was made from another image"
    if not _user_fits(entry.user, required):
        return "its calls' user is not one that the settings give"
    return ""


def labels_of(pool_id: str, config_hash: str) -> dict[str, str]:
    """The labels by which instances of one pool recognise each other's sandboxes."""
    return {LABEL_POOL: pool_id, LABEL_CONFIG: config_hash, LABEL_KIND: "sandbox"}


def _user_fits(user: str, required: Requirements) -> bool:
    policy = required.users
    try:
        chosen = policy.calls_user(required.image, required.taken, offset=0)
    except ProfileMismatch:
        return False  # no sandbox can be had now; a start says why
    if _of_its_own(chosen, policy):
        return _of_its_own(user, policy) and user not in required.taken
    return user == chosen


def _of_its_own(user: str, policy: UserPolicy) -> bool:
    """Whether a user is one that each sandbox has for itself."""
    uid, _, gid = user.partition(":")
    return uid == gid and uid.isdecimal() and int(uid) in policy.uids.calls


def _runs(facts: Mapping[str, Any]) -> bool:
    status = facts.get("State")
    return isinstance(status, Mapping) and status.get("Running") is True and not status.get("Paused")
