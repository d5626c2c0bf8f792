"""A sandbox with a runner on a scripted engine, without a pool around it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from executor.engine.events import EventHub
from executor.sandbox.profile import LABEL_POOL, ContainerProfile, Identity
from executor.sandbox.sandbox import RunnerOptions, Sandbox, SandboxSpec
from executor.sandbox.start import start_sandbox
from tests.support.scripted import IMAGE, ScriptedEngine

NAME = "emberpool-test-1"
NONCE = "0123456789abcdef"


@dataclass(slots=True)
class Site:
    """Where a sandbox is started: its engine, a hub that follows it, and a group for its tasks."""

    engine: ScriptedEngine
    hub: EventHub
    tasks: TaskGroup
    staging: Path

    async def start(self, *, calls: int = 1, parallel: int = 1, grace: float = 2.0) -> Sandbox:
        """Start the sandbox, its runners armed."""
        spec = SandboxSpec(
            identity=Identity(name=NAME, labels={LABEL_POOL: "test"}),
            profile=ContainerProfile(user="1:1", cpu_limit=False),
            image=IMAGE,
            user="2:2",
            staging=str(self.staging),
            nonce=NONCE,
            lifetime=1e6,
            runner=RunnerOptions(calls=calls, parallel=parallel, grace=grace),
        )
        return await start_sandbox(self.engine, self.hub, spec, python=True, tasks=self.tasks)


@asynccontextmanager
async def site(staging: Path, engine: ScriptedEngine) -> AsyncIterator[Site]:
    """A site on ``engine``, for one sandbox."""
    (staging / "nonce").write_text(NONCE + "\n")
    hub = EventHub()
    async with engine, anyio.create_task_group() as tasks:
        tasks.start_soon(_follow, engine, hub)
        while not hub.connected:  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.001)
        yield Site(engine, hub, tasks, staging)
        tasks.cancel_scope.cancel()


async def _follow(engine: ScriptedEngine, hub: EventHub) -> None:
    """What the pool's link does: hand on every event once, and connect again."""
    since, seen = 0, 0
    while True:
        if engine.up_now:
            async with engine.events(LABEL_POOL, "test", f"{since // 10**9}.{since % 10**9:09d}") as events:
                hub.connected = True
                async for event in events:
                    since = event.time
                    if event.time > seen:
                        seen = event.time
                        hub.publish(event)
        hub.connected = False
        await anyio.sleep(0.05)
