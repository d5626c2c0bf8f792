"""The launch check: before a gateway starts, say where each tool of a manifest would run, and why.

It starts nothing but the doctor's probe. A tool that would run on the host, or nowhere, is to be seen at a glance.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anyio import to_thread

from executor.result import EmberpoolError
from executor.staging import StageLimits, Staging, StagingFailed
from pool.checks import Check
from pool.config import ConfigError, Settings
from pool.manifest import Manifest, ToolEntry
from pool.tools import ToolPlan, plan_tool

Runs = Literal["container", "limits", "refused"]

_UNISOLATED = "on the host, under resource limits: no boundary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Where one tool of one agent would run; ``why`` and, where anything helps, ``change``."""

    agent: str
    tool: str
    runs: Runs
    why: str
    change: str = ""


async def check_launch(manifest: Manifest, settings: Settings, doctor: Sequence[Check]) -> list[Launch]:
    """Every tool of the manifest. ``doctor`` is the doctor's report: what fails there refuses the tools in containers."""
    broken = next((check for check in doctor if check.status == "fail"), None)
    return [await to_thread.run_sync(_launch, entry, settings, broken) for entry in manifest.entries]


def failed(launches: Sequence[Launch], *, strict: bool) -> bool:
    """Whether a gateway should not start: something cannot run at all, or, with ``strict``, would run unisolated."""
    return any(one.runs == "refused" or (strict and one.runs == "limits") for one in launches)


def _launch(entry: ToolEntry, settings: Settings, broken: Check | None) -> Launch:
    try:
        plan = plan_tool(entry, settings)
        _look(plan, settings)
    except (ConfigError, EmberpoolError) as error:
        return Launch(agent=entry.agent, tool=entry.name, runs="refused", why=" ".join(str(error).split()))
    if plan.python_tools == "limits":
        return Launch(
            agent=entry.agent,
            tool=entry.name,
            runs="limits",
            why=_UNISOLATED,
            change=f'python_tools = "container" for agent {entry.agent}, in the configuration',
        )
    if broken is not None:
        return Launch(
            agent=entry.agent,
            tool=entry.name,
            runs="refused",
            why=f"{broken.name}: {broken.detail}",
            change=broken.remedy,
        )
    return Launch(agent=entry.agent, tool=entry.name, runs="container", why="in the session's own hardened container")


def _look(plan: ToolPlan, settings: Settings) -> None:
    """Do with a tool's directory what its first call will do. Raises ``InvalidCall`` or ``StagingFailed``."""
    tool = plan.tool
    if tool.directory is None or tool.file is None:
        return
    limits = StageLimits(max_bytes=settings.tools.max_bytes, max_files=settings.tools.max_files)
    try:
        with tempfile.TemporaryDirectory(prefix="emberpool-launch-") as place:
            digest = Staging(Path(place), limits).stage(tool.directory, plan.allowed)
            if not (Path(place) / digest / tool.path).is_file():
                raise StagingFailed(f"there is no file {tool.file}; correct the manifest, or bring the file")
    except OSError as error:
        raise StagingFailed(f"{tool.directory} cannot be looked at: {error.strerror or error}") from error
