"""Pages of docs/ taken apart, so that every example in them is run as it stands there."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from pool.config.load import Settings

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of one language in a page (``"usage.md"``), in their order."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


async def run_fragments(fragments: Sequence[str], names: dict[str, Any]) -> None:
    """Run Python blocks one after the other, with ``await`` at the top; what one defines, the next ones find."""
    for number, source in enumerate(fragments):
        code = compile(source, f"example {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made = eval(code, names)  # noqa: S307 - the example under test
        if inspect.iscoroutine(made):
            await made


def variables(settings: Settings) -> dict[str, str]:
    """The environment in which programs and commands of a page run: on the image, and in the place, of a test's pool."""
    pool = settings.pool
    own = {
        "NAME": pool.name,
        "STATE_DIR": str(pool.state_dir),
        "MIN_STANDBY": "0",
        "MAX_SANDBOXES": "2",
        "OVERCOMMIT": "true",
    }
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("EMBERPOOL_CONFIG")},
        **{f"EMBERPOOL_POOL__{key}": value for key, value in own.items()},
        "EMBERPOOL_SANDBOX__IMAGE": settings.sandbox.image,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


async def run_program(source: str, env: Mapping[str, str]) -> str:
    """Run a Python block as a program of its own; what it printed."""
    done = await anyio.run_process(
        [sys.executable, "-c", source], env=env, cwd=ROOT, check=False, stderr=subprocess.PIPE
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@dataclass(frozen=True, slots=True)
class Command:
    """A line behind ``$ `` in a ``console`` block, and the lines that it prints, on whichever stream."""

    line: str
    prints: str


def commands(page: str) -> list[Command]:
    """The commands of all console blocks of a page."""
    found = []
    for block in blocks(page, "console"):
        _, *parts = re.split(r"^\$ ", block, flags=re.M)
        for part in parts:
            line, _, prints = part.partition("\n")
            found.append(Command(line, prints))
    return found


async def run_commands(page: Sequence[Command], env: Mapping[str, str]) -> list[str]:
    """Run commands one after the other in one shell; for each that printed something else than it should, a line."""
    mark = f"-- {secrets.token_hex(8)}"
    # Each finds the status of the one before in `$?`, as it would at a prompt.
    script = "".join(f"(exit $s)\n{{ {one.line}\n}} 2>&1\ns=$?; echo '{mark}'\n" for one in page)
    done = await anyio.run_process(["bash", "-c", f"s=0\n{script}"], env=env, cwd=ROOT, stderr=subprocess.STDOUT)
    printed = done.stdout.decode().split(f"{mark}\n")
    same = doctest.OutputChecker().check_output
    return [
        f"$ {one.line}\nshould print\n{one.prints}and printed\n{got}"
        for one, got in zip(page, printed[:-1], strict=True)
        if not same(one.prints, got, doctest.ELLIPSIS)
    ]
