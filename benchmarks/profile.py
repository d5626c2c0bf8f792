"""``python -m benchmarks.profile``: where the time of one call on a runner that stays goes, by time stamps.

Host and container share one monotonic clock. On the host, functions on the way are wrapped; into the runner's program,
stamps are written at known lines before it is sent. Runner and child share a page of memory for them, and they come back
in the frame that follows the answer. A line that is not there any more ends the profile with an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Annotated, Any

import anyio
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.bench import BenchmarkError, check_result, new_pool
from executor import inside
from executor.engine import channel
from executor.errors import EmberpoolError
from executor.sandbox import runner_call, runner_client, wire
from pool import logs
from pool.config.load import load_settings

WARM_UP = 50
SHARED = "import mmap\nSTAMPS = mmap.mmap(-1, 4096)\ndef stamp(at):\n    STAMPS[at * 8 : at * 8 + 8] = time.monotonic_ns().to_bytes(8, 'big')\n"
INSIDE = (
    # (name, a line of the runner's program, whether the stamp goes before it)
    ("asked", "                if frame[0] == CALL and frame[1] == wire.seq:\n", False),
    ("given", "        call = RunningCall(wire, processes, child, payload[:CALL_HEADER], began)\n", True),
    ("woken", '    request = json.loads(data[8 : 8 + more]) if more else {}\n', True),
    ("begun", "        gc.freeze()\n", True),
    ("run", "        failed = self._results[0] != 0\n", True),
    ("left", "                QUIT(1 if failed else 0)\n", True),
    ("ended", "                        call.ended(status, usage, call.silent())\n", True),
    ("said", "        wire.send(DONE, call.report())\n", False),
)  # fmt: skip
STEPS = (
    ("sent", "host: check the call, take the turn in the core, write the request"),
    ("asked", "the stream to the container, and the runner's waking"),
    ("given", "runner: hand it to the child that waits"),
    ("woken", "child: wake, read it"),
    ("begun", "child: be the process that the code expects"),
    ("run", "child: compile and run `print(1)`"),
    ("left", "child: see that nothing would notice the interpreter's end, flush"),
    ("ended", "the child ends, and the runner learns of it"),
    ("said", "runner: take the rest of the output, report"),
    ("read", "the stream back, and the host's waking"),
    ("woke", "host: check the report, wake the caller"),
    ("end", "host: result, audit line, the core's state"),
)


def stamped(parts: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of the runner with the stamps in them. Raises ``BenchmarkError`` where a line is missing."""
    parts = replaced(parts, "SIGNALS = (", SHARED + "SIGNALS = (")
    for at, (_, line, before) in enumerate(INSIDE):
        indent = line[: len(line) - len(line.lstrip())] + "    " * line.rstrip().endswith(":")
        stamp = f"{indent}stamp({at})\n"
        parts = replaced(parts, line, stamp + line if before else line + stamp)
    return replaced(parts, 'repr(spent).encode("ascii")', f"STAMPS[: {8 * len(INSIDE)}]")


def replaced(parts: Mapping[str, str], line: str, by: str, script: str = "benchmarks/profile.py") -> dict[str, str]:
    """Replace the first occurrence of a line. ``BenchmarkError`` where no part has it names the script to mend."""
    for name, text in parts.items():
        if line in text:
            return {**parts, name: text.replace(line, by, 1)}
    raise BenchmarkError(f"executor/inside/runner has no line {line.strip()!r} any more; mend {script}")


class Stamps:
    """Time stamps of the call under way, in nanoseconds of the monotonic clock, by name."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def install(self) -> None:
        """Stamp whatever this process does from now on. There is no way back: the process is the profile's own."""
        program = inside.join(stamped(inside.parts("runner"))).encode("utf-8")
        runner_client._program = lambda: program  # type: ignore[assignment]
        wire._LIMITS[wire.CLEAN] = 4096
        self._wrap(channel.PipeChannel, "send_at_once", after="sent")
        self._wrap(wire.Decoder, "feed", before="read")
        self._wrap(runner_call, "result_of", before="woke")
        take = runner_client.ArmedRunner._take

        def taking(runner: runner_client.ArmedRunner, frame: wire.Frame) -> None:
            if frame.kind == wire.CLEAN:
                for at, (name, _, _) in enumerate(INSIDE):
                    self.seen[name] = int.from_bytes(frame.payload[at * 8 : at * 8 + 8], "big")
            take(runner, frame)

        runner_client.ArmedRunner._take = taking  # type: ignore[assignment,method-assign]

    def note(self, name: str) -> None:
        self.seen.setdefault(name, time.monotonic_ns())

    def _wrap(self, owner: Any, name: str, *, before: str = "", after: str = "") -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def wrapper(*args: Any, **more: Any) -> Any:
            if before:
                self.note(before)
            result = function(*args, **more)
            if after:
                self.note(after)
            return result

        setattr(owner, name, wrapper)


async def profile(calls: int) -> tuple[float, list[float]]:
    """Microseconds of the whole call, and of each of ``STEPS``: medians of ``calls``, one right after the other."""
    stamps, rows = Stamps(), []
    stamps.install()
    async with new_pool(load_settings(None), min_standby=0, calls_per_exec=0) as pool:
        session = await pool.acquire("benchmark", "profile")
        for number in range(WARM_UP + calls):
            await session.ready()
            stamps.seen.clear()
            stamps.note("begin")
            check_result(await session.call(code="print(1)"))
            stamps.note("end")
            await session.ready()
            if number >= WARM_UP:
                rows.append([stamps.seen[name] / 1e3 for name in ("begin", *(name for name, _ in STEPS))])
    steps = [median(row[at + 1] - row[at] for row in rows) for at in range(len(STEPS))]
    return median(row[-1] - row[0] for row in rows), steps


def main(calls: Annotated[int, typer.Option(min=1, max=100_000, help="Calls that count.")] = 300) -> None:
    """Say where the time of a call goes. Needs an engine and the image; everything it starts is removed at the end."""
    logs.configure("warning")
    try:
        whole, steps = anyio.run(profile, calls)
    except (EmberpoolError, BenchmarkError) as error:
        typer.echo(f"profile: {error}", err=True)
        raise typer.Exit(1) from None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step")
    table.add_column("µs", justify="right")
    for (_, what), step in zip(STEPS, steps, strict=True):
        table.add_row(what, f"{step:.0f}")
    table.add_section()
    table.add_row(f"one call, the median of {calls}", f"{whole:.0f}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    typer.run(main)
