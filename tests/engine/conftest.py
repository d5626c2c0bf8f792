"""A real engine for tests: its events feed a hub, and whatever a test leaves behind fails it."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.engine.docker import CommandLineEngine
from executor.engine.events import EventHub
from executor.engine.locate import find_engine
from executor.engine.protocol import EngineInfo, ImageInfo
from executor.errors import EmberpoolError
from executor.result import CallResult
from executor.sandbox.cold import ColdSpec, cold_call
from executor.sandbox.profile import LABEL_POOL, ContainerProfile, Identity
from executor.sandbox.request import Call
from executor.sandbox.sandbox import RunnerOptions, Sandbox, SandboxSpec
from executor.sandbox.start import start_sandbox
from tests.engine.faulty import IMAGE
from tests.engine.faulty import daemon as daemon
from tests.engine.faulty import private_daemon as private_daemon
from tests.engine.faulty import recoveries as recoveries

KEEPER = 1_879_048_192


@dataclass
class Room:
    """One test's share of the engine. ``pool`` is in every name and label of it."""

    engine: CommandLineEngine
    info: EngineInfo
    image: ImageInfo
    hub: EventHub
    pool: str
    place: Path
    made: int = 0
    images: list[str] = field(default_factory=list)

    def identity(self) -> Identity:
        self.made += 1
        return Identity(name=f"{self.pool}-{self.made}", labels={LABEL_POOL: self.pool})

    def spec(self, **changes: Any) -> SandboxSpec:
        """What a sandbox is started from; ``profile`` is a mapping of changes to the default one."""
        identity = self.identity()
        staging = self.place / identity.name
        staging.mkdir(mode=0o755)
        nonce = secrets.token_hex(16)
        (staging / "nonce").write_text(f"{nonce}\n")
        calls = KEEPER + 1 + secrets.randbelow(60_000)
        profile = replace(ContainerProfile(user=f"{KEEPER}:{KEEPER}"), **changes.pop("profile", {}))
        facts: dict[str, Any] = {
            "identity": identity,
            "profile": profile,
            "image": self.image,
            "user": f"{calls}:{calls}",
            "staging": str(staging),
            "nonce": nonce,
            "lifetime": 600.0,
        }
        return SandboxSpec(**{**facts, **changes})

    @asynccontextmanager
    async def sandbox(self, *, python: bool | None = True, **changes: Any) -> AsyncIterator[Sandbox]:
        """A started and verified sandbox that is removed at the end."""
        spec = self.spec(**changes)
        try:
            yield await start_sandbox(self.engine, self.hub, spec, python=python)
        finally:
            with anyio.CancelScope(shield=True):
                await self.engine.remove(spec.identity.name)

    @asynccontextmanager
    async def armed(
        self, *, calls: int = 0, parallel: int = 1, grace: float = 0.5, **changes: Any
    ) -> AsyncIterator[Sandbox]:
        """A sandbox whose calls go to runners (``calls`` for each exec, 0 for no limit), removed at the end."""
        profile = {"cpu_limit": False, **changes.pop("profile", {})}
        options = RunnerOptions(calls=calls, parallel=parallel, grace=grace, preload=changes.pop("preload", ()))
        spec = self.spec(profile=profile, runner=options, **changes)
        async with anyio.create_task_group() as tasks:
            box = None
            try:
                box = await start_sandbox(self.engine, self.hub, spec, python=True, tasks=tasks)
                yield box
            finally:
                with anyio.CancelScope(shield=True):
                    if box is not None:
                        box.close_runners()
                    await self.engine.remove(spec.identity.name)

    async def cold(
        self, call: Call, *, python: bool = True, image: ImageInfo | None = None, **profile: Any
    ) -> CallResult:
        """One cold call under a uid of its own."""
        calls = KEEPER + 1 + secrets.randbelow(60_000)
        shared = ContainerProfile(**{"user": f"{calls}:{calls}", **profile})
        spec = ColdSpec(identity=self.identity(), profile=shared, image=image or self.image, python=python)
        return await cold_call(self.engine, self.hub, spec, call)

    async def gone(self, name: str) -> bool:
        """Whether a container is absent."""
        return name not in [row.name for row in await self.engine.list(LABEL_POOL, self.pool)]

    async def import_image(self, tar: Path, *changes: str) -> ImageInfo:
        """An image of one test's own, removed at its end."""
        reference = f"localhost/{self.pool}:{len(self.images)}"
        await self.engine.import_tar(tar, reference, changes)
        self.images.append(reference)
        return await self.engine.image(reference)


@pytest.fixture
async def real_engine(
    anyio_backend: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Room]:
    """The engine, or a skip without one (a failure where ``EMBERPOOL_CI`` says that there must be one)."""
    missing = pytest.fail if os.environ.get("EMBERPOOL_CI") else pytest.skip
    # Something of this process's own that no client may inherit.
    monkeypatch.setenv("EMBERPOOL_TEST_FOREIGN", f"foreign-{secrets.token_hex(6)}")
    try:
        engine, info = await find_engine()
        image = await engine.image(IMAGE)
    except EmberpoolError as error:
        missing(f"no engine with {IMAGE}: {error}")
    pool = f"ember-test-{secrets.token_hex(5)}"
    place = tmp_path_factory.mktemp("staging")
    for parent in (place, place.parent, place.parent.parent):
        parent.chmod(0o755)  # the calls' uid reads what is mounted; pytest makes its directories private
    room = Room(engine, info, image, EventHub(), pool, place)

    async def follow(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with engine.events(LABEL_POOL, pool, info.time or "0") as events:
            room.hub.connected = True
            task_status.started()
            async for event in events:
                room.hub.publish(event)

    async with anyio.create_task_group() as tasks:
        await tasks.start(follow)
        yield room
        tasks.cancel_scope.cancel()
    left = [row.name for row in await engine.list(LABEL_POOL, pool)]
    for name in left:
        await engine.remove(name)
    for reference in room.images:
        await engine._ask("rmi", "-f", reference, doing="removing a test's image")
    assert left == [], "the test left containers behind"
