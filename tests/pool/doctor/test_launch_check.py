"""The launch check: where each tool would run, why, and what to change; and what the doctor says of Python tools."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor.engine.protocol import Engine, EngineInfo
from executor.errors import EngineUnavailable
from pool.config.load import Settings
from pool.doctor.checks import Check, tools_check
from pool.doctor.doctor import examine
from pool.doctor.launch_check import Launch, check_launch, failed
from pool.manifest.load import Manifest, load_manifest
from tests.support import ROOT
from tests.support.scripted import ScriptedEngine
from tests.support.tools import AGENT, Toolbox

pytestmark = pytest.mark.anyio

WELL = [Check("engine", "ok", "it answers"), Check("CVE-1", "warn", "unknown")]
HOST = "host-agent"


@pytest.fixture
def settings(state_dir: Path) -> Settings:
    return Settings(pool={"state_dir": state_dir}, agents={HOST: {"python_tools": "limits"}})


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    root = tmp_path / "tools"
    root.mkdir()
    return Toolbox(root)


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))


async def checked(manifest: Manifest, settings: Settings, doctor: list[Check] = WELL) -> dict[str, Launch]:
    """The report by the tools' names; nothing may be left of the check."""
    launches = await check_launch(manifest, settings, doctor)
    assert os.listdir(tempfile.gettempdir()) == []  # noqa: PTH208 - it is short
    return {one.tool: one for one in launches}


async def test_each_tool_is_told_with_its_place(settings: Settings, toolbox: Toolbox) -> None:
    toolbox.write("tool/tool.py")
    tools = {"tool": {"file": "tool/tool.py"}, "short": {"inline": "print(1)"}}
    manifest = Manifest.from_tables({"agents": {AGENT: {"tools": tools}, HOST: {"tools": tools}}}, toolbox.root)
    launches = await check_launch(manifest, settings, WELL)
    assert [(one.agent, one.tool, one.runs) for one in launches] == [
        (AGENT, "tool", "container"),
        (AGENT, "short", "container"),
        (HOST, "tool", "limits"),
        (HOST, "short", "limits"),
    ]
    isolated, _, unisolated, _ = launches
    assert (isolated.why, isolated.change) == ("in the session's own hardened container", "")
    assert unisolated.why == "on the host, under resource limits: no boundary"
    assert not failed(launches, strict=False)
    assert failed(launches, strict=True)
    assert not failed(launches[:2], strict=True)


async def test_the_change_that_is_told_isolates_the_tool(settings: Settings, toolbox: Toolbox) -> None:
    for said in ({}, {"python_tools": "limits"}):
        tools = {"t": {"inline": "print(1)", **said}}
        change = (await checked(toolbox.manifest(agent=HOST, tools=tools, **said), settings))["t"].change
        key, _, value = change.partition(" = ")
        assert (key, value) == (f"agents.{HOST}.tools.t.python_tools", '"container" in the manifest')
        tools["t"]["python_tools"] = "container"
        assert (await checked(toolbox.manifest(agent=HOST, tools=tools, **said), settings))["t"].runs == "container"


async def test_what_the_doctor_finds_failed_refuses_the_tools_of_containers_and_no_others(
    settings: Settings, toolbox: Toolbox
) -> None:
    tools = {"t": {"inline": "print(1)"}}
    manifest = Manifest.from_tables({"agents": {AGENT: {"tools": tools}, HOST: {"tools": tools}}}, toolbox.root)
    doctor = [*WELL, Check("image", "fail", "it is missing", "build it"), Check("memory", "fail", "too little", "x")]
    refused, unisolated = await check_launch(manifest, settings, doctor)
    assert (refused.runs, refused.why, refused.change) == ("refused", "image: it is missing", "build it")
    assert unisolated.runs == "limits"
    assert failed([refused], strict=False)


async def test_without_an_engine_tools_of_containers_are_refused_with_the_next_step(
    settings: Settings, toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST"):
        monkeypatch.delenv(name, raising=False)

    async def nothing() -> tuple[Engine, EngineInfo]:
        raise EngineUnavailable("no container engine answers")

    manifest = toolbox.manifest(tools={"t": {"inline": "print(1)"}})
    told = (await checked(manifest, settings, await examine(settings, find=nothing)))["t"]
    assert (told.runs, told.why) == ("refused", "engine: no container engine answers")
    assert told.change == "run: emberpool engine up"


async def test_without_the_image_tools_of_containers_are_refused_with_the_next_step(
    settings: Settings, toolbox: Toolbox
) -> None:
    async with ScriptedEngine() as engine:
        del engine.images["default"]
        doctor = await examine(settings, find=engine.find)
        told = (await checked(toolbox.manifest(tools={"t": {"inline": "print(1)"}}), settings, doctor))["t"]
        assert told.runs == "refused"
        assert told.why == f"image: {settings.sandbox.image} is not on the engine"
        assert told.change == f"run: emberpool image build --image {settings.sandbox.image}"
        assert engine.started == []


def _large(tool: Path) -> None:
    with (tool / "data").open("wb") as file:
        file.truncate(1 << 30)


def _pipe(tool: Path) -> None:
    os.mkfifo(tool / "pipe")


def _outside(tool: Path) -> None:
    away = tool.parent.parent / "away"
    tool.rename(away)
    tool.symlink_to(away)


def _gone(tool: Path) -> None:
    (tool / "tool.py").unlink()


def _all_gone(tool: Path) -> None:
    _gone(tool)
    tool.rmdir()


@pytest.mark.parametrize(
    ("spoil", "why", "change", "on_host"),
    [
        (
            _large,
            "holds more than 16777216 bytes (tools.max_bytes",
            "keep data elsewhere, or raise the limit",
            "limits",
        ),
        (_pipe, "is a named pipe", "a tool directory may hold files, directories and relative links", "limits"),
        (_outside, "which is outside of sandbox.allowed_tool_dirs", "move it there, or allow its directory", "refused"),
        (_gone, "has no file 'tool.py'", "add the file, or correct its path", "refused"),
        (_all_gone, "cannot be found", "it must exist inside one of sandbox.allowed_tool_dirs", "refused"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_tool_whose_files_cannot_be_used_is_refused_where_its_call_would_be(
    settings: Settings, toolbox: Toolbox, spoil: Callable[[Path], None], why: str, change: str, on_host: str
) -> None:
    spoil(toolbox.write("tool/tool.py").parent)
    tools = {"tool": {"file": "tool/tool.py"}}
    told = (await checked(toolbox.manifest(tools=tools), settings))["tool"]
    assert told.runs == "refused"
    assert why in told.why
    assert told.change == change
    # On the host nothing is copied: only where the tool lies matters.
    assert (await checked(toolbox.manifest(agent=HOST, tools=tools), settings))["tool"].runs == on_host


async def test_a_tool_that_asks_for_more_than_the_configuration_allows_is_refused(
    settings: Settings, toolbox: Toolbox
) -> None:
    more: dict[str, dict[str, Any]] = {
        "host": {"inline": "1", "python_tools": "limits"},
        "variable": {"inline": "1", "env": ["TOKEN"]},
        "long": {"inline": "1", "timeout": "61s"},
    }
    told = await checked(toolbox.manifest(tools={**more, "fine": {"inline": "1"}}), settings)
    assert {name: one.runs for name, one in told.items()} == {**dict.fromkeys(more, "refused"), "fine": "container"}
    assert '"limits" would run it on the host' in told["host"].why
    assert told["host"].change.startswith("leave it out here, or set agents.agent.python_tools")
    assert "TOKEN is not in the configuration's agents.agent.env" in told["variable"].why
    assert told["long"].change == "lower it, or raise call.timeout"


async def test_tools_of_one_directory_are_copied_once(
    settings: Settings, toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        toolbox.write(f"tools/t{number}.py")
    made: list[str] = []
    mkdir = Path.mkdir

    def counted(self: Path, *args: Any, **more: Any) -> None:
        made.append(self.name)
        mkdir(self, *args, **more)

    monkeypatch.setattr(Path, "mkdir", counted)
    tools = {f"t{number}": {"file": f"tools/t{number}.py"} for number in range(20)}
    assert {one.runs for one in (await checked(toolbox.manifest(tools=tools), settings)).values()} == {"container"}
    assert len([name for name in made if name.startswith(".new-")]) == 1


async def test_every_tool_of_the_examples_would_run() -> None:
    examples = ROOT / "docs" / "examples"
    settings = Settings(agents={"analyst": {"env": ["REPORT_CURRENCY"]}, "legacy": {"python_tools": "limits"}})
    told = await checked(load_manifest(examples / "manifest.toml"), settings)
    assert {one.runs for one in told.values() if one.agent == "analyst"} == {"container"}
    assert told["host_disk"].runs == "limits"


# --- the doctor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "status", "words"),
    [
        ({}, "ok", "run in containers, of every agent"),
        ({"agents": {"a": {"python_tools": "container"}}}, "ok", "run in containers, of every agent"),
        (
            {"agents": {"b": {"python_tools": "limits"}, "a": {"python_tools": "limits"}, "c": {}}},
            "warn",
            "run in containers, but of these agents on the host under limits, no boundary: a, b",
        ),
        ({"sandbox": {"python_tools": "limits"}}, "warn", "run on the host under limits, which is no boundary"),
        (
            {"sandbox": {"python_tools": "limits"}, "agents": {"a": {"python_tools": "container"}, "b": {}}},
            "warn",
            "run on the host under limits, which is no boundary; but not of: a",
        ),
    ],
)
async def test_the_doctor_warns_of_every_agent_whose_tools_run_unisolated(
    sections: dict[str, Any], status: str, words: str
) -> None:
    check = tools_check(Settings(**sections))
    assert (check.name, check.status, check.detail) == ("python tools", status, words)
    assert bool(check.remedy) == (status == "warn")


async def test_the_doctor_checks_python_tools_without_an_engine_too(settings: Settings) -> None:
    async def nothing() -> tuple[Engine, EngineInfo]:
        raise EngineUnavailable("no container engine answers")

    (check,) = [one for one in await examine(settings, find=nothing) if one.name == "python tools"]
    assert (check.status, check.remedy) == ("warn", 'set their python_tools to "container"')


UNFIT = {
    "another name": ("def tol(): pass", "has no function tool"),
    "no python": ("def tool(:", "line 1 is no Python"),
    "a NUL": ("def tool(): pass\0", "is no Python"),
}
FIT = {
    "async": "async def tool(): pass",
    "a class": "class tool: pass",
    "assigned": "tool = print",
    "imported": "from json import dumps as tool",
    "star": "from elsewhere import *",
    "made when asked": "def __getattr__(name): return print",
}


@pytest.mark.parametrize(("source", "why"), UNFIT.values(), ids=UNFIT)
async def test_source_that_can_be_no_tool_is_refused_unrun(
    settings: Settings, toolbox: Toolbox, source: str, why: str
) -> None:
    toolbox.write("tool/tool.py", source)
    told = (await checked(toolbox.manifest(tools={"tool": {"file": "tool/tool.py"}}), settings))["tool"]
    assert told.runs == "refused"
    assert why in told.why
    assert told.change


@pytest.mark.parametrize("source", FIT.values(), ids=FIT)
async def test_a_function_may_come_about_in_any_way(settings: Settings, toolbox: Toolbox, source: str) -> None:
    toolbox.write("tool/tool.py", source)
    manifest = toolbox.manifest(tools={"tool": {"file": "tool/tool.py"}})
    assert (await checked(manifest, settings))["tool"].runs == "container"


async def test_inline_code_that_is_no_python_is_refused(settings: Settings, toolbox: Toolbox) -> None:
    manifest = toolbox.manifest(tools={"tool": {"inline": "print(1"}})
    assert (await checked(manifest, settings))["tool"].runs == "refused"
