"""A gateway's Python tools, carried out where the configuration says: in the session's sandbox, or under limits on the host.

Where a tool runs is decided by the configuration and the manifest alone, never by what happens to be available: a tool
whose place is the container is refused while there is none.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import anyio

from executor.common.log import get_logger
from executor.errors import EmberpoolError, InvalidCall, StagingFailed
from executor.host.call import HOST, HostLimits, host_call
from executor.sandbox.request import Call
from executor.sandbox.sandbox import no_file
from executor.staging.threads import StagingThreads
from executor.staging.versions import resolve_tool_dir
from executor.tool import Tool, ToolResult, encode_arguments, tool_code, tool_result
from pool.audit import AuditEntry
from pool.config.load import Settings
from pool.config.types import PythonTools
from pool.manifest.load import ToolEntry, resolve
from pool.supervisor.host_calls import HostCalls

log = get_logger("emberpool.tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """A tool of an agent, and what holds for its calls. ``env`` holds names of the gateway's variables; the tool's directory
    must lie inside one of ``allowed``. ``timeout`` and ``backoff`` are seconds, ``max_output`` bytes of each stream."""

    agent: str
    tool: Tool
    python_tools: PythonTools
    env: tuple[str, ...]
    allowed: tuple[Path, ...]
    timeout: float
    max_output: int
    retries: int = 0
    backoff: float = 0.2


def plan_tool(entry: ToolEntry, settings: Settings) -> ToolPlan:
    """What a manifest's entry comes to under ``settings``. Raises ``ManifestError`` or ``InvalidCall``."""
    holds = resolve(entry, settings)
    tool = Tool(
        name=entry.name, file=entry.file, inline=entry.inline, function=entry.function, directory=entry.directory
    )
    return ToolPlan(
        agent=entry.agent,
        tool=tool,
        python_tools=holds.python_tools,
        env=holds.env,
        allowed=holds.allowed_tool_dirs,
        timeout=holds.timeout,
        max_output=holds.max_output,
        retries=entry.retries,
        backoff=entry.backoff,
    )


def environment(names: Iterable[str]) -> dict[str, str]:
    """The variables of the gateway's environment that a tool gets: those named, and set here."""
    return {name: os.environ[name] for name in names if name in os.environ}


def retry_wait(plan: ToolPlan, attempt: int, error: EmberpoolError) -> float | None:
    """Seconds before repetition number ``attempt`` (from 1); ``None`` where there is none.

    Only what never started is tried again, since nothing else is known to have had no effect.
    """
    if attempt > plan.retries or error.started or not error.retryable:
        return None
    return max(plan.backoff * 2.0 ** (attempt - 1), error.retry_after or 0.0)


async def with_retries(once: Callable[[], Awaitable[ToolResult]], plan: ToolPlan) -> ToolResult:
    """Do it, and again where it never started, as ``plan`` says."""
    attempt = 0
    while True:
        try:
            return await once()
        except EmberpoolError as error:
            attempt += 1
            wait = retry_wait(plan, attempt, error)
            if wait is None:
                raise
            log.info("tool.retried", tool=plan.tool.name, reason=error.reason, attempt=attempt, wait=round(wait, 3))
        await anyio.sleep(wait)


async def run_on_host(
    plan: ToolPlan,
    arguments: object,
    settings: Settings,
    *,
    session: str = "",
    calls: HostCalls | None = None,
    threads: StagingThreads | None = None,
) -> ToolResult:
    """Call a tool on this host under limits: a guard against exhaustion and NOT a boundary (``executor.host.call``).

    ``session`` is the session's id for the audit line, ``calls`` and ``threads`` are the pool's, where there is one. What never
    started is tried again, up to ``plan.retries`` times. Raises ``InvalidCall``, ``StagingFailed``, what ``HostCalls.run``
    raises and what ``executor.host.call.host_call`` raises.
    """
    stdin = encode_arguments(arguments, max_input=settings.call.max_input)
    threads = threads or StagingThreads()

    async def once() -> ToolResult:
        return await _once_on_host(plan, stdin, settings, session, threads)

    return await with_retries(once if calls is None else lambda: calls.run(once), plan)


async def _once_on_host(
    plan: ToolPlan, stdin: bytes, settings: Settings, session: str, threads: StagingThreads
) -> ToolResult:
    box, tool = settings.sandbox, plan.tool
    deadline = anyio.current_time() + plan.timeout
    root = await _find_in_time(plan, threads)
    # Of what is sent, only inline code is the caller's: the rest is not held against the ceiling of his input.
    call = Call(
        code=tool.inline or "",
        stdin=stdin,
        timeout=max(0.001, min(plan.timeout, deadline - anyio.current_time())),
        max_output=plan.max_output,
        max_input=settings.call.max_input,
    ).with_code(tool_code(tool, root))
    limits = HostLimits(
        cpu_seconds=box.cpu_seconds,
        memory_mb=box.memory_mb,
        open_files=box.open_files,
        file_size_mb=box.file_size_mb,
        strict=box.limits_strict,
    )
    entry = AuditEntry(call, anyio.current_time())
    entry.start(entry.asked)
    try:
        result = entry.ended(await host_call(call, limits=limits, env=environment(plan.env), grace=settings.call.grace))
    except EmberpoolError as error:
        entry.failed(error)
        raise
    finally:
        fields = entry.fields(anyio.current_time(), "")
        log.info("call.ended", session=session or None, generation=HOST, tool=tool.name, **fields)
    return tool_result(tool, result)


async def _find_in_time(plan: ToolPlan, threads: StagingThreads) -> str:
    if plan.tool.directory is None:
        return ""
    directory = str(plan.tool.directory)
    with anyio.move_on_after(plan.timeout):
        return await threads.run(directory, lambda: place_on_host(plan))
    raise StagingFailed(
        f"{directory!r:.300} was not found within the tool's {plan.timeout:g} s; look after its file system",
        retry_after=1.0,
    )


def place_on_host(plan: ToolPlan) -> str:
    """Where a tool's directory really is on this host, once it and the file are seen to lie where they may; ``""`` for
    inline code. Reads the disk. Raises ``InvalidCall``."""
    tool = plan.tool
    if tool.directory is None or tool.file is None:
        return ""
    root = resolve_tool_dir(tool.directory, plan.allowed)
    file = root / tool.path
    try:
        found = file.is_file()
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidCall(f"{str(file)!r:.300} cannot be read: {why}; let the gateway's user read it") from error
    if not found:
        raise InvalidCall(no_file(tool.directory, tool.path))
    resolve_tool_dir(file, plan.allowed)
    return str(root)
