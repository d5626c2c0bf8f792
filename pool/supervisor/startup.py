"""What is made ready at the start, so that no call waits for it: the engine is found, the image pulled or built."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from executor.engine.docker import CommandLineEngine
from executor.engine.locate import find_engine
from executor.engine.protocol import Engine, ImageInfo
from executor.errors import ImageMissing
from executor.machine.image import ensure_image
from pool.config.load import Settings

Report = Callable[[str], None]
MakeImage = Callable[[Engine, str, Report], Awaitable[ImageInfo]]
"""Brings the image of a reference to an engine, and reports its progress in short lines."""


async def make_image(engine: Engine, reference: str, report: Report) -> ImageInfo:
    """Return the image, pulled or built where it is missing (``executor.machine.image``). Raises ``ImageMissing`` with the next step."""
    if not isinstance(engine, CommandLineEngine):
        raise ImageMissing(
            f"the image {reference} is not on the engine, and this kind of engine cannot be asked to fetch it; load it "
            "with that engine's own tools"
        )
    return await ensure_image(engine, reference, report)


async def make_ready(settings: Settings, report: Report) -> ImageInfo:
    """Find the engine and bring the image to it, before a pool starts, for callers that would rather wait than be refused.

    A pool does the same by itself and refuses meanwhile. Raises ``EngineUnavailable`` or ``ImageMissing``.
    """
    engine, _ = await find_engine(settings.sandbox.binary)
    return await make_image(engine, settings.sandbox.image, report)
