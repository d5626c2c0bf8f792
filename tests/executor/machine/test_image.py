"""The image is made ready before any call: present, pulled, or built, and never half."""

from __future__ import annotations

import io
import os
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from executor.engine.docker import CommandLineEngine, Endpoint
from executor.engine.locate import find_engine
from executor.errors import EmberpoolError, EngineFailed, EngineUnavailable, ImageMissing
from executor.machine import image
from executor.machine.debian import Report
from executor.machine.image import DEFAULT_IMAGE, PUBLIC_IMAGE, ensure_image
from executor.machine.rootfs import CHANGES

pytestmark = pytest.mark.anyio

# An engine's command line over a directory: `images/` holds the names that exist, `log` what was asked, and `pull` is
# what a pull does.
_SCRIPT = """#!/bin/sh
cd "{root}"
echo "$*" >>log
name() {{ printf %s "$1" | tr / _; }}
for last; do :; done
case "$1" in
image)
    [ -e "images/$(name "$last")" ] || {{ echo "Error: No such image: $last" >&2; exit 1; }}
    echo '[{{"Id": "sha256:1", "Config": {{}}}}]' ;;
pull) . ./pull; : >"images/$(name "$last")" ;;
tag|import) : >"images/$(name "$last")" ;;
esac
"""
_REFUSED = 'echo "Error response from daemon: dial tcp: lookup registry: no such host" >&2; exit 1'
_LAYERS = 'printf "a: Pulling fs layer\\nb: Pulling fs layer\\na: Pull complete\\nb: Pull complete\\n"'


class Scripted(CommandLineEngine):
    """The engine seam over that script."""

    def __init__(self, root: Path, pull: str) -> None:
        self.root = root
        (root / "images").mkdir(parents=True)
        (root / "pull").write_text(pull + "\n")
        binary = root / "engine"
        binary.write_text(_SCRIPT.format(root=root))
        binary.chmod(0o755)
        super().__init__(Endpoint(str(binary)))

    def hold(self, reference: str) -> None:
        (self.root / "images" / reference.replace("/", "_")).touch()

    @property
    def asked(self) -> list[str]:
        return [line.split()[0] for line in (self.root / "log").read_text().splitlines()]


def quiet(line: str) -> None:
    """A report that nobody reads."""


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Replaces the build by a given function on a machine that may build; returns where it builds."""

    def use(build: Callable[[Path, Report], object]) -> Path:
        monkeypatch.setenv("EMBERPOOL_ENGINE_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(image, "may_build", lambda: True)
        monkeypatch.setattr(image, "build_rootfs", build)
        return tmp_path / "home" / "build"

    return use


async def test_present_image_is_neither_pulled_nor_built(tmp_path: Path) -> None:
    engine = Scripted(tmp_path / "e", _LAYERS)
    engine.hold(DEFAULT_IMAGE)
    await ensure_image(engine, DEFAULT_IMAGE, quiet)
    assert engine.asked == ["image"]


async def test_rebuild_pulls_although_the_image_is_present(tmp_path: Path) -> None:
    engine = Scripted(tmp_path / "e", _LAYERS)
    engine.hold(DEFAULT_IMAGE)
    await ensure_image(engine, DEFAULT_IMAGE, quiet, rebuild=True)
    assert engine.asked == ["pull", "tag", "image"]


async def test_default_image_is_a_public_one_under_its_own_name(tmp_path: Path) -> None:
    engine, lines = Scripted(tmp_path / "e", _LAYERS), list[str]()
    await ensure_image(engine, DEFAULT_IMAGE, lines.append)
    assert engine.asked == ["image", "pull", "tag", "image"]
    assert lines[-1] == f"pulling {PUBLIC_IMAGE}: 2 of 2 layers"


async def test_other_image_is_pulled_and_never_replaced_by_a_built_one(
    tmp_path: Path, builder: Callable[..., Path]
) -> None:
    async def build(target: Path, report: Report) -> None:
        raise AssertionError("built")

    builder(build)
    engine = Scripted(tmp_path / "e", _REFUSED)
    with pytest.raises(ImageMissing, match=r"team/tools:7 could not be pulled.*no such host"):
        await ensure_image(engine, "team/tools:7", quiet)
    assert engine.asked == ["image", "pull"]


async def test_a_registry_that_cannot_be_reached_is_not_told_as_a_lost_engine(tmp_path: Path) -> None:
    refused = "echo 'Error response from daemon: Get https://r.example/v2/: connection refused' >&2; exit 1"
    engine = Scripted(tmp_path / "e", refused)
    with pytest.raises(ImageMissing, match=r"registry cannot be reached.*check the image's name") as caught:
        await ensure_image(engine, "r.example/tools:7", quiet)
    assert "engine cannot be reached" not in str(caught.value)


async def test_without_registry_the_image_is_built_and_nothing_else_is_left(
    tmp_path: Path, builder: Callable[..., Path]
) -> None:
    async def build(target: Path, report: Report) -> None:
        await anyio.Path(target).write_bytes(b"tar")

    place = builder(build)
    engine = Scripted(tmp_path / "e", _REFUSED)
    await ensure_image(engine, DEFAULT_IMAGE, quiet)
    assert engine.asked == ["image", "pull", "image", "import", "image"]
    assert not await anyio.Path(place).exists()


async def test_build_that_another_process_finished_meanwhile_is_taken(
    tmp_path: Path, builder: Callable[..., Path]
) -> None:
    builds: list[Path] = []

    async def build(target: Path, report: Report) -> None:
        builds.append(target)
        await anyio.lowlevel.checkpoint()

    builder(build)
    engine = Scripted(tmp_path / "e", _REFUSED)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ensure_image, engine, DEFAULT_IMAGE, quiet)
    assert len(builds) == 1


async def test_cancelled_build_leaves_no_file_and_no_image(tmp_path: Path, builder: Callable[..., Path]) -> None:
    begun = anyio.Event()

    async def build(target: Path, report: Report) -> None:
        await anyio.Path(target).write_bytes(b"half")
        begun.set()
        await anyio.sleep_forever()

    place = builder(build)
    engine = Scripted(tmp_path / "e", _REFUSED)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ensure_image, engine, DEFAULT_IMAGE, quiet)
        await begun.wait()
        assert await anyio.Path(place).exists()
        tasks.cancel_scope.cancel()
    assert not await anyio.Path(place).exists()
    assert "import" not in engine.asked


async def test_failed_build_says_why_and_what_went_before(tmp_path: Path, builder: Callable[..., Path]) -> None:
    async def build(target: Path, report: Report) -> None:
        raise EngineFailed("mmdebstrap could not build the image")

    builder(build)
    with pytest.raises(EngineFailed, match=r"mmdebstrap could not build.*could not be pulled.*no such host"):
        await ensure_image(Scripted(tmp_path / "e", _REFUSED), DEFAULT_IMAGE, quiet)


async def test_where_nothing_can_be_built_the_next_step_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "may_build", lambda: False)
    with pytest.raises(ImageMissing, match=f"no such host.*docker tag IMAGE {DEFAULT_IMAGE}"):
        await ensure_image(Scripted(tmp_path / "e", _REFUSED), DEFAULT_IMAGE, quiet)


async def test_silent_registry_is_given_up(tmp_path: Path) -> None:
    engine = Scripted(tmp_path / "e", "exec sleep 1000")
    with pytest.raises(EngineUnavailable, match="no answer in time"):
        await engine.pull("any", answer=0.2, timeout=1000.0, seen=quiet)


async def test_pull_that_begins_and_never_ends_is_given_up(tmp_path: Path) -> None:
    engine = Scripted(tmp_path / "e", f"{_LAYERS}; exec sleep 1000")
    with pytest.raises(EngineUnavailable, match="did not end within"):
        await engine.pull("any", answer=1000.0, timeout=0.5, seen=quiet)


@pytest.fixture
async def real() -> CommandLineEngine:
    try:
        engine, _ = await find_engine()
    except EngineUnavailable as error:
        if os.environ.get("EMBERPOOL_CI") == "1":
            pytest.fail(f"CI needs a container engine: {error}")
        pytest.skip(str(error))
    return engine


def tar_of_one_file(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("marker")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))


@pytest.mark.engine
async def test_imported_image_has_its_command_path_and_name(tmp_path: Path, real: CommandLineEngine) -> None:
    name = f"localhost/emberpool-test-{uuid.uuid4().hex[:12]}"
    tar_of_one_file(tmp_path / "root fs.tar")
    try:
        await real.import_tar(tmp_path / "root fs.tar", f"{name}:1", CHANGES)
        await real.tag(f"{name}:1", f"{name}:2")
        first, second = await real.image(f"{name}:1"), await real.image(f"{name}:2")
        assert first.id == second.id
        assert any(item.startswith("PATH=/usr/local/sbin:") for item in first.env)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.run_process([*real.endpoint.argv, "rmi", f"{name}:1", f"{name}:2"], env=dict(os.environ))


@pytest.mark.engine
@pytest.mark.parametrize("reference", ["--help", "-a"])
async def test_image_reference_never_becomes_a_flag(real: CommandLineEngine, reference: str) -> None:
    with pytest.raises(EmberpoolError, match="invalid reference format"):
        await real.pull(reference, answer=30.0, timeout=30.0, seen=quiet)
    with pytest.raises(EmberpoolError, match=r"invalid reference format|not a valid repository"):
        await real.tag(DEFAULT_IMAGE, reference)
