"""An event stream that is cut, loses, repeats or delays what it tells, while a container dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.errors import EngineUnavailable
from pool.session import Session
from tests.engine.faulty import Daemon, Recovery, until
from tests.engine.scene import MOMENTS, pool_settings, staged
from tests.engine.steered import clients, kill_clients

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # what happens is the engine's doing


TOLD = {
    "cut": ("killed", "engine"),
    "lose": ("engine", "runner"),
    "twice": ("killed",),
    "late": ("killed", "engine", "runner"),
}
"""By what becomes of the events: the causes that a running call may be told when its container is killed. Where a resync
comes before the event, it is the engine that has lost the container; where nothing comes in time, a runner is gone."""


@pytest.mark.parametrize("how", TOLD)
async def test_death_whose_events_are_cut_lost_repeated_or_late_is_one_death(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], how: str
) -> None:
    async with staged(f"events: {how}", daemon, recoveries, pool_settings(state_dir), filtered=True) as scene:
        for moment in MOMENTS:
            async with scene.at(moment) as hit:
                if how == "cut":
                    kill_clients("events")
                else:
                    scene.docker.events(how)
                daemon.docker("kill", hit.container)
            if moment == "busy":
                hit.died(*TOLD[how])
            elif moment == "starting" and how == "cut":
                hit.refused(EngineUnavailable)  # for the moment that the pool takes to follow the events anew
            elif moment == "starting":
                assert isinstance(hit.outcome, Session), hit.outcome
            await scene.answered(hit, lost=True)
            scene.docker.events("")
            assert len(scene.pool._shell.state.sessions["agent", hit.key].deaths) <= 1
            await scene.recovered(hit, lost=True)


async def test_events_client_that_floods_stderr_still_tells_its_events(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery]
) -> None:
    async with staged("events: flood", daemon, recoveries, pool_settings(state_dir)) as scene:
        scene.docker.rule("events", "flood")
        (first,) = clients("events")
        kill_clients("events")
        await until(lambda: clients("events") not in ([], [first]) and scene.pool.snapshot().engine == "up")
        async with scene.at("busy") as hit:
            daemon.docker("kill", hit.container)
        hit.died("killed")
        await scene.recovered(hit, lost=True)
