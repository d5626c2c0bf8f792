"""Packages are installed without starting a service, and the policy that denies it leaves no trace."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from executor.machine.debian import no_service_starts
from tests.support import ROOT


def a_file(path: Path) -> None:
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o640)


def a_link(path: Path) -> None:
    path.symlink_to("elsewhere")


def look(directory: Path) -> dict[str, tuple[int, int, float, str]]:
    """Everything about the files in a directory: identity, mode, times and content."""
    found = {}
    for path in directory.iterdir():
        info = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_text()
        found[path.name] = (info.st_ino, info.st_mode, info.st_mtime, content)
    return found


def denied(policy: Path) -> None:
    """A package asks, is denied, and fails; nothing but ``RuntimeError`` says all three."""
    assert subprocess.run([policy, "docker", "start"], check=False).returncode == 101
    raise RuntimeError


@pytest.mark.parametrize("make", [a_file, a_link, lambda path: None], ids=["file", "link", "absent"])
def test_policy_denies_inside_and_comes_back_as_it_was(tmp_path: Path, make: Callable[[Path], None]) -> None:
    policy = tmp_path / "policy-rc.d"
    make(policy)
    before = look(tmp_path)
    with pytest.raises(RuntimeError), no_service_starts(policy):
        denied(policy)
    assert look(tmp_path) == before


@pytest.mark.parametrize("make", [a_file, a_link, lambda path: None], ids=["file", "link", "absent"])
def test_policy_of_a_killed_run_is_undone_by_the_next(tmp_path: Path, make: Callable[[Path], None]) -> None:
    policy = tmp_path / "policy-rc.d"
    make(policy)
    before = look(tmp_path)
    code = (
        "import os, pathlib, sys\nfrom executor.machine.debian import no_service_starts\n"
        "with no_service_starts(pathlib.Path(sys.argv[1])):\n    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, policy], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert look(tmp_path) != before
    with no_service_starts(policy):
        pass
    assert look(tmp_path) == before


def test_policy_that_somebody_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    a_file(policy)
    with no_service_starts(policy):
        policy.unlink()
        policy.write_text("new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("policy-rc.d", "new")]
