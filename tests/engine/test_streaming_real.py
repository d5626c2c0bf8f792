"""Streaming on a real engine: bytes, backpressure, deadlines, and what leaving early ends."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from executor.errors import InvalidCall, SessionClosed
from executor.result import CallResult
from executor.sandbox import files
from executor.sandbox.request import Call
from executor.sandbox.stream import WINDOW, CallStream, Output
from pool.config.load import CallSettings, Settings
from pool.pool import SandboxPool
from tests.engine.conftest import Room
from tests.engine.tiny import tiny_image

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

PIPE = 65_536
FLOOD = "import sys\nwhile True: sys.stdout.buffer.write(b'x' * 65536)"
HELD = """
import os, select, sys, time
os.write(2, b"begun")
time.sleep(0.2)
os.set_blocking(1, False)
written = 0
while written < 50_000_000 and select.select([], [1], [], 0.3)[1]:
    try:
        written += os.write(1, b"x" * 4096)
    except BlockingIOError:
        pass
print(written, file=sys.stderr)
"""
"""Writes until nothing has been taken for 0.3 s, and tells how much it got rid of."""


@asynccontextmanager
async def pool_of(settings: Settings) -> AsyncIterator[SandboxPool]:
    """A pool whose calls may write 16 MB."""
    call = CallSettings(max_output=16_000_000, grace=1.0)
    async with SandboxPool(settings.model_copy(update={"call": call})) as pool:
        yield pool


async def collect(events: CallStream) -> tuple[dict[str, bytes], CallResult]:
    seen = {"stdout": bytearray(), "stderr": bytearray()}
    async for event in events:
        if isinstance(event, CallResult):
            return {name: bytes(data) for name, data in seen.items()}, event
        seen[event.stream] += event.data
    raise AssertionError("a stream ended without a result")


def memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_ten_megabytes_arrive_to_the_byte_and_interleaved_streams_keep_their_order(
    engine_settings: Settings,
) -> None:
    async with pool_of(engine_settings) as pool:
        session = await pool.acquire("agent", "bytes")
        code = "import sys; sys.stdout.buffer.write(bytes(range(250)) * 40_000)"
        async with session.stream(code=code) as events:
            seen, result = await collect(events)
        assert seen["stdout"] == bytes(range(250)) * 40_000
        assert (result.ok, result.stdout_total, result.truncated) == (True, 10_000_000, False)
        assert result.generation == session.generation

        code = "import os\nfor i in range(5000):\n os.write(1 + i % 2, b'%d\\n' % i)\nos.write(2, b'\\xff\\x00end')"
        async with session.stream(code=code) as events:
            seen, result = await collect(events)
        numbers = {
            name: b"".join(b"%d\n" % i for i in range(first, 5000, 2)) for name, first in (("stdout", 0), ("stderr", 1))
        }
        assert seen == {"stdout": numbers["stdout"], "stderr": numbers["stderr"] + b"\xff\x00end"}

        async with session.stream(["sh", "-c", "cat; exit 7"], stdin=b"given" * 200_000, max_output=600_000) as events:
            seen, result = await collect(events)
        assert seen["stdout"] == (b"given" * 200_000)[:600_000]
        assert (result.exit_code, result.stdout_total, result.truncated) == (7, 1_000_000, True)


async def test_a_slow_consumer_holds_the_tool_back_and_not_the_hosts_memory(engine_settings: Settings) -> None:
    async with pool_of(engine_settings) as pool:
        session, other = await pool.acquire("agent", "slow"), await pool.acquire("agent", "other")
        await other.call(code="pass")
        before = memory()
        async with session.stream(code=HELD, max_output=16_000_000) as events:
            assert await anext(events) == Output("stderr", b"begun")
            # Meanwhile nothing is taken, and another session's call goes on as ever.
            assert (await other.call(code="import time; time.sleep(2)")).ok
            assert memory() - before < 8_000_000
            seen, result = await collect(events)
        written = int(seen["stderr"])
        assert WINDOW <= written <= WINDOW + 2 * PIPE
        assert len(seen["stdout"]) == written == result.stdout_total


async def test_a_consumer_that_never_reads_costs_its_own_call_its_deadline(engine_settings: Settings) -> None:
    async with pool_of(engine_settings) as pool:
        session = await pool.acquire("agent", "never")
        generation = session.generation
        async with session.stream(code=FLOOD, timeout=1) as events:
            # The session's next call waits for its turn, and gets it although nobody has read.
            after = await session.call(code="print('next')")
            assert (after.stdout, after.generation) == (b"next\n", generation)
            seen, result = await collect(events)
        assert result.timed_out
        assert len(seen["stdout"]) == WINDOW
        # Held back for its last word only, a call is out of time all the same.
        code = f"import sys; sys.stdout.buffer.write(b'x' * {WINDOW + 100}); sys.stdout.flush()"
        async with session.stream(code=code, timeout=1) as events:
            await session.call(code="pass")
            _, result = await collect(events)
        assert result.timed_out


async def test_leaving_early_ends_all_that_the_call_started_and_keeps_the_sandbox(engine_settings: Settings) -> None:
    spawn = (
        "import os, subprocess\nsubprocess.Popen(['sleep', '4242'], start_new_session=True)\nprint('up', flush=True)\n"
    )
    look = "import glob; print(sum(b'4242' in open(p, 'rb').read() for p in glob.glob('/proc/[0-9]*/cmdline')))"
    async with pool_of(engine_settings) as pool:
        session = await pool.acquire("agent", "early")
        await session.write_file("kept", b"kept")
        generation = session.generation
        async with session.stream(code=spawn + FLOOD) as events:
            async for _ in events:
                break
        left = await session.call(code=look)
        assert (left.stdout, left.generation) == (b"0\n", generation)
        assert await session.read_file("kept") == b"kept"


async def test_a_session_that_is_closed_under_a_stream_tells_it_and_its_container_goes(
    engine_settings: Settings,
) -> None:
    async with pool_of(engine_settings) as pool:
        session = await pool.acquire("agent", "closed")
        async with session.stream(code=FLOOD) as events:
            await anext(events)
            await session.close()
            with pytest.raises(SessionClosed):
                await collect(events)
        with pytest.raises(SessionClosed):
            session.stream(code="pass")


async def test_an_image_without_python_streams_nothing_and_says_so(real_engine: Room, tmp_path: Path) -> None:
    image = await tiny_image(real_engine, tmp_path)
    async with real_engine.sandbox(python=False, image=image) as box:
        async with box.stream(Call(argv=("cat",))) as events:
            with pytest.raises(InvalidCall, match="python3"):
                await anext(events)
        with pytest.raises(InvalidCall, match="python3"):
            await box.call(Call(code=files.program(), stdin=files.list_request("/tmp", max_output=1_000)))
        assert box.poisoned == ""
        assert (await box.call(Call(argv=("cat",), stdin=b"still here"))).stdout == b"still here"
