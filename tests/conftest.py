"""Every asynchronous test runs on asyncio and on trio; a module may choose trio under virtual time instead.

Tests of a real engine take ``engine_settings``: without an engine they are skipped, in CI they fail.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio.lowlevel
import anyio.to_thread
import pytest
import structlog

from executor.engine.locate import find_engine
from executor.engine.protocol import Engine
from executor.errors import EmberpoolError
from executor.sandbox.profile import LABEL_POOL
from pool.config.load import Settings
from pool.supervisor import containers
from tests.support import parallel, selection
from tests.support.selection import pytest_addoption as pytest_addoption
from tests.support.selection import pytest_runtest_makereport as pytest_runtest_makereport

ENGINE_IMAGE = os.environ.get("EMBERPOOL_TEST_IMAGE", "")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the environment and the logging as the tests find them, and draw the seeds of random schedules."""
    config.stash[_ENVIRONMENT], config.stash[_LOGGING] = _environment(), structlog.get_config()
    selection.configure(config)
    config.pluginmanager.register(parallel)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    selection.generate_seeds(metafunc)


def pytest_report_header(config: pytest.Config) -> str:
    """Say what runs, and how to draw the same seeds again."""
    return f"{'everything' if config.option.full else 'quick set'}, --first-seed {config.option.first_seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose what runs."""
    parallel.check_daemon(items)
    selection.mark_undrawn(config, items)
    selection.deselect(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that leaves the environment or the logging changed, after all its fixtures: the tests after it would run
    elsewhere, or capture no log.

    Two fixtures that set the same variable must take it back in the reverse order, which their names do not show.
    """
    before = item.config.stash[_ENVIRONMENT]
    yield
    after = _environment()
    if after != before:
        os.environ.clear()
        os.environ.update(before)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        pytest.fail(f"the test left the environment changed: {', '.join(changed)}", pytrace=False)
    if structlog.get_config() != item.config.stash[_LOGGING]:
        structlog.reset_defaults()
        pytest.fail("the test left logging configured; end it with structlog.reset_defaults()", pytrace=False)


_ENVIRONMENT = pytest.StashKey[dict[str, str]]()
_LOGGING = pytest.StashKey[dict[str, Any]]()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The backend that AnyIO's plugin runs the test on."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_thread_for_the_ledger_under_virtual_time(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread takes real time, for which virtual time does not wait: there entries are written on the event loop."""
    if "anyio_backend" in request.fixturenames and isinstance(request.getfixturevalue("anyio_backend"), tuple):

        async def run_sync(work: Callable[..., object], *args: object, limiter: object) -> object:
            await anyio.lowlevel.checkpoint()
            return work(*args)

        monkeypatch.setattr(containers, "to_thread", SimpleNamespace(run_sync=run_sync))


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A place for one pool's state directory, below nothing that every user may write (and of a short path)."""
    with tempfile.TemporaryDirectory(prefix="ember-", dir="/tmp") as directory:
        yield Path(directory) / "state"


@cache
def engine_fault() -> str:
    """Why there is no engine with the image to test on; ``""`` where there is. Asked once in a session."""

    async def ask() -> None:
        engine, _ = await find_engine()
        await engine.image(ENGINE_IMAGE or Settings().sandbox.image)

    try:
        anyio.run(ask)
    except EmberpoolError as error:
        return str(error)
    return ""


@pytest.fixture
async def engine_settings(state_dir: Path) -> AsyncIterator[Settings]:
    """Settings of a small pool of its own on the real engine; afterwards none of its containers may be left."""
    fault = await anyio.to_thread.run_sync(engine_fault)
    if fault:
        if os.environ.get("EMBERPOOL_CI"):
            pytest.fail(f"CI needs a container engine: {fault}")
        pytest.skip(fault)
    sandbox: dict[str, Any] = {"image": ENGINE_IMAGE} if ENGINE_IMAGE else {}
    settings = Settings(
        sandbox=sandbox,
        pool={
            "name": f"test-{secrets.token_hex(4)}",
            "state_dir": state_dir,
            "min_standby": 0,
            "max_sandboxes": 3,
            "overcommit": True,
        },
    )
    yield settings
    await assert_nothing_left(state_dir)


async def assert_nothing_left(state_dir: Path) -> None:
    """No container carries the label of the pool whose state directory this was, and its ledger names none."""
    identity = state_dir / "pool.json"
    if not identity.exists():
        return
    pool_id = json.loads(identity.read_text("utf-8"))["pool_id"]
    engine: Engine
    engine, _ = await find_engine()
    assert await engine.list(LABEL_POOL, pool_id) == []
    assert list((state_dir / "ledger").iterdir()) == []
