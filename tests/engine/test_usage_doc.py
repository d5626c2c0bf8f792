"""Every example of docs/usage.md runs, as it stands there."""

from __future__ import annotations

import anyio
import pytest

from pool.config.load import Settings
from pool.pool import SandboxPool
from tests.engine.documents import blocks, run_fragments, run_program, variables

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

PROGRAM, *FRAGMENTS = blocks("usage.md", "python")


async def test_every_example_runs_inside_a_pool(engine_settings: Settings) -> None:
    assert len(FRAGMENTS) >= 8
    async with SandboxPool(engine_settings) as pool:
        await run_fragments(FRAGMENTS, {"pool": pool, "anyio": anyio})


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_first_example_runs_as_a_program(engine_settings: Settings) -> None:
    assert "42" in await run_program(PROGRAM, variables(engine_settings))
