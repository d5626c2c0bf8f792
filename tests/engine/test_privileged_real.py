"""Privileged commands on a real engine: what of the workspace they reach, as whom, and what stays closed to them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from executor.errors import InvalidCall, ProfileMismatch
from pool.config.load import Settings
from pool.pool import SandboxPool
from tests.support.tools import changed

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.engine,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"),
]

OWNER = 1000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the host's side is not what is tested here


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace whose ``data/sandbox`` belongs to a user, and that holds more than that."""
    place = tmp_path / "workspace"
    (place / "data" / "sandbox").mkdir(parents=True)
    (place / "secret.txt").write_text("of the workspace")
    (place / "data" / "secret.txt").write_text("of its data")
    os.chown(place / "data" / "sandbox", OWNER, OWNER)
    return place


@pytest.fixture
async def pool(engine_settings: Settings, workspace: Path) -> AsyncIterator[SandboxPool]:
    async with SandboxPool(changed(engine_settings, sandbox={"workspace": str(workspace)})) as pool:
        yield pool


async def test_commands_write_to_the_workspace_as_its_owner_and_find_it_again(
    pool: SandboxPool, workspace: Path
) -> None:
    sandbox, commands = workspace / "data" / "sandbox", pool.privileged
    wrote = await commands.shell_exec("cat > note.txt; id -u; pwd", stdin=b"from the shell")
    assert (wrote.exit_code, wrote.stdout) == (0, b"1000\n/workspace\n"), wrote
    assert (sandbox / "note.txt").read_text() == "from the shell"
    assert (sandbox / "note.txt").stat().st_uid == OWNER
    (sandbox / "steps").mkdir()
    (sandbox / "steps" / "go.py").write_text(
        "import sys, lately\nprint(lately.WORD, sys.argv[1:], open('note.txt').read())\n"
    )
    (sandbox / "lib").mkdir()
    (sandbox / "lib" / "lately.py").write_text("WORD = 'installed'\n")
    ran = await commands.run_script("steps/go.py", ["a b", "--c"])
    assert ran.stdout == b"installed ['a b', '--c'] from the shell\n", ran
    (sandbox / "go.sh").write_text('echo "$1" >&2; exit 3\n')
    ran = await commands.run_script("go.sh", ("first",))
    assert (ran.exit_code, ran.stderr) == (3, b"first\n")
    evaluated = await commands.python_eval("import sys; print(open('note.txt').read(), sys.stdin.read())", stdin=b"in")
    assert evaluated.stdout == b"from the shell in\n"
    assert not list(sandbox.rglob("__pycache__"))


async def test_a_command_sees_nothing_else_of_the_workspace_no_network_and_a_root_that_nobody_writes(
    pool: SandboxPool, workspace: Path
) -> None:
    code = """
import os
found = [os.path.join(top, name) for top, _, names in os.walk("/") for name in names if name == "secret.txt"]
def attempt(act):
    try: return act()
    except OSError as error: return error.strerror
print(found, sorted(os.listdir("/workspace/..")).count("secret.txt"))
print(attempt(lambda: open("/here", "w")), attempt(lambda: open("/usr/bin/here", "w")))
print([line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]])
print(os.path.exists("/tool"), open("/proc/self/status").read().split("CapEff:")[1].split()[0])
"""
    seen = await pool.privileged.python_eval(code)
    assert seen.stdout.decode().splitlines() == [
        "[] 0",
        "Read-only file system Read-only file system",
        "['lo']",
        "False 0000000000000000",
    ], seen.stderr
    (workspace / "data" / "sandbox" / "way").symlink_to(workspace / "secret.txt")
    (workspace / "data" / "sandbox" / "up").symlink_to("../secret.txt")
    out = await pool.privileged.shell_exec("cat way up")
    assert (out.exit_code, out.stdout) == (1, b"")


async def test_nothing_of_a_command_stays_but_what_it_wrote(pool: SandboxPool) -> None:
    await pool.privileged.shell_exec("echo kept > /workspace/kept; echo gone > /tmp/gone; sleep 1000 & echo x")
    left = await pool.privileged.shell_exec("cat kept; ls /tmp; ls /proc | grep -c '^[0-9]'")
    kept, *rest = left.stdout.decode().split()
    assert kept == "kept"
    assert len(rest) == 1
    assert int(rest[0]) <= 5


async def test_a_command_is_held_to_its_own_ceilings(pool: SandboxPool) -> None:
    late = await pool.privileged.shell_exec("echo begun; sleep 60", timeout=2)
    assert (late.timed_out, late.exit_code) == (True, None)
    with pytest.raises(InvalidCall, match=r"at most 60 s are allowed \(privileged.shell_exec.timeout\)"):
        await pool.privileged.shell_exec("true", timeout=61)
    flood = await pool.privileged.shell_exec("head -c 3000000 /dev/zero")
    assert (len(flood.stdout), flood.stdout_total, flood.truncated) == (1_048_576, 3_000_000, True)


async def test_a_workspace_of_root_is_refused_with_what_to_do(pool: SandboxPool, workspace: Path) -> None:
    place = workspace / "data" / "sandbox"
    os.chown(place, 0, 0)
    with pytest.raises(ProfileMismatch, match=f"give it an owner, for example: chown 1000:1000 {place}"):
        await pool.privileged.shell_exec("true")
