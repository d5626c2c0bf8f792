"""Tests in several processes (pytest-xdist): those of the private daemon stay in one, all draw the same seeds, and each
tears its fixtures down before the run ends."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from tests.engine.faulty import hand_over_recoveries, report_recoveries, take_over_recoveries

DAEMON = ("tests/engine/test_fault", "tests/engine/test_concurrency_real.py")
"""How the files begin whose tests share the private daemon."""
TEARDOWN = 90.0
"""Seconds that an interrupted process has for its fixtures: a container's removal, the private daemon's end."""
_NODES = pytest.StashKey[list[Any]]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Let any test go to any process, but those of the private daemon to the same one.

    ``--dist loadgroup`` does this too, and writes the group into each test's name: that name can then neither be typed
    again nor be found by ``--lf``.
    """
    # Where it is not installed, nothing asks for a scheduler.
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class OneDaemon(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "daemon" if nodeid.startswith(DAEMON) else nodeid

    return OneDaemon(config, log)


def check_daemon(items: list[pytest.Item]) -> None:
    """Refuse a test of the private daemon in a file whose tests may run in another process."""
    for item in items:
        if "private_daemon" in getattr(item, "fixturenames", ()) and not item.nodeid.startswith(DAEMON):
            raise pytest.UsageError(f"{item.nodeid}: a file with tests of the private daemon is named in DAEMON")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a new process the number that all draw their seeds from."""
    node.workerinput["first_seed"] = node.config.option.first_seed
    node.config.stash.setdefault(_NODES, []).append(node)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Hand over what this process has recorded; after Ctrl-C wait until the others have torn their fixtures down.

    pytest-xdist alone would interrupt them again after five seconds, and kill them after ten.
    """
    hand_over_recoveries(session.config)
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        for node in session.config.stash.get(_NODES, []):
            node.shutdown()
        for node in session.config.stash.get(_NODES, []):
            with suppress(Exception):  # it has been lost, or takes too long
                node.channel.waitclose(TEARDOWN)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    take_over_recoveries(node.config, getattr(node, "workeroutput", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    report_recoveries(terminalreporter)
