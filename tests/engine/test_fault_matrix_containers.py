"""A hand that ends or pauses a container of the pool: while it is idle, while it starts, while a call runs in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pool.session import Session
from tests.engine.faulty import Daemon, Recovery
from tests.engine.scene import MOMENTS, pool_settings, staged

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # what happens is the engine's doing


HANDS: list[tuple[str, ...]] = [("kill",), ("rm", "-f"), ("pause",), ("stop", "-t", "1")]


@pytest.mark.parametrize("hand", HANDS, ids=lambda hand: hand[0])
async def test_container_that_a_hand_ends_or_pauses_is_replaced(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], hand: tuple[str, ...]
) -> None:
    settings = pool_settings(state_dir, resync_interval=300.0)  # events alone must tell
    async with staged(f"docker {hand[0]}", daemon, recoveries, settings) as scene:
        for moment in MOMENTS:
            async with scene.at(moment) as hit:
                daemon.docker(*hand, hit.container)
            if moment == "busy":
                hit.died("killed")
            elif moment == "starting":
                assert isinstance(hit.outcome, Session), hit.outcome
                assert scene.name(hit.outcome.generation) != hit.container
            await scene.recovered(hit, lost=True)
