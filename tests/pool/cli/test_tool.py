"""The commands for Python tools: what they print where, how they end, and that an interrupted one leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import typer
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from executor.engine.locate import find_engine
from executor.errors import EngineUnavailable
from executor.sandbox.profile import LABEL_POOL
from pool.cli import tool
from pool.cli.tool import launch_check, tool_app
from pool.config.load import Settings
from pool.doctor.checks import Check
from tests.support import ROOT

MANIFEST = """
[agents.host.tools.add]
description = "Adds [two] numbers."
file = "add.py"

[agents.host.tools.words]
inline = "import sys; print(sys.stdin.read().upper(), end='')"

[agents.host.tools.fails]
inline = "import sys; print('half'); sys.exit('no such row')"

[agents.host.tools.long]
inline = "import os, time; open('/proc/self/fd/2', 'w').write('up\\\\n'); time.sleep(600)"

[agents.boxed.tools.add]
file = "add.py"
[agents.boxed.tools.hang]
inline = "import time; time.sleep(600)"
"""
CONFIG = """
[agents.host]
python_tools = "limits"
"""


@dataclass
class Desk:
    """A manifest, its tools and a configuration in one directory; ``place`` is for state and temporary files."""

    root: Path
    place: Path

    @property
    def manifest(self) -> str:
        return str(self.root / "manifest.toml")

    @property
    def config(self) -> str:
        return str(self.root / "emberpool.toml")

    def invoke(self, *words: str, stdin: str = "") -> Result:
        """A command in this process."""
        app = typer.Typer()
        app.add_typer(tool_app, name="tool")
        app.command("launch-check")(launch_check)
        with capture_logs():  # the command itself sends logs to stderr
            return CliRunner().invoke(app, [*words, "--config", self.config], input=stdin)

    def start(self, *words: str, log_level: str = "error") -> subprocess.Popen[str]:
        """A command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "pool.cli", "--log-level", log_level, *words, "--config", self.config],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self.place)},
        )  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.delenv("EMBERPOOL_CONFIG", raising=False)
    root = tmp_path / "desk"
    root.mkdir()
    state_dir.parent.joinpath("tmp").mkdir()
    (root / "manifest.toml").write_text(MANIFEST)
    (root / "emberpool.toml").write_text(f'{CONFIG}\n[pool]\nstate_dir = "{state_dir}"\n')
    (root / "add.py").write_text("def add(a, b=1):\n    print('adding')\n    return {'sum': a + b}\n")
    return Desk(root, state_dir.parent / "tmp")


def one_line(result: Result) -> str:
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("\n")
    return result.stderr.rstrip("\n")


# --- run --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_stdin", [False, True])
def test_a_tool_is_called_and_what_it_returns_is_printed(desk: Desk, from_stdin: bool) -> None:
    words = ["--args", "-"] if from_stdin else ["--args", '{"a": 2}']
    done = desk.invoke("tool", "run", desk.manifest, "add", "--agent", "host", *words, stdin='{"a": 2}')
    assert (done.exit_code, done.stdout, done.stderr) == (0, '{"sum": 3}\n', "adding\n")


def test_output_is_printed_as_it_is_and_ends_with_a_line(desk: Desk) -> None:
    done = desk.invoke("tool", "run", desk.manifest, "words", "--args", '{"é": "ß"}')
    assert (done.exit_code, done.stdout) == (0, '{"É": "SS"}\n')


def test_a_tool_that_fails_ends_with_1_and_its_error_on_stderr_alone(desk: Desk) -> None:
    done = desk.invoke("tool", "run", desk.manifest, "fails")
    assert (done.exit_code, one_line(done)) == (1, "no such row")


def test_json_holds_the_whole_outcome(desk: Desk) -> None:
    done = desk.invoke("tool", "run", desk.manifest, "add", "--agent", "host", "--args", '{"a": 2}', "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (0, "")
    assert told.keys() == {"ok", "output", "error", "result"}
    assert (told["ok"], told["output"], told["error"]) == (True, '{"sum": 3}', "")
    assert (told["result"]["exit_code"], told["result"]["stderr"]) == (0, "adding\n")
    assert told["result"]["generation"] == "host"
    done = desk.invoke("tool", "run", desk.manifest, "fails", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["ok"], told["output"], told["error"]) == (1, False, "", "no such row")
    assert told["result"]["stdout"] == "half\n"


REFUSED: dict[str, tuple[list[str], str]] = {
    "no such tool": (["ad", "--agent", "host"], "error: ad: there is no such tool in the manifest; did you mean add?"),
    "no such agent": (
        ["add", "--agent", "hots"],
        "error: hots: there is no such agent in the manifest; did you mean host?",
    ),
    "two agents": (["add"], "error: add: several agents have this tool: host, boxed; pass --agent"),
    "a list": (["words", "--args", "[1]"], "error: InvalidCall: arguments must be one JSON object"),
    "no JSON": (["words", "--args", "{"], "error: InvalidCall: arguments are not JSON"),
    "NaN": (["words", "--args", '{"a": NaN}'], "error: InvalidCall: argument 'a' is not JSON"),
    "a slash": (
        ["../add"],
        "error: ../add: there is no such tool in the manifest; did you mean add? It has add, words",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_line_on_stderr_and_status_1(desk: Desk, case: str) -> None:
    words, said = REFUSED[case]
    done = desk.invoke("tool", "run", desk.manifest, *words)
    assert done.exit_code == 1
    assert one_line(done).startswith(said)


def test_a_refusal_as_json_says_whether_to_try_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> None:
        raise EngineUnavailable("no container engine answers; run: emberpool engine up", retry_after=1.0)

    monkeypatch.setattr(tool, "make_ready", nothing)
    done = desk.invoke("tool", "run", desk.manifest, "hang", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "error": "EngineUnavailable",
        "reason": "engine_unavailable",
        "message": "no container engine answers; run: emberpool engine up",
        "retryable": True,
        "retry_after": 1.0,
        "started": False,
    }
    assert not list(desk.place.parent.glob("one-shot-*"))
    done = desk.invoke("tool", "run", desk.manifest, "hang")
    assert one_line(done) == "error: EngineUnavailable: no container engine answers; run: emberpool engine up"


def test_too_many_arguments_on_stdin_are_refused(desk: Desk) -> None:
    done = desk.invoke("tool", "run", desk.manifest, "words", "--args", "-", stdin='{"a": "' + "x" * 33_000_000 + '"}')
    assert done.exit_code == 1
    assert one_line(done) == "error: InvalidCall: stdin is more than 32000000 bytes; send less, or raise call.max_input"


@pytest.mark.parametrize("words", [["tool", "run", "X", "add"], ["tool", "list", "X"], ["launch-check", "X"]])
def test_a_manifest_that_cannot_be_used_is_told_problem_by_problem(desk: Desk, words: list[str]) -> None:
    words = [desk.manifest if word == "X" else word for word in words]
    Path(desk.manifest).write_text("[agents.a.tools.t]\nfil = 'x'\nretries = 11\n")
    done = desk.invoke(*words)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "agents.a.tools.t.fil: unknown key" in done.stderr
    assert "agents.a.tools.t.retries: " in done.stderr
    Path(desk.manifest).unlink()
    done = desk.invoke(*words)
    assert one_line(done) == f"error: {desk.manifest}: there is no such file"
    Path(desk.config).write_text("[pol]\n")
    assert "unknown" in desk.invoke(*words).stderr


# --- list -------------------------------------------------------------------------------------------------------------


def test_tools_are_listed_with_their_agent_and_place(desk: Desk) -> None:
    done = desk.invoke("tool", "list", desk.manifest)
    lines = done.stdout.splitlines()
    assert (done.exit_code, done.stderr) == (0, "")
    assert lines[0].split(None, 3) == ["agent", "tool", "runs", "in    description"]
    assert lines[1] == "host   add    limits     Adds [two] numbers."
    assert [line.split()[:3] for line in lines[2:]] == [
        ["host", "words", "limits"],
        ["host", "fails", "limits"],
        ["host", "long", "limits"],
        ["boxed", "add", "container"],
        ["boxed", "hang", "container"],
    ]


def test_a_description_cannot_command_the_terminal(desk: Desk) -> None:
    text = MANIFEST.replace("Adds [two] numbers.", "[red]a\\u001b[31m\\nb\\tc\\u202e")
    Path(desk.manifest).write_text(text)
    done = desk.invoke("tool", "list", desk.manifest)
    assert done.stdout.splitlines()[1].endswith(r"limits     [red]a\x1b[31m b c\u202e")


def test_the_list_as_json_is_for_programs(desk: Desk) -> None:
    done = desk.invoke("tool", "list", desk.manifest, "--json")
    told = json.loads(done.stdout)
    assert told[0] == {"agent": "host", "tool": "add", "description": "Adds [two] numbers.", "python_tools": "limits"}
    assert len(told) == 6


# --- launch-check -----------------------------------------------------------------------------------------------------


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """What the doctor reports."""
    checks = [Check("engine", "ok", "it answers")]

    async def examine(settings: Settings) -> list[Check]:
        return checks

    monkeypatch.setattr(tool, "examine", examine)
    return checks


def test_the_launch_check_says_where_each_tool_runs_and_ends_with_1_where_one_cannot(
    desk: Desk, doctor: list[Check]
) -> None:
    done = desk.invoke("launch-check", desk.manifest)
    lines = done.stdout.splitlines()
    assert (done.exit_code, done.stderr) == (0, "")
    assert lines[0] == (
        "limits     host   add    on the host, under resource limits: no boundary -> "
        'agents.host.tools.add.python_tools = "container" in the manifest'
    )
    assert lines[4] == "container  boxed  add    in the session's own hardened container"
    assert lines[-1] == "agents with tools that run unisolated: host"
    assert desk.invoke("launch-check", desk.manifest, "--strict").exit_code == 1
    doctor.append(Check("image", "fail", "it is not there", "build it"))
    done = desk.invoke("launch-check", desk.manifest)
    assert done.exit_code == 1
    assert "refused  boxed  hang   image: it is not there -> build it" in done.stdout.splitlines()


def test_the_launch_check_as_json(desk: Desk, doctor: list[Check]) -> None:
    done = desk.invoke("launch-check", desk.manifest, "--strict", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 1
    assert (told["ok"], told["strict"], len(told["tools"])) == (False, True, 6)
    assert told["tools"][4] == {
        "agent": "boxed",
        "tool": "add",
        "runs": "container",
        "why": "in the session's own hardened container",
        "change": "",
    }


# --- the commands as processes ----------------------------------------------------------------------------------------


def ended(process: subprocess.Popen[str], text: str = "", *, within: float = 60) -> tuple[int, str, str]:
    out, err = process.communicate(text, timeout=within)
    return process.returncode, out, err


def said(process: subprocess.Popen[str], word: str) -> None:
    """Read stderr up to a line with ``word``."""
    assert process.stderr is not None
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError(f"it ended without {word!r}")


def test_the_command_calls_a_tool_with_arguments_on_stdin(desk: Desk) -> None:
    process = desk.start("tool", "run", desk.manifest, "add", "--agent", "host", "--args", "-")
    assert ended(process, '{"a": 40, "b": 2}') == (0, '{"sum": 42}\n', "adding\n")
    assert list(desk.place.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_tool_on_the_host_leaves_nothing(desk: Desk, number: int) -> None:
    fifo = desk.root / "up"
    os.mkfifo(fifo)
    Path(desk.manifest).write_text(
        f"[agents.host.tools.long]\ninline = \"import os, time; open('{fifo}', 'w').write(str(os.getpid())); time.sleep(600)\"\n"
    )
    process = desk.start("tool", "run", desk.manifest, "long")
    pid = int(fifo.read_text())
    process.send_signal(number)
    assert ended(process) == (130, "", "error: interrupted\n")
    assert not Path(f"/proc/{pid}").exists()
    assert list(desk.place.iterdir()) == []


@pytest.mark.engine
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_command_calls_a_tool_in_a_container_and_leaves_nothing(
    desk: Desk, engine_settings: Settings
) -> None:
    def run(*words: str, **more: Any) -> tuple[int, str, str]:
        return ended(desk.start("tool", "run", desk.manifest, *words, **more))

    done = await anyio.to_thread.run_sync(lambda: run("add", "--agent", "boxed", "--args", '{"a": 1}'))
    assert done == (0, '{"sum": 2}\n', "adding\n")
    process = desk.start("tool", "run", desk.manifest, "hang", log_level="info")
    await anyio.to_thread.run_sync(said, process, "session.bound")
    (identity,) = desk.place.parent.glob("one-shot-*/pool.json")
    pool_id = json.loads(identity.read_text())["pool_id"]
    engine, _ = await find_engine()
    assert len(await engine.list(LABEL_POOL, pool_id)) == 1
    process.send_signal(signal.SIGINT)
    status, out, err = await anyio.to_thread.run_sync(ended, process)
    assert (status, out) == (130, "")
    assert err.endswith("error: interrupted\n")
    assert await engine.list(LABEL_POOL, pool_id) == []
    assert [path.name for path in desk.place.parent.iterdir()] == ["tmp"]
    assert list(desk.place.iterdir()) == []
    process = desk.start("launch-check", desk.manifest, "--strict", "--json")
    status, out, _ = await anyio.to_thread.run_sync(ended, process)
    assert status == 1
    assert {one["agent"]: one["runs"] for one in json.loads(out)["tools"]} == {"host": "limits", "boxed": "container"}
