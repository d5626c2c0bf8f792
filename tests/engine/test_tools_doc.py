"""Every command and every example of docs/tools.md runs, as it stands there, and prints what stands there."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from pool.config.load import Settings, load_settings
from pool.pool import SandboxPool
from tests.engine.documents import ROOT, blocks, commands, run_commands, run_fragments, run_program, variables
from tests.support.tools import changed

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

PROGRAM, *FRAGMENTS = blocks("tools.md", "python")
EXAMPLES = load_settings(ROOT / "docs" / "examples" / "emberpool.toml", {}).model_dump(exclude_unset=True)["agents"]


@pytest.mark.full  # each command of the page in turn; the quick set runs its program and its examples
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_command_prints_what_the_page_says(engine_settings: Settings) -> None:
    page = commands("tools.md")
    assert len(page) >= 10
    wrong = await run_commands(page, variables(engine_settings))
    assert not wrong, "\n".join(wrong)
    assert not list(engine_settings.pool.state_dir.parent.iterdir())


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_program_of_the_page_runs(engine_settings: Settings) -> None:
    returned, failed = (await run_program(PROGRAM, variables(engine_settings))).splitlines()
    assert returned.startswith("returned ")
    assert failed.startswith("failed ")
    assert "line 2 has 1 fields" in failed


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives the workspace away")
async def test_every_example_runs_inside_a_pool(
    engine_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(FRAGMENTS) >= 4
    monkeypatch.chdir(ROOT)
    (tmp_path / "data" / "sandbox").mkdir(parents=True)
    os.chown(tmp_path / "data" / "sandbox", 1000, 1000)
    settings = changed(engine_settings, sandbox={"workspace": str(tmp_path)}, agents=EXAMPLES)
    async with SandboxPool(settings) as pool:
        await run_fragments(FRAGMENTS, {"pool": pool, "settings": settings, "anyio": anyio})
