"""Every asynchronous test runs on asyncio and on trio."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The backend that AnyIO's plugin runs the test on."""
    return str(request.param)
