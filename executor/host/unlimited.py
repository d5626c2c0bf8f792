"""A call on a host that knows no resource limits (Windows): run, capped, held to its deadline, and nothing more."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio

from executor.engine.attached import QUIET
from executor.engine.process import Capped, drain, feed
from executor.errors import EngineFailed
from executor.result import CallResult
from executor.sandbox.request import Call


async def unlimited(
    program: Sequence[str], call: Call, env: Mapping[str, str], cwd: Path, *, generation: str
) -> CallResult:
    """Run a program to its end or the call's deadline. What it started itself is not followed, and may live on.

    Raises ``EngineFailed`` where it cannot be started.
    """
    began = anyio.current_time()
    out, err = Capped(call.max_output), Capped(call.max_output)
    with anyio.CancelScope(shield=True):
        try:
            process = await anyio.open_process(list(program), stdin=subprocess.PIPE, env=dict(env), cwd=cwd)
        except OSError as error:
            raise EngineFailed(f"the call could not be started on this host: {error}") from error
    assert process.stdout is not None  # noqa: S101 - all three are pipes
    assert process.stderr is not None  # noqa: S101
    streams, read_all = ((process.stdout, out), (process.stderr, err)), anyio.Event()

    async def read() -> None:
        async with anyio.create_task_group() as readers:
            for stream, into in streams:
                readers.start_soon(drain, stream, into)
        read_all.set()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(feed, process, call.stdin)
            with anyio.move_on_after(call.timeout) as deadline:
                await process.wait()
            if deadline.cancelled_caught:
                process.kill()
            with anyio.move_on_after(QUIET):
                await read_all.wait()
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.wait()
            await process.aclose()
    code = process.returncode or 0
    return CallResult(
        exit_code=code if code >= 0 and not deadline.cancelled_caught else None,
        signal=-code if code < 0 else None,
        timed_out=deadline.cancelled_caught,
        stdout=bytes(out.kept),
        stderr=bytes(err.kept),
        stdout_total=out.total,
        stderr_total=err.total,
        duration=anyio.current_time() - began,
        generation=generation,
    )
