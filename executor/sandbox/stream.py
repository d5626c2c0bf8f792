"""A call's output as it comes: a consumer takes it, and output that it has not taken holds the tool back.

The call itself runs in a task of its own, which reads on whatever the consumer does; only credit goes back to the runner
as output is taken. So at most ``WINDOW`` bytes of each stream wait here, and a consumer that never reads harms its own
call alone: that one stands still until its deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal

import anyio
import anyio.lowlevel

from executor.common.event_loop import EventLoop, current_loop
from executor.engine.process import Capped
from executor.errors import SandboxDied
from executor.result import CallResult

WINDOW = 262_144
"""Bytes of each stream that a tool may be ahead of its consumer, the pipe inside the sandbox (64 KiB) not counted."""
STEP = WINDOW // 4
"""Bytes that a consumer has taken before the runner gets credit for them: a frame for each chunk would cost too much."""

StreamName = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that the code wrote to one of its streams, at most ``WINDOW``; never empty. A character may be cut in two."""

    stream: StreamName
    data: bytes


class Flow(Capped):
    """One stream of a streamed call. ``cap`` is what may have come by now: the credit given so far, at most ``limit``."""

    __slots__ = ("_sink", "limit", "name", "taken")

    def __init__(self, name: StreamName, limit: int, sink: Sink) -> None:
        super().__init__(min(limit, WINDOW))
        self.name, self.limit, self.taken = name, limit, 0
        self._sink = sink

    def add(self, data: bytes) -> None:
        self.total += len(data)
        self._sink.put(self.name, data)

    def due(self) -> int:
        """Return the credit to give to the runner now, in bytes; it counts as given."""
        if self.taken < STEP or self.cap == self.limit:
            return 0
        more, self.taken = self.taken, 0
        self.cap = min(self.limit, self.cap + more)
        return more


class Sink:
    """Where a streamed call's output waits for its consumer.

    Bytes of a stream keep their order. Across the two, the one whose bytes have waited longest is taken first; an exact
    order would cost memory for every byte, and the pipes inside keep none.
    """

    def __init__(self, max_output: int) -> None:
        self.stdout, self.stderr = Flow("stdout", max_output, self), Flow("stderr", max_output, self)
        self.discarded = False
        self.on_taken: Callable[[], None] = lambda: None
        self._waiting: dict[StreamName, bytearray] = {}
        self._arrived = anyio.Event()

    def put(self, stream: StreamName, data: bytes) -> None:
        """Keep what has come, and wake the consumer."""
        if not self.discarded:
            self._waiting.setdefault(stream, bytearray()).extend(data)
            self.notify()

    def take(self) -> Output | None:
        """Take what waits of one stream; ``None`` when nothing does."""
        for stream in self._waiting:
            output = Output(stream, bytes(self._waiting.pop(stream)))
            flow = self.stdout if stream == "stdout" else self.stderr
            flow.taken += len(output.data)
            self.on_taken()
            return output
        return None

    def notify(self) -> None:
        """Wake the consumer: output has come, or the call has ended."""
        self._arrived.set()

    async def wait(self) -> None:
        """Wait until output has come, or the call has ended."""
        await self._arrived.wait()
        self._arrived = anyio.Event()

    def discard(self) -> None:
        """Throw away what waits and what still comes, which is not held back any more."""
        self.discarded = True
        self._waiting.clear()
        for flow in (self.stdout, self.stderr):
            flow.cap = flow.limit


class _StreamedCall:
    """The call of a stream, in a task of its own. It does not refer to the stream, which can be collected meanwhile."""

    def __init__(self, carry_out: Callable[[Sink], Awaitable[CallResult]], max_output: int) -> None:
        self.sink, self.scope = Sink(max_output), anyio.CancelScope()
        self.began, self.ended = anyio.Event(), anyio.Event()
        self.result: CallResult | None = None
        self.error: BaseException | None = None
        self._carry_out = carry_out

    async def run(self) -> None:
        sink = self.sink
        self.began.set()
        try:
            with self.scope:
                result = await self._carry_out(sink)
                self.result = replace(result, stdout_streamed=sink.stdout.total, stderr_streamed=sink.stderr.total)
        except anyio.get_cancelled_exc_class():  # the loop itself ends
            self.error = SandboxDied("the event loop ended under the call", cause="unknown")
            raise
        except BaseException as error:  # the consumer's task raises it
            self.error = error
        finally:
            self.ended.set()
            sink.notify()


class CallStream:
    """A call under way: ``async with`` it, then ``async for`` over its ``Output`` and, last, its ``CallResult``.

    The result has the totals and no bytes. Errors are raised by the iteration. Leaving the block before the result has
    come, ``aclose`` or dropping the stream cancels the call; the first two wait until nothing of it runs any more. No cancel
    scope or task group stays open between two events, so any task may read on or close, and a generator may yield inside.
    """

    def __init__(self, carry_out: Callable[[Sink], Awaitable[CallResult]], max_output: int) -> None:
        self._carry_out, self._max_output = carry_out, max_output
        self._call: _StreamedCall | None = None
        self._loop: EventLoop | None = None
        self._over = False

    async def __aenter__(self) -> CallStream:
        if self._call is not None:
            raise RuntimeError("a stream is one call and entered once; make a new one")
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the call if it still runs, and wait until nothing of it does. Twice is harmless."""
        self._over = True
        if self._call is not None:
            self._call.scope.cancel()
            # What has to be done for a cancelled call is bounded, so this is too.
            with anyio.CancelScope(shield=True):
                await self._call.ended.wait()

    def __aiter__(self) -> CallStream:
        return self

    async def __anext__(self) -> Output | CallResult:
        if self._over:
            raise StopAsyncIteration
        call = self._call or await self._begin()
        await anyio.lowlevel.checkpoint()
        while not self._over:
            output = call.sink.take()
            if output is not None:
                return output
            if call.ended.is_set():
                self._over = True
                if call.error is not None:
                    raise call.error
                if call.result is not None:
                    return call.result
                break
            await call.sink.wait()
        raise StopAsyncIteration

    async def _begin(self) -> _StreamedCall:
        self._loop = current_loop()
        call = self._call = _StreamedCall(self._carry_out, self._max_output)
        self._loop.start(call.run, "emberpool stream")
        # The call has taken its place in its session's queue once this returns; a cancel is seen after that.
        with anyio.CancelScope(shield=True):
            await call.began.wait()
        return call

    def __del__(self) -> None:
        call = self._call
        # Collection may come at any moment and in any thread: the loop itself ends the call.
        if call is not None and self._loop is not None and not call.ended.is_set():
            self._loop.call_soon(call.scope.cancel)
