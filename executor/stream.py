"""A call's output as it comes: a consumer takes it, and what it has not taken holds the tool back.

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
from anyio.abc import TaskStatus

from executor.process import Capped
from executor.result import CallResult

WINDOW = 262_144
"""Bytes of each stream that a tool may be ahead of its consumer, the pipe inside the sandbox (64 KiB) not counted."""
STEP = WINDOW // 4
"""Bytes that a consumer has taken before the runner is told of it: a frame for each chunk would be more frame than use."""

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
        """Credit that is to be given to the runner now; it counts as given."""
        if self.taken < STEP or self.cap == self.limit:
            return 0
        more, self.taken = self.taken, 0
        self.cap = min(self.limit, self.cap + more)
        return more


class Sink:
    """Where a streamed call's output waits for its consumer.

    Bytes of a stream keep their order. Across the two, the one whose bytes have waited longest is taken first; an exact
    order would cost memory for every byte, and the pipes inside have none to tell.
    """

    def __init__(self, max_output: int) -> None:
        self.stdout, self.stderr = Flow("stdout", max_output, self), Flow("stderr", max_output, self)
        self.discarded = False
        self.on_taken: Callable[[], None] = lambda: None
        self._waiting: dict[StreamName, bytearray] = {}
        self._news = anyio.Event()

    def put(self, stream: StreamName, data: bytes) -> None:
        """Keep what has come, and tell the consumer."""
        if not self.discarded:
            self._waiting.setdefault(stream, bytearray()).extend(data)
            self.tell()

    def take(self) -> Output | None:
        """What waits of one stream; ``None`` when nothing does."""
        for stream in self._waiting:
            output = Output(stream, bytes(self._waiting.pop(stream)))
            flow = self.stdout if stream == "stdout" else self.stderr
            flow.taken += len(output.data)
            self.on_taken()
            return output
        return None

    def tell(self) -> None:
        self._news.set()

    async def news(self) -> None:
        """Wait until something has come, or the call has ended."""
        await self._news.wait()
        self._news = anyio.Event()

    def discard(self) -> None:
        """Nobody wants the rest: it may all come, and is thrown away."""
        self.discarded = True
        self._waiting.clear()
        for flow in (self.stdout, self.stderr):
            flow.cap = flow.limit


class CallStream:
    """A call under way: ``async with`` it, then ``async for`` over its ``Output`` and, last, its ``CallResult``.

    The result has the totals and no bytes. Errors are raised by the iteration. Leaving the block before the result has
    come cancels the call and waits until nothing of it runs any more.
    """

    def __init__(self, carry_out: Callable[[Sink], Awaitable[CallResult]], max_output: int) -> None:
        self._carry_out, self._sink = carry_out, Sink(max_output)
        self._scope = anyio.CancelScope()
        self._result: CallResult | None = None
        self._error: Exception | None = None
        self._entered = self._over = self._ended = False

    async def __aenter__(self) -> CallStream:
        if self._entered:
            raise RuntimeError("a stream is one call and entered once; make a new one")
        self._entered = True
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        # The call has taken its place in its session's queue once this returns; a cancel is seen after that.
        with anyio.CancelScope(shield=True):
            await self._tasks.start(self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._over = True
        self._scope.cancel()
        # Only a cancellation is the task group's business; it would wrap the block's own error in a group.
        if error is not None and isinstance(error, anyio.get_cancelled_exc_class()):
            return await self._tasks.__aexit__(kind, error, trace)
        await self._tasks.__aexit__(None, None, None)
        return None

    def __aiter__(self) -> CallStream:
        return self

    async def __anext__(self) -> Output | CallResult:
        if not self._entered:
            raise RuntimeError("enter the stream first: `async with session.stream(...) as events`")
        await anyio.lowlevel.checkpoint()
        while not self._over:
            output = self._sink.take()
            if output is not None:
                return output
            if self._ended:
                self._over = True
                if self._error is not None:
                    raise self._error
                if self._result is not None:
                    return self._result
                break
            await self._sink.news()
        raise StopAsyncIteration

    async def _run(self, *, task_status: TaskStatus[None]) -> None:
        sink = self._sink
        task_status.started()
        try:
            with self._scope:
                result = await self._carry_out(sink)
                self._result = replace(result, stdout_streamed=sink.stdout.total, stderr_streamed=sink.stderr.total)
        except Exception as error:  # the consumer's task raises it
            self._error = error
        finally:
            self._ended = True
            sink.tell()
