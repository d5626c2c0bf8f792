"""The container manager: makes and removes the containers that the core asks for, with the ledger entry, the staging directory
and the uid of each. It decides nothing: every outcome goes back to its caller."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from executor.common.log import get_logger
from executor.engine.events import EventHub
from executor.engine.protocol import ImageInfo, NameTaken
from executor.errors import (
    EmberpoolError,
    EngineFailed,
    EngineUnavailable,
    ImageMissing,
    ImageUnfit,
    PoolUnusable,
    ProfileMismatch,
)
from executor.result import CallResult
from executor.sandbox.arming import ArmingLimit
from executor.sandbox.cold import ColdSpec, cold_call, has_python
from executor.sandbox.host_files import require_host_files
from executor.sandbox.mount import Mount
from executor.sandbox.profile import LABEL_CONFIG, LABEL_INSTANCE, LABEL_KIND, LABEL_POOL, ContainerKind, Identity
from executor.sandbox.request import Call
from executor.sandbox.sandbox import RunnerOptions, Sandbox, SandboxSpec
from executor.sandbox.start import start_sandbox, take_over
from executor.sandbox.verify import require_no_volumes
from executor.staging.threads import StagingThreads
from executor.staging.versions import Fingerprints, StageLimits
from pool.config.load import Settings
from pool.config.tables import WORKSPACE
from pool.ledger.cleanup import LATE_START as LATE_START
from pool.ledger.cleanup import drop, look
from pool.ledger.ledger import Entry, EntryState, StateDirectory
from pool.supervisor.connection import Connection as Connection
from pool.supervisor.connection import connection as connection
from pool.supervisor.connection import lifetime
from pool.supervisor.connection import shared_profile as shared_profile
from pool.supervisor.sweep import Sweeper, labels_of
from pool.supervisor.users import UserPolicy

log = get_logger("emberpool.pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSetting:
    """How a cold call's container differs from the shared profile: a host directory to mount, writable, at ``/workspace``
    (calls then run as its owner), and a network other than none."""

    workspace: str
    network: str = ""


@contextmanager
def _host_errors(doing: str) -> Iterator[None]:
    """Raise ``EngineUnavailable`` where this host is out of file descriptors, disk or memory: it is tried again, and does not end
    the supervisor's tasks."""
    try:
        yield
    except OSError as error:
        raise EngineUnavailable(
            f"this host is out of file descriptors, disk or memory while {doing}: {error}", retry_after=1.0
        ) from error


DISK_THREADS = 4
"""Threads in which ledger entries wait for the disk. They are used for nothing else, so a disk that hangs stops no other work."""

LAST_SWEEP = 5.0
"""Seconds for which a pool that ends waits for the removal of what its ledger still names."""


def runner_options(settings: Settings) -> RunnerOptions:
    """Return the runner options that ``settings`` ask for."""
    call = settings.call
    return RunnerOptions(
        calls=call.calls_per_exec, parallel=call.parallel, preload=settings.sandbox.preload, grace=call.grace
    )


class ContainerManager:
    """All containers of one pool instance. ``instance`` is random for each start of a pool."""

    def __init__(
        self,
        settings: Settings,
        state: StateDirectory,
        hub: EventHub,
        tasks: TaskGroup,
        threads: StagingThreads,
    ) -> None:
        self.instance = secrets.token_hex(4)
        self.connection: Connection | None = None
        self.sandboxes: dict[int, Sandbox] = {}
        self._settings, self._state, self._hub = settings, state, hub
        self._users: dict[str, str] = {}
        self._cold_count = 0
        self._offset = secrets.randbelow(settings.sandbox.uid_range.count)
        self._user_policy = UserPolicy(
            settings.sandbox.user, settings.sandbox.uid_range, tuple(settings.sandbox.mounts)
        )
        self._python: dict[str, bool] = {}
        self._fingerprints, self._arming, self._threads = Fingerprints(), ArmingLimit(), threads
        self._unidentified: set[str] = set()
        self._containers: dict[str, str] = {}
        self._sweeper = Sweeper(settings, state, self._users, self._user_policy)
        self._adoptions = self._sweeper.adoptions
        self._tasks, self._probing = tasks, anyio.Lock()
        self._disk = anyio.CapacityLimiter(DISK_THREADS)

    def name(self, n: int) -> str:
        """Return the container name of sandbox ``n``; an adopted one keeps the name that the earlier instance gave it."""
        taken = self._adoptions.taken.get(n)
        return taken.name if taken else f"emberpool-{self._state.pool_id}-{self.instance}-{n}"

    def number(self, name: str) -> int | None:
        """Return the number of the sandbox with this container name, ``None`` for any other container."""
        n = name.rpartition("-")[2]
        return int(n) if n.isdecimal() and self.name(int(n)) == name else self._adoptions.number(name)

    def age(self, n: int) -> float:
        """Return the age of sandbox ``n`` in seconds if it was adopted, else 0: it has just been started."""
        taken = self._adoptions.taken.get(n)
        return max(0.0, time.time() - taken.created) if taken else 0.0

    @property
    def names(self) -> set[str]:
        """The names of the containers that this instance is making, using or removing."""
        return set(self._users)

    @property
    def image_id(self) -> str:
        """The ID of the image that containers are made from now; ``""`` while it is not known."""
        return self.connection.image.id if self.connection is not None else ""

    def _require(self) -> Connection:
        if self.connection is None:
            raise EngineUnavailable("the engine is not connected", retry_after=1.0)
        return self.connection

    def _identity(self, name: str, kind: ContainerKind, config_hash: str) -> Identity:
        labels = {
            LABEL_POOL: self._state.pool_id,
            LABEL_INSTANCE: self.instance,
            LABEL_CONFIG: config_hash,
            LABEL_KIND: kind,
        }
        return Identity(name=name, labels=labels)

    async def _record(self, name: str, state: EntryState, image: ImageInfo, policy: UserPolicy | None = None) -> str:
        """Choose the calls' user of a container and put the container into the ledger, before its start."""
        require_no_volumes(image)
        require_host_files(self._require().profile)
        choice = policy or self._user_policy
        try:
            # What is not removed yet may still run.
            taken = (*self._users.values(), *self._sweeper.left.values())
            user = choice.calls_user(image, taken, offset=self._offset)
        except ProfileMismatch:
            # In a narrow range, what is stuck must not close the pool.
            user = choice.calls_user(image, self._users.values(), offset=self._offset)
        self._offset += 1
        self._users[name] = user
        try:
            entry = Entry(name, state, user=user, created=time.time())
            # It waits for the disk, which may be busy or slow; calls go on meanwhile.
            await to_thread.run_sync(self._state.enter, entry, limiter=self._disk)
        except BaseException:
            self._users.pop(name, None)
            raise
        return user

    async def enter(self, n: int) -> None:
        """Put sandbox ``n`` into the ledger, before its start. Raises ``PoolUnusable`` or ``ProfileMismatch``.

        If an earlier instance left a standby that is fit for adoption, sandbox ``n`` will be that one; its entry exists already.
        """
        if not self._adoptions.claim(n):
            await self._record(self.name(n), "standby", self._require().image)

    def bind(self, n: int) -> None:
        """Note in the ledger that sandbox ``n`` has a session, before the session has it. Raises ``PoolUnusable``."""
        self._state.bind(self.name(n))

    async def start(self, n: int) -> Sandbox:
        """Start and verify sandbox ``n``, or adopt it. After an error the container may exist, and its entry stays: call ``stop``."""
        link = self._require()
        try:
            with _host_errors(f"starting {self.name(n)}"):
                box = self.sandboxes[n] = await self._adopt(n, link) or await self._make(n, link)
        except (ImageMissing, ImageUnfit):
            await self._renew_image(link)
            raise
        return box

    async def _renew_image(self, link: Connection) -> None:
        """Look the image's name up again after its ID was refused: the next start uses what the name refers to now."""
        reference = self._settings.sandbox.image
        try:
            image = await link.engine.image(reference)
        except EmberpoolError:
            return  # the next start that fails looks again
        if image.id != link.image.id and self.connection is link:
            self.connection = connection(self._settings, link.engine, link.info, image, self._state.pool_id)
            log.info("pool.image_changed", pool=self._state.pool_id, image=image.id, was=link.image.id)

    async def _make(self, n: int, link: Connection) -> Sandbox:
        name = self.name(n)
        user = self._users[name]
        python = await self._has_python(link)
        place, nonce = self._state.stage(name)
        spec = self._spec(link, self._identity(name, "sandbox", link.config_hash), str(place), nonce, python=python)

        def created(container: str) -> None:
            self._containers[name] = container
            self._unidentified.discard(name)  # first: the ID is known even if the ledger cannot take it
            self._state.note(Entry(name, "standby", container=container, user=user, created=time.time()))

        self._unidentified.add(name)
        try:
            return await start_sandbox(link.engine, self._hub, spec, python=python, tasks=self._tasks, created=created)
        except (ImageMissing, ImageUnfit, ProfileMismatch, EngineFailed):
            self._unidentified.discard(name)  # the engine has answered: it will not carry the start out later
            raise

    async def _adopt(self, n: int, link: Connection) -> Sandbox | None:
        """Adopt the standby that ``enter`` chose for sandbox ``n``. If it turns out unfit it is removed, and ``n`` is entered
        anew, to be made."""
        entry = self._adoptions.taken.get(n)
        if entry is None:
            return None
        identity = Identity(name=entry.name, labels=labels_of(self._state.pool_id, link.config_hash))
        try:
            place, nonce = self._state.staged(entry.name)
            spec = self._spec(link, identity, str(place), nonce, python=True)
            box = await take_over(link.engine, self._hub, spec, entry.container, self._tasks)
        except EmberpoolError as error:
            await self._sweeper.remove(link, entry, time.time())
            # What could not be removed now is left to the next sweep.
            del self._adoptions.taken[n], self._users[entry.name]
            self._hub.forget(entry.name)
            await self._record(self.name(n), "standby", link.image)
            log.info("sandbox.not_adopted", sandbox=entry.name, pool=self._state.pool_id, error=str(error))
            return None
        self._python[link.image.id] = True
        self._containers[entry.name] = entry.container
        log.info("sandbox.adopted", sandbox=entry.name, pool=self._state.pool_id, n=n, age=round(self.age(n), 3))
        return box

    def _spec(self, link: Connection, identity: Identity, place: str, nonce: str, *, python: bool) -> SandboxSpec:
        return SandboxSpec(
            identity=identity,
            # A CPU limit on the container would use the runner up; the runner sets one for each call instead.
            profile=replace(link.profile, user=self._user_policy.keeper, cpu_limit=not python),
            image=link.image,
            user=self._users[identity.name],
            staging=place,
            nonce=nonce,
            lifetime=lifetime(self._settings),
            runner=runner_options(self._settings),
            stage_limits=StageLimits(
                max_bytes=self._settings.tools.max_bytes, max_files=self._settings.tools.max_files
            ),
            fingerprints=self._fingerprints,
            threads=self._threads,
            arming=self._arming,
        )

    async def stop(self, n: int) -> None:
        """Remove sandbox ``n``, and all that belongs to it once the container is confirmed absent. Raises the engine's error."""
        name, box = self.name(n), self.sandboxes.pop(n, None)
        if box is not None:
            box.close_runners()
        with _host_errors(f"removing {name}"):
            await self._remove(name)
        self._hub.forget(name)
        self._containers.pop(name, None)
        # A start that was requested and never returned an ID: the entry stays for a while, the daemon may still carry it out.
        if name in self._unidentified:
            self._unidentified.discard(name)
        else:
            await drop(self._state, name)
        self._users.pop(name, None)

    async def _remove(self, name: str) -> None:
        """Remove the container that was made under a name, by its ID: another user of the engine may have renamed it, and made
        another container of that name."""
        engine = self._require().engine
        if container := self._containers.get(name):
            await engine.remove(container)
            return
        for entry in self._state.entries():
            if entry.name == name:
                left = await look(engine, self._state.pool_id, entry, time.time())
                if left.found == "ours":
                    await engine.remove(left.container)

    async def _has_python(self, link: Connection) -> bool:
        """Return whether the image has an interpreter; found out once for each image, in a disposable container."""
        async with self._probing:
            if link.image.id not in self._python:
                async with self._disposable("probe") as (name, user):
                    spec = ColdSpec(
                        identity=self._identity(name, "probe", link.config_hash),
                        profile=replace(link.profile, user=user),
                        image=link.image,
                    )
                    self._python[link.image.id] = await has_python(link.engine, self._hub, spec)
            return self._python[link.image.id]

    def abandon(self, n: int) -> None:
        """Forget sandbox ``n`` without touching any container: none was made, and its name belongs to somebody else's."""
        name = self.name(n)
        self._hub.forget(name)
        self._unidentified.discard(name)
        self._users.pop(name, None)
        self._drop(name)

    async def cold(self, call: Call, setting: ColdSetting | None = None) -> CallResult:
        """Run one call in a disposable container of its own."""
        link, began = self._require(), anyio.current_time()
        known = self._python.get(link.image.id)
        try:
            return await self._cold(link, call, setting, python=known is not False)
        except ImageUnfit:
            # Nothing has run. In an image without python3 an argv needs none, and code is refused with that reason.
            if known is not None or await self._has_python(link):
                raise
        left = call.timeout - (anyio.current_time() - began)
        return await self._cold(link, call.within(max(0.001, left)), setting, python=False)

    async def _cold(self, link: Connection, call: Call, setting: ColdSetting | None, *, python: bool) -> CallResult:
        policy = self._user_policy
        profile = link.profile
        if setting is not None:
            mounts = (Mount(setting.workspace, WORKSPACE),)
            profile = replace(
                profile, mounts=(*profile.mounts, *mounts), network=setting.network or "none", workdir=WORKSPACE
            )
            policy = replace(policy, mounts=mounts)
        async with self._disposable("cold", policy) as (name, user):
            spec = ColdSpec(
                identity=self._identity(name, "cold", link.config_hash),
                profile=replace(profile, user=user),
                image=link.image,
                python=python,
            )
            try:
                return await cold_call(link.engine, self._hub, spec, call)
            except ImageMissing:
                await self._renew_image(link)
                raise

    @asynccontextmanager
    async def _disposable(
        self, kind: Literal["cold", "probe"], policy: UserPolicy | None = None
    ) -> AsyncIterator[tuple[str, str]]:
        """Enter a container that ends with the block into the ledger, for as long as it may exist; yields its name and user."""
        self._cold_count += 1
        name = f"emberpool-{self._state.pool_id}-{self.instance}-{kind[0]}{self._cold_count}"
        user = await self._record(name, kind, self._require().image, policy)
        watch, unmade = self._hub.watch(name), False

        def created(container: str) -> None:
            try:
                self._state.note(Entry(name, kind, container=container, user=user, created=time.time()))
            except PoolUnusable as error:  # the entry stays without the ID, and its name and label find the container
                log.warning("pool.id_not_noted", sandbox=name, pool=self._state.pool_id, error=str(error))

        watch.on_created = created
        try:
            yield name, user
        except NameTaken:
            unmade = True
            raise
        finally:
            # Where its absence is not confirmed the entry stays, and the next resync removes the container.
            self._users.pop(name, None)
            self._hub.forget(name)
            if unmade or watch.destroyed.is_set():
                self._drop(name)

    def _drop(self, name: str) -> None:
        """Drop an entry whose container is gone; one that cannot be dropped now is dropped by the next resync."""
        try:
            self._state.drop(name)
        except PoolUnusable as error:
            log.warning("pool.entry_stays", sandbox=name, pool=self._state.pool_id, error=str(error))

    async def survey(self) -> list[Entry]:
        """Return the ledger's entries that this instance does not use (``Sweeper.survey``). Raises ``PoolUnusable``."""
        return await self._sweeper.survey(self._require(), time.time())

    async def sweep(self, found: list[Entry] | None = None) -> int:
        """Remove what a survey found (by default a new one), and return how many were removed. Raises ``PoolUnusable``."""
        found = await self.survey() if found is None else found
        return await self._sweeper.sweep(self._require(), found, time.time())

    async def last_sweep(self, *, everything: bool = False) -> list[str]:
        """Sweep once more as the pool ends, with what is in use if ``everything``; return the names of the containers that may
        still exist."""
        self._sweeper.withdraw()
        if everything:
            self._users.clear()
        try:
            if self.connection is not None and any(one.name not in self._users for one in self._state.entries()):
                with anyio.move_on_after(LAST_SWEEP):
                    await self.sweep()
            return sorted({*self._users, *(entry.name for entry in self._state.entries())})
        except PoolUnusable as error:
            log.warning("pool.not_swept", pool=self._state.pool_id, error=str(error))
            return sorted(self._users)
