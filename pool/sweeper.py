"""What an instance does with the containers that its ledger names and that it does not use: an earlier start's, mostly."""

from __future__ import annotations

from executor.log import get_logger
from executor.result import EmberpoolError, PoolUnusable
from executor.threads import in_thread
from pool.adoption import Inheritance, Standard, unfit
from pool.cleanup import look, remove
from pool.config import Settings
from pool.connection import Connection
from pool.ledger import Entry, StateDirectory
from pool.users import UserPolicy

log = get_logger("emberpool.pool")


class Sweeper:
    """Removes them, or offers them to be taken over (``inherited``). ``users`` are the containers in use and the users of
    their calls, which it shares with its workshop: what is on offer counts as in use. Times are wall clock seconds."""

    def __init__(self, settings: Settings, state: StateDirectory, users: dict[str, str], policy: UserPolicy) -> None:
        self.inherited = Inheritance()
        self._pool, self._state, self._users, self._policy = settings.pool, state, users, policy
        self._first = True

    async def sweep(self, link: Connection, now: float) -> int:
        """Remove every container of the ledger that is not in use; how many there were.

        The first sweep spares the youngest standbys, ``min_standby`` at most, that are fit to be taken over; what has not
        been claimed by the next one goes as well. What the engine will not remove now stays in the ledger for the next
        time: one stuck container must not close the pool for all. Raises ``PoolUnusable``.
        """
        self.disinherit()
        swept = 0
        for entry in sorted(self._state.entries(), key=lambda entry: -entry.created):
            if entry.name in self._users or (self._first and await self._offer(link, entry, now)):
                continue
            swept += await self.remove(link, entry, now)
        if self._first:
            await self._remove_strays()
        self._first = False
        return swept

    def disinherit(self) -> None:
        """Nothing that is still on offer will be taken over."""
        for entry in self.inherited.offered:
            del self._users[entry.name]
        self.inherited.offered.clear()

    async def remove(self, link: Connection, entry: Entry, now: float) -> bool:
        """Remove an entry's container and the entry; ``False`` where they stay for the next sweep."""
        try:
            await remove(link.engine, self._state, await look(link.engine, self._state.pool_id, entry, now))
        except EmberpoolError as error:
            log.warning("pool.not_swept", sandbox=entry.name, pool=self._state.pool_id, error=str(error))
            return False
        return True

    async def _offer(self, link: Connection, entry: Entry, now: float) -> bool:
        """Offer an entry's sandbox to be taken over, if it is fit; whether it is."""
        if entry.state != "standby" or len(self.inherited.offered) >= self._pool.min_standby:
            return False
        standard = Standard(
            pool_id=self._state.pool_id,
            config_hash=link.config_hash,
            image=link.image,
            users=self._policy,
            taken=frozenset(self._users.values()),
            now=now,
            max_age=self._pool.standby_max_age,
            boot=self._state.boot,
        )
        try:
            why = unfit(await look(link.engine, self._state.pool_id, entry, now), standard)
        except EmberpoolError as error:
            why = str(error)
        if why:
            log.info("sandbox.not_adopted", sandbox=entry.name, pool=self._state.pool_id, error=why)
            return False
        self.inherited.offered.append(entry)
        self._users[entry.name] = entry.user
        return True

    async def _remove_strays(self) -> None:
        try:
            for stray in self._state.strays():
                await in_thread(self._state.remove_stray, stray)
        except PoolUnusable as error:  # the next start's, then: they are in nobody's way
            log.warning("pool.staging_stays", pool=self._state.pool_id, error=str(error))
