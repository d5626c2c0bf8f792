"""The caller's handle on one agent session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from executor.errors import SessionClosed
from executor.result import CallResult
from executor.sandbox import files
from executor.sandbox.files import FileInfo
from executor.sandbox.request import Call
from executor.sandbox.sandbox import TOOL_PLACE, Sandbox
from executor.sandbox.stream import CallStream
from executor.staging.copy import DIGEST_LENGTH
from executor.tool import Tool, ToolResult, encode_arguments, tool_code, tool_result
from pool.core.events import SessionKey
from pool.supervisor.calls import Calls
from pool.supervisor.requests import ceilings, checked_call, yielding


class Session:
    """A handle on one agent session, from ``SandboxPool.acquire``; any number may be attached to one session.

    ``id`` is the session's only name in logs, labels and containers. Leaving an ``async with`` block releases the handle;
    the session itself lives on until it idles out or somebody closes it. A handle that is forgotten is released once Python
    has collected it.
    """

    def __init__(self, calls: Calls, key: SessionKey, epoch: int, session_id: str) -> None:
        self.id = session_id
        self._calls, self._key, self._epoch = calls, key, epoch
        self._released = False

    def __del__(self) -> None:
        # Whoever forgets a handle holds nothing by it: neither its session nor its agent's share.
        if not getattr(self, "_released", True):
            self._calls.drop(self._key, self._epoch)

    def __repr__(self) -> str:
        return f"<Session {self.id} generation={self.generation!r}{' released' if self._released else ''}>"

    @property
    def generation(self) -> str | None:
        """Which sandbox the session has now, ``<instance>-<n>``; ``None`` while it has none. A change means that
        everything kept in the sandbox (``/tmp``) is gone."""
        return self._calls.generation(self._key, self._epoch)

    @yielding
    async def call(
        self,
        argv: Sequence[str] | None = None,
        *,
        code: str | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_output: int | None = None,
        generation: str | None = None,
        unbuffered: bool | None = None,
    ) -> CallResult:
        """Run a program (``argv``) or Python source (``code``) in the session's sandbox and return what it did.

        ``timeout`` (seconds, at most and by default ``call.timeout``) counts from this call to its answer, waiting
        included. ``max_output`` (bytes of each stream, at most and by default ``call.max_output``) is kept; the rest is
        counted. ``generation`` asks for that very sandbox. ``unbuffered`` (by default ``call.unbuffered``) runs ``code`` as
        ``python3 -u`` would: what it prints is there at once, also when the call times out. Calls of one session run one after another, first come first
        served. Raises ``InvalidCall``, ``SessionBusy``, ``SandboxDied``, ``StateLost``, ``SessionClosed``, ``PoolClosed``
        and whatever ``acquire`` raises when the session has to be given a sandbox anew.
        """
        self._require_attached()
        call = self._new_call(argv, code, stdin, env, timeout, max_output, unbuffered)
        return await self._calls.run(self._key, self._epoch, call, generation)

    @yielding
    async def tool(
        self,
        tool: Tool,
        arguments: object = {},
        *,
        allowed: Sequence[Path] = (),
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_output: int | None = None,
        generation: str | None = None,
    ) -> ToolResult:
        """Call a Python tool with ``arguments`` (a mapping, or the JSON text of an object) in the session's sandbox.

        The tool's directory must lie inside one of ``allowed`` (by default it alone is), links followed, and is seen by the
        code read-only, as it is at this moment. A tool that fails is a result whose ``ok`` is false. ``timeout`` (seconds), ``max_output`` (bytes)
        as ``call``. Raises what ``call`` raises; ``InvalidCall`` also says what is wrong about the directory. ``SandboxPool.run_tool`` does all that a manifest says.
        """
        self._require_attached()
        stdin = encode_arguments(arguments, max_input=self._calls.settings.call.max_input)
        # Of what is sent, only inline code is the caller's: the rest is not held against the ceiling of his input.
        call = self._new_call(None, tool.inline or "", stdin, env, timeout, max_output)
        prepare = None
        if (directory := tool.directory) is not None:
            call = call.with_code(tool_code(tool, f"{TOOL_PLACE}/{'0' * DIGEST_LENGTH}"))

            @asynccontextmanager
            async def prepare(box: Sandbox, call: Call) -> AsyncIterator[Call]:
                own = allowed or (directory,)
                async with box.tool_dir(directory, own, file=tool.path, timeout=call.timeout) as root:
                    yield call.with_code(tool_code(tool, root))

        result = await self._calls.run(self._key, self._epoch, call, generation, prepare=prepare)
        return tool_result(tool, result)

    def stream(
        self,
        argv: Sequence[str] | None = None,
        *,
        code: str | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_output: int | None = None,
        generation: str | None = None,
        unbuffered: bool | None = None,
    ) -> CallStream:
        """As ``call``, with the output as it comes: ``async with session.stream(...) as events: async for event in events``.

        The events are ``Output`` (some bytes of one stream) and, last, the ``CallResult`` with the totals and no bytes. The
        first ``max_output`` bytes of each stream are handed out. A consumer that is slow holds the tool back (about 256 KiB
        ahead of it in each stream), and time held back counts towards ``timeout`` (seconds). Leaving the block early cancels the call
        and ends all that it started. Raises ``InvalidCall`` at once; all else that ``call`` raises comes from the iteration.
        Code that prints to a pipe buffers some KiB, so its output comes in lumps unless it is ``unbuffered``. An image without
        Python cannot stream (``InvalidCall``).
        """
        self._require_attached()
        call = self._new_call(argv, code, stdin, env, timeout, max_output, unbuffered)
        return CallStream(lambda sink: self._calls.run(self._key, self._epoch, call, generation, sink), call.max_output)

    @yielding
    async def write_file(
        self,
        path: str,
        data: bytes,
        *,
        parents: bool = False,
        timeout: float | None = None,
        generation: str | None = None,
    ) -> None:
        """Write a file below ``/tmp`` or ``/dev/shm``: the whole of it, or, on any error, what was there before.

        A relative ``path`` begins at ``/tmp``; ``parents`` makes missing directories. ``data`` may be as long as a call's
        input (``call.max_input`` bytes), and has to fit into the sandbox's tmpfs. ``timeout`` (seconds) as ``call``. Raises ``FileFailed`` (``code`` is the errno's
        name), ``InvalidCall`` (a path that leads elsewhere; an image without Python) and what ``call`` raises.
        """
        limits = self._calls.settings.call
        request = files.write_request(path, data, parents=parents, max_input=limits.max_input)
        await self._file_call(request, f"writing {path!r:.200}", 0, timeout, generation)

    @yielding
    async def read_file(
        self, path: str, *, max_bytes: int | None = None, timeout: float | None = None, generation: str | None = None
    ) -> bytes:
        """Return the bytes of a regular file below ``/tmp``, ``/dev/shm`` or ``/tool``; links that stay inside are followed.

        A file of more than ``max_bytes`` bytes (at most and by default ``call.max_output``, the agent's where it has its own) is
        ``FileFailed`` with the code ``EFBIG``, not a part of it.
        ``timeout`` (seconds) as ``call``. Raises as ``write_file``.
        """
        most = self._ceiling() if max_bytes is None else max_bytes
        request = files.read_request(path, max_bytes, max_output=self._ceiling())
        return await self._file_call(request, f"reading {path!r:.200}", most, timeout, generation)

    @yielding
    async def list_files(
        self, path: str = "/tmp",  # noqa: S108 - the place inside the sandbox
        *, timeout: float | None = None, generation: str | None = None,
    ) -> list[FileInfo]:  # fmt: skip
        """Return the entries of a directory below ``/tmp``, ``/dev/shm`` or ``/tool``, sorted by name. ``timeout`` (seconds) as ``call``.

        Raises as ``read_file``."""
        most, doing = self._ceiling(), f"listing {path!r:.200}"
        request = files.list_request(path, max_output=most)
        return files.parse_listing(await self._file_call(request, doing, most, timeout, generation), doing)

    async def _file_call(
        self, request: bytes, doing: str, most: int, timeout: float | None, generation: str | None
    ) -> bytes:
        self._require_attached()
        call = self._new_call(None, files.program(), request, None, timeout, None)
        # The reason for a refusal is the program's own output and must fit, however little the agent's calls may print.
        if call.max_output < files.MAX_REPORT:
            call = replace(call, max_output=files.MAX_REPORT)
        return files.answer(await self._calls.run(self._key, self._epoch, call, generation), doing, most=most)

    def _ceiling(self) -> int:
        """Bytes of each stream that this agent's calls may print."""
        return ceilings(self._calls.settings, self._key[0]).max_output

    def _new_call(
        self,
        argv: Sequence[str] | None,
        code: str | None,
        stdin: bytes,
        env: Mapping[str, str] | None,
        timeout: float | None,
        max_output: int | None,
        unbuffered: bool | None = None,
    ) -> Call:
        return checked_call(self._calls.settings, self._key[0], argv, code, stdin, env, timeout, max_output, unbuffered)

    def _require_attached(self) -> None:
        self._calls.require_here()
        if self._released:
            raise SessionClosed("this handle was released; acquire the session again")

    @yielding
    async def ready(self) -> None:
        """Wait until a call would find a runner armed and pay nothing for the start of one; runs nothing itself.

        Returns at once where calls go by plain exec. A session without a sandbox waits for one as ``acquire`` does; a call
        that is running is waited for, 15 s at most. Somebody else's call may still come first. Raises ``SessionClosed``,
        ``PoolClosed``, ``SandboxDied``, ``EngineUnavailable`` (no runner was armed in time) and whatever ``acquire`` raises.
        """
        self._require_attached()
        await self._calls.ready(self._key, self._epoch)

    async def release(self) -> None:
        """Detach this handle; the session and its sandbox stay. Twice is harmless. Raises ``PoolUnusable`` on another event loop."""
        self._calls.require_here()
        if not self._released:
            self._released = True
            self._calls.detach(self._key, self._epoch)

    async def close(self) -> None:
        """End the session for all its handles: its sandbox is destroyed, its running call ends with ``SessionClosed``.

        Raises ``PoolUnusable`` on another event loop."""
        self._calls.require_here()
        self._released = True
        self._calls.end(self._key, self._epoch)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()
