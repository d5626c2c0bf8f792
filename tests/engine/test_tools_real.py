"""Python tools on a real engine: what they can import, what comes of each way to end, and what no tool can do."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.errors import EmberpoolError, InvalidCall, SandboxDied, StagingFailed
from executor.staging import source
from executor.tool import ToolResult
from pool.config.load import Settings
from pool.pool import SandboxPool
from pool.tools import ToolPlan, plan_tool
from tests.support.pools import outcome
from tests.support.stagings import once
from tests.support.tools import AGENT, Toolbox, changed

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

HOST = "host-agent"
"""An agent whose tools run on the host."""
PLACES = ("container", "limits")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the host's side is not what is tested here


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    root = tmp_path / "tools"
    root.mkdir()
    return Toolbox(root)


@dataclass
class Shop:
    """A pool, and tools that are called in it."""

    pool: SandboxPool
    tools: Toolbox

    def plan(self, name: str, *, place: str = "container", **table: Any) -> ToolPlan:
        agent = AGENT if place == "container" else HOST
        return self.tools.plan(self.pool.settings, name, agent=agent, **table)

    async def run(self, plan: ToolPlan, arguments: object = {}, *, session: str = "s") -> ToolResult:
        return await self.pool.run_tool(plan, arguments, session=session)

    async def call(self, name: str, arguments: object = {}, *, session: str = "s", **table: Any) -> ToolResult:
        return await self.run(self.plan(name, **table), arguments, session=session)

    async def value(self, name: str, arguments: object = {}, *, session: str = "s", **table: Any) -> Any:
        """What a tool returned, which must be JSON."""
        result = await self.call(name, arguments, session=session, **table)
        assert result.ok, result.error
        return json.loads(result.output)


@pytest.fixture
async def shop(engine_settings: Settings, toolbox: Toolbox) -> AsyncIterator[Shop]:
    settings = changed(engine_settings, agents={HOST: {"python_tools": "limits"}}, call={"max_output": "128MiB"})
    async with SandboxPool(settings) as pool:
        yield Shop(pool, toolbox)


# --- what a tool finds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_tool_imports_its_siblings_and_is_seen_edited_by_the_next_call(shop: Shop) -> None:
    shop.tools.write("csv/csv.py", "import words\ndef csv(n): return [words.WORD, n]\n", words="WORD = 'one'\n")
    assert await shop.value("csv", {"n": 1}) == ["one", 1]
    shop.tools.edit("csv/words.py", "one", "two")
    assert await shop.value("csv", {"n": 2}) == ["two", 2]


async def test_tools_of_every_kind_are_found_and_called(shop: Shop) -> None:
    tools = shop.tools
    tools.write("pack/inner/__init__.py", "")
    tools.write("pack/inner/base.py", "from ..top import WORD\n")
    tools.write("pack/top.py", "WORD = 'relative'\n")
    tools.write("pack/__init__.py", "")
    tools.write("pack/inner/deep.py", "from .base import WORD\ndef deep(): return WORD\n")
    tools.write("pack/later.py", "import asyncio\nasync def later(n):\n    await asyncio.sleep(0)\n    return n + 1\n")
    tools.write("plugin/shared.py", "import pathlib\nDATA = (pathlib.Path(__file__).parent / 'data.txt').read_text()\n")
    tools.write("plugin/data.txt", "from the plugin")
    tools.write("plugin/tools/shout.py", "from shared import DATA\ndef shout(): return DATA.upper()\n")
    manifest = tools.manifest(
        tools={
            "later": {"file": "pack/later.py"},
            "again": {"file": "pack/later.py:later"},
            "inline": {"inline": "import sys, json\nprint(json.load(sys.stdin)['n'] * 2)"},
        },
        plugins={
            "acme": {"directory": "plugin", "tools": {"shout": {"file": "tools/shout.py"}}},
            "pack": {"directory": "pack", "tools": {"deep": {"file": "inner/deep.py"}}},
        },
    )

    async def run(name: str, arguments: object = {}) -> str:
        result = await shop.run(plan_tool(manifest.find(name), shop.pool.settings), arguments)
        assert result.ok, result.error
        return result.output

    assert await run("plugin__acme__shout") == "FROM THE PLUGIN"
    assert await run("later", {"n": 1}) == await run("again", {"n": 1}) == "2"
    assert await run("inline", '{"n": 21}') == "42\n"
    assert await run("plugin__pack__deep") == "relative"


async def test_traceback_of_a_tool_shows_its_own_lines_and_none_of_ours(shop: Shop) -> None:
    shop.tools.write("bad/bad.py", "import helper\ndef bad(x):\n    return helper.fall(x)\n")
    shop.tools.write("bad/helper.py", "def fall(x):\n    raise LookupError(x)  # here it falls\n")
    result = await shop.call("bad", {"x": "why"})
    assert not result.ok
    lines = result.error.splitlines()
    frames = [line for line in lines if line.lstrip().startswith("File ")]
    assert [frame.rpartition("/")[2] for frame in frames] == ['bad.py", line 3, in bad', 'helper.py", line 2, in fall']
    assert "    raise LookupError(x)  # here it falls" in lines
    assert lines[-1] == "LookupError: why"


async def test_a_call_that_runs_keeps_its_version_while_the_tool_is_edited(
    engine_settings: Settings, toolbox: Toolbox
) -> None:
    toolbox.write(
        "slow/slow.py",
        """
        import os, time
        def slow(go):
            if not go:
                open('/tmp/runs', 'w').close()
                while not os.path.exists('/tmp/go'):
                    time.sleep(0.01)
            import late
            return late.WORD
        """,
        late="WORD = 'one'\n",
    )
    async with SandboxPool(changed(engine_settings, call={"parallel": 2})) as pool:
        shop = Shop(pool, toolbox)
        async with await pool.acquire(AGENT, "s") as session, anyio.create_task_group() as tasks:
            words: list[str] = []

            async def first() -> None:
                words.append((await shop.call("slow", {"go": False})).output)

            tasks.start_soon(first)
            with anyio.fail_after(30):
                while "runs" not in [entry.name for entry in await session.list_files()]:  # noqa: ASYNC110 - the tool tells
                    await anyio.sleep(0.02)
            toolbox.edit("slow/late.py", "one", "two")
            assert (await shop.call("slow", {"go": True})).output == "two"
            assert words == []
            await session.write_file("/tmp/go", b"")
        assert words == ["one"]
        assert len([entry for entry in await session_files(pool, "/tool") if entry != "nonce"]) == 1


async def session_files(pool: SandboxPool, path: str, session: str = "s") -> list[str]:
    async with await pool.acquire(AGENT, session) as handle:
        return [entry.name for entry in await handle.list_files(path)]


async def test_tools_of_a_session_are_read_only_and_not_there_in_another(shop: Shop) -> None:
    shop.tools.write("mine/mine.py", "def mine(): return __file__\n")
    file = (await shop.call("mine")).output
    attempt = f"""
import os, sys
def attempt(act):
    try: act()
    except OSError as error: return error.strerror
    return "done"
top = {str(Path(file).parent)!r}
print([attempt(act) for act in (
    lambda: open(top + "/mine.py", "w"), lambda: open(top + "/new", "w"), lambda: open("/tool/new", "w"),
    lambda: os.unlink(top + "/mine.py"), lambda: os.chmod(top, 0o777), lambda: os.rename(top, top + "x"))])
print(len(open("/tool/nonce").read().strip()) > 8)
"""
    result = await shop.call("try", inline=attempt)
    assert result.ok, result.error
    denied, readable = result.output.splitlines()
    assert set(json.loads(denied.replace("'", '"'))) <= {
        "Read-only file system",
        "Permission denied",
        "Operation not permitted",
    }
    assert readable == "True"
    assert await session_files(shop.pool, "/tool") != ["nonce"]
    assert await session_files(shop.pool, "/tool", session="other") == ["nonce"]


async def test_a_tool_says_the_same_cold_warm_and_on_the_host(shop: Shop) -> None:
    shop.tools.write(
        "same/same.py",
        """
        import sys
        def same(x):
            print("printed"); print("warned", file=sys.stderr)
            if x == "raise": raise ValueError(x)
            return {"é": [x, None, 1.5, True]}
        """,
    )
    inline = "import json, sys\nx = json.load(sys.stdin)['x']\nprint(x)\nif x == 'raise': raise ValueError(x)"

    def said(result: ToolResult) -> tuple[object, ...]:
        told = result.result
        return (
            result.ok,
            result.output,
            result.error.partition('same.py"')[2] or result.error,
            told.exit_code,
            len(told.stderr),
        )

    for x in ("value", "raise"):
        cold = await shop.call("same", {"x": x}, session=x)  # the first call of a fresh sandbox
        warm = await shop.call("same", {"x": x}, session=x)
        assert cold == replace(warm, result=cold.result)
        assert cold.result.generation == warm.result.generation
        host = await shop.call("same", {"x": x}, place="limits")
        # Paths differ, and so what they take to be told.
        assert said(host)[:4] == said(warm)[:4]
        async with await shop.pool.acquire(AGENT, x) as session:
            alone = await shop.pool.call_cold(code=inline, stdin=json.dumps({"x": x}).encode())
            here = await session.call(code=inline, stdin=json.dumps({"x": x}).encode())
            assert (alone.exit_code, alone.stdout) == (here.exit_code, here.stdout)
            assert alone.stderr.splitlines()[-1:] == here.stderr.splitlines()[-1:]
            await session.close()


# --- how a tool may end -----------------------------------------------------------------------------------------------

ENDS: dict[str, tuple[str, bool, str]] = {
    "binary": ("import sys; sys.stdout.buffer.write(bytes(range(256))); return 'fine'", True, "fine"),
    "closed": ("import os, sys; os.close(1); return 'fine'", True, "fine"),
    "closed too": ("import sys; sys.stdout.close(); return 'fine'", True, "fine"),
    "child": ("import subprocess; subprocess.run(['echo', 'noise']); return 'fine'", True, "fine"),
    "nothing": ("return None", True, ""),
    "exit": ("import sys; sys.exit('no such row')", False, "no such row"),
    "exit 0": ("import sys; sys.exit()", True, ""),
    "set": ("return {1}", False, "the tool returned a set, which is not JSON"),
    "signal": ("import os; os.kill(os.getpid(), 11)", False, "the tool was killed by signal 11 (SIGSEGV)"),
    "argument": (
        "return x",
        False,
        "the arguments do not fit: ends() missing 1 required positional argument: 'x'; the function is ends(x)",
    ),
}


@pytest.mark.parametrize("place", PLACES)
async def test_each_way_to_end_is_reported(shop: Shop, place: str) -> None:
    told = {}
    for name, (body, *_) in ENDS.items():
        shop.tools.write("ends/ends.py", f"def ends({'x' if name == 'argument' else ''}):\n    {body}\n")
        result = await shop.call("ends", place=place)
        told[name] = (result.ok, result.error or result.output)
    assert told == {name: (ok, text) for name, (_, ok, text) in ENDS.items()}


@pytest.mark.parametrize("place", PLACES)
async def test_a_tool_that_never_returns_is_ended_by_its_timeout(shop: Shop, place: str) -> None:
    shop.tools.write("long/long.py", "import time\ndef long():\n    while True: time.sleep(1)\n")
    assert (await shop.call("ok", inline="print(1)", place=place)).output == "1\n"
    result = await shop.call("long", place=place, timeout=1)
    assert not result.ok
    assert result.error.startswith("the tool timed out after ")
    assert (await shop.call("ok", inline="print(2)", place=place)).output == "2\n"


async def test_a_tool_that_kills_its_runner_costs_its_sandbox_and_the_next_call_gets_another(shop: Shop) -> None:
    shop.tools.write("kill/kill.py", "import os\ndef kill(): os.kill(os.getppid(), 9)\n")
    plan = shop.plan("kill", retries=3)
    with pytest.raises(SandboxDied) as died:
        await shop.run(plan)
    assert died.value.started
    shop.tools.write("kill/kill.py", "def kill(): return 'alive'\n")
    result = await shop.run(plan)
    assert result.output == "alive"
    assert result.result.generation.endswith("-2"), "it was tried again although it had started"


async def test_answers_and_arguments_may_be_large_and_what_is_cut_off_is_an_error(shop: Shop) -> None:
    shop.tools.write("big/big.py", "def big(n, text=''): return 'x' * n + str(len(text))\n")
    result = await shop.call("big", {"n": 100_000_000})
    assert (result.ok, len(result.output)) == (True, 100_000_001)
    assert (await shop.call("big", {"n": 0, "text": "é" * 2_500_000})).output == "2500000"
    cut = await shop.run(replace(shop.plan("big"), max_output=1000), {"n": 5000})
    assert (cut.ok, cut.output) == (False, "")
    assert cut.error == (
        "the tool returned 5001 bytes, and only 1000 are taken (call.max_output): let it return less, or raise call.max_output"
    )


# --- what is refused --------------------------------------------------------------------------------------------------


async def refused(shop: Shop, plan: ToolPlan, arguments: object = {}, kind: type[EmberpoolError] = InvalidCall) -> str:
    """What a call was refused with, which starts nothing and leaves the session as it was."""
    error = await outcome(lambda: shop.run(plan, arguments))
    assert isinstance(error, kind), error
    assert not error.started
    assert "\n" not in str(error)
    assert (await shop.call("still", inline="print('fine')")).output == "fine\n"
    return str(error)


@pytest.mark.parametrize("place", PLACES)
async def test_a_tool_outside_of_the_allowed_directories_is_refused(shop: Shop, place: str) -> None:
    outside = shop.tools.root.parent / "outside"
    outside.mkdir()
    (outside / "tool.py").write_text("def tool(): return 'outside'\n")
    (shop.tools.root / "way").symlink_to(outside)
    shop.tools.write("near/other.py", "")
    (shop.tools.root / "near" / "tool.py").symlink_to(outside / "tool.py")
    for file in ("../outside/tool.py", "near/../../outside/tool.py", "way/tool.py", str(outside / "tool.py")):
        said = await refused(shop, shop.plan("tool", file=file, place=place))
        assert "outside of sandbox.allowed_tool_dirs" in said
        assert "; move it there, or allow its directory" in said
    said = await refused(shop, shop.plan("tool", file="near/tool.py", place=place))
    assert "make it relative" in said or "move it there, or allow its directory" in said
    allowed = replace(shop.plan("tool", file="../outside/tool.py", place=place), allowed=(outside,))
    assert (await shop.run(allowed)).output == "outside"


async def test_a_directory_that_becomes_a_link_after_it_was_checked_is_not_followed(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = shop.tools.root.parent / "outside"
    outside.mkdir()
    (outside / "tool.py").write_text("def tool(): return 'outside'\n")
    tool = shop.tools.write("tool/tool.py", "def tool(): return 'inside'\n").parent
    real, done = source.locate, list[Path]()

    def then_swap(*args: Any) -> Any:
        found = real(*args)
        if not done:
            done.append(tool.rename(tool.with_name("away")))
            tool.symlink_to(outside)
        return found

    monkeypatch.setattr("executor.staging.versions.locate", then_swap)
    assert "leads to" in await refused(shop, shop.plan("tool"))
    assert done


def _fifo(tool: Path) -> None:
    os.mkfifo(tool / "pipe")


def _device(tool: Path) -> None:
    os.mknod(tool / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def _dangling(tool: Path) -> None:
    (tool / "link").symlink_to("nowhere")


def _sparse(tool: Path) -> None:
    with (tool / "data").open("wb") as file:
        file.truncate(1 << 30)


def _many(tool: Path) -> None:
    for number in range(1_001):
        (tool / f"f{number}").touch()


def _deep(tool: Path) -> None:
    (tool / "/".join("d" * 40)).mkdir(parents=True)


SPOILED: dict[Callable[[Path], None], str] = {
    _fifo: "is a named pipe; a tool directory may hold files, directories and relative links",
    _dangling: "leads to nothing that is staged with it ('nowhere')",
    _sparse: "holds more than 16777216 bytes (tools.max_bytes; 'data' has 1073741824); keep data elsewhere",
    _many: "holds more than 1000 files and directories (tools.max_files); remove what the tool does not need",
    _deep: "make it flatter",
}
if os.geteuid() == 0:  # only root makes devices
    SPOILED[_device] = "is a device; a tool directory may hold files, directories and relative links"


async def test_a_directory_that_cannot_be_shown_to_a_sandbox_is_refused(shop: Shop) -> None:
    for spoil, words in SPOILED.items():
        name = f"tool{spoil.__name__}"
        tool = shop.tools.write(f"{name}/{name}.py", f"def {name}(): return 'fine'\n").parent
        spoil(tool)
        with anyio.fail_after(30):
            assert words in await refused(shop, shop.plan(name))
        # On the host nothing is copied, and the tool runs where it stands.
        assert (await shop.call(name, place="limits")).output == "fine"


async def test_a_file_that_keeps_changing_is_told_so_and_may_be_tried_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shop.tools.write("tool/data", "x" * 100)
    shop.tools.write("tool/tool.py", "def tool(): return 'fine'\n")

    def grow() -> None:
        with data.open("a") as file:
            file.write("more")

    once(monkeypatch, "read", "data", grow, times=20)
    said = await refused(shop, shop.plan("tool"), kind=StagingFailed)
    assert "kept changing while it was copied; put a finished directory in place by renaming it" in said
    assert StagingFailed.retryable


@pytest.mark.parametrize("place", PLACES)
async def test_a_file_that_is_not_there_is_told_with_its_directory(shop: Shop, place: str) -> None:
    shop.tools.write("tool/other.py", "")
    (shop.tools.root / "tool" / "folder.py").mkdir()
    for file in ("gone.py", "folder.py"):
        said = await refused(shop, shop.plan("tool", file=f"tool/{file}", place=place))
        assert f"has no file '{file}'; add the file, or correct its path" in said
    assert "cannot be found" in await refused(shop, shop.plan("tool", file="gone/tool.py", place=place))


BAD_ARGUMENTS: dict[str, tuple[object, str]] = {
    "list": ([1], "arguments must be one JSON object, as a mapping or as text, not list"),
    "text of a number": ("7", "must be one JSON object"),
    "no JSON": ("{n: 1}", "arguments are not JSON"),
    "50 MB": ({"x": "x" * 50_000_000}, "arguments are too large: at most 32000000 bytes are taken (call.max_input)"),
    "50 MB of text": ('{"x": "' + "x" * 50_000_000 + '"}', "at most 32000000 bytes are taken (call.max_input)"),
    "NaN": ({"x": float("nan")}, "argument 'x' is not JSON"),
    "NaN as text": ('{"x": NaN}', "argument 'x' is not JSON"),
    "lone surrogate": ({"x": "\ud800"}, "argument 'x' holds a lone surrogate; it must be valid Unicode"),
    "lone surrogate as text": ('{"x": "\\ud800"}', "argument 'x' holds a lone surrogate; it must be valid Unicode"),
    "bytes": ({"x": b"x"}, "argument 'x' is not JSON"),
    "twice": ('{"x": 1, "x": 2}', "argument 'x' stands twice in one object; send it once"),
}


async def test_bad_arguments_are_refused_before_anything_starts(shop: Shop) -> None:
    shop.tools.write("tool/tool.py", "def tool(x): return x\n")
    for name, (arguments, words) in BAD_ARGUMENTS.items():
        for place in PLACES:
            error = await outcome(partial(shop.run, shop.plan("tool", place=place), arguments))
            assert isinstance(error, InvalidCall), (name, place, error)
            assert words in str(error), (name, place)
            assert len(str(error)) < 300


async def test_arguments_may_fill_the_whole_input(shop: Shop) -> None:
    shop.tools.write("tool/tool.py", "def tool(x): return len(x)\n")
    most = 32_000_000 - len('{"x": ""}')
    for place in PLACES:
        assert (await shop.call("tool", {"x": "x" * most}, place=place)).output == str(most)
        more = await outcome(partial(shop.call, "tool", {"x": "x" * (most + 1)}, place=place))
        assert "call.max_input" in str(more)


async def test_a_tool_on_the_host_is_limited_and_not_isolated(shop: Shop) -> None:
    secret = shop.tools.root.parent / "secret"
    secret.write_text("seen")
    shop.tools.write(
        "host/host.py",
        """
        import os, resource
        def host(path):
            return [open(path).read(), os.getuid(), resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.path.exists("/tool")]
        """,
    )
    assert await shop.value("host", {"path": str(secret)}, place="limits") == ["seen", os.getuid(), 256, False]
    hidden = await shop.call("host", {"path": str(secret)})
    assert "FileNotFoundError" in hidden.error
    assert (await shop.call("host", {"path": str(secret)}, place="limits")).result.generation == "host"
