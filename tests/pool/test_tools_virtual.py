"""What tools wait for, under virtual time: another try, their turn, their deadline, and the image of a pool's start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from executor.engine.protocol import Engine, ImageInfo
from executor.errors import (
    EmberpoolError,
    EngineFailed,
    EngineUnavailable,
    ImageMissing,
    InvalidCall,
    PoolExhausted,
    QuotaExceeded,
    SandboxDied,
    SessionBusy,
    StagingFailed,
)
from executor.result import CallResult
from executor.tool import Tool, ToolResult
from pool.config.load import Settings
from pool.pool import SandboxPool
from pool.supervisor.startup import Report
from pool.tools import ToolPlan, run_on_host, with_retries
from tests.support.pools import (
    LATENCY,
    count,
    outcome,
    running,
    settings_of,
    until,
    virtual_backend,
    wall_clock_follows,
)
from tests.support.scripted import IMAGE, ScriptedEngine
from tests.support.tools import AGENT, Toolbox, changed

pytestmark = pytest.mark.anyio

FINE = CallResult(exit_code=0, stdout=b"", stderr=b"", stdout_total=0, stderr_total=0, duration=0.0)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return virtual_backend()


@pytest.fixture(autouse=True)
def _virtual_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_clock_follows(monkeypatch)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(latency=LATENCY) as engine:
        yield engine


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    return Toolbox(tmp_path)


# --- another try ------------------------------------------------------------------------------------------------------


def plan_of(*, retries: int, backoff: float, place: Any = "container") -> ToolPlan:
    tool = Tool(name="tool", inline="echo ran")
    return ToolPlan(
        agent=AGENT, tool=tool, python_tools=place, env=(), allowed=(), timeout=10, max_output=100, retries=retries,
        backoff=backoff,
    )  # fmt: skip


class Attempts:
    """Something that fails in these ways, one after the other, and then succeeds; ``times`` are the seconds of each."""

    def __init__(self, *errors: EmberpoolError) -> None:
        self._errors, self.times = list(errors), list[float]()
        self._began = anyio.current_time()

    async def __call__(self, *_: object, **__: object) -> Any:
        self.times.append(round(anyio.current_time() - self._began, 6))
        if self._errors:
            raise self._errors.pop(0)
        return ToolResult(ok=True, output="", error="", result=FINE)


async def test_the_wait_before_another_try_is_doubled_and_never_shorter_than_the_error_says() -> None:
    once = Attempts(
        PoolExhausted("full"),
        EngineUnavailable("away", retry_after=10.0),
        SessionBusy("busy", retry_after=0.1),
        StagingFailed("it changed"),
    )
    await with_retries(once, plan_of(retries=4, backoff=0.5))
    # 0.5, then 10 over 1, then 2 over 0.1, then 4
    assert once.times == [0, 0.5, 10.5, 12.5, 16.5]


async def test_tries_are_counted_and_the_last_error_is_raised() -> None:
    last = EngineUnavailable("third")
    once = Attempts(EngineUnavailable("first"), EngineUnavailable("second"), last, EngineUnavailable("fourth"))
    assert await outcome(lambda: with_retries(once, plan_of(retries=2, backoff=1))) is last
    assert once.times == [0, 1, 3]
    once = Attempts(EngineUnavailable("first"))
    assert isinstance(await outcome(lambda: with_retries(once, plan_of(retries=0, backoff=1))), EngineUnavailable)
    assert once.times == [0]


@pytest.mark.parametrize(
    "error",
    [
        SandboxDied("it died", cause="oom"),
        SandboxDied("it died", cause="runner", started=True, retry_after=1),
        EngineFailed("lost", started=True),
        InvalidCall("wrong"),
        ImageMissing("missing", retry_after=1),
    ],
    ids=lambda error: f"{error.reason}, started {error.started}",
)
async def test_what_may_have_started_and_what_cannot_get_better_is_not_tried_again(error: EmberpoolError) -> None:
    once = Attempts(error)
    assert await outcome(lambda: with_retries(once, plan_of(retries=10, backoff=0.1))) is error
    assert once.times == [0]


async def test_a_sandbox_that_died_before_the_call_is_tried_again() -> None:
    once = Attempts(SandboxDied("it died", cause="unknown", started=False))
    await with_retries(once, plan_of(retries=1, backoff=0.1))
    assert once.times == [0, 0.1]


async def test_a_tool_that_failed_is_a_result_and_not_tried_again(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox
) -> None:
    settings = settings_of(state_dir)
    async with running(engine, settings) as pool:
        result = await pool.run_tool(toolbox.plan(settings, "t", inline="exit 1", retries=5), {}, session="s")
        assert not result.ok
        assert [served for runner in engine.runners for served in runner.served] == ["exit 1"]


async def test_a_call_on_the_host_that_could_not_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[float] = []

    async def host_call(call: object, **more: object) -> CallResult:
        tries.append(anyio.current_time())
        if len(tries) == 1:
            raise EngineFailed("no process could be made")
        return FINE

    monkeypatch.setattr("pool.tools.host_call", host_call)
    assert (await run_on_host(plan_of(retries=1, backoff=3, place="limits"), {}, Settings())).ok
    assert tries[1] - tries[0] == 3


async def test_a_tool_waits_out_an_engine_that_is_away_and_runs_once(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox
) -> None:
    settings = settings_of(state_dir)
    async with running(engine, settings) as pool:
        await anyio.sleep(1)
        engine.down()
        await anyio.sleep(1)
        plan = toolbox.plan(settings, "t", inline="echo ran", retries=10, backoff=0.5)
        async with anyio.create_task_group() as tasks:

            async def come_up() -> None:
                await anyio.sleep(20)
                engine.up()

            tasks.start_soon(come_up)
            began = anyio.current_time()
            with capture_logs() as lines:
                assert (await pool.run_tool(plan, {}, session="s")).output == "ran\n"
        assert anyio.current_time() - began >= 20
        assert {line["reason"] for line in lines if line["event"] == "tool.retried"} == {"engine_unavailable"}
        assert [served for runner in engine.runners for served in runner.served] == ["echo ran"]


async def test_a_tool_waits_out_its_agents_quota(engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox) -> None:
    settings = changed(settings_of(state_dir), agents={AGENT: {"max_sessions": 1}})
    plan = toolbox.plan(settings, "t", inline="echo ran", retries=10)
    async with running(engine, settings) as pool:
        other = await pool.acquire(AGENT, "other")
        async with anyio.create_task_group() as tasks:

            async def leave() -> None:
                await anyio.sleep(5)
                await other.close()

            tasks.start_soon(leave)
            assert (await pool.run_tool(plan, {}, session="s")).ok
            error = await outcome(lambda: pool.run_tool(toolbox.plan(settings, "t", inline="x"), {}, session="third"))
            assert isinstance(error, QuotaExceeded)


async def test_a_cancelled_tool_is_not_tried_again(engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox) -> None:
    settings = settings_of(state_dir)
    async with running(engine, settings) as pool:
        with anyio.move_on_after(5) as scope:
            await pool.run_tool(toolbox.plan(settings, "t", inline="hang", retries=5), {}, session="s")
        assert scope.cancelled_caught
        await anyio.sleep(60)
        assert [served for runner in engine.runners for served in runner.served] == ["hang"]


# --- its turn and its deadline ----------------------------------------------------------------------------------------


async def test_waiting_for_a_turn_is_told_apart_and_counts_towards_the_deadline(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox
) -> None:
    settings = changed(settings_of(state_dir), agents={AGENT: {"call": {"timeout": 8}}})
    async with running(engine, settings) as pool:
        await pool.acquire(AGENT, "s")
        answers: list[object] = []

        async def call(inline: str) -> None:
            plan = toolbox.plan(settings, "t", inline=inline)
            answers.append(await outcome(lambda: pool.run_tool(plan, {}, session="s")))

        with capture_logs() as lines:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call, "sleep 5; echo first")
                await anyio.sleep(1)
                tasks.start_soon(call, "hang")
        told = [(line["outcome"], line["waited"], line["seconds"]) for line in lines if line["event"] == "call.ended"]
        assert [(kind, round(waited), round(seconds)) for kind, waited, seconds in told] == [
            ("ok", 0, 5),
            ("timed_out", 4, 8),
        ]
        late = answers[1]
        assert isinstance(late, ToolResult)
        assert late.error.startswith("the tool timed out after ")
        assert (await pool.run_tool(toolbox.plan(settings, "t", inline="echo on"), {}, session="s")).output == "on\n"


async def test_a_tool_with_a_short_timeout_waits_for_its_sandbox_as_long_as_any_session(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox
) -> None:
    settings = settings_of(state_dir, acquire_timeout=30)
    async with running(engine, settings) as pool:
        plan = toolbox.plan(settings, "t", inline="echo ran", timeout="100ms")
        # A container takes longer than that to start; the timeout is the call's.
        assert (await pool.run_tool(plan, {}, session="s")).output == "ran\n"


async def test_an_engine_that_dies_under_the_start_of_a_tools_sandbox_leads_to_no_other_place(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def host_call(call: object, **more: object) -> None:
        raise AssertionError("a tool that belongs into a container was called on the host")

    monkeypatch.setattr("pool.tools.host_call", host_call)
    engine.before = lambda operation: engine.down() if operation == "attach" else None
    settings = settings_of(state_dir)
    async with SandboxPool(settings, find=engine.find) as pool:
        error = await outcome(lambda: pool.run_tool(toolbox.plan(settings, "t", inline="echo x"), {}, session="s"))
        assert isinstance(error, EngineUnavailable)
        assert not error.started
        engine.before = lambda operation: None
        engine.up()
        await anyio.sleep(60)
        assert (await pool.run_tool(toolbox.plan(settings, "t", inline="echo x"), {}, session="s")).ok


# --- the image of a pool's start --------------------------------------------------------------------------------------

Bring = Callable[[Report], Awaitable[None]]


class Maker:
    """A ``make_image`` that does ``bring``; ``made`` are the references that it was asked for."""

    def __init__(self, engine: ScriptedEngine, bring: Bring) -> None:
        self._engine, self._bring, self.made = engine, bring, list[str]()
        del engine.images["default"]

    async def __call__(self, engine: Engine, reference: str, report: Report) -> ImageInfo:
        assert engine is self._engine
        self.made.append(reference)
        await self._bring(report)
        self._engine.images["default"] = IMAGE
        return IMAGE


async def slowly(report: Report) -> None:
    report("pulling: 1 of 2 layers")
    await anyio.sleep(20)
    report("pulling: 2 of 2 layers")
    await anyio.sleep(100)


async def test_callers_are_refused_while_the_image_is_made_ready_and_come_in_after_it(
    engine: ScriptedEngine, state_dir: Path, toolbox: Toolbox
) -> None:
    make = Maker(engine, slowly)
    settings = settings_of(state_dir, min_standby=1)
    plan = toolbox.plan(settings, "t", inline="echo ran")
    async with SandboxPool(settings, find=engine.find, make_image=make) as pool:
        began = anyio.current_time()
        for at, said in ((1, "1 of 2 layers"), (17, "1 of 2 layers"), (22, "2 of 2 layers"), (112, "2 of 2 layers")):
            await anyio.sleep(at - (anyio.current_time() - began))
            for ask in (
                lambda: pool.acquire(AGENT, "s"),
                lambda: pool.run_tool(plan, {}, session="s"),
                lambda: pool.call_cold(code="echo x"),
            ):
                error = await outcome(ask)
                assert isinstance(error, EngineUnavailable)
                assert (error.retryable, error.started) == (True, False)
                assert f"the image {settings.sandbox.image} is being made ready (pulling: {said})" in str(error)
                # However long nothing is heard of the pull, nobody is told to come back at once.
                assert error.retry_after is not None
                assert 1 < error.retry_after <= 5
        assert engine.started == []
        await until(lambda: count(pool, "standby") == 1)
        assert (await pool.run_tool(plan, {}, session="s")).output == "ran\n"
        assert make.made == [settings.sandbox.image]
    assert engine.boxes == {}


@pytest.mark.parametrize("kind", [ImageMissing, EngineFailed, OSError])
async def test_an_image_that_cannot_be_had_is_refused_with_the_next_step_and_not_tried_again(
    engine: ScriptedEngine, state_dir: Path, kind: type[Exception]
) -> None:
    async def fail(report: Report) -> None:
        await anyio.sleep(3)
        raise kind("no registry answers")

    make = Maker(engine, fail)
    settings = settings_of(state_dir)
    async with SandboxPool(settings, find=engine.find, make_image=make) as pool:
        await anyio.sleep(4)
        for _ in range(20):
            error = await outcome(lambda: pool.acquire(AGENT, "s"))
            assert isinstance(error, ImageMissing)
            assert not error.retryable
            assert f"run: emberpool image build --image {settings.sandbox.image}" in str(error)
            assert "(the pool could not bring it: no registry answers)" in str(error)
            await anyio.sleep(30)
        assert len(make.made) == 1
        engine.images["default"] = IMAGE  # whoever is told the next step takes it
        await anyio.sleep(10)
        await pool.acquire(AGENT, "s")
    assert len(make.made) == 1


async def test_an_image_that_goes_while_the_pool_runs_is_never_brought_by_an_acquire(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async def never(report: Report) -> None:
        raise AssertionError("an image was brought on the way to a call")

    image = engine.images["default"]
    make = Maker(engine, never)
    engine.images["default"] = image
    settings = settings_of(state_dir, resync_interval=5)
    async with SandboxPool(settings, find=engine.find, make_image=make) as pool:
        first = await pool.acquire(AGENT, "one")
        del engine.images["default"]
        error = await outcome(lambda: pool.acquire(AGENT, "two"))
        assert isinstance(error, ImageMissing)
        engine.cut_events()
        await anyio.sleep(100)
        assert isinstance(await outcome(lambda: pool.acquire(AGENT, "two")), ImageMissing)
        assert (await first.call(code="echo on")).ok
    assert make.made == []


async def test_a_pool_that_closes_gives_up_an_image_that_is_on_its_way(engine: ScriptedEngine, state_dir: Path) -> None:
    ended: list[str] = []

    async def forever(report: Report) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("pull")

    make = Maker(engine, forever)
    async with SandboxPool(settings_of(state_dir), find=engine.find, make_image=make):
        await anyio.sleep(30)
        began = anyio.current_time()
    assert ended == ["pull"]
    assert anyio.current_time() - began < 15
