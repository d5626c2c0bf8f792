"""Several calls in one sandbox: each has a runner of its own, and what one does costs the others only what must go."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.errors import SandboxDied, SessionClosed
from executor.result import CallResult
from executor.sandbox import wire
from executor.sandbox.request import Call
from executor.sandbox.sandbox import Sandbox
from tests.support.pools import LATENCY, outcome, running, settings_of, until, virtual_backend
from tests.support.runners import Site, site
from tests.support.scripted import ScriptedEngine
from tests.support.scripted_runner import ScriptedRunner, cleans_for, dies, falls_silent, says, takes
from tests.support.wire import report

pytestmark = pytest.mark.anyio
VIRTUAL = pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True)


@pytest.fixture(params=["asyncio", "trio", "virtual"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return virtual_backend() if request.param == "virtual" else request.param


@pytest.fixture
async def place(tmp_path: Path, anyio_backend: object) -> AsyncIterator[Site]:
    engine = ScriptedEngine(latency=LATENCY if isinstance(anyio_backend, tuple) else None)
    async with site(tmp_path, engine) as place:
        yield place


class Calls:
    """Calls that run at once; ``answers`` by name. A call named ``a`` runs on until the gate ``a`` is opened."""

    def __init__(self, place: Site, box: Sandbox, tasks: anyio.abc.TaskGroup) -> None:
        self.answers: dict[str, object] = {}
        self.place, self.box, self._tasks = place, box, tasks
        self.scopes: dict[str, anyio.CancelScope] = {}

    async def begin(self, name: str, steps: str = "", **more: Any) -> None:
        """Begin a call and wait until its program runs."""
        steps = steps or f"gate {name}; echo {name}"
        self.scopes[name] = anyio.CancelScope()
        self._tasks.start_soon(self._call, name, Call(code=steps, **more))
        await until(lambda: name in self.answers or any(steps in one.served for one in self.place.engine.runners))

    async def _call(self, name: str, call: Call) -> None:
        with self.scopes[name]:
            self.answers[name] = await outcome(partial(self.box.call, call))

    async def end(self, *names: str) -> None:
        """Open gates, and wait for the answers."""
        self.place.engine.gates.update(names)
        await until(lambda: all(name in self.answers for name in names))

    def right(self, *names: str) -> bool:
        answers = {name: self.answers[name] for name in names}
        return all(isinstance(one, CallResult) and one.stdout == f"{n}\n".encode() for n, one in answers.items())

    def runner(self, name: str) -> ScriptedRunner:
        (one,) = [r for r in self.place.engine.runners if any(f"gate {name};" in steps for steps in r.served)]
        return one


def _told(place: Site) -> list[bool]:
    return sorted(sweep for runner in place.engine.runners for sweep in runner.sweeps)


def _died(answer: object, cause: str) -> None:
    assert isinstance(answer, SandboxDied)
    assert (answer.cause, answer.started) == (cause, True)


def _done(runner: ScriptedRunner) -> bytes:
    return wire.encode(wire.DONE, runner.seq, report(stdout_total=2))


# --- side by side -----------------------------------------------------------------------------------------------------


async def test_calls_run_at_once_and_each_has_a_runner_of_its_own(place: Site) -> None:
    box = await place.start(parallel=3)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        for name in "abc":
            await calls.begin(name)
        assert place.engine.the_box().busy == 3
        assert len({calls.runner(name) for name in "abc"}) == 3
        await calls.end("c", "a", "b")
    assert calls.right("a", "b", "c")


async def test_callers_that_come_at_one_moment_never_claim_the_same_runner(place: Site) -> None:
    box = await place.start(parallel=4)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        for name in "abcd":
            tasks.start_soon(calls.begin, name)
        await until(lambda: place.engine.the_box().busy == 4)
        await calls.end(*"abcd")
    assert calls.right(*"abcd")


async def test_a_sandbox_for_one_call_at_a_time_is_never_asked_how_to_clean_up(place: Site) -> None:
    box = await place.start(calls=0)
    for _ in range(3):
        assert (await box.call(Call(code="echo x"))).stdout == b"x\n"
    (runner,) = place.engine.runners
    assert wire.FINISH not in runner.heard
    assert runner.config["shared"] is False


async def test_the_sandbox_is_ready_once_all_of_its_runners_are_armed(place: Site) -> None:
    place.engine.misdeeds["armed"] = [takes(0.05), takes(0.1)]
    await place.start(parallel=3)
    assert len([runner for runner in place.engine.runners if runner.seq == 1]) == 3


# --- how they end -----------------------------------------------------------------------------------------------------


async def test_a_call_that_ends_beside_others_is_walked_and_the_last_one_sweeps(place: Site) -> None:
    box = await place.start(parallel=3)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        for name in "abc":
            await calls.begin(name)
        for name in "bca":
            await calls.end(name)
    assert [calls.runner(name).sweeps for name in "bca"] == [[False], [False], [True]]
    await until(lambda: len(place.engine.runners) == 6)
    assert place.engine.asked["kill"] == 0
    assert box.poisoned == ""


@VIRTUAL
async def test_of_calls_that_end_at_one_moment_exactly_one_sweeps_after_the_others(place: Site) -> None:
    box = await place.start(parallel=3)
    place.engine.misdeeds["clean"] = [cleans_for(1.0), cleans_for(1.0)]
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        for name in "abc":
            await calls.begin(name)
        began = anyio.current_time()
        await calls.end(*"abc")
        assert anyio.current_time() < began + 0.5  # nobody's answer waits for that
    assert calls.right(*"abc")
    await until(lambda: _told(place) == [False, False, True])
    assert anyio.current_time() >= began + 1.0
    assert (await box.call(Call(code="echo x"))).ok
    assert box.poisoned == ""


async def test_a_runner_beside_others_serves_the_next_call_there(place: Site) -> None:
    box = await place.start(parallel=2)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        await calls.begin("a")
        for _ in range(5):
            assert (await box.call(Call(code="echo x"))).stdout == b"x\n"
        assert len(place.engine.runners) == 2
        await calls.end("a")
    assert _told(place) == [False] * 5 + [True]


@pytest.mark.parametrize(("limit", "runners"), [(1, 6), (2, 5), (0, 5)])
async def test_after_a_sweep_every_runner_is_armed_anew_but_one_that_may_serve_more(
    place: Site, limit: int, runners: int
) -> None:
    box = await place.start(parallel=3, calls=limit)
    assert (await box.call(Call(code="echo x"))).ok
    await until(lambda: len(place.engine.runners) == runners and len(place.engine.the_box().execs) == 3)
    assert _told(place) == [True]
    assert (await box.call(Call(code="echo x"))).ok
    assert box.poisoned == ""


@VIRTUAL
async def test_no_call_begins_while_a_runner_is_half_way_beside_it(place: Site) -> None:
    box = await place.start(parallel=2)
    busy: list[int] = []

    async def late(runner: ScriptedRunner) -> bool:
        await anyio.sleep(3.0)
        busy.append(place.engine.the_box().busy)
        return False

    place.engine.misdeeds["armed"] = [late]
    began = anyio.current_time()
    for turn in (1, 2):
        assert (await box.call(Call(code="sleep 5; echo x"))).stdout == b"x\n"
        await until(lambda: len(_told(place)) == turn)  # noqa: B023 - it is waited for
    assert busy == [0]
    assert anyio.current_time() >= began + 13


@VIRTUAL
@pytest.mark.parametrize("seen", [True, False], ids=["their ends are seen", "their ends are not seen"])
async def test_while_the_last_call_is_swept_after_nothing_begins_and_nothing_starts(place: Site, seen: bool) -> None:
    box = await place.start(parallel=3, calls=0)
    place.engine.misdeeds["clean"] = [cleans_for(4.5)]
    if not seen:
        for runner in place.engine.runners:
            runner.sweep = lambda: None
    began = anyio.current_time()
    assert (await box.call(Call(code="echo x"))).ok
    await until(lambda: _told(place) == [True])
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        tasks.start_soon(calls.begin, "a")
        await anyio.sleep(4.0)
        assert (len(place.engine.runners), place.engine.the_box().busy) == (3, 0)
        await calls.end("a")
    assert calls.right("a")
    assert anyio.current_time() >= began + 4.5
    assert len(place.engine.runners) == 5
    assert box.poisoned == ""


@VIRTUAL
@pytest.mark.parametrize("seed", range(8))
async def test_whatever_overlaps_every_answer_is_right_and_nothing_starts_beside_tool_code(
    place: Site, seed: int
) -> None:
    dice = random.Random(seed)
    limit = dice.choice((0, 1, 2))
    box = await place.start(parallel=3, calls=limit, grace=0.2)
    slots = anyio.Semaphore(3)  # what the pool sees to
    wrong: list[object] = []

    async def one(number: int) -> None:
        await anyio.sleep(dice.uniform(0, 30))
        async with slots:
            length, patience = dice.choice((0, 0.001, 0.1, 2)), dice.choice((0.05, 5, 60))
            with anyio.move_on_after(patience):
                answer = await outcome(partial(box.call, Call(code=f"sleep {length}; echo {number}", timeout=50)))
                if not isinstance(answer, CallResult) or answer.stdout != f"{number}\n".encode():
                    wrong.append(answer)

    async with anyio.create_task_group() as tasks:
        for number in range(60):
            tasks.start_soon(one, number)
    assert wrong == []
    assert box.poisoned == ""
    assert all(runner.hello["alone"] for runner in place.engine.runners)
    await until(lambda: len(place.engine.the_box().execs) == 3)


# --- one among several ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", ["hang", "stubborn; hang"])
async def test_a_cancelled_call_costs_the_others_nothing_and_its_place_is_free_again(place: Site, steps: str) -> None:
    box = await place.start(parallel=2, grace=0.05)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        await calls.begin("a")
        await calls.begin("b", steps)
        calls.scopes["b"].cancel()
        await until(lambda: place.engine.the_box().busy == 1)
        assert (await box.call(Call(code="echo next"))).stdout == b"next\n"
        assert "a" not in calls.answers
        await calls.end("a")
    assert calls.right("a")
    assert "b" not in calls.answers
    assert box.poisoned == ""


async def test_a_call_past_its_deadline_costs_the_others_nothing(place: Site) -> None:
    box = await place.start(parallel=2, grace=0.05)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        await calls.begin("a")
        answer = await box.call(Call(code="stubborn; hang", timeout=0.1))
        assert (answer.timed_out, answer.signal) == (True, 9)
        await calls.end("a")
    assert calls.right("a")
    assert box.poisoned == ""


async def test_one_sibling_that_is_killed_for_memory_reports_it_and_the_other_goes_on(place: Site) -> None:
    box = await place.start(parallel=2)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        await calls.begin("a")
        assert (await box.call(Call(code="oom"))).oom_killed
        await calls.end("a")
    assert calls.right("a")
    assert not calls.answers["a"].oom_killed  # type: ignore[attr-defined]


@VIRTUAL
async def test_a_call_that_can_only_be_ended_with_the_sandbox_times_out_and_those_beside_it_die(place: Site) -> None:
    box = await place.start(parallel=3)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        await calls.begin("a")
        await calls.begin("b")
        place.engine.misdeeds["call"] = [falls_silent]
        answer = await box.call(Call(code="echo x", timeout=1))
    assert answer.timed_out
    for name in "ab":
        _died(calls.answers[name], "killed")
        assert "another call" in str(calls.answers[name])
    assert box.poisoned == "timeout"


@pytest.mark.parametrize(
    ("misdeeds", "steps", "cause"),
    [
        ({"done": dies}, "echo x", "runner"),
        ({"clean": dies}, "echo x", "runner"),
        ({}, "dirty", "runner"),
        ({"done": says(b"garbage, and more of it")}, "echo x", "protocol"),
        ({"done": says(lambda runner: _done(runner) + wire.encode(wire.CLEAN, runner.seq))}, "echo x", "protocol"),
    ],
    ids=["its runner dies", "its runner dies cleaning", "it is not proven dead", "garbage", "clean unasked"],
)
async def test_a_runner_that_cannot_be_trusted_ends_the_sandbox_and_each_call_names_it(
    place: Site, misdeeds: dict[str, Any], steps: str, cause: str
) -> None:
    box = await place.start(parallel=3)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        await calls.begin("a")
        await calls.begin("b")
        for where, misdeed in misdeeds.items():
            place.engine.misdeeds[where] = [misdeed]
        await calls.begin("c", steps)
        await until(lambda: len(calls.answers) == 3)
    for answer in (calls.answers["a"], calls.answers["b"]):
        assert isinstance(answer, SandboxDied)
        assert answer.started
    if isinstance(calls.answers["c"], SandboxDied):
        _died(calls.answers["c"], cause)
    assert box.poisoned == cause
    assert not place.engine.boxes


@pytest.mark.parametrize(("oom", "code", "cause"), [(False, 137, "killed"), (True, 137, "oom"), (False, 1, "unknown")])
async def test_the_containers_death_ends_each_call_with_its_cause(
    place: Site, oom: bool, code: int, cause: str
) -> None:
    box = await place.start(parallel=3)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        for name in "abc":
            await calls.begin(name)
        if oom:
            calls.runner("a").send_oom()
        place.engine.die(place.engine.the_box(), code)
    for name in "abc":
        _died(calls.answers[name], cause)


async def test_letting_go_ends_all_calls_and_arms_nothing_more(place: Site) -> None:
    box = await place.start(parallel=2)
    async with anyio.create_task_group() as tasks:
        calls = Calls(place, box, tasks)
        await calls.begin("a")
        await calls.begin("b")
        await box.destroy()
    for answer in calls.answers.values():
        assert isinstance(answer, SandboxDied)
        assert answer.started
    assert len(calls.answers) == 2
    assert len(place.engine.runners) == 2


# --- a pool of them ---------------------------------------------------------------------------------------------------


async def test_a_sessions_calls_run_at_once_up_to_parallel_and_end_with_it(place: Site, state_dir: Path) -> None:
    engine = place.engine
    async with running(engine, settings_of(state_dir, call={"parallel": 2})) as pool:
        session = await pool.acquire("agent", "session")
        answers: dict[str, object] = {}

        async def call(name: str) -> None:
            answers[name] = await outcome(lambda: session.call(code=f"gate {name}; echo {name}"))

        async with anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(call, name)
            await until(lambda: engine.the_box().busy == 2)
            begun = {steps[5] for runner in engine.runners for steps in runner.served}
            engine.gates.add(min(begun))
            await until(lambda: len(answers) == 1 and engine.the_box().busy == 2)
            await session.close()
        first = answers.pop(min(begun))
        assert isinstance(first, CallResult)
        assert len(answers) == 2
        assert all(isinstance(one, SessionClosed) and one.started for one in answers.values()), answers
