"""Every example of docs/usage.md runs, as it stands there."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from pool.config import Settings
from pool.pool import SandboxPool

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

ROOT = Path(__file__).parents[2]
PROGRAM, *FRAGMENTS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/usage.md").read_text("utf-8"), re.M | re.S)


async def test_every_example_runs_inside_a_pool(engine_settings: Settings) -> None:
    assert len(FRAGMENTS) >= 8
    async with SandboxPool(engine_settings) as pool:
        names: dict[str, Any] = {"pool": pool, "anyio": anyio}
        for number, source in enumerate(FRAGMENTS):
            code = compile(source, f"example {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            made = eval(code, names)  # noqa: S307 - the example under test
            if inspect.iscoroutine(made):
                await made


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_first_example_runs_as_a_program(engine_settings: Settings, tmp_path: Path) -> None:
    config = tmp_path / "emberpool.toml"
    pool, image = engine_settings.pool, engine_settings.sandbox.image
    config.write_text(
        f'[sandbox]\nimage = "{image}"\n[pool]\nname = "{pool.name}"\nstate_dir = "{pool.state_dir}"\n'
        "min_standby = 0\nmax_sandboxes = 2\novercommit = true\n"
    )
    env = {**os.environ, "EMBERPOOL_CONFIG": str(config), "PYTHONPATH": str(ROOT)}
    done = await anyio.run_process(
        [sys.executable, "-c", PROGRAM], env=env, cwd=ROOT, check=False, stderr=subprocess.PIPE
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"42" in done.stdout
