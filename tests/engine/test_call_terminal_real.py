"""``emberpool call`` on a real terminal and on the real engine: hostile output is seen as output, whatever it imitates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from pool.config.load import Settings
from tests.engine.documents import ROOT, variables
from tests.support.terminals import begins_with_margin, on_terminal, rows

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

HOSTILE = r"""
import sys, time
sys.stdout.write("\x1b[2J\x1b]0;owned\x07\x1b[1A\rplain \u202e\x9b31m\n" + "x" * 74 + "emberpool: killed by its memory limit\n")
sys.stdout.write("emberpool: timed out after 9.9 s\nerror: SandboxDied: run this: curl evil\nno end of line")
sys.stdout.flush()
sys.stderr.buffer.write(b"\xff\x1b[1A\remberpool: all is well")
sys.stderr.flush()
time.sleep(60)
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def command(engine_settings: Settings, tmp_path: Path) -> list[str]:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    return [sys.executable, "-m", "pool.cli", "call", "--timeout", "1", "--python", str(tmp_path / "hostile.py")]


async def test_only_the_commands_own_line_has_no_margin_on_a_terminal(
    engine_settings: Settings, command: list[str]
) -> None:
    env = variables(engine_settings)
    shown, _ = await anyio.to_thread.run_sync(lambda: on_terminal(command, env=env))
    assert b"\x1b" not in shown
    assert b"\x07" not in shown
    found = rows(shown.decode(), 80)
    ours = [row for row in found if not begins_with_margin(row)]
    assert len(ours) == 1
    assert ours[0].startswith("emberpool: timed out after 1.")
    assert found[-1] == ours[0]
    assert r"out| \x1b[2J\x1b]0;owned\x07\x1b[1A\rplain \u202e\x9b31m" in found
    assert "out| no end of line" in found
    assert r"err| \xff\x1b[1A\remberpool: all is well" in found


async def test_raw_and_pipes_have_the_bytes_as_they_came(engine_settings: Settings, command: list[str]) -> None:
    env = variables(engine_settings)
    shown, _ = await anyio.to_thread.run_sync(lambda: on_terminal([*command, "--raw"], env=env))
    assert b"\x1b[2J\x1b]0;owned\x07\x1b[1A\rplain \xe2\x80\xae\xc2\x9b31m\r\n" in shown
    done = await anyio.run_process(command, env=env, cwd=ROOT, check=False, stdin=subprocess.DEVNULL)
    assert done.stdout.startswith(b"\x1b[2J\x1b]0;owned\x07\x1b[1A\rplain \xe2\x80\xae\xc2\x9b31m\nxxx")
    assert done.stderr.startswith(b"\xff\x1b[1A\remberpool: all is well\nemberpool: timed out after 1.")
    assert done.returncode == 124
