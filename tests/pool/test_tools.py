"""Python tools in a pool: where they run, what they are given, what they may use, and what is told of their calls."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from executor.engine.protocol import Engine, EngineInfo
from executor.errors import (
    EmberpoolError,
    EngineUnavailable,
    ImageMissing,
    InvalidCall,
    ProfileMismatch,
    QuotaExceeded,
    SandboxDied,
    SessionClosed,
)
from executor.tool import Tool
from pool.config.load import Settings
from pool.manifest.load import ManifestError
from pool.pool import SandboxPool
from pool.tools import environment
from tests.support.pools import outcome, running, settings_of
from tests.support.scripted import ScriptedEngine
from tests.support.tools import AGENT, Toolbox, changed

pytestmark = pytest.mark.anyio

HOST = "host-agent"
VALUE = "value-of-a-variable"


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    root = tmp_path / "tools"
    root.mkdir()
    return Toolbox(root)


@pytest.fixture
def settings(state_dir: Path) -> Settings:
    return changed(settings_of(state_dir), agents={HOST: {"python_tools": "limits"}})


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted engine runs steps, not Python: the call of a file's function says where it would have been found."""
    monkeypatch.setattr("pool.session.tool_code", lambda tool, root: tool.inline or f"echo {root}/{tool.path}; cat")


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls that reached the host, where none is carried out."""
    calls: list[object] = []

    async def host_call(call: object, **more: object) -> None:
        calls.append(call)
        raise AssertionError("a tool that belongs into a container was called on the host")

    monkeypatch.setattr("pool.tools.host_call", host_call)
    return calls


async def no_engine() -> tuple[Engine, EngineInfo]:
    raise EngineUnavailable("no container engine answers", retry_after=1.0)


# --- where a tool runs ------------------------------------------------------------------------------------------------


def _missing_image(engine: ScriptedEngine) -> None:
    del engine.images["default"]


def _weaker(engine: ScriptedEngine) -> None:
    engine.patch = lambda record: record["HostConfig"].update(ReadonlyRootfs=False)


def _down(engine: ScriptedEngine) -> None:
    engine.up_now = False


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (_down, EngineUnavailable),
        (_missing_image, ImageMissing),
        (_weaker, ProfileMismatch),
    ],
    ids=lambda value: value.__name__,
)
async def test_a_tool_of_a_container_is_refused_without_one_and_never_runs_on_the_host(
    engine: ScriptedEngine,
    settings: Settings,
    toolbox: Toolbox,
    on_host: list[object],
    spoil: Callable[[ScriptedEngine], None],
    kind: type[EmberpoolError],
) -> None:
    spoil(engine)
    plan = toolbox.plan(settings, "tool", inline="echo ran", timeout=5)
    async with SandboxPool(settings, find=engine.find) as pool:
        with anyio.fail_after(30):
            error = await outcome(lambda: pool.run_tool(plan, {}, session="s"))
            while isinstance(error, EngineUnavailable) and "being made ready" in str(error):
                error = await outcome(lambda: pool.run_tool(plan, {}, session="s"))
    assert isinstance(error, kind), error
    assert not error.started
    assert on_host == []


async def test_a_tool_of_a_container_runs_in_its_sessions_sandbox(
    engine: ScriptedEngine, settings: Settings, toolbox: Toolbox, on_host: list[object]
) -> None:
    async with running(engine, settings) as pool:
        plan = toolbox.plan(settings, "tool", inline="cat")
        first = await pool.run_tool(plan, {"n": 1}, session="one")
        again = await pool.run_tool(plan, '{"n": 2}', session="one")
        other = await pool.run_tool(plan, {}, session="two")
        assert [json.loads(result.output) for result in (first, again, other)] == [{"n": 1}, {"n": 2}, {}]
        assert first.result.generation == again.result.generation != other.result.generation
        assert len(engine.boxes) == 2
    assert on_host == []


async def test_a_tool_under_limits_needs_no_engine(settings: Settings, toolbox: Toolbox) -> None:
    toolbox.write("tool/tool.py", "from words import WORD\ndef tool(n): return [WORD, n]\n", words="WORD = 'host'\n")
    async with SandboxPool(settings, find=no_engine) as pool:
        result = await pool.run_tool(toolbox.plan(settings, "tool", agent=HOST), {"n": 1}, session="s")
        assert (result.output, result.result.generation) == ('["host", 1]', "host")
        error = await outcome(lambda: pool.run_tool(toolbox.plan(settings, "tool"), {"n": 1}, session="s"))
        assert isinstance(error, EngineUnavailable)


async def test_the_tool_itself_may_choose_the_container_where_its_agent_has_the_host_and_not_the_other_way(
    settings: Settings, toolbox: Toolbox
) -> None:
    narrowed = toolbox.plan(settings, "tool", agent=HOST, inline="cat", python_tools="container")
    assert narrowed.python_tools == "container"
    with pytest.raises(ManifestError, match='"limits" would run it on the host'):
        toolbox.plan(settings, "tool", inline="cat", python_tools="limits")


# --- what it is given -------------------------------------------------------------------------------------------------


async def test_a_tool_gets_the_named_variables_as_they_are_at_the_call_and_no_others(
    engine: ScriptedEngine, settings: Settings, toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = changed(settings, agents={AGENT: {"env": ["OF_AGENT", "EMPTY", "NOT_SET"]}})
    monkeypatch.setenv("FOREIGN", VALUE)
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NOT_SET", raising=False)
    ask = "env OF_AGENT; env EMPTY; env NOT_SET; env FOREIGN; env PATH; env HOME"
    plan = toolbox.plan(settings, "tool", inline=ask)
    narrowed = toolbox.plan(settings, "tool", inline=ask, env=["EMPTY"])
    async with running(engine, settings) as pool:
        for value in ("first", "second"):
            monkeypatch.setenv("OF_AGENT", value)
            got = (await pool.run_tool(plan, {}, session="s")).output.splitlines()
            assert got == [value, "", "(unset)", "(unset)", "(unset)", "(unset)"]
        monkeypatch.delenv("OF_AGENT")
        assert (await pool.run_tool(plan, {}, session="s")).output.splitlines()[0] == "(unset)"
        monkeypatch.setenv("OF_AGENT", "third")
        assert (await pool.run_tool(narrowed, {}, session="s")).output.splitlines()[:2] == ["(unset)", ""]
    with pytest.raises(ManifestError, match="FOREIGN is not in the configuration's agents"):
        toolbox.plan(settings, "tool", inline=ask, env=["FOREIGN"])


async def test_a_tool_on_the_host_gets_the_named_variables_and_what_a_program_needs(
    settings: Settings, toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = changed(settings, agents={HOST: {"python_tools": "limits", "env": ["OF_AGENT"]}})
    monkeypatch.setenv("FOREIGN", VALUE)
    monkeypatch.setenv("OF_AGENT", "first")
    plan = toolbox.plan(settings, "tool", agent=HOST, inline="import json, os; print(json.dumps(dict(os.environ)))")
    async with SandboxPool(settings, find=no_engine) as pool:
        env = json.loads((await pool.run_tool(plan, {}, session="s")).output)
    assert env["OF_AGENT"] == "first"
    assert env.keys() <= {"OF_AGENT", "PATH", "HOME", "LANG", "TMPDIR", "LC_CTYPE"}


def test_a_variable_that_is_not_set_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "x")
    monkeypatch.delenv("NOT_SET", raising=False)
    assert environment(["SET", "NOT_SET"]) == {"SET": "x"}


async def test_each_call_sees_its_directory_as_it_is_then(
    engine: ScriptedEngine, settings: Settings, toolbox: Toolbox, steps: None
) -> None:
    file = toolbox.write("tool/tool.py", "one")
    async with running(engine, settings) as pool:
        plan = toolbox.plan(settings, "tool")

        async def staged() -> tuple[str, str]:
            """The path inside, and what stands at it."""
            line, arguments = (await pool.run_tool(plan, {"n": 1}, session="s")).output.splitlines()
            assert json.loads(arguments) == {"n": 1}
            place = Path(engine.the_box().words.staging)
            return line, await anyio.Path(place / line.removeprefix("/tool/")).read_text()

        first, text = await staged()
        assert (text, await staged()) == ("one", (first, "one"))
        toolbox.edit("tool/tool.py", "one", "two")
        second, text = await staged()
        assert (text, second) != ("one", first)
        assert text == "two"
        file.unlink()
        error = await outcome(lambda: pool.run_tool(plan, {}, session="s"))
        assert isinstance(error, InvalidCall)
        assert "has no file 'tool.py'; add the file, or correct its path" in str(error)


async def test_a_handle_calls_tools_of_allowed_directories_and_none_once_it_is_released(
    engine: ScriptedEngine, settings: Settings, toolbox: Toolbox, steps: None
) -> None:
    tool = Tool(name="tool", file=toolbox.write("tool/tool.py"))
    async with running(engine, settings) as pool:
        session = await pool.acquire(AGENT, "s")
        assert (await session.tool(tool)).output.startswith("/tool/")
        assert (await session.tool(tool, {}, allowed=[toolbox.root])).ok
        error = await outcome(lambda: session.tool(tool, {}, allowed=[toolbox.root / "other"]))
        assert isinstance(error, InvalidCall)
        assert "outside of sandbox.allowed_tool_dirs" in str(error)
        await session.release()
        assert isinstance(await outcome(lambda: session.tool(tool)), SessionClosed)


# --- what it may use --------------------------------------------------------------------------------------------------


async def test_the_ceilings_of_an_agent_hold_for_its_tools(
    engine: ScriptedEngine, settings: Settings, toolbox: Toolbox, steps: None
) -> None:
    settings = changed(settings, agents={AGENT: {"call": {"timeout": 7, "max_output": 1000}}})
    plan = toolbox.plan(settings, "tool", inline="flood 5000")
    assert (plan.timeout, plan.max_output) == (7, 1000)
    assert toolbox.plan(settings, "tool", inline="x", agent="other").timeout == 60
    with pytest.raises(ManifestError, match=r"agents.agent.call.timeout \(7s\); lower it, or raise"):
        toolbox.plan(settings, "tool", inline="x", timeout=8)
    async with running(engine, settings) as pool:
        told = (await pool.run_tool(plan, {}, session="s")).result
        assert (len(told.stdout), told.stdout_total) == (1000, 5000)
        for more in ({"timeout": 7.5}, {"max_output": 1001}):
            error = await outcome(lambda more=more: pool.run_tool(replace(plan, **more), {}, session="s"))  # type: ignore[misc]
            assert isinstance(error, InvalidCall)
            assert "are allowed" in str(error)


async def test_an_agents_quota_holds_for_the_sessions_of_its_tools(
    engine: ScriptedEngine, settings: Settings, toolbox: Toolbox
) -> None:
    settings = changed(settings, agents={AGENT: {"max_sessions": 1}})
    plan = toolbox.plan(settings, "tool", inline="echo ran")
    async with running(engine, settings) as pool, await pool.acquire(AGENT, "one"):
        assert (await pool.run_tool(plan, {}, session="one")).ok
        error = await outcome(lambda: pool.run_tool(plan, {}, session="two"))
        assert isinstance(error, QuotaExceeded)
        assert (error.retryable, error.started) == (True, False)
        assert (await pool.run_tool(replace(plan, agent="other"), {}, session="two")).ok


# --- what is told of it -----------------------------------------------------------------------------------------------

FIELDS = {"event", "log_level", "kind", "code", "image", "outcome", "waited", "seconds", "generation"}


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


async def test_a_call_is_told_in_one_line_that_holds_no_content(
    engine: ScriptedEngine, settings: Settings, toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = changed(
        settings, agents={AGENT: {"env": ["OF_AGENT"]}, HOST: {"python_tools": "limits", "env": ["OF_AGENT"]}}
    )
    monkeypatch.setenv("OF_AGENT", VALUE)
    arguments = {"argument-name": "argument-value"}
    inline = "echo of-the-tool; env OF_AGENT; cat; exit 3"
    with capture_logs() as lines:
        async with running(engine, settings) as pool:
            failed = await pool.run_tool(toolbox.plan(settings, "tool", inline=inline), arguments, session="chat-42")
            assert VALUE in failed.result.stdout.decode()
            await outcome(lambda: pool.run_tool(toolbox.plan(settings, "tool", inline="die 9"), {}, session="chat-42"))
            await pool.call_cold(["echo", "of-the-tool"])
            if os.name == "posix":
                await pool.run_tool(toolbox.plan(settings, "tool", agent=HOST, inline="#of-the-tool"), {}, session="s")
    text = repr(lines)
    for content in ("of-the-tool", VALUE, "OF_AGENT", "argument-", "chat-42", AGENT + "'"):
        assert content not in text
    told = [line for line in lines if line["event"] == "call.ended"]
    outcomes = [(line["kind"], line["outcome"], line["code"]) for line in told]
    assert outcomes[:2] == [("python", "failed", hashed(inline)), ("python", "sandbox_died", hashed("die 9"))]
    assert outcomes[2][::2] == ("argv", hashed("echo\0of-the-tool"))
    first, died, cold, *host = told
    assert first.keys() == FIELDS | {"session", "pool", "name", "exit_code", "signal"}
    assert died.keys() == FIELDS | {"session", "pool", "name"}
    assert cold.keys() == FIELDS - {"generation"} | {"pool", "name", "exit_code", "signal"}
    assert (first["image"], first["exit_code"]) == (engine.images["default"].id, 3)
    assert first["session"] == died["session"] != "chat-42"
    for line in host:
        assert line.keys() == FIELDS | {"session", "tool", "exit_code", "signal"}
        assert (line["generation"], line["outcome"], line["code"]) == ("host", "ok", hashed("#of-the-tool"))


async def test_the_hash_of_a_call_tells_versions_of_a_file_apart(
    engine: ScriptedEngine, settings: Settings, toolbox: Toolbox, steps: None
) -> None:
    toolbox.write("tool/tool.py", "one")
    plan = toolbox.plan(settings, "tool")

    def codes(lines: Any) -> list[str]:
        return [line["code"] for line in lines if line["event"] == "call.ended"]

    with capture_logs() as lines:
        async with running(engine, settings) as pool:
            for text in ("one", "one", "two"):
                toolbox.write("tool/tool.py", text)
                await pool.run_tool(plan, {"n": text}, session="s")
    one, again, two = codes(lines)
    assert one == again != two


async def test_a_sandbox_that_dies_under_a_tool_is_an_error_and_no_result(
    engine: ScriptedEngine, settings: Settings, toolbox: Toolbox, on_host: list[object]
) -> None:
    async with running(engine, settings) as pool:
        plan = toolbox.plan(settings, "tool", inline="die 137", retries=5)
        error = await outcome(lambda: pool.run_tool(plan, {}, session="s"))
        assert isinstance(error, SandboxDied)
        assert error.started
        assert sum(runner.served.count("die 137") for runner in engine.runners) == 1
    assert on_host == []
