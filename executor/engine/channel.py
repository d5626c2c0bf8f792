"""An attached engine client's streams, as ``executor.engine.protocol.Channel`` describes them.

Stdin and stdout are plain pipes that are read and written without anything between: a short call's bytes pass here in both
directions, and a stream of the event loop's own costs it turns of that loop.
"""

from __future__ import annotations

import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress

import anyio
import anyio.lowlevel
from anyio.abc import Process

from executor.engine import process
from executor.engine.process import READ_SIZE, Capped
from executor.engine.protocol import Channel


@asynccontextmanager
async def attached(argv: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[Channel]:
    """Start a client with a channel to it; it is dead and reaped once the block is left. Nothing may use the channel then."""
    with ExitStack() as ends:

        def pipe() -> list[int]:
            fds = list(os.pipe())
            for fd in fds:
                ends.callback(_close, fds, fd)
            return fds

        try:
            asks, answers = pipe(), pipe()
        except OSError as error:
            raise process.not_started(argv[0], error) from error
        async with process.client(argv, env, stdin=asks[0], stdout=answers[1]) as client:
            _close(asks, asks[0])
            _close(answers, answers[1])
            os.set_blocking(asks[0], False)
            os.set_blocking(answers[0], False)
            channel = PipeChannel(client, asks, answers[0])
            yield channel


async def keep(receive: Callable[[], Awaitable[bytes]], into: Capped) -> None:
    """Read one stream of a channel to its end, keeping what the cap allows."""
    while data := await receive():
        into.add(data)


def _close(fds: list[int], fd: int) -> None:
    """Close one of the descriptors that are open, once; tasks that wait for it are woken."""
    if fd in fds:
        fds.remove(fd)
        anyio.notify_closing(fd)
        os.close(fd)


class PipeChannel:
    """A channel over pipes that do not block: ``asks`` holds the one that is written while it is open. The client's stderr
    is a stream of the event loop."""

    def __init__(self, client: Process, asks: list[int], answers: int) -> None:
        assert client.stderr is not None  # noqa: S101 - it is a pipe, see `process.client`
        self._process, self._stderr = client, client.stderr
        self._asks, self._answers = asks, answers

    def send_at_once(self, data: bytes) -> bool:
        # What is no longer than this is written whole or not at all.
        if len(data) > select.PIPE_BUF or not self._asks:
            return False
        try:
            return os.write(self._asks[0], data) == len(data)
        except OSError:
            return False

    async def send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            if not self._asks:
                raise BrokenPipeError("the engine client's stdin is closed")
            try:
                left = left[os.write(self._asks[0], left) :]
            except BlockingIOError:
                with suppress(anyio.ClosedResourceError):  # then the loop raises above
                    await anyio.wait_writable(self._asks[0])

    async def close_stdin(self) -> None:
        for fd in self._asks[:]:
            _close(self._asks, fd)
        await anyio.lowlevel.cancel_shielded_checkpoint()

    async def receive_stdout(self) -> bytes:
        while True:
            try:
                await anyio.wait_readable(self._answers)
                return os.read(self._answers, READ_SIZE)
            except BlockingIOError:
                continue
            except (OSError, anyio.ClosedResourceError):
                return b""

    async def receive_stderr(self) -> bytes:
        return await process.receive(self._stderr)

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        process.kill(self._process)
