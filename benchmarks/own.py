"""A sandbox of the measured profile that no pool owns: its state directory, ledger and events are its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
from anyio.abc import TaskStatus

from benchmarks.bench import STILL, Bench, temporary_state
from executor.common.log import get_logger
from executor.engine.cgroups import remove_parent
from executor.engine.events import EventHub
from executor.errors import EmberpoolError
from executor.sandbox.profile import LABEL_CONFIG, LABEL_INSTANCE, LABEL_KIND, LABEL_POOL, Identity
from executor.sandbox.sandbox import RunnerOptions, Sandbox, SandboxSpec
from executor.sandbox.start import start_sandbox
from pool.ledger.ledger import Entry, StateDirectory
from pool.supervisor.containers import connection
from pool.supervisor.users import UserPolicy

log = get_logger("emberpool.benchmark")

REMOVE_PATIENCE = 30.0


@asynccontextmanager
async def own_sandbox(bench: Bench, *, runners: bool) -> AsyncIterator[Sandbox]:
    """A started and verified sandbox, gone again on leaving.

    With ``runners`` it is a pool's sandbox: one resident runner serves its calls, and the limit of CPU seconds is the
    runner's to set. Without, its calls go by plain exec, and the limit is the container's.
    """
    with temporary_state() as place:
        state = StateDirectory.open(place)
        link = connection(bench.settings, bench.engine, bench.info, bench.image, state.pool_id)
        hub, following = EventHub(), anyio.CancelScope()

        async def follow(*, task_status: TaskStatus[None]) -> None:
            # Opened and read in one task: whatever the stream's context holds must not span the caller's block.
            with following:
                try:
                    async with bench.engine.events(LABEL_POOL, state.pool_id, bench.info.time or "0") as events:
                        hub.connected = True
                        task_status.started()
                        async for event in events:
                            hub.publish(event)
                except EmberpoolError as error:
                    if not hub.connected:
                        raise
                    log.warning("benchmark.events_lost", error=str(error))
                hub.connected = False

        name = f"emberpool-{state.pool_id}-own"
        try:
            await bench.tasks.start(follow)
            spec = _spec(bench, state, name, cpu_limit=not runners)
            try:
                box = await start_sandbox(bench.engine, hub, spec, python=True, tasks=bench.tasks if runners else None)
                try:
                    yield box
                finally:
                    box.close_runners()
            finally:
                await _remove(bench, state, name)
        finally:
            following.cancel()
            remove_parent(link.profile.cgroup_parent)
            state.close()


def _spec(bench: Bench, state: StateDirectory, name: str, *, cpu_limit: bool) -> SandboxSpec:
    """What the sandbox is started from; it stands in the ledger from here on."""
    box = bench.settings.sandbox
    link = connection(bench.settings, bench.engine, bench.info, bench.image, state.pool_id)
    users = UserPolicy(box.user, box.uid_range, tuple(box.mounts))
    user = users.calls_user(bench.image, (), offset=secrets.randbelow(box.uid_range.count))
    state.enter(Entry(name, "probe", user=user, created=time.time()))
    place, nonce = state.stage(name)
    labels = {
        LABEL_POOL: state.pool_id,
        LABEL_INSTANCE: "benchmark",
        LABEL_CONFIG: link.config_hash,
        LABEL_KIND: "probe",
    }
    return SandboxSpec(
        identity=Identity(name=name, labels=labels),
        profile=replace(link.profile, user=users.keeper, cpu_limit=cpu_limit),
        image=bench.image,
        user=user,
        staging=str(place),
        nonce=nonce,
        lifetime=STILL,
        runner=RunnerOptions(calls=0, preload=box.preload, grace=bench.settings.call.grace),
    )


async def _remove(bench: Bench, state: StateDirectory, name: str) -> None:
    with anyio.CancelScope(shield=True), anyio.move_on_after(REMOVE_PATIENCE):
        try:
            await bench.engine.remove(name)
            state.drop(name)
        except EmberpoolError as error:
            log.warning("benchmark.left_behind", sandbox=name, ledger=str(state.path), error=str(error))
