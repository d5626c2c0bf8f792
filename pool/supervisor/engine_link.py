"""The pool's link to its engine: connect, sweep what an earlier instance left, follow the events, resync, and again.

One loop that never gives up: whatever breaks the link ends one round of it, the core gets an event, and the next round begins.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from executor.common.log import get_logger
from executor.engine.events import EventHub
from executor.engine.paths import engine_paths
from executor.engine.protocol import Engine, EngineEvent, EngineInfo, ImageInfo
from executor.errors import EmberpoolError, EngineUnavailable, ImageMissing
from executor.machine.private_engine import hold_engine
from executor.sandbox.profile import LABEL_POOL
from pool.config.load import Settings
from pool.core.events import EngineDown, EngineUp, Event, Fault, RefusalKind, SandboxDied
from pool.ledger.ledger import Entry
from pool.supervisor.containers import ContainerManager, connection
from pool.supervisor.refusals import fault_of
from pool.supervisor.startup import MakeImage, make_image

log = get_logger("emberpool.pool")

FindEngine = Callable[[], Awaitable[tuple[Engine, EngineInfo]]]
_RETRY_CAP = 5.0
IMAGE_RETRY = 5.0


class LinkOwner(Protocol):
    """What the link needs of the pool: to feed its core, to draw jitter, and to know which sandboxes should run."""

    def feed(self, event: Event) -> None: ...
    def jitter(self) -> float: ...
    def running(self) -> list[int]: ...


class EngineLink:
    """Keeps ``containers.connection`` and the hub current while ``run`` runs."""

    def __init__(
        self,
        settings: Settings,
        find: FindEngine,
        pool_id: str,
        hub: EventHub,
        containers: ContainerManager,
        owner: LinkOwner,
        make_image: MakeImage = make_image,
    ) -> None:
        self._settings, self._find, self._pool_id, self._make_image = settings, find, pool_id, make_image
        self._no_image: str | None = None
        self._hub, self._containers, self._owner = hub, containers, owner
        self._since, self._up, self._held = "", False, False
        self._seen: set[tuple[int, str, str, str]] = set()

    async def run(self) -> None:
        """Connect again and again, for as long as the pool lives."""
        with ExitStack() as self._stack:
            await self._rounds()

    async def _rounds(self) -> None:
        failures = 0
        while True:
            try:
                await self._round()
            except (EmberpoolError, OSError) as raised:
                error = (
                    raised
                    if isinstance(raised, EmberpoolError)
                    else EngineUnavailable(f"the host cannot ask it: {raised}")
                )
                failures = 1 if self._up else failures + 1
                self._hub.connected = self._up = False
                wait = min(_RETRY_CAP, 0.2 * 2.0 ** min(failures, 10)) * (0.5 + 0.5 * self._owner.jitter())
                self._owner.feed(EngineDown(fault_of(error), wait))
                log.warning(
                    "pool.engine_down", pool=self._pool_id, reason=error.reason, error=str(error), retry_after=wait
                )
                await anyio.sleep(wait)

    async def _round(self) -> None:
        engine, info = await self._find()
        if info.private and not self._held:
            # From now on `emberpool engine down` refuses, for as long as this pool lives.
            self._stack.enter_context(hold_engine(engine_paths()))
            self._held = True
        image = await self._image(engine)
        self._containers.connection = connection(self._settings, engine, info, image, self._pool_id)
        # Events are subscribed to from a moment before anything is started, so none can be missed.
        # Kept for the next round: one that sees no event must not lose those between it and the next.
        self._since = self._since or info.time or "0"
        async with engine.events(LABEL_POOL, self._pool_id, self._since) as events:
            self._hub.connected = True
            ended: list[EmberpoolError | OSError] = []

            def answered() -> None:
                self._up = True
                self._owner.feed(EngineUp())
                log.info(
                    "pool.engine_up", pool=self._pool_id, engine=info.endpoint, version=info.version, image=image.id
                )

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_in_step, engine, answered, ended, tasks)
                try:
                    async for event in events:
                        self._take(event)
                except EmberpoolError as error:
                    ended.append(error)
                tasks.cancel_scope.cancel()
        raise ended[0] if ended else EngineUnavailable("the engine's event stream ended", retry_after=0.5)

    async def _keep_in_step(
        self, engine: Engine, answered: Callable[[], None], ended: list[EmberpoolError | OSError], tasks: TaskGroup
    ) -> None:
        """Look at the engine now and again and again. It is up with its first answer: what an earlier instance left, and
        what cannot be removed, keeps nobody waiting, nor do they keep each other."""
        try:
            await self._resync(engine)
            found = await self._containers.survey()
            answered()
            while True:
                tasks.start_soon(self._sweep, found)
                await anyio.sleep(self._settings.pool.resync_interval)
                await self._resync(engine)
                found = await self._containers.survey()
        except (EmberpoolError, OSError) as error:
            ended.append(error)
            tasks.cancel_scope.cancel()

    async def _sweep(self, found: list[Entry]) -> None:
        if swept := await self._containers.sweep(found):
            log.info("pool.swept", pool=self._pool_id, containers=swept)

    async def _image(self, engine: Engine) -> ImageInfo:
        try:
            return await engine.image(self._settings.sandbox.image)
        except ImageMissing as error:
            if self._containers.connection is not None:
                # What runs needs its image no more: follow it, and let the next start find out.
                return self._containers.connection.image
            if self._no_image is None:
                return await self._bring_image(engine)
            raise self._missing() from error

    async def _bring_image(self, engine: Engine) -> ImageInfo:
        """Pull or build the image, once in the pool's life; requests that come meanwhile are refused with that reason."""
        reference, said = self._settings.sandbox.image, "looking for it"
        self._no_image = ""

        def report(text: str) -> None:
            nonlocal said
            said = text
            refuse()
            log.info("pool.image", pool=self._pool_id, image=reference, progress=text)

        def refuse() -> None:
            message = f"the image {reference} is being made ready ({said}); come back in a while"
            self._owner.feed(EngineDown(Fault(RefusalKind.ENGINE_UNAVAILABLE, message), IMAGE_RETRY))

        async def go_on_telling() -> None:
            # A pull can be silent for minutes, and when to come back is reckoned from the last word.
            while True:
                refuse()
                await anyio.sleep(IMAGE_RETRY)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(go_on_telling)
            try:
                return await self._make_image(engine, reference, report)
            except (EmberpoolError, OSError) as error:
                failure = error  # raised out here: a task group would wrap it
            finally:
                tasks.cancel_scope.cancel()
        self._no_image = str(failure)
        raise self._missing() from failure

    def _missing(self) -> ImageMissing:
        reference = self._settings.sandbox.image
        message = f"the image {reference} is not on the engine; run: emberpool image build --image {reference}"
        # What was in the way here may be in the way of that step too.
        return ImageMissing(message + (f" (the pool could not bring it: {self._no_image})" if self._no_image else ""))

    def _take(self, event: EngineEvent) -> None:
        # A new subscription repeats what lies in its first moment; an event counts once.
        mark = (event.time, event.container, event.action, event.exec_id)
        if mark in self._seen:
            return
        if len(self._seen) > 4096:
            self._seen.clear()
        self._seen.add(mark)
        if event.time:
            self._since = f"{event.time // 1_000_000_000}.{event.time % 1_000_000_000:09d}"
        watch = self._hub.publish(event)
        n = self._containers.number(event.name)
        if watch is not None and n is not None and event.action in ("die", "destroy", "pause"):
            # An event from before the engine answered happened while it was away, and may be its own doing.
            cause = watch.cause if self._up else "engine"
            self._owner.feed(SandboxDied(n, cause, self._owner.jitter()))

    async def _resync(self, engine: Engine) -> None:
        """Heal lost events: what should live and is not running has died."""
        expected = {self._containers.name(n): n for n in self._owner.running()}
        running = {row.name for row in await engine.list(LABEL_POOL, self._pool_id) if row.running}
        living = set(self._owner.running())
        for name, n in expected.items():
            if name not in running and n in living:
                watch = self._hub.watch(name)
                watch.lost()
                self._owner.feed(SandboxDied(n, watch.cause, self._owner.jitter()))
