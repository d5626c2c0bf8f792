"""How many files a gateway's process may open, against the size of its pool."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from executor.errors import InvalidCall
from pool.config import descriptors
from pool.config.load import ConfigError, Settings, check_host
from pool.pool import SandboxPool
from tests.support.pools import running, settings_of
from tests.support.scripted import ScriptedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may open 500 files, and not change that."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (500, 500))


@pytest.mark.usefixtures("few")
async def test_pool_that_may_need_more_files_than_its_process_may_open_is_refused_at_entry(state_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool.max_sandboxes: 100 sandboxes may need .* this process may have 500"):
        async with SandboxPool(settings_of(state_dir, max_sandboxes=100)):
            pass
    assert not state_dir.exists()  # noqa: ASYNC240 - a look at the disk blocks nobody here
    with pytest.raises(ConfigError, match="RLIMIT_NOFILE"):  # as many runners, in fewer sandboxes
        async with SandboxPool(settings_of(state_dir, call={"parallel": 25}, max_sandboxes=4)):
            pass


@pytest.mark.usefixtures("few")
async def test_resize_is_held_against_the_same_limit(state_dir: Path) -> None:
    async with running(ScriptedEngine(), settings_of(state_dir)) as pool:
        pool.resize(max_sandboxes=10)
        with pytest.raises(InvalidCall, match="100 sandboxes may need"):
            pool.resize(max_sandboxes=100)


@pytest.mark.usefixtures("few")
def test_config_check_and_doctor_report_too_few_descriptors() -> None:
    settings = Settings(pool={"max_sandboxes": 100, "overcommit": True})
    assert [text for text in check_host(settings, 1 << 40) if text.startswith("pool.max_sandboxes: 100 sandboxes")]
    assert not [text for text in check_host(Settings(), 1 << 40) if text.startswith("pool.max_sandboxes")]


def test_no_limit_is_no_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (infinity, infinity))
    assert descriptors.shortage(Settings(), 10_000) == ""


def test_soft_limit_is_raised_to_the_hard_one_and_no_further() -> None:
    code = (
        "import resource, sys\nfrom pool.config.descriptors import raise_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), 400))\nraise_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    for soft in ("300", "400"):
        done = subprocess.run(
            [sys.executable, "-c", code, soft], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout == "400 400\n"
