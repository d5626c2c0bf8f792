"""What an instance does with the containers that its ledger names and that it does not use: an earlier start's, mostly."""

from __future__ import annotations

import anyio

from executor.common.log import get_logger
from executor.common.threads import in_thread
from executor.errors import EmberpoolError, PoolUnusable
from pool.config.load import Settings
from pool.ledger.cleanup import Leftover, look, remove
from pool.ledger.ledger import Entry, StateDirectory
from pool.supervisor.adoption import Inheritance, Standard, unfit
from pool.supervisor.connection import Connection
from pool.supervisor.users import UserPolicy

log = get_logger("emberpool.pool")

AT_ONCE = 4
"""Containers that are looked at or removed at the same time: fewer than what an engine is asked at once, so that starts
find their turn."""
LOOK_PATIENCE = 5.0
"""Seconds for which a pool's start waits for what it may take over."""
REMOVE_PATIENCE = 60.0
"""Seconds after which a container that will not go is left to the next sweep."""


class Sweeper:
    """Removes them, or offers them to be taken over (``inherited``). ``users`` are the containers in use and the users of
    their calls, which it shares with its containers: what is on offer counts as in use. ``left`` are those that are to be
    removed, and the users of their calls. Times are wall clock seconds."""

    def __init__(self, settings: Settings, state: StateDirectory, users: dict[str, str], policy: UserPolicy) -> None:
        self.inherited = Inheritance()
        self.left: dict[str, str] = {}
        self._pool, self._state, self._users, self._policy = settings.pool, state, users, policy
        self._first, self._busy = True, set[str]()

    async def survey(self, link: Connection, now: float) -> list[Entry]:
        """Every entry of the ledger that is not in use, for ``sweep``.

        The first survey spares the youngest standbys, ``min_standby`` at most, that are fit to be taken over and of which the
        engine tells in time; what has not been claimed by the next one is found by it. Raises ``PoolUnusable``.
        """
        self.disinherit()
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

    def disinherit(self) -> None:
        """Nothing that is still on offer will be taken over."""
        for entry in self.inherited.offered:
            del self._users[entry.name]
        self.inherited.offered.clear()

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
        """Offer what is fit to be taken over, the youngest first."""
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
            if len(self.inherited.offered) >= self._pool.min_standby:
                return
            seen = looks.get(entry.name, "the engine did not tell of it in time")
            why = seen if isinstance(seen, str) else unfit(seen, self._standard(link, now))
            if why:
                log.info("sandbox.not_adopted", sandbox=entry.name, pool=self._state.pool_id, error=why)
            else:
                self.inherited.offered.append(entry)
                self._users[entry.name] = entry.user

    def _standard(self, link: Connection, now: float) -> Standard:
        return Standard(
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
