"""One attached engine client from start to end: stdin fed, both outputs drained and capped, and the first end noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import anyio

from executor.engine.channel import keep
from executor.engine.process import Capped
from executor.engine.protocol import Channel, Engine

QUIET = 0.25
"""Seconds without a byte after which the streams of an exec that has ended are taken to be held open by somebody else."""
LINGER = 10.0
"""Seconds after which streams that are held open are given up although bytes still come."""
STDIN_CHUNK = 65_536


PROVED, REFUSED = b"\x06", b"\x15"
"""The first byte on the stdout of a call that ``executor/inside/plain.py`` carries out: the boundary is in force, or is not."""


class Proven(Capped):
    """A call's stdout without its first byte, which is ``proof``: ``b""`` until it has come."""

    __slots__ = ("proof",)

    def __init__(self, cap: int) -> None:
        super().__init__(cap)
        self.proof = b""

    def add(self, data: bytes) -> None:
        if not self.proof:
            self.proof, data = data[:1], data[1:]
        super().add(data)


@dataclass(slots=True)
class Attached:
    """How an attached client ended: ``client`` (it ended by itself, with ``code``), ``deadline``, ``over`` (the process
    inside had ended, but something kept its streams open), or ``death`` (the whole container ended)."""

    stdout: Capped
    stderr: Capped
    ended_by: Literal["client", "deadline", "over", "death"] = "deadline"
    code: int | None = None
    duration: float = 0.0

    @property
    def proof(self) -> bytes:
        """What stands before a call's own output, ``b""`` where nothing does: the call then never began."""
        return self.stdout.proof if isinstance(self.stdout, Proven) else PROVED


async def run_attached(
    engine: Engine,
    args: Sequence[str],
    *,
    stdin: Sequence[bytes],
    timeout: float,
    max_output: int,
    over: anyio.Event,
    died: anyio.Event,
    proof: bool = False,
) -> Attached:
    """Run one attached client for at most ``timeout`` seconds; whatever ended it, the client is gone on return.

    ``over`` is set when the process inside has ended, ``died`` when its container has. With ``proof`` the first byte of
    stdout is not the call's (``executor/inside/plain.py`` writes it).
    """
    stdout = Proven(max_output) if proof else Capped(max_output)
    end, began = Attached(stdout, Capped(max_output)), anyio.current_time()
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
