"""emberpool: a warm pool of hardened containers for an AI gateway's tool code.

Everything that users of the library need is importable from here; nothing else is meant for them::

    from emberpool import SandboxPool, Settings

    async with SandboxPool(Settings()) as pool:
        async with await pool.acquire("agent", "chat-42") as session:
            result = await session.call(code="print(6 * 7)")
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def _require_own_packages() -> None:
    """Raise ``ImportError`` where another package or module is imported in the place of this distribution's ``pool`` or ``executor``."""
    here = Path(__file__).resolve().parent.parent
    for name in ("executor", "pool"):
        try:
            spec = find_spec(name)
        except ValueError:  # a module without a spec has been put into sys.modules
            spec = None
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if found is None or found.parent != here / name:
            raise ImportError(
                f"emberpool needs its own package {name!r} ({here / name}), but Python finds {found or 'none'} instead; "
                "rename that file or directory, or take its place out of sys.path (PYTHONPATH, the working directory)"
            )


_require_own_packages()

from executor.common.printable import printable
from executor.errors import (
    DeathCause,
    EmberpoolError,
    EngineFailed,
    EngineUnavailable,
    FileFailed,
    ImageMissing,
    ImageUnfit,
    InvalidCall,
    PoolClosed,
    PoolExhausted,
    PoolUnusable,
    ProfileMismatch,
    QuotaExceeded,
    SandboxDied,
    SessionBusy,
    SessionClosed,
    StagingFailed,
    StateLost,
)
from executor.result import CallResult
from executor.sandbox.files import FileInfo
from executor.sandbox.stream import CallStream, Output
from executor.tool import Tool, ToolResult
from pool.config.errors import ConfigError, Problem
from pool.config.load import Settings, load_settings
from pool.doctor.checks import Check
from pool.doctor.doctor import examine as doctor
from pool.doctor.launch_check import Launch
from pool.doctor.launch_check import check_launch as launch_check
from pool.logs import configure as configure_logs
from pool.manifest.load import Manifest, ManifestError, ToolEntry, load_manifest
from pool.manifest.load import Resolved as ResolvedTool
from pool.manifest.load import problems as manifest_problems
from pool.manifest.load import resolve as resolve_tool
from pool.pool import SandboxPool
from pool.privileged import Privileged
from pool.session import Session
from pool.supervisor.sessions import SessionEnd, SessionInfo
from pool.supervisor.snapshot import PoolSnapshot, SandboxCounts
from pool.tools import ToolPlan, plan_tool

try:
    __version__ = version("emberpool")
except PackageNotFoundError:  # a checkout that was put on the path, and not installed
    __version__ = "0+unknown"

__all__ = [
    "CallResult",
    "CallStream",
    "Check",
    "ConfigError",
    "DeathCause",
    "EmberpoolError",
    "EngineFailed",
    "EngineUnavailable",
    "FileFailed",
    "FileInfo",
    "ImageMissing",
    "ImageUnfit",
    "InvalidCall",
    "Launch",
    "Manifest",
    "ManifestError",
    "Output",
    "PoolClosed",
    "PoolExhausted",
    "PoolSnapshot",
    "PoolUnusable",
    "Privileged",
    "Problem",
    "ProfileMismatch",
    "QuotaExceeded",
    "ResolvedTool",
    "SandboxCounts",
    "SandboxDied",
    "SandboxPool",
    "Session",
    "SessionBusy",
    "SessionClosed",
    "SessionEnd",
    "SessionInfo",
    "Settings",
    "StagingFailed",
    "StateLost",
    "Tool",
    "ToolEntry",
    "ToolPlan",
    "ToolResult",
    "configure_logs",
    "doctor",
    "launch_check",
    "load_manifest",
    "load_settings",
    "manifest_problems",
    "plan_tool",
    "printable",
    "resolve_tool",
]
