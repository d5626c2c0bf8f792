"""The command with standard streams that are closed, full, broken, endless or not to be read: never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

MANIFEST = f"{ROOT}/docs/examples/manifest.toml --config {ROOT}/docs/examples/emberpool.toml"
COMMANDS = {
    "config check": f"config check {ROOT}/docs/emberpool.example.toml",
    "tool list": f"tool list {MANIFEST}",
    "tool run": "tool run {place}/manifest.toml add --config {place}/emberpool.toml",
    "cleanup": "cleanup --state-dir {place}/none",
}
LOST = "error: stdout cannot be written: {}; what was to be said there is lost\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "emberpool.toml").write_text('[sandbox]\npython_tools = "limits"\n[call]\nmax_input = "1MB"\n')
    (tmp_path / "manifest.toml").write_text('[agents.a.tools.add]\nfile = "add.py:add"\n')
    (tmp_path / "add.py").write_text("def add(a=1, b=1):\n    return a + b\n")
    return tmp_path


def run(place: Path, words: str, redirections: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m pool.cli {words.format(place=place)} {redirections}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EMBERPOOL_CONFIG")}
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, cwd=ROOT, env=environ,
        stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.drawn(cases=2)  # several processes for each
@pytest.mark.parametrize("command", COMMANDS)
def test_closed_streams_end_no_command_in_a_traceback(place: Path, command: str) -> None:
    done = run(place, COMMANDS[command], "<&- >&-")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", LOST.format("Bad file descriptor"))


@pytest.mark.parametrize("command", ["config check", "cleanup"])
def test_a_full_disk_is_told_on_stderr(place: Path, command: str) -> None:
    done = run(place, COMMANDS[command], ">/dev/full")
    assert (done.returncode, done.stderr) == (1, LOST.format("No space left on device"))


@pytest.mark.parametrize(
    ("redirections", "status"),
    [("<&-", 0), ("2>&-", 0), ("2>/dev/full", 0), ("<&- 2>&-", 0), ("<&- >&- 2>&-", 1), (">/dev/full 2>&1", 1)],
)
def test_only_a_lost_stdout_changes_the_status(place: Path, redirections: str, status: int) -> None:
    done = run(place, COMMANDS["tool run"], redirections)
    assert (done.returncode, done.stdout, done.stderr) == (status, "" if status else "2\n", "")


@pytest.mark.parametrize("both", ["", "2>&1"])
def test_a_reader_that_has_gone_is_no_error_to_be_told(place: Path, both: str) -> None:
    done = run(place, COMMANDS["config check"], f"{both} | true")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.drawn(cases=2)  # a process for each
@pytest.mark.parametrize("words", ["tool run {place}/manifest.toml add --args -", "call -- cat", "call --python -"])
@pytest.mark.parametrize(
    ("redirection", "why"),
    [
        ("</dev/zero", "stdin is more than 1000000 bytes; send less, or raise call.max_input"),
        ("0>{place}/out", "stdin cannot be read: Bad file descriptor; redirect it from a file or a pipe"),
    ],
)
def test_stdin_that_cannot_be_taken_is_refused_at_once(place: Path, words: str, redirection: str, why: str) -> None:
    option = " --config {place}/emberpool.toml "
    words = words.replace(" -- ", f"{option}-- ") if " -- " in words else words + option
    done = run(place, words, redirection.format(place=place))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: InvalidCall: {why}\n")


def test_endless_source_is_refused_at_once(place: Path) -> None:
    done = run(place, "call --python /dev/zero --config {place}/emberpool.toml", "<&-")
    why = "/dev/zero is more than 1000000 bytes; send less, or raise call.max_input"
    assert (done.returncode, done.stderr) == (1, f"error: InvalidCall: {why}\n")


def test_a_call_that_is_wrong_is_refused_before_an_engine_is_looked_for(place: Path) -> None:
    done = run(place, "call --config {place}/emberpool.toml --timeout 3600 -- true", "")
    assert done.stderr.startswith("error: InvalidCall: timeout is 3600 s; at most 60 s are allowed")


def test_streams_that_do_not_block_are_waited_for(place: Path) -> None:
    # Both ends of a pipe that somebody else has made non-blocking, as node's are; more than fits into it.
    source = (
        "import sys, time; sys.stdout.write('[pool]\\n'); sys.stdout.flush(); time.sleep(1.5); print('name = \"x\"')"
    )
    program = (
        "import os, sys\n"
        "from pool.cli import streams as cli_streams\n"
        "os.set_blocking(0, False); os.set_blocking(1, False)\n"
        "cli_streams.install()\n"
        "data = cli_streams.read_stdin(10_000_000)\n"
        "sys.stdout.buffer.write(data * 100_000)\n"
        "cli_streams.finish()\n"
    )
    (place / "program.py").write_text(program)
    (place / "source.py").write_text(source)
    command = f"{sys.executable} {place}/source.py | {sys.executable} {place}/program.py | (sleep 0.2; wc -c)"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == (str(18 * 100_000), "")
