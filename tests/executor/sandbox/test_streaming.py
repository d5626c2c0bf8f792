"""Streams: output as it comes, under credit; the result last; leaving early ends the call and nothing else."""

from __future__ import annotations

import anyio
import pytest

from executor.errors import EngineUnavailable, SandboxDied
from executor.result import CallResult
from executor.sandbox import wire
from executor.sandbox.request import Call
from executor.sandbox.runner_call import run_on_runner
from executor.sandbox.stream import STEP, WINDOW, CallStream, Output, Sink
from tests.support.pools import virtual_backend
from tests.support.streams import Exec, Room, python, room

pytestmark = pytest.mark.anyio

FLOOD = bytes(range(256)) * 6_000  # 1.5 MB: several windows


def stream(made: Room, call: Call | None = None) -> CallStream:
    call = call or python(max_output=4_000_000)
    return CallStream(lambda sink: run_on_runner(made.runners, call, sink), call.max_output)


async def collect(events: CallStream) -> tuple[dict[str, bytes], CallResult]:
    seen = {"stdout": b"", "stderr": b""}
    async for event in events:
        if isinstance(event, CallResult):
            return seen, event
        seen[event.stream] += event.data
    raise AssertionError("a stream ended without a result")


async def flood(tool: Exec) -> None:
    await tool.write(wire.OUT, FLOOD)
    tool.done()


# --- what a consumer gets -----------------------------------------------------------------------------------------------


async def test_output_comes_while_the_call_runs_and_the_result_last() -> None:
    go_on = anyio.Event()

    async def talk(tool: Exec) -> None:
        await tool.write(wire.OUT, b"one")
        await go_on.wait()
        await tool.write(wire.ERR, b"two!")
        tool.done()

    async with room(talk) as made, stream(made) as events:
        assert await anext(events) == Output("stdout", b"one")
        go_on.set()
        assert await anext(events) == Output("stderr", b"two!")
        result = await anext(events)
        assert isinstance(result, CallResult)
        assert (result.stdout, result.stderr) == (b"", b"")
        assert (result.stdout_total, result.stderr_total, result.ok, result.truncated) == (3, 4, True, False)
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_every_byte_of_a_flood_arrives_in_order() -> None:
    async with room(flood) as made, stream(made) as events:
        seen, result = await collect(events)
    assert seen["stdout"] == FLOOD
    assert (result.stdout_total, result.truncated) == (len(FLOOD), False)


async def test_output_past_the_cap_is_counted_and_marked_truncated() -> None:
    async def talk(tool: Exec) -> None:
        await tool.write(wire.OUT, b"x" * 10)
        tool.done(stdout_total=25)

    async with room(talk) as made, stream(made, python(max_output=10)) as events:
        seen, result = await collect(events)
    assert seen["stdout"] == b"x" * 10
    assert (result.stdout_total, result.truncated) == (25, True)


async def test_an_ordinary_call_beside_streams_keeps_its_bytes() -> None:
    async def talk(tool: Exec) -> None:
        tool.emit(wire.OUT, b"kept")
        tool.done()

    async with room(talk) as made:
        result = await run_on_runner(made.runners, python())
        assert made.execs[0].request["credit"] is None
    assert (result.stdout, result.truncated, result.stdout_streamed) == (b"kept", False, 0)


async def test_a_calls_error_is_raised_by_the_iteration_once() -> None:
    async def fail(sink: Sink) -> CallResult:
        sink.put("stdout", b"before")
        raise EngineUnavailable("no engine")

    async with CallStream(fail, 10) as events:
        assert await anext(events) == Output("stdout", b"before")
        with pytest.raises(EngineUnavailable):
            await anext(events)
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_the_blocks_own_error_comes_out_as_it_is() -> None:
    async with room(flood) as made:
        with pytest.raises(KeyError):
            async with stream(made):
                raise KeyError("mine")


async def test_a_stream_begins_when_it_is_entered_or_first_read_and_only_once() -> None:
    async with room(flood) as made:
        events = stream(made)
        assert await anext(events)
        with pytest.raises(RuntimeError, match="once"):
            await events.__aenter__()
        await events.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_a_call_has_its_place_in_the_queue_once_its_stream_is_entered() -> None:
    order = []

    async def queue(sink: Sink) -> CallResult:
        order.append("stream")
        raise EngineUnavailable("no engine")

    async with CallStream(queue, 10):
        order.append("block")
    assert order == ["stream", "block"]


# --- credit -------------------------------------------------------------------------------------------------------------


async def test_a_tool_is_held_back_at_its_credit_until_the_consumer_takes() -> None:
    async with room(flood) as made, stream(made) as events:
        await anyio.wait_all_tasks_blocked()
        assert made.now.written[wire.OUT] == WINDOW
        await anext(events)
        await anyio.wait_all_tasks_blocked()
        assert made.now.written[wire.OUT] == 2 * WINDOW
        seen, _ = await collect(events)
        assert len(seen["stdout"]) == len(FLOOD) - WINDOW


async def test_one_streams_flood_does_not_hold_the_other_back() -> None:
    async def talk(tool: Exec) -> None:
        await tool.write(wire.OUT, b"o" * WINDOW)
        await tool.write(wire.ERR, b"e" * WINDOW)
        tool.done()

    async with room(talk) as made, stream(made) as events:
        await anyio.wait_all_tasks_blocked()
        assert made.execs[0].written == {wire.OUT: WINDOW, wire.ERR: WINDOW}
        seen, result = await collect(events)
    assert (len(seen["stdout"]), len(seen["stderr"]), result.truncated) == (WINDOW, WINDOW, False)


async def test_a_runner_that_overdraws_its_credit_breaks_the_protocol() -> None:
    async def overdraw(tool: Exec) -> None:
        for _ in range(WINDOW // 65_536 + 1):
            tool.emit(wire.OUT, b"x" * 65_536)
        await tool.hear()

    async with room(overdraw) as made, stream(made) as events:
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(SandboxDied) as died:
            await collect(events)
    assert died.value.cause == "protocol"
    assert "protocol" in made.killed


def test_credit_is_given_in_steps_and_never_beyond_the_cap() -> None:
    sink = Sink(WINDOW + STEP)
    flow = sink.stdout
    assert (flow.cap, flow.due()) == (WINDOW, 0)
    flow.taken = STEP - 1
    assert flow.due() == 0
    flow.taken = 3 * STEP
    assert (flow.due(), flow.cap) == (3 * STEP, WINDOW + STEP)
    flow.taken = 3 * STEP
    assert flow.due() == 0, "the runner may send all that is left"


def test_what_waits_costs_no_more_than_its_bytes_however_it_was_written() -> None:
    sink = Sink(1_000_000)
    for number in range(1_000):
        sink.stdout.add(b"%03d" % number)
        sink.stderr.add(b"%03d" % number)
    first, second, nothing = sink.take(), sink.take(), sink.take()
    text = b"".join(b"%03d" % number for number in range(1_000))
    assert (first, second, nothing) == (Output("stdout", text), Output("stderr", text), None)


# --- leaving early ------------------------------------------------------------------------------------------------------


async def stopped_by_cancel(tool: Exec) -> None:
    """A tool that ends when it is asked to, once its runner may pass on what it had written."""
    await tool.write(wire.OUT, b"x" * WINDOW)
    await tool.until(wire.CANCEL)
    await tool.write(wire.OUT, b"x" * 100_000)
    tool.done(exit_code=None, signal=15, cancelled=True)


async def test_leaving_early_cancels_the_call_and_waits_until_all_of_it_is_gone() -> None:
    async with room(stopped_by_cancel) as made:
        async with stream(made) as events:
            await anext(events)
            left = made.now
        assert left.written[wire.OUT] == WINDOW + 100_000, "what the tool still wrote was not held back"
        assert wire.CANCEL in [kind for kind, _ in left.received]
        assert made.killed == []
        await made.ready()
        assert made.now is not left


async def test_leaving_without_reading_at_all_ends_the_call_too() -> None:
    async with room(stopped_by_cancel) as made:
        async with stream(made):
            await made.now.called.wait()
        assert wire.CANCEL in [kind for kind, _ in made.execs[0].received]
        assert made.killed == []


async def test_leaving_after_the_result_cancels_nothing() -> None:
    async with room(flood) as made:
        async with stream(made) as events:
            await collect(events)
        assert wire.CANCEL not in [kind for kind, _ in made.execs[0].received]


async def test_a_cancelled_consumer_ends_the_call() -> None:
    async with room(stopped_by_cancel) as made:
        with anyio.CancelScope() as scope:
            async with stream(made) as events:
                async for _ in events:
                    scope.cancel()
        assert scope.cancelled_caught
        assert wire.CANCEL in [kind for kind, _ in made.execs[0].received]
        assert made.killed == []


@pytest.mark.parametrize("anyio_backend", [virtual_backend()], ids=["virtual"])
async def test_a_runner_that_does_not_end_a_call_that_was_left_loses_its_sandbox() -> None:
    async def deaf(tool: Exec) -> None:
        await anyio.sleep_forever()

    async with room(deaf) as made:
        async with stream(made):
            await made.now.called.wait()
        assert made.killed == ["cancelled"]


# --- the deadline -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", [virtual_backend()], ids=["virtual"])
async def test_a_consumer_that_never_reads_costs_its_own_call_its_deadline() -> None:
    async def held(tool: Exec) -> None:
        with anyio.move_on_after(tool.request["timeout"]) as late:
            await tool.write(wire.OUT, FLOOD)
        tool.done(timed_out=late.cancelled_caught, exit_code=None, signal=15)

    async with room(held) as made, stream(made, python(max_output=4_000_000, timeout=5.0)) as events:
        began = anyio.current_time()
        await anyio.sleep(60.0)
        seen, result = await collect(events)
        assert anyio.current_time() - began == pytest.approx(60.0), "the call had ended long before"
    assert (result.timed_out, result.stdout_total, len(seen["stdout"])) == (True, WINDOW, WINDOW)
    assert result.duration == pytest.approx(5.0)
    assert made.killed == []


@pytest.mark.parametrize("anyio_backend", [virtual_backend()], ids=["virtual"])
async def test_a_silent_runner_ends_as_a_timeout_although_nobody_reads() -> None:
    async def silent(tool: Exec) -> None:
        await tool.write(wire.OUT, b"something")
        await anyio.sleep_forever()

    async with room(silent) as made, stream(made, python(timeout=5.0)) as events:
        await anyio.sleep(60.0)
        seen, result = await collect(events)
    assert (seen["stdout"], result.timed_out, result.truncated) == (b"something", True, False)
    assert made.killed == ["timeout"]


async def test_a_call_ends_with_its_tool_although_its_stdin_was_never_taken() -> None:
    async def ignore(tool: Exec) -> None:
        tool.done()

    async with room(ignore) as made:
        with anyio.fail_after(30):
            assert (await run_on_runner(made.runners, python(stdin=b"x" * 1_000_000))).ok
