"""An image that is removed or whose name moves to another, while sessions are idle and while sandboxes start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from executor.errors import EmberpoolError, ImageMissing
from pool.session import Session
from tests.engine.faulty import IMAGE, Daemon, Recovery, until
from tests.engine.scene import Hit, Scene, pool_settings, staged
from tests.support.pools import outcome

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

NAME = "localhost/ember-fault:1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # what happens is the engine's doing


@pytest.fixture(autouse=True)
def _leaves_one_image(daemon: Daemon) -> Iterator[None]:
    yield
    keep = daemon.docker("image", "inspect", "--format", "{{.Id}}", IMAGE).strip()
    for image in set(daemon.docker("image", "ls", "-q", "--no-trunc").split()) - {keep}:
        daemon.docker("rmi", "-f", image)


def make_image(daemon: Daemon, version: int) -> str:
    """Make an image of its own ID and give it the name; its ID."""
    container = daemon.docker("create", "--network", "none", IMAGE).strip()
    image = daemon.docker("commit", "--change", f"LABEL version={version}", container, NAME).strip()
    daemon.docker("rm", container)
    return image


def image_of(daemon: Daemon, container: str) -> str:
    return daemon.docker("inspect", "--format", "{{.Image}}", container).strip()


@asynccontextmanager
async def with_image(
    fault: str, daemon: Daemon, record: list[Recovery], state_dir: Path
) -> AsyncIterator[tuple[Scene, str]]:
    """A scene on an image of its own, and the image's ID."""
    image = make_image(daemon, 1)
    async with staged(fault, daemon, record, pool_settings(state_dir, sandbox={"image": NAME})) as scene:
        yield scene, image


async def test_image_whose_name_moves_or_goes_is_kept_to_while_the_engine_has_it(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery]
) -> None:
    async with with_image("", daemon, recoveries, state_dir) as (scene, image):
        for scene.fault in ("the image's name moves", "the image's name goes"):
            for moment in ("idle", "starting"):
                async with scene.at(moment) as hit:
                    if scene.fault.endswith("moves"):
                        make_image(daemon, 2)
                    else:
                        daemon.docker("rmi", "-f", NAME)
                if moment == "starting":
                    assert isinstance(hit.outcome, Session)
                    assert image_of(daemon, scene.name(hit.outcome.generation)) == image
                await scene.recovered(hit, lost=False)


@pytest.mark.parametrize("comes_back", ["the same", "another"])
async def test_image_that_is_removed_is_a_refusal_until_its_name_is_there_again(
    daemon: Daemon, state_dir: Path, recoveries: list[Recovery], comes_back: str
) -> None:
    async with with_image(f"the image is removed, then {comes_back}", daemon, recoveries, state_dir) as (scene, image):
        archive = str(state_dir.with_name("image.tar"))
        daemon.docker("save", "-o", archive, NAME)
        await scene.other.close()
        await scene.at_rest(bound=0)
        # The start has the image's ID already, and has not asked for it yet.
        hit = Hit("starting", "starting", "")
        with scene.docker.holding("run"):
            scene.tasks.start_soon(scene._acquire, hit)
            await until(lambda: scene.docker.met())
            daemon.docker("rmi", "-f", NAME)
        await scene.outcome(hit)
        error = hit.refused(ImageMissing)
        assert not error.retryable
        assert "emberpool image build" in str(error)
        assert scene.pool.snapshot().fault == "ImageMissing"
        assert isinstance(await outcome(lambda: scene.pool.acquire("agent", "idle")), ImageMissing)
        if comes_back == "the same":
            daemon.docker("load", "-i", archive)
        else:
            image = make_image(daemon, 2)
        lifted = anyio.current_time()
        with anyio.fail_after(20.0):
            while isinstance(
                scene_other := await outcome(lambda: scene.pool.acquire("agent", "other")), EmberpoolError
            ):
                assert isinstance(scene_other, ImageMissing)
                await anyio.sleep(0.1)
        assert isinstance(scene_other, Session)
        scene.other, scene.kept = scene_other, scene_other.generation
        assert image_of(daemon, scene.name(scene.kept)) == image
        assert (await scene.other.call(["touch", "/tmp/began"])).ok
        await scene.recovered(hit, lost=True, lifted=lifted)
