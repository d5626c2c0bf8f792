"""A soak's load on one pool: clients that take their turns, and kills and resizes from outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

import anyio
from anyio.abc import TaskGroup

from benchmarks.soak_books import PoolState, Wound
from benchmarks.soak_log import LogTap
from benchmarks.soak_plan import KINDS, Blow, Size, Turn, agent_of, kills, probe, sizes, step_of, turns
from benchmarks.soak_steps import Steps, counted
from executor.engine.protocol import ContainerGone, Engine
from executor.errors import EmberpoolError
from pool.pool import SandboxPool
from pool.session import Session

KILL_EVERY, RESIZE_EVERY = 3.0, 8.0
"""Mean seconds between two kills of containers, and between two changes of the pool's size."""
PATIENCE = 20.0
HEAL_PATIENCE = 60.0
"""Seconds within which a session whose sandbox was killed must have had a good call again."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much load: so many ``clients`` at once, on a pool that begins and ends with these sizes."""

    seed: int
    clients: int
    min_standby: int
    max_sandboxes: int

    @property
    def sessions(self) -> int:
        """One less than fit beside the standbys, for one is always being stopped: while the pool has its full size nobody
        has to wait for lack of room, and when it is made smaller somebody has."""
        return max(2, self.max_sandboxes - self.min_standby - 1)


@dataclass(kw_only=True)
class Load:
    """What the clients share. ``latest`` is the newest handle on each session, by which its generation is known."""

    pool: SandboxPool
    engine: Engine
    tap: LogTap
    books: PoolState
    steps: Steps
    scale: Scale
    latest: dict[str, Session] = field(default_factory=dict)
    probes: Iterator[int] = field(default_factory=count)

    async def once_each(self) -> None:
        """Every kind of step, one after the other, so that nothing is done for the first time once it counts."""
        dice = Random(f"{self.scale.seed}/each")  # noqa: S311 - a schedule that can be had again
        steps = tuple(step_of(kind, dice, f"each-{kind}") for kind in KINDS)
        async with anyio.create_task_group() as healers:
            await self._turn(Turn(session="session-0", patience=PATIENCE, steps=steps), healers)

    async def run(self, name: str, seconds: float) -> None:
        """Load the pool for ``seconds``, and until what is under way then has ended. ``name`` distinguishes runs of one seed.

        Cancelled, all that is under way is cancelled too, and the books still balance.
        """
        scale, until = self.scale, anyio.current_time() + seconds
        seed = f"{scale.seed}/{name}"
        try:
            async with anyio.create_task_group() as healers, anyio.create_task_group() as outside:
                outside.start_soon(self._strike, kills(seed, KILL_EVERY), healers)
                outside.start_soon(self._resize, sizes(seed, RESIZE_EVERY, scale.min_standby, scale.max_sandboxes))
                async with anyio.create_task_group() as clients:
                    for number in range(scale.clients):
                        clients.start_soon(self._client, turns(seed, number, scale.sessions), until, healers)
                outside.cancel_scope.cancel()
        finally:
            self.pool.resize(min_standby=scale.min_standby, max_sandboxes=scale.max_sandboxes)

    # --- clients ------------------------------------------------------------------------------------------------------

    async def _client(self, plan: Iterator[Turn], until: float, healers: TaskGroup) -> None:
        for turn in plan:
            if anyio.current_time() >= until:
                return
            await self._turn(turn, healers, until)
            with anyio.CancelScope(deadline=until):
                await anyio.sleep(turn.gap)

    async def _turn(self, turn: Turn, healers: TaskGroup, until: float = float("inf")) -> None:
        handle = None
        with anyio.move_on_after(turn.give_up):
            handle = await self._acquire(turn.session, turn.patience)
        if not isinstance(handle, Session):
            return
        try:
            for step in turn.steps:
                if anyio.current_time() >= until:
                    break
                self.books.steps[step.kind] += 1
                with anyio.move_on_after(step.give_up):
                    await self.steps.carry_out(turn.session, handle, step)
                if step.kind == "kill_runner":
                    healers.start_soon(self._heal, turn.session)
        finally:
            # Neither waits for anything, so a cancel does not tear them.
            if turn.close:
                self.books.closed(turn.session)
                await handle.close()
            else:
                await handle.release()

    async def _acquire(self, session: str, patience: float) -> Session | EmberpoolError | None:
        """A handle on the session; where it came from is booked."""
        tally, mark = self.books.acquires, self.tap.starts
        had = latest.generation if (latest := self.latest.get(session)) else None
        handle = await counted(
            self.books, tally, lambda: self.pool.acquire(agent_of(session), session, timeout=patience)
        )
        if isinstance(handle, Session):
            self.latest[session], has = handle, handle.generation
            standby = has is not None and self.tap.started_before(self._container(has), mark)
            tally.results["own" if has is not None and has == had else "standby" if standby else "started"] += 1
        return handle

    def _container(self, generation: str) -> str:
        return f"emberpool-{self.pool.snapshot().pool}-{generation}"

    # --- what comes from outside --------------------------------------------------------------------------------------

    async def _strike(self, blows: Iterator[Blow], healers: TaskGroup) -> None:
        """Kill the container of one living session after the other, and see each through its recovery."""
        wounds = self.books.wounds
        for blow in blows:
            await anyio.sleep(blow.pause)
            living = sorted(name for name, handle in self.latest.items() if handle.generation and name not in wounds)
            if living:
                session = living[int(blow.where * len(living))]
                # A kill that was torn would leave a wound of which nobody knows whether it is one.
                with anyio.CancelScope(shield=True):
                    await self._kill(session, self.latest[session].generation or "")
                if session in wounds:
                    healers.start_soon(self._heal, session)

    async def _kill(self, session: str, generation: str) -> None:
        wound = Wound(anyio.current_time(), generation, "docker kill")
        self.books.wound(session, wound)
        try:
            await self.engine.kill(self._container(generation))
        except ContainerGone:
            self.books.missed(session, wound)
        except EmberpoolError as error:
            self.books.missed(session, wound)
            self.books.strange.add(f"the kill of {generation} failed: {error}")

    async def _heal(self, session: str) -> None:
        """Call until a call is good again: the caller that has just lost its sandbox, and does not give up."""
        with anyio.move_on_after(HEAL_PATIENCE):
            while session in self.books.wounds:
                handle = await self._acquire(session, PATIENCE)
                if isinstance(handle, Session):
                    step = probe(f"probe-{next(self.probes)}")
                    try:
                        await self.steps.carry_out(session, handle, step)
                    finally:
                        await handle.release()
                    pause = SHORTEST_PAUSE
                else:
                    pause = handle.retry_after or SHORTEST_PAUSE if handle is not None else LONGEST_PAUSE
                if session in self.books.wounds:
                    await anyio.sleep(min(pause, LONGEST_PAUSE))

    async def _resize(self, plan: Iterator[Size]) -> None:
        for size in plan:
            await anyio.sleep(size.pause)
            self.pool.resize(min_standby=size.min_standby, max_sandboxes=size.max_sandboxes)
            self.books.resizes += 1
