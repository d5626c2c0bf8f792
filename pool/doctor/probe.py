"""One real sandbox and one real cold call, made like a pool makes them, to see whether the boundary is really there.

All containers are in a ledger before their start, end by themselves within a minute, and are removed before this
returns, however it ends.
"""

from __future__ import annotations

import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from executor.common.log import get_logger
from executor.common.printable import printable
from executor.engine.cgroups import remove_parent
from executor.engine.events import EventHub
from executor.engine.protocol import Engine, EngineEvent, EngineInfo, ImageInfo
from executor.errors import EmberpoolError, ImageUnfit, ProfileMismatch
from executor.sandbox.cold import ColdSpec, cold_call, has_python
from executor.sandbox.profile import LABEL_CONFIG, LABEL_INSTANCE, LABEL_KIND, LABEL_POOL, Identity
from executor.sandbox.request import Call
from executor.sandbox.sandbox import Sandbox, SandboxSpec
from executor.sandbox.start import start_sandbox
from pool.config.load import Settings
from pool.ledger.ledger import Entry, StateDirectory
from pool.supervisor.containers import Connection, connection, runner_options
from pool.supervisor.users import UserPolicy

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


class _Bench:
    """The probes' own state directory and events."""

    def __init__(self, settings: Settings, state: StateDirectory, link: Connection) -> None:
        self.hub = EventHub()
        self.left: list[str] = []
        self._settings, self._state, self._link = settings, state, link
        self._instance = secrets.token_hex(4)
        box = settings.sandbox
        self._users = UserPolicy(box.user, box.uid_range, tuple(box.mounts))
        self._python = False

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
        """Start a sandbox as a pool does: its boundary read back from the engine and from inside, a runner armed where the
        image has Python, and a call made that keeps a file in ``/tmp``."""
        python = self._python = await self._has_python()
        identity, user = self._enter("sandbox")
        try:
            staging, nonce = self._state.stage(identity.name)
            spec = SandboxSpec(
                identity=identity,
                profile=replace(self._link.profile, user=self._users.keeper, cpu_limit=not python),
                image=self._link.image,
                user=user,
                staging=str(staging),
                nonce=nonce,
                lifetime=LIFETIME,
                runner=runner_options(self._settings),
            )
            async with anyio.create_task_group() as tasks:
                began = anyio.current_time()
                box = await start_sandbox(self._link.engine, self.hub, spec, python=python, tasks=tasks)
                took = anyio.current_time() - began
                try:
                    call = await _first_call(box)
                finally:
                    box.close_runners()
                    tasks.cancel_scope.cancel()
            seccomp = ", the strict seccomp profile too," if self._link.profile.seccomp == "strict" else ""
            return f"each point{seccomp} read back equal from the engine and from inside ({took:.1f} s); {call}"
        finally:
            await self._remove(identity.name)

    async def _has_python(self) -> bool:
        identity, user = self._enter("python")
        profile = replace(self._link.profile, user=user)
        spec = ColdSpec(identity=identity, profile=profile, image=self._link.image)
        try:
            return await has_python(self._link.engine, self.hub, spec)
        finally:
            await self._remove(identity.name)

    async def cold(self) -> str:
        """Ask in a disposable container for the uid, the way that a call of a pool goes, and compare it."""
        identity, user = self._enter("cold")
        spec = ColdSpec(
            identity=identity,
            profile=replace(self._link.profile, user=user),
            image=self._link.image,
            python=self._python,
        )
        call = Call(argv=("cat", "/proc/self/status"), timeout=_COLD_TIMEOUT)
        if self._python:
            call = Call(code="print(open('/proc/self/status').read())", timeout=_COLD_TIMEOUT)
        try:
            done = await cold_call(self._link.engine, self.hub, spec, call)
        finally:
            await self._remove(identity.name)
        uids = re.search(rb"^Uid:\t(\d+)\t(\d+)", done.stdout, re.MULTILINE)
        said = uids[2].decode() if uids else "nothing"
        wanted = user.partition(":")[0]
        if not done.ok or said == "0" or not uids or (wanted.isdigit() and said != wanted):
            shown = printable(done.stderr)[-400:]
            raise ProfileMismatch(f"its uid was {said} where {wanted} was asked (exit {done.exit_code}) {shown}")
        return f"its uid was {said}, and its container is gone ({done.duration:.1f} s)"

    async def _remove(self, name: str) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(REMOVE_PATIENCE):
            try:
                await self._link.engine.remove(name)
                self._state.drop(name)
                return
            except EmberpoolError as error:
                log.warning("doctor.remove_failed", sandbox=name, error=str(error))
        self.left.append(name)
