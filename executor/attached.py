"""One attached engine client from start to end: stdin fed, both outputs drained and capped, and the first end noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import anyio

from executor.channel import keep
from executor.engine import Channel, Engine
from executor.process import Capped

QUIET = 0.25
"""Seconds without a byte after which the streams of an exec that has ended are taken to be held open by somebody else."""
LINGER = 10.0
"""Seconds after which streams that are held open are given up although bytes still come."""
STDIN_CHUNK = 65_536


@dataclass(slots=True)
class Attached:
    """How an attached client ended: ``client`` (it ended by itself, with ``code``), ``deadline``, ``over`` (the process
    inside had ended, but something kept its streams open), or ``death`` (the whole container ended)."""

    stdout: Capped
    stderr: Capped
    ended_by: Literal["client", "deadline", "over", "death"] = "deadline"
    code: int | None = None
    duration: float = 0.0


async def run_attached(
    engine: Engine,
    args: Sequence[str],
    *,
    stdin: Sequence[bytes],
    timeout: float,
    max_output: int,
    over: anyio.Event,
    died: anyio.Event,
) -> Attached:
    """Run one attached client for at most ``timeout`` seconds; whatever ended it, the client is gone on return.

    ``over`` is set when the process inside has ended, ``died`` when its container has.
    """
    end, began = Attached(Capped(max_output), Capped(max_output)), anyio.current_time()
    with anyio.move_on_after(timeout):
        async with engine.attach(args) as channel, anyio.create_task_group() as tasks:

            async def finish(how: Literal["over", "death"], event: anyio.Event) -> None:
                await event.wait()
                seen = -1
                with anyio.move_on_after(LINGER):
                    while seen != (seen := end.stdout.total + end.stderr.total):  # noqa: ASYNC110 - silence has no event
                        await anyio.sleep(QUIET)
                end.ended_by = how
                tasks.cancel_scope.cancel()

            async def read() -> None:
                async with anyio.create_task_group() as readers:
                    readers.start_soon(keep, channel.receive_stdout, end.stdout)
                    readers.start_soon(keep, channel.receive_stderr, end.stderr)
                end.code = await channel.wait()
                end.ended_by = "client"
                tasks.cancel_scope.cancel()

            tasks.start_soon(finish, "over", over)
            tasks.start_soon(finish, "death", died)
            tasks.start_soon(_feed, channel, stdin)
            tasks.start_soon(read)
    end.duration = anyio.current_time() - began
    return end


async def _feed(channel: Channel, parts: Sequence[bytes]) -> None:
    """Write the parts and close stdin; code that does not read its stdin is no error."""
    try:
        for part in parts:
            for start in range(0, len(part), STDIN_CHUNK):
                await channel.send(part[start : start + STDIN_CHUNK])
        await channel.close_stdin()
    except (BrokenPipeError, ConnectionResetError):
        return
