"""Makes and unmakes the containers that the core asks for, with the ledger entry, the staging directory and the uid that
belong to each. Decides nothing: every outcome goes back to whoever asked."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Literal

import anyio
import structlog
from anyio.abc import TaskGroup

from executor.call import Call
from executor.cold import ColdSpec, cold_call, has_python
from executor.engine import ContainerGone, Engine, EngineInfo, ImageInfo
from executor.profile import (
    LABEL_CONFIG,
    LABEL_INSTANCE,
    LABEL_KIND,
    LABEL_POOL,
    ContainerKind,
    ContainerProfile,
    Identity,
    Limits,
)
from executor.result import (
    CallResult,
    EmberpoolError,
    EngineFailed,
    EngineUnavailable,
    ImageMissing,
    PoolUnusable,
    ProfileMismatch,
)
from executor.sandbox import RunnerOptions, Sandbox, SandboxSpec, start_sandbox
from executor.watch import EventHub
from pool.config import Settings
from pool.ledger import Entry, EntryState, StateDirectory
from pool.users import UserPolicy

log = structlog.get_logger("emberpool.pool")


@dataclass(frozen=True, slots=True)
class Connection:
    """A reachable engine with the configured image on it, and what is fixed for every container made over it."""

    engine: Engine
    info: EngineInfo
    image: ImageInfo
    profile: ContainerProfile
    config_hash: str


def shared_profile(settings: Settings, info: EngineInfo, pool_id: str) -> ContainerProfile:
    """The one profile that every container of a pool is made from; only its user differs from container to container."""
    box = settings.sandbox
    parent = {"cgroupfs": f"/emberpool-{pool_id}", "systemd": f"emberpool-{pool_id}.slice"}
    return ContainerProfile(
        network=box.network,
        limits=Limits(
            cpu_seconds=box.cpu_seconds,
            memory_mb=box.memory_mb,
            open_files=box.open_files,
            file_size_mb=box.file_size_mb,
        ),
        pids=box.pids,
        tmpfs_mb=box.tmpfs_mb,
        mounts=tuple(box.mounts),
        cpus=box.cpus,
        runtime=box.runtime,
        seccomp=box.seccomp,
        cgroup_parent="" if info.rootless else parent.get(info.cgroup_driver, ""),
    )


def connection(settings: Settings, engine: Engine, info: EngineInfo, image: ImageInfo, pool_id: str) -> Connection:
    """Everything fixed at create time, and a hash of it: two containers of one hash are interchangeable."""
    profile = shared_profile(settings, info, pool_id)
    facts = {"profile": asdict(profile), "image": image.id, "user": settings.sandbox.user}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return Connection(engine, info, image, profile, digest)


LATE_START = 120.0
"""Seconds for which a start of unknown result stays in the ledger although its container is not there: a daemon that
hung may carry it out after all."""

LAST_SWEEP = 5.0
"""Seconds for which a pool that ends waits for the removal of what its ledger still names."""


class Workshop:
    """All containers of one pool instance. ``instance`` is random for each start of a pool."""

    def __init__(self, settings: Settings, state: StateDirectory, hub: EventHub, tasks: TaskGroup) -> None:
        self.instance = secrets.token_hex(4)
        self.connection: Connection | None = None
        self.sandboxes: dict[int, Sandbox] = {}
        self._settings, self._state, self._hub = settings, state, hub
        self._users: dict[str, str] = {}
        self._colds = 0
        self._offset = secrets.randbelow(settings.sandbox.uid_range.count)
        self._user_policy = UserPolicy(
            settings.sandbox.user, settings.sandbox.uid_range, tuple(settings.sandbox.mounts)
        )
        self._python: dict[str, bool] = {}
        self._untold: set[str] = set()
        self._tasks, self._asking = tasks, anyio.Lock()

    def name(self, n: int) -> str:
        """The name of the container of sandbox ``n``."""
        return f"emberpool-{self._state.pool_id}-{self.instance}-{n}"

    def number(self, name: str) -> int | None:
        """The ``n`` of a sandbox's name; ``None`` for any other container's."""
        n = name.rpartition("-")[2]
        return int(n) if n.isdecimal() and self.name(int(n)) == name else None

    @property
    def names(self) -> set[str]:
        """The containers that this instance is making, using or unmaking."""
        return set(self._users)

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

    def _enter(self, name: str, state: EntryState, image: ImageInfo) -> str:
        """Choose the calls' user of a container and put the container into the ledger, before its start."""
        user = self._user_policy.calls_user(image, self._users.values(), offset=self._offset)
        self._offset += 1
        self._users[name] = user
        try:
            self._state.enter(Entry(name, state, user=user, created=time.time()))
        except BaseException:
            self._users.pop(name, None)
            raise
        return user

    def enter(self, n: int) -> None:
        """Put sandbox ``n`` into the ledger, before its start. Raises ``PoolUnusable`` or ``ProfileMismatch``."""
        self._enter(self.name(n), "standby", self._require().image)

    def bind(self, n: int) -> None:
        """Note in the ledger that sandbox ``n`` has a session, before the session has it. Raises ``PoolUnusable``."""
        self._state.bind(self.name(n))

    async def start(self, n: int) -> Sandbox:
        """Start and verify sandbox ``n``. On any error the container may exist, and its entry stands: ``stop`` it."""
        link, name = self._require(), self.name(n)
        user = self._users[name]
        python = await self._has_python(link)
        place, nonce = self._state.stage(name)
        call, pool = self._settings.call, self._settings.pool
        spec = SandboxSpec(
            identity=self._identity(name, "sandbox", link.config_hash),
            # A limit on the container would wear a runner down; it sets one for each call instead.
            profile=replace(link.profile, user=self._user_policy.keeper, cpu_limit=not python),
            image=link.image,
            user=user,
            staging=str(place),
            nonce=nonce,
            lifetime=pool.standby_max_age + pool.max_lifetime + call.timeout + call.grace,
            runner=RunnerOptions(
                calls=call.calls_per_exec,
                parallel=call.parallel,
                preload=self._settings.sandbox.preload,
                grace=call.grace,
            ),
        )

        def created(container: str) -> None:
            self._state.enter(Entry(name, "standby", container=container, user=user, created=time.time()))
            self._untold.discard(name)

        self._untold.add(name)
        try:
            box = await start_sandbox(link.engine, self._hub, spec, python=python, tasks=self._tasks, created=created)
        except (ImageMissing, ProfileMismatch, EngineFailed):
            self._untold.discard(name)  # the engine has answered: it will not carry the start out later
            raise
        self.sandboxes[n] = box
        return box

    async def stop(self, n: int) -> None:
        """Remove sandbox ``n``, and everything of it once the container is confirmed absent. Raises the engine's error."""
        name, box = self.name(n), self.sandboxes.pop(n, None)
        if box is not None:
            box.let_go()
        await self._require().engine.remove(name)
        self._hub.forget(name)
        # Where a start was asked for and never told an ID, the entry stays for a while: the daemon may still carry it out.
        if name in self._untold:
            self._untold.discard(name)
        else:
            self._state.drop(name)
        self._users.pop(name, None)

    async def _has_python(self, link: Connection) -> bool:
        """Whether the image has an interpreter, found out once for each image, in a disposable container."""
        async with self._asking:
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
        """Forget sandbox ``n`` without touching any container: none was made, its name is another's."""
        name = self.name(n)
        self._hub.forget(name)
        self._untold.discard(name)
        self._users.pop(name, None)
        self._drop(name)

    async def cold(self, call: Call) -> CallResult:
        """Run one call in a disposable container of its own."""
        link = self._require()
        async with self._disposable("cold") as (name, user):
            spec = ColdSpec(
                identity=self._identity(name, "cold", link.config_hash),
                profile=replace(link.profile, user=user),
                image=link.image,
                python=self._python.get(link.image.id, True),
            )
            return await cold_call(link.engine, self._hub, spec, call)

    @asynccontextmanager
    async def _disposable(self, kind: Literal["cold", "probe"]) -> AsyncIterator[tuple[str, str]]:
        """Name and user of a container that ends with the block, in the ledger for as long as it may exist."""
        self._colds += 1
        name = f"emberpool-{self._state.pool_id}-{self.instance}-{kind[0]}{self._colds}"
        user = self._enter(name, kind, self._require().image)
        watch = self._hub.watch(name)
        try:
            yield name, user
        finally:
            # Where its absence is not confirmed the entry stays, and the next resync removes the container.
            self._users.pop(name, None)
            if watch.destroyed.is_set():
                self._drop(name)

    def _drop(self, name: str) -> None:
        """Drop an entry whose container is gone; one that cannot be dropped now is dropped by the next resync."""
        try:
            self._state.drop(name)
        except PoolUnusable as error:
            log.warning("pool.entry_stays", sandbox=name, pool=self._state.pool_id, error=str(error))

    async def sweep(self) -> int:
        """Remove every container of the ledger that this instance does not use; how many there were.

        An entry that knows its container's full ID removes only that; one that does not (its start was cut off) removes
        the container of its name if that carries this pool's label. Nothing else is touched, however it is labelled.
        What the engine will not remove now stays in the ledger for the next time: one stuck container must not close
        the pool for all. Raises ``PoolUnusable``.
        """
        swept = 0
        for entry in self._state.entries():
            if entry.name in self._users:
                continue
            try:
                await self._remove_own(entry)
            except EmberpoolError as error:
                log.warning("pool.not_swept", sandbox=entry.name, pool=self._state.pool_id, error=str(error))
                continue
            self._state.drop(entry.name)
            swept += 1
        return swept

    async def last_sweep(self) -> list[str]:
        """Sweep once more as the pool ends; the names of the containers that may exist all the same."""
        try:
            if self.connection is not None and any(one.name not in self._users for one in self._state.entries()):
                with anyio.move_on_after(LAST_SWEEP):
                    await self.sweep()
            return sorted({*self._users, *(entry.name for entry in self._state.entries())})
        except PoolUnusable as error:
            log.warning("pool.not_swept", pool=self._state.pool_id, error=str(error))
            return sorted(self._users)

    async def _remove_own(self, entry: Entry) -> None:
        engine = self._require().engine
        try:
            facts = await engine.inspect(entry.name)
        except ContainerGone:
            if not entry.container and time.time() - entry.created < LATE_START:
                raise  # a start that was given up may still arrive
            return
        try:
            container, labels = str(facts["Id"]), dict(facts["Config"]["Labels"] or {})
        except (LookupError, TypeError, ValueError) as error:
            raise EngineFailed(f"the engine's record of {entry.name} has an unknown form") from error
        ours = container == entry.container if entry.container else labels.get(LABEL_POOL) == self._state.pool_id
        if ours:
            await engine.remove(container)
        else:
            log.warning("pool.foreign_container", sandbox=entry.name, pool=self._state.pool_id)
