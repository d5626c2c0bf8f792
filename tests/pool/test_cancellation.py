"""A cancel at any place leaves the books balanced, no container and no ledger entry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from executor.errors import EmberpoolError
from pool.pool import SandboxPool
from pool.session import Session
from tests.support.pools import assert_balanced, assert_closed, running, settings_of, until
from tests.support.scripted import Fault, ScriptedEngine
from tests.support.stepwise import Cancelled, after_turns, at_pause, every_place

pytestmark = [pytest.mark.anyio, pytest.mark.drawn]  # each test cancels at every await in turn

Act = Callable[[SandboxPool], Awaitable[object]]
PLACES = pytest.mark.parametrize("cancelled", [at_pause, after_turns])


async def _each_place(
    state_dir: Path, cancelled: Cancelled, act: Act, *, standbys: int = 0, prepare: Act | None = None
) -> None:
    """Cancel ``act`` at each of its places, each time in a pool of its own, and check what is left."""

    async def one(place: int) -> bool:
        settings = settings_of(state_dir, min_standby=standbys)
        async with ScriptedEngine() as engine, running(engine, settings) as pool:
            if prepare is not None:
                await prepare(pool)

            async def scenario() -> None:
                await act(pool)

            reached = await cancelled(place, scenario)
            assert_balanced(pool)
            # The pool is as good as before.
            session = await pool.acquire("other", "session")
            assert (await session.call(code="echo still here")).stdout == b"still here\n"
        return reached

    assert await every_place(one) > 0 or cancelled is after_turns


async def _acquire(pool: SandboxPool) -> Session:
    return await pool.acquire("agent", "session")


@PLACES
async def test_a_cancelled_acquire_gives_everything_back(state_dir: Path, cancelled: Cancelled) -> None:
    await _each_place(state_dir, cancelled, _acquire)


@PLACES
async def test_a_cancelled_acquire_from_the_standbys_gives_everything_back(
    state_dir: Path, cancelled: Cancelled
) -> None:
    async def a_standby_stands(pool: SandboxPool) -> None:
        await until(lambda: pool.snapshot().sandboxes.standby, limit=5)

    await _each_place(state_dir, cancelled, _acquire, standbys=1, prepare=a_standby_stands)


@PLACES
@pytest.mark.parametrize("steps", ["echo done", "sleep 0; echo more; cat", "exit 3"])
async def test_a_cancelled_call_leaves_nothing_running(state_dir: Path, steps: str, cancelled: Cancelled) -> None:
    async def call(pool: SandboxPool) -> None:
        session = await pool.acquire("agent", "session")
        await session.call(code=steps, stdin=b"input" * 50_000)

    await _each_place(state_dir, cancelled, call)


@pytest.mark.parametrize("python", [True, False])
async def test_a_cancelled_call_that_would_never_end_is_ended_or_takes_its_sandbox_with_it(
    state_dir: Path, python: bool
) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        engine.python = python
        session = await pool.acquire("agent", "session")
        first = session.generation
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: session.call(["hang"]))
            await until(lambda: engine.the_box().busy, limit=5)
            tasks.cancel_scope.cancel()
        assert_balanced(pool)
        # Only a runner can end a call without ending the container.
        assert python == (bool(engine.boxes) and engine.the_box().busy == 0)
        assert ((await session.call(["echo", "on"])).generation == first) == python


@PLACES
async def test_a_cancelled_cold_call_leaves_no_container(state_dir: Path, cancelled: Cancelled) -> None:
    async def call(pool: SandboxPool) -> None:
        # Until the engine is there a cold call waits; whoever is cancelled then leaves nothing either.
        await pool.call_cold(["echo", "cold"])

    await _each_place(state_dir, cancelled, call)


async def test_a_cancelled_call_that_waits_for_its_turn_disturbs_nobody(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        answers: list[bytes] = []

        async def call(steps: str) -> None:
            answers.append((await session.call(code=steps)).stdout)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "sleep 0.05; echo first")
            await until(lambda: engine.the_box().busy, limit=5)
            with anyio.move_on_after(0) as waiting:
                await call("echo never")
            assert waiting.cancelled_caught
            tasks.start_soon(call, "echo second")
        assert answers == [b"first\n", b"second\n"]
        assert_balanced(pool)


@PLACES
async def test_a_pool_that_is_cancelled_at_any_place_leaves_nothing(state_dir: Path, cancelled: Cancelled) -> None:
    async def one(place: int) -> bool:
        async with ScriptedEngine() as engine:
            pool = SandboxPool(settings_of(state_dir, min_standby=1, drain_timeout=0.5), find=engine.find)

            async def scenario() -> None:
                async with pool:
                    session = await pool.acquire("agent", "session")
                    await session.call(code="echo one")
                    await pool.call_cold(code="echo two")

            reached = await cancelled(place, scenario)
            assert_closed(pool, engine)
        return reached

    assert await every_place(one) > 0


async def test_a_cancelled_pool_removes_its_containers_before_it_ends(state_dir: Path) -> None:
    async with ScriptedEngine() as engine:
        pool = SandboxPool(settings_of(state_dir, min_standby=2), find=engine.find)
        with anyio.CancelScope() as scope:
            async with pool:
                await until(lambda: pool.snapshot().sandboxes.standby == 2, limit=5)
                await pool.acquire("agent", "session")
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert engine.started
        assert_closed(pool, engine)


async def test_a_pool_closed_while_it_starts_leaves_nothing(state_dir: Path) -> None:
    for turns in range(60):
        async with ScriptedEngine() as engine:
            async with SandboxPool(settings_of(state_dir, min_standby=2), find=engine.find) as pool:
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
            assert_closed(pool, engine)


@pytest.mark.parametrize("operation", ["start", "inspect", "attach", "remove", "list", "info", "image"])
async def test_an_error_of_the_callers_block_passes_through_and_leaves_nothing(state_dir: Path, operation: str) -> None:
    async with ScriptedEngine() as engine:
        engine.faults[operation] = [Fault(garbage=True)]
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is what is tested
            async with SandboxPool(settings_of(state_dir, min_standby=1), find=engine.find) as pool:
                with suppress(EmberpoolError):
                    await pool.acquire("agent", "session", timeout=2)
                raise ZeroDivisionError
        assert_closed(pool, engine)


async def test_two_cancelled_acquires_of_one_session_leave_the_third_its_sandbox(state_dir: Path) -> None:
    async with ScriptedEngine() as engine, running(engine, settings_of(state_dir)) as pool:
        got: list[Session] = []

        async def acquire() -> None:
            got.append(await pool.acquire("agent", "session"))

        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as cancelled:
                    cancelled.start_soon(_acquire, pool)
                    cancelled.start_soon(_acquire, pool)
                    tasks.start_soon(acquire)
                    await until(lambda: engine.started, limit=5)
                    scope.cancel()
        (session,) = got
        assert (await session.call(code="echo ok")).ok
        assert engine.asked["start"] == 1
