"""One real sandbox and one real cold call, made like a pool makes them, to see whether the boundary is really there.

Both containers are in a ledger before their start, end by themselves within a minute, and are removed before this
returns, however it ends.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from executor.call import Call
from executor.cgroups import remove_parent
from executor.cold import ColdSpec, cold_call
from executor.engine import Engine, EngineEvent, EngineInfo, ImageInfo
from executor.log import get_logger
from executor.printable import printable
from executor.profile import LABEL_CONFIG, LABEL_INSTANCE, LABEL_KIND, LABEL_POOL, Identity
from executor.result import EmberpoolError, ProfileMismatch
from executor.sandbox import SandboxSpec, start_sandbox
from executor.watch import EventHub
from pool.config import Settings
from pool.ledger import Entry, StateDirectory
from pool.users import UserPolicy
from pool.workshop import Connection, connection

log = get_logger("emberpool.doctor")

LIFETIME = 60.0
"""Seconds after which a probe's PID 1 ends by itself, whatever has become of the doctor."""
PATIENCE = 45.0
REMOVE_PATIENCE = 20.0
_COLD_TIMEOUT = 20.0


@dataclass(slots=True)
class Probed:
    """What the probes found: a line each, or the error that refused it. ``left``: containers not confirmed gone."""

    sandbox: str = ""
    sandbox_error: Exception | None = None
    cold: str = ""
    cold_error: Exception | None = None
    left: list[str] = field(default_factory=list)


async def probe(settings: Settings, engine: Engine, info: EngineInfo, image: ImageInfo) -> Probed:
    """Start a sandbox and make a cold call. What is wrong with the boundary is in the answer; raises ``PoolUnusable``
    or the engine's error where a probe could not even be made."""
    found = Probed()
    with tempfile.TemporaryDirectory(prefix="emberpool-doctor-", dir=_place(settings)) as place:
        state = StateDirectory.open(Path(place) / "state")
        link = connection(settings, engine, info, image, state.pool_id)
        try:
            async with engine.events(LABEL_POOL, state.pool_id, info.time or "0") as events:
                bench = _Bench(settings, state, link)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_follow, bench.hub, events)
                    found.sandbox, found.sandbox_error = await _told(bench.sandbox)
                    found.cold, found.cold_error = await _told(bench.cold)
                    tasks.cancel_scope.cancel()
                found.left = bench.left
        finally:
            remove_parent(link.profile.cgroup_parent)
            state.close()
    return found


def _place(settings: Settings) -> Path | None:
    """Where the probe's staging stands: beside the pool's own where that exists; the daemon has to reach it there."""
    pools = settings.pool.state_dir.parent
    try:
        if not pools.stat().st_mode & 0o022:
            with tempfile.TemporaryDirectory(dir=pools):
                return pools
    except OSError:
        pass
    return None


async def _told(work: Callable[[], Awaitable[str]]) -> tuple[str, Exception | None]:
    try:
        with anyio.fail_after(PATIENCE):
            return await work(), None
    except TimeoutError:
        return "", TimeoutError(f"did not end within {PATIENCE:g} s")
    except EmberpoolError as error:
        return "", error


async def _follow(hub: EventHub, events: AsyncIterator[EngineEvent]) -> None:
    hub.connected = True
    try:
        async for event in events:
            hub.publish(event)
    except EmberpoolError as error:
        log.debug("doctor.events_lost", error=str(error))
    hub.connected = False


class _Bench:
    """The probes' own state directory and events."""

    def __init__(self, settings: Settings, state: StateDirectory, link: Connection) -> None:
        self.hub = EventHub()
        self.left: list[str] = []
        self._settings, self._state, self._link = settings, state, link
        self._instance = secrets.token_hex(4)
        box = settings.sandbox
        self._users = UserPolicy(box.user, box.uid_range, tuple(box.mounts))

    def _enter(self, part: str) -> tuple[Identity, str]:
        """A probe's name and labels, and its calls' user; it stands in the ledger from here on."""
        offset = secrets.randbelow(self._settings.sandbox.uid_range.count)
        user = self._users.calls_user(self._link.image, (), offset=offset)
        name = f"emberpool-{self._state.pool_id}-{self._instance}-{part}"
        labels = {
            LABEL_POOL: self._state.pool_id,
            LABEL_INSTANCE: self._instance,
            LABEL_CONFIG: self._link.config_hash,
            LABEL_KIND: "probe",
        }
        self._state.enter(Entry(name, "probe", user=user, created=time.time()))
        return Identity(name=name, labels=labels), user

    async def sandbox(self) -> str:
        """Start a sandbox, and have its boundary read back from the engine and from inside."""
        identity, user = self._enter("sandbox")
        try:
            staging, nonce = self._state.stage(identity.name)
            spec = SandboxSpec(
                identity=identity,
                profile=replace(self._link.profile, user=self._users.keeper),
                image=self._link.image,
                user=user,
                staging=str(staging),
                nonce=nonce,
                lifetime=LIFETIME,
            )
            began = anyio.current_time()
            box = await start_sandbox(self._link.engine, self.hub, spec)
            took = anyio.current_time() - began
            python = "the image has python3" if box.python else "the image has no python3: argv calls only"
            return f"each point, seccomp too, read back equal from the engine and from inside ({took:.1f} s); {python}"
        finally:
            await self._remove(identity.name)

    async def cold(self) -> str:
        """Run ``id`` in a disposable container, and compare the uid that it says."""
        identity, user = self._enter("cold")
        spec = ColdSpec(
            identity=identity,
            profile=replace(self._link.profile, user=user),
            image=self._link.image,
            python=False,
        )
        try:
            # Whatever the image holds, `id` goes without the loader; python3 may be missing in it.
            done = await cold_call(self._link.engine, self.hub, spec, Call(argv=("id", "-u"), timeout=_COLD_TIMEOUT))
        finally:
            await self._remove(identity.name)
        said = printable(done.stdout, limit=40)
        wanted = user.partition(":")[0]
        if not done.ok or said == "0" or (wanted.isdigit() and said != wanted):
            shown = printable(done.stderr, limit=200)
            raise ProfileMismatch(f"`id -u` said {said!r} where uid {wanted} was asked (exit {done.exit_code}) {shown}")
        return f"`id -u` said {said}, and its container is gone ({done.duration:.1f} s)"

    async def _remove(self, name: str) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(REMOVE_PATIENCE):
            try:
                await self._link.engine.remove(name)
                self._state.drop(name)
                return
            except EmberpoolError as error:
                log.warning("doctor.remove_failed", sandbox=name, error=str(error))
        self.left.append(name)
