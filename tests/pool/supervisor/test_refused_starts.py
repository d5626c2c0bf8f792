"""Starts that are refused before a container is made: nothing is left of them, however many there are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from executor.engine.protocol import EngineInfo
from executor.errors import EngineFailed, EngineUnavailable, ProfileMismatch
from pool.cli.call import one_shot, swept
from pool.pool import SandboxPool
from pool.supervisor import engine_link
from tests.support.pools import outcome, running, settings_of, until
from tests.support.scripted import IMAGE, ScriptedEngine

pytestmark = pytest.mark.anyio

VOLUME = replace(IMAGE, volumes=("/data",))
KINDS: dict[str, Callable[[SandboxPool], Awaitable[object]]] = {
    "session": lambda pool: pool.acquire("agent", "session", timeout=1),
    "cold": lambda pool: pool.call_cold(["true"]),
}


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.mark.parametrize("kind", KINDS)
async def test_an_image_with_a_volume_leaves_nothing_of_what_it_was_refused(
    engine: ScriptedEngine, state_dir: Path, kind: str
) -> None:
    engine.images["default"] = VOLUME
    with capture_logs() as lines:
        async with running(engine, settings_of(state_dir)) as pool:
            await until(lambda: pool.snapshot().engine == "up", limit=5)
            for _ in range(5):
                error = await outcome(lambda: KINDS[kind](pool))
                assert isinstance(error, ProfileMismatch)
                assert "VOLUME /data" in str(error)
                assert list(pool._shell.hub._watches) == []
                assert pool._shell.containers.names == set()
                assert list((state_dir / "ledger").iterdir()) == []
    assert engine.asked["attach"] == engine.asked["start"] == engine.asked["remove"] == 0
    assert "pool.left_behind" not in [line["event"] for line in lines]


async def test_an_image_with_a_volume_leaves_no_directory_of_a_one_shot_pool(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    engine.images["default"] = VOLUME
    settings = one_shot(settings_of(state_dir))
    async with swept(settings), SandboxPool(settings, find=engine.find) as pool:
        await until(lambda: pool.snapshot().engine == "up", limit=5)
        assert isinstance(await outcome(lambda: pool.acquire("agent", "chat")), ProfileMismatch)
    assert list(state_dir.parent.iterdir()) == []


async def test_a_cold_call_whose_name_is_anothers_leaves_no_entry(engine: ScriptedEngine, state_dir: Path) -> None:
    async with SandboxPool(settings_of(state_dir), find=engine.find) as pool:
        await until(lambda: pool.snapshot().engine == "up", limit=5)
        engine.foreign(pool._shell.containers.name(0)[:-1] + "c1")
        assert isinstance(await outcome(lambda: pool.call_cold(code="echo x")), EngineFailed)
        assert list((state_dir / "ledger").iterdir()) == []
        assert list(pool._shell.hub._watches) == []
    assert len(engine.boxes) == 1


async def test_a_private_engine_that_could_not_be_held_is_held_by_the_next_try(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    @contextmanager
    def hold(paths: object) -> Iterator[None]:
        tries.append("")
        if len(tries) == 1:
            raise EngineUnavailable("the private engine is being stopped", retry_after=0.01)
        tries.append("held")
        try:
            yield
        finally:
            tries.append("given back")

    async def find() -> tuple[ScriptedEngine, EngineInfo]:
        return engine, replace(await engine.info(), private=True)

    monkeypatch.setattr(engine_link, "hold_engine", hold)
    async with SandboxPool(settings_of(state_dir), find=find) as pool:
        await until(lambda: pool.snapshot().engine == "up", limit=5)
        assert tries == ["", "", "held"]
    assert tries[-1] == "given back"
