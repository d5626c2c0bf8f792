"""One real sandbox and one real cold call, made like a pool makes them, to see whether the boundary is really there.

All containers are in a ledger before their start, end by themselves, and are removed before this returns, however it ends.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from executor.common.log import get_logger
from executor.common.printable import printable
from executor.engine.cgroups import remove_parent
from executor.engine.events import EventHub
from executor.engine.protocol import Engine, EngineEvent, EngineInfo, ImageInfo
from executor.errors import EmberpoolError, ImageUnfit, ProfileMismatch
from executor.sandbox.profile import LABEL_POOL
from executor.sandbox.request import Call
from executor.sandbox.sandbox import Sandbox
from executor.staging.threads import StagingThreads
from pool.config.load import Settings
from pool.ledger.ledger import StateDirectory
from pool.supervisor.containers import Connection, ContainerManager, connection
from pool.supervisor.users import UserPolicy

log = get_logger("emberpool.doctor")

LIFETIME = 60.0
"""Seconds after which a probe's PID 1 ends by itself; a call's timeout and grace are added to them, as for any sandbox."""
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
    found, settings = Probed(), _short_lived(settings)
    with tempfile.TemporaryDirectory(prefix="emberpool-doctor-", dir=_place(settings)) as place:
        state = StateDirectory.open(Path(place) / "state")
        link, hub = connection(settings, engine, info, image, state.pool_id), EventHub()
        probes = _Probes(settings, state, hub, link)
        try:
            async with engine.events(LABEL_POOL, state.pool_id, info.time or "0") as events:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_follow, hub, events)
                    found.sandbox, found.sandbox_error = await _outcome(probes.sandbox)
                    found.cold, found.cold_error = await _outcome(probes.cold)
                    tasks.cancel_scope.cancel()
                found.left = probes.left
        finally:
            remove_parent(link.profile.cgroup_parent)
            state.close()
    return found


def _short_lived(settings: Settings) -> Settings:
    """Return settings with which a sandbox ends by itself soon, whatever has become of the doctor."""
    ages = {"standby_max_age": LIFETIME / 2, "max_lifetime": LIFETIME / 2}
    return settings.model_copy(update={"pool": settings.pool.model_copy(update=ages)})


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


async def _outcome(work: Callable[[], Awaitable[str]]) -> tuple[str, Exception | None]:
    try:
        with anyio.fail_after(PATIENCE):
            return await work(), None
    except TimeoutError:
        return "", TimeoutError(f"did not end within {PATIENCE:g} s")
    except EmberpoolError as error:
        return "", error
    except ExceptionGroup as group:  # of the task group that keeps a runner
        return "", _first_of(group)


def _first_of(group: ExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, ExceptionGroup) else first


async def _follow(hub: EventHub, events: AsyncIterator[EngineEvent]) -> None:
    hub.connected = True
    try:
        async for event in events:
            hub.publish(event)
    except EmberpoolError as error:
        log.debug("doctor.events_lost", error=str(error))
    hub.connected = False


async def _first_call(box: Sandbox) -> str:
    """Make a call that keeps a file, and say how calls go."""
    if not box.python:
        done = await box.call(Call(argv=("cat", "/dev/null"), timeout=_COLD_TIMEOUT))
        how = "the image has no python3: argv calls only, none as fast as with one"
    else:
        code = "open('/tmp/probe', 'w').write('1')\nprint(open('/tmp/probe').read())"
        done = await box.call(Call(code=code, timeout=_COLD_TIMEOUT))
        how = f"a runner was armed, and answered in {done.duration * 1000:.0f} ms"
    if not done.ok:
        said = printable(done.stderr)[-400:]
        raise ImageUnfit(f"a sandbox started, and its first call failed (exit status {done.exit_code}): {said}")
    return how


class _Probes:
    """One sandbox and one cold call, made by the container manager of a pool that has nothing else."""

    def __init__(self, settings: Settings, state: StateDirectory, hub: EventHub, link: Connection) -> None:
        self.left: list[str] = []
        self._settings, self._state, self._hub, self._link = settings, state, hub, link

    def _manager(self, tasks: TaskGroup) -> ContainerManager:
        manager = ContainerManager(self._settings, self._state, self._hub, tasks, StagingThreads())
        manager.connection = self._link
        return manager

    async def sandbox(self) -> str:
        """Start a sandbox as a pool does: its boundary read back from the engine and from inside, a runner armed where the
        image has Python, and a call made that keeps a file in ``/tmp``."""
        async with anyio.create_task_group() as tasks:
            manager = self._manager(tasks)
            try:
                await manager.enter(1)
                began = anyio.current_time()
                box = await manager.start(1)
                took = anyio.current_time() - began
                call = await _first_call(box)
            finally:
                await self._clear(manager, 1)
        seccomp = ", the strict seccomp profile too," if self._link.profile.seccomp == "strict" else ""
        return f"each point{seccomp} read back equal from the engine and from inside ({took:.1f} s); {call}"

    async def cold(self) -> str:
        """Ask in a disposable container for the uid, the way that a call of a pool goes, and compare it."""
        async with anyio.create_task_group() as tasks:
            manager = self._manager(tasks)
            try:
                done = await manager.cold(Call(argv=("cat", "/proc/self/status"), timeout=_COLD_TIMEOUT))
            finally:
                await self._clear(manager)
        uids = re.search(rb"^Uid:\t(\d+)\t(\d+)", done.stdout, re.MULTILINE)
        said = uids[2].decode() if uids else "nothing"
        box = self._settings.sandbox
        policy = UserPolicy(box.user, box.uid_range, tuple(box.mounts))
        if not done.ok or not uids or said == "0" or not policy.allows(int(said), self._link.image):
            shown = printable(done.stderr)[-400:]
            wanted = policy.calls_user(self._link.image, (), offset=0).partition(":")[0]
            raise ProfileMismatch(
                f"its uid was {said} where one like {wanted} was asked (exit {done.exit_code}) {shown}"
            )
        return f"its uid was {said}, and its container is gone ({done.duration:.1f} s)"

    async def _clear(self, manager: ContainerManager, *numbers: int) -> None:
        """Remove what a probe has made, and note what may still exist."""
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(REMOVE_PATIENCE):
                for number in numbers:
                    try:
                        await manager.stop(number)
                    except EmberpoolError as error:
                        log.warning("doctor.remove_failed", sandbox=manager.name(number), error=str(error))
            for name in await manager.last_sweep(everything=True):
                # By its name: nobody else has names of this state directory.
                try:
                    await self._link.engine.remove(name)
                    self._state.drop(name)
                except EmberpoolError as error:
                    log.warning("doctor.remove_failed", sandbox=name, error=str(error))
                    self.left.append(name)
