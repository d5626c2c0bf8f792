"""Make the image ready, before any pool starts: nothing is ever pulled on the way to a call."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from executor.common.locks import exclusive, private_directory
from executor.common.log import get_logger
from executor.engine.docker import CommandLineEngine
from executor.engine.paths import engine_paths
from executor.engine.protocol import ImageInfo
from executor.errors import EmberpoolError, EngineUnavailable, ImageMissing
from executor.machine.debian import Report, is_root, release
from executor.machine.rootfs import CHANGES, build_rootfs

log = get_logger("emberpool.engine")

DEFAULT_IMAGE = "localhost/emberpool-python:2"
"""The image of the default profile. No public registry can serve this name, so that where it is missing, it can never
be pulled from a stranger."""

PUBLIC_IMAGE = "python:3.13-slim"
"""What becomes the default image where a registry can be reached."""

_ANSWER_TIMEOUT = 15.0
_PULL_TIMEOUT = 1800.0
_BUILD_LOCK_TIMEOUT = 1200.0


async def ensure_image(
    engine: CommandLineEngine, reference: str, report: Report, *, rebuild: bool = False
) -> ImageInfo:
    """Make sure that the engine has the image, and return what it says of it.

    A present image is taken as it is, unless ``rebuild`` is set. ``DEFAULT_IMAGE`` is made: from a public image where a
    registry answers, else, on Debian or Ubuntu as root, from the distribution's packages. Any other reference is
    pulled. The name moves only once the new image is whole. Raises ``ImageMissing`` with the next step,
    ``EngineUnavailable`` or ``EngineFailed``.
    """
    if not rebuild and (present := await _present(engine, reference)):
        return present
    if reference != DEFAULT_IMAGE:
        report(f"pulling {reference}")
        try:
            await engine.pull(
                reference, answer=_PULL_TIMEOUT, timeout=_PULL_TIMEOUT, seen=_Layers(reference, report).line
            )
        except ImageMissing:
            raise
        except EmberpoolError as error:
            raise ImageMissing(f"image {reference} could not be pulled: {error}") from error
    else:
        await _make_default(engine, report, rebuild=rebuild)
    return await engine.image(reference)


def may_build() -> bool:
    """Whether an image can be built here from the distribution's packages."""
    return release().is_debian and is_root()


async def _present(engine: CommandLineEngine, reference: str) -> ImageInfo | None:
    try:
        return await engine.image(reference)
    except ImageMissing:
        return None


async def _make_default(engine: CommandLineEngine, report: Report, *, rebuild: bool) -> None:
    report(f"pulling {PUBLIC_IMAGE}")
    try:
        await engine.pull(
            PUBLIC_IMAGE,
            answer=_ANSWER_TIMEOUT,
            timeout=_PULL_TIMEOUT,
            seen=_Layers(PUBLIC_IMAGE, report).line,
        )
        await engine.tag(PUBLIC_IMAGE, DEFAULT_IMAGE)
        return
    except EmberpoolError as error:
        why = str(error)
        log.debug("image.no_pull", image=PUBLIC_IMAGE, error=why)
    if not may_build():
        raise ImageMissing(
            f"{PUBLIC_IMAGE} could not be pulled ({why}), and an image is built from packages only on Debian or Ubuntu "
            "as root. Next step: bring any image with Python 3.8 or later to this engine (`docker save`, "
            f"`docker load`), then `docker tag IMAGE {DEFAULT_IMAGE}`"
        )
    report("no registry can be reached; the distribution's packages will do")
    paths = engine_paths()
    private_directory(paths.root)
    async with exclusive(paths.root / "build.lock", timeout=_BUILD_LOCK_TIMEOUT, doing="building the image"):
        # Another process may have built it while this one waited for the lock.
        if not rebuild and await _present(engine, DEFAULT_IMAGE):
            return
        try:
            await _build(engine, paths.build, report)
        except EngineUnavailable as error:
            raise type(error)(f"{error}. Before that, {PUBLIC_IMAGE} could not be pulled: {why}") from error


async def _build(engine: CommandLineEngine, directory: Path, report: Report) -> None:
    archive = directory / "rootfs.tar"
    _remove(directory)  # of a build that was killed; the lock says that none runs
    private_directory(directory)
    try:
        await build_rootfs(archive, report)
        report("importing the image")
        await engine.import_tar(archive, DEFAULT_IMAGE, CHANGES)
    finally:
        _remove(directory)


def _remove(directory: Path) -> None:
    # Processes of a killed build may take some milliseconds to end, and make files until then.
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            return
    log.warning("image.leftovers", directory=str(directory))


class _Layers:
    """Turns the lines of a pull into progress by layers; what is not about a layer is not shown."""

    def __init__(self, reference: str, report: Report) -> None:
        self._reference, self._report = reference, report
        self._known: set[str] = set()
        self._ready: set[str] = set()

    def line(self, text: str) -> None:
        layer, _, state = text.strip().partition(": ")
        if state in ("Pulling fs layer", "Already exists"):
            self._known.add(layer)
        if state not in ("Pull complete", "Already exists"):
            return
        self._ready.add(layer)
        self._report(f"pulling {self._reference}: {len(self._ready)} of {len(self._known)} layers")
