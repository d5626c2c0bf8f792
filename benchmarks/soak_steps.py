"""Carries out one step of a soak's client, checks what came of it, and puts it on the books."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import anyio

from benchmarks.soak_books import PoolState, Tally, Wound
from benchmarks.soak_plan import Step, wrong
from executor.errors import EmberpoolError, FileFailed
from executor.result import CallResult
from executor.tool import Tool
from pool.pool import SandboxPool
from pool.session import Session

FLOOD_KEPT = 65_536
"""Bytes that are kept of each stream of a flood."""
TOOL = "soak_echo"

_T = TypeVar("_T")


class Left(Exception):
    """Its caller left a streamed call before its end, which cancels it; nothing failed."""


def write_tool(directory: Path) -> Tool:
    """A tool in a directory of its own, which is made."""
    directory.mkdir()
    file = directory / f"{TOOL}.py"
    file.write_text(f"def {TOOL}(word):\n    return '<' + word + '>'\n", "utf-8")
    return Tool(name=TOOL, file=file)


async def counted(books: PoolState, tally: Tally, once: Callable[[], Awaitable[_T]]) -> _T | EmberpoolError | None:
    """Make one request and book how it ended, unless by a result: that the caller books before it waits for anything.

    Returns the result or the error; ``None`` where there is neither.
    """
    tally.accepted += 1
    try:
        return await once()
    except EmberpoolError as error:
        tally.error(error)
        return error
    except anyio.get_cancelled_exc_class():
        tally.cancelled += 1
        raise
    except Left:
        tally.cancelled += 1
    except Exception as error:  # no documented error of a call
        books.strange.add(f"{type(error).__name__}: {error}")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What steps are carried out with."""

    pool: SandboxPool
    books: PoolState
    tool: Tool

    async def carry_out(self, session: str, handle: Session, step: Step) -> None:
        """Do it, and wait for its end. Cancelled, the call under way is too, and stands on the books as that."""
        match step.kind:
            case "files":
                await self._files(handle, step)
            case "cold":
                await self._cold(step)
            case "tool":
                await self._call(session, handle, step, lambda: self._use_tool(handle, step))
            case "stream" | "leave" | "kill_runner":
                await self._call(session, handle, step, lambda: self._stream(session, handle, step))
            case _:
                await self._call(session, handle, step, lambda: self._plain(handle, step))

    async def _call(self, session: str, handle: Session, step: Step, once: Callable[[], Awaitable[CallResult]]) -> None:
        books, had = self.books, handle.generation
        result = await counted(books, books.calls, once)
        if isinstance(result, CallResult):
            self._take(step, result, wounded=session in books.wounds)
            books.warm.add(had is not None and result.generation == had)
            books.answered(session, result, anyio.current_time())

    async def _cold(self, step: Step) -> None:
        result = await counted(
            self.books, self.books.calls, lambda: self.pool.call_cold(code=step.code, timeout=step.timeout)
        )
        if isinstance(result, CallResult):
            self._take(step, result, wounded=False)

    def _take(self, step: Step, result: CallResult, *, wounded: bool) -> None:
        self.books.result(result)
        if why := wrong(step, result, wounded=wounded):
            self.books.wrong.add(why)

    async def _plain(self, handle: Session, step: Step) -> CallResult:
        kept = FLOOD_KEPT if step.kind == "flood" else None
        if step.argv:
            return await handle.call(step.argv, timeout=step.timeout, max_output=kept)
        return await handle.call(code=step.code, timeout=step.timeout, max_output=kept)

    async def _use_tool(self, handle: Session, step: Step) -> CallResult:
        return (await handle.tool(self.tool, {"word": step.token}, timeout=step.timeout)).result

    async def _stream(self, session: str, handle: Session, step: Step) -> CallResult:
        """The result of a streamed call, with the bytes that came before it."""
        came = bytearray()
        async with handle.stream(code=step.code, timeout=step.timeout) as events:
            async for event in events:
                if isinstance(event, CallResult):
                    return replace(event, stdout=bytes(came), stdout_streamed=0)
                if event.stream == "stdout":
                    came += event.data
                if step.kind == "leave":
                    raise Left
                if step.kind == "kill_runner":
                    self._struck(session, handle)
        raise AssertionError("a stream ended without a result")

    def _struck(self, session: str, handle: Session) -> None:
        # The tool has just said that it kills its runner now.
        if generation := handle.generation:
            self.books.wound(session, Wound(anyio.current_time(), generation, "the tool itself"))

    async def _files(self, handle: Session, step: Step) -> None:
        """Write a file, find it, read it: in one generation, in which it must then be."""
        generation, name, data = handle.generation, f"{step.token}.txt", step.stdout or b""

        async def write() -> bool:
            await handle.write_file(name, data, timeout=step.timeout, generation=generation)
            return True

        if await self._file(write) is not True:
            return
        listed = await self._file(lambda: handle.list_files(timeout=step.timeout, generation=generation))
        read = await self._file(lambda: handle.read_file(name, timeout=step.timeout, generation=generation))
        if generation is None:
            return  # the session may have been given another sandbox since, and that is no fault
        if isinstance(listed, list) and (name, len(data)) not in [(entry.name, entry.size) for entry in listed]:
            self.books.wrong.add(f"files: {name} is not in its directory")
        if isinstance(read, bytes) and read != data:
            self.books.wrong.add(f"files: {name} has {len(read)} bytes {read[:40]!r}, not {len(data)} {data[:40]!r}")
        if isinstance(read, FileFailed) and read.code == "ENOENT":
            self.books.wrong.add(f"files: {name} is gone from its own generation")

    async def _file(self, once: Callable[[], Awaitable[_T]]) -> _T | EmberpoolError | None:
        result = await counted(self.books, self.books.calls, once)
        if result is not None and not isinstance(result, EmberpoolError):
            self.books.calls.results["ok"] += 1
        return result
