"""Kills on the real engine: they wait for no other question, and what was killed is dead when its call is answered."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from executor.engine.docker import CommandLineEngine
from executor.engine.protocol import ContainerGone
from executor.errors import SandboxDied
from executor.result import CallResult
from executor.sandbox.request import Call
from tests.engine.conftest import Room
from tests.engine.faulty import until
from tests.engine.steered import clients, kill_clients, processes
from tests.support.pools import outcome

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

SECONDS = f"33.{os.getpid():09d}"
"""Seconds for which nothing else of this machine sleeps, a test in another process included."""
CROWD = Call(argv=("sh", "-c", f"for i in 1 2 3 4 5 6 7 8 9; do sleep {SECONDS} & done; sleep {SECONDS}"), timeout=1.5)


@asynccontextmanager
async def busy(engine: CommandLineEngine) -> AsyncIterator[None]:
    """As many questions are being asked as may be at once, and none of them ends."""
    taken = 0
    try:
        while engine._limit.value:
            await engine._limit.acquire()
            taken += 1
        yield
    finally:
        for _ in range(taken):
            engine._limit.release()


async def test_timed_out_call_is_killed_and_answered_while_every_question_waits(real_engine: Room) -> None:
    async with real_engine.sandbox() as box:
        async with busy(real_engine.engine):
            result = await box.call(CROWD)
            assert not processes("sleep", SECONDS)
        assert isinstance(result, CallResult)
        assert result.timed_out


async def test_timed_out_cold_call_is_killed_and_answered_while_every_question_waits(real_engine: Room) -> None:
    async with busy(real_engine.engine):
        result = await real_engine.cold(CROWD, python=False)
        assert not processes("sleep", SECONDS)
    assert result.timed_out


@pytest.mark.parametrize("kind", ["plain", "cold"])
async def test_call_whose_client_is_killed_has_no_result(real_engine: Room, kind: str) -> None:
    """The code ends by itself a second later, and what it printed then is lost."""
    call, answers = Call(code=f"import time; time.sleep(1.0); print({SECONDS})"), list[object]()

    async def end_with(run: Callable[[Call], Awaitable[CallResult]]) -> None:
        async with anyio.create_task_group() as tasks:

            async def one() -> None:
                answers.append(await outcome(lambda: run(call)))

            tasks.start_soon(one)
            await until(lambda: clients(word))
            await anyio.sleep(0.7)
            kill_clients(word)

    if kind == "cold":
        word = "run"
        await end_with(real_engine.cold)
    else:
        word = "exec"
        async with real_engine.sandbox() as box:
            await end_with(box.call)
    (error,) = answers
    assert isinstance(error, SandboxDied), error
    assert error.started


async def test_kill_returns_once_all_that_ran_is_dead(real_engine: Room) -> None:
    async with real_engine.sandbox() as box, anyio.create_task_group() as tasks:
        tasks.start_soon(outcome, lambda: box.call(Call(argv=CROWD.argv, timeout=30)))
        await until(lambda: len(processes("sleep", SECONDS)) >= 10)
        await real_engine.engine.kill(box.container)
        assert not processes("sleep", SECONDS)
        with pytest.raises(ContainerGone):
            await real_engine.engine.kill(box.container)
