"""The launch check: before a gateway starts, say where each tool of a manifest would run, and why.

It starts nothing but the doctor's probe. A tool that would run on the host, or nowhere, is to be seen at a glance.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from executor.common.printable import printable
from executor.errors import EmberpoolError, InvalidCall, StagingFailed
from executor.sandbox.sandbox import no_file
from executor.staging.threads import StagingThreads
from executor.staging.versions import StageLimits, Staging
from pool.config.load import ConfigError, Settings
from pool.doctor.checks import Check
from pool.manifest.load import Manifest, ToolEntry
from pool.tools import ToolPlan, place_on_host, plan_tool

Runs = Literal["container", "limits", "refused"]

_ISOLATED = "in the session's own hardened container"
_UNISOLATED = "on the host, under resource limits: no boundary"
_KEPT = 8
"""Copies of tool directories that lie in the temporary directory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Where one tool of one agent would run; ``why`` and, where anything helps, ``change``."""

    agent: str
    tool: str
    runs: Runs
    why: str
    change: str = ""


async def check_launch(manifest: Manifest, settings: Settings, doctor: Sequence[Check]) -> list[Launch]:
    """Every tool of the manifest. ``doctor`` is the doctor's report: what fails there refuses the tools in containers.

    Raises ``StagingFailed`` where no temporary directory can be made to try things out in.
    """
    broken = next((check for check in doctor if check.status == "fail"), None)
    return await StagingThreads().run(str(manifest.base), lambda: _check(manifest, settings, broken))


def failed(launches: Sequence[Launch], *, strict: bool) -> bool:
    """Whether a gateway should not start: something cannot run at all, or, with ``strict``, would run unisolated."""
    return any(one.runs == "refused" or (strict and one.runs == "limits") for one in launches)


@dataclass(frozen=True, slots=True)
class _Rehearsal:
    """A place of its own in which tool directories are read and copied as by a call; one of many tools is copied once."""

    place: Path
    staging: Staging

    def look(self, plan: ToolPlan) -> None:
        """Raises ``InvalidCall`` or ``StagingFailed``."""
        tool = plan.tool
        if tool.directory is None:
            return
        with self.staging.staged(tool.directory, plan.allowed) as digest:
            if not (self.place / digest / tool.path).is_file():
                raise InvalidCall(no_file(tool.directory, tool.path))


def _check(manifest: Manifest, settings: Settings, broken: Check | None) -> list[Launch]:
    limits = StageLimits(settings.tools.max_bytes, settings.tools.max_files, max_versions=_KEPT)
    try:
        directory = tempfile.TemporaryDirectory(prefix="emberpool-launch-", ignore_cleanup_errors=True)
    except OSError as error:
        raise StagingFailed(f"no temporary directory can be made: {error.strerror}; look after the disk") from error
    with directory as name:
        rehearsal = _Rehearsal(Path(name), Staging(Path(name), limits))
        return [_launch(entry, settings, broken, rehearsal) for entry in manifest.entries]


def _launch(entry: ToolEntry, settings: Settings, broken: Check | None, rehearsal: _Rehearsal) -> Launch:
    def launch(runs: Runs, why: str, change: str = "") -> Launch:
        return Launch(agent=entry.agent, tool=entry.name, runs=runs, why=why, change=change)

    try:
        plan = plan_tool(entry, settings)
        if plan.python_tools == "limits":
            _look_on_host(plan, settings)
        else:
            rehearsal.look(plan)
        _parse(plan)
    except (ConfigError, EmberpoolError) as error:
        # Messages say what is wrong and then, behind the last semicolon, what to do.
        why, sign, change = printable(error).rpartition("; ")
        return launch("refused", why if sign else change, change if sign else "")
    if plan.python_tools == "limits":
        return launch("limits", _UNISOLATED, f'{entry.key}.python_tools = "container" in the manifest')
    if broken is not None:
        return launch("refused", f"{broken.name}: {broken.detail}", broken.remedy)
    return launch("container", _ISOLATED)


def _parse(plan: ToolPlan) -> None:
    """Raises ``InvalidCall`` where the tool's source can be no tool: it does not parse, or has nothing of its function's name.

    Read where it stands and never run; a file that cannot be read is reported by the check of its directory.
    """
    tool = plan.tool
    try:
        source = tool.inline if tool.inline is not None else tool.file.read_bytes() if tool.file is not None else ""
        tree = ast.parse(source, filename=tool.path or tool.name)
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InvalidCall(f"{tool.path or 'its inline code'}{where} is no Python: {text}; correct it") from error
    except OSError:
        return
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if tool.inline is None and not names & {tool.function, "*", "__getattr__"}:
        raise InvalidCall(f"{tool.path} has no function {tool.function}; name the one that it has with function = ...")


def _look_on_host(plan: ToolPlan, settings: Settings) -> None:
    """Raises ``InvalidCall``."""
    place_on_host(plan)
