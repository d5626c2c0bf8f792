"""The main job, shown: untrusted code in warm hardened containers; cold beside warm; a crash healed; a refusal."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from emberpool import (
    CallResult,
    EmberpoolError,
    Manifest,
    SandboxDied,
    SandboxPool,
    Session,
    Settings,
    ToolResult,
    configure_logs,
    load_manifest,
    plan_tool,
)
from pool.cli import interrupts

out = Console(highlight=False)

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
ORDERS = "item,count,price,since\nanvil,2,89.00,2024-02-29\nrocket,1,1249.50,2023-01-01\nmagnet,,14.95,2025-12-31\n"
WHO = "import os; print('uid', os.getuid(), 'sees', len([p for p in os.listdir('/proc') if p.isdigit()]), 'processes')"
COUNT_SLEEPERS = """
import glob
print(sum(open(path, "rb").read().startswith((b"sleep\\x00600", b"sleep\\x0060")) for path in glob.glob("/proc/[0-9]*/cmdline")))
"""
HOSTILE = {
    "write to the root filesystem": "open('/etc/passwd', 'a')",
    "reach the network": "import socket; socket.create_connection(('192.0.2.1', 80), 2)",
    "kill PID 1": "import os; os.kill(1, 9)",
    "become root": "import os; os.setuid(0)",
    "run a dropped binary": "import os; open('/tmp/x','w').write('#!/bin/sh\\n'); os.chmod('/tmp/x',0o755); os.execv('/tmp/x',['x'])",
    "take all memory": "x = [bytearray(10**7) for _ in range(10**6)]",
}


def last_line(result: CallResult) -> str:
    if result.oom_killed:
        return "killed by its memory limit"
    text = (result.stderr or result.stdout).decode("utf-8", "replace").strip()
    return text.rpartition("\n")[2][:90] or f"exit status {result.exit_code}"


async def timed(make: Callable[[], Awaitable[CallResult]]) -> float:
    began = anyio.current_time()
    result = await make()
    if result.stdout != b"1\n":
        raise SystemExit(f"a timed call failed: {result}")
    return (anyio.current_time() - began) * 1000


async def sessions(pool: SandboxPool) -> Session:
    out.rule("agent sessions, one hardened container each")
    first = await pool.acquire("researcher", "chat-42")
    second = await pool.acquire("researcher", "chat-43")
    for session in (first, second):
        result = await session.call(code=WHO)
        out.print(f"session {session.id} in {result.generation}: {result.stdout.decode().strip()}")
    await first.call(["sh", "-c", "echo kept > /tmp/note"])
    mine, theirs = await first.call(["cat", "/tmp/note"]), await second.call(["cat", "/tmp/note"])
    out.print(
        f"what the first wrote to /tmp, it reads again: {mine.stdout.decode().strip()!r}; the second: {last_line(theirs)}"
    )
    await second.close()
    return first


async def hostile(pool: SandboxPool) -> None:
    out.rule("hostile code")
    session = await pool.acquire("mallory", "chat-1")
    for what, code in HOSTILE.items():
        out.print(f"{what}: {last_line(await session.call(code=code))}")
    await session.close()


async def latency(pool: SandboxPool, session: Session, rounds: int) -> None:
    out.rule("cold beside warm")
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(rounds):
        cold.append(await timed(lambda: pool.call_cold(code="print(1)")))
        await anyio.sleep(0.2)  # as in a conversation: the next runner is armed meanwhile
        warm.append(await timed(lambda: session.call(code="print(1)")))
    table = Table("one Python call", "median", "slowest")
    for name, values in (
        ("cold: a container of its own", cold),
        ("warm: the session's own, a runner armed in it", warm),
    ):
        table.add_row(name, *shown(values))
    out.print(table)
    out.print(f"warm is {statistics.median(cold) / statistics.median(warm):.1f} times faster at the median of {rounds}")


async def tools(pool: SandboxPool, rounds: int) -> None:
    out.rule("a real tool, cold and warm")
    manifest = load_manifest(EXAMPLES / "manifest.toml")
    started: list[float] = []
    cold = pool.settings.pool.model_copy(
        update={"state_dir": pool.settings.pool.state_dir.with_name("cold"), "min_standby": 0}
    )
    async with SandboxPool(pool.settings.model_copy(update={"pool": cold})) as empty:
        await csv_summary(empty, manifest, "first")  # finds the engine, and looks whether the image has a Python
        for number in range(min(rounds, 3)):
            started.append((await csv_summary(empty, manifest, str(number)))[0])
    milliseconds, result = await csv_summary(pool, manifest, "chat-45")
    warm = []
    for _ in range(rounds):
        await anyio.sleep(0.2)
        warm.append((await csv_summary(pool, manifest, "chat-45"))[0])
    for name, column in json.loads(result.output)["columns"].items():
        out.print(f"csv_summary says of {name}: {json.dumps(column)}")
    table = Table("csv_summary of docs/examples", "median", "slowest")
    table.add_row("cold: a container is started for it", *shown(started))
    table.add_row("a new session, on a standby of the pool", *shown([milliseconds]))
    table.add_row("warm: in its session", *shown(warm))
    out.print(table)
    quote = plan_tool(manifest.find("plugin__acme__price_quote"), pool.settings)
    answer = await pool.run_tool(quote, {"items": {"anvil": 2, "rocket": 1}}, session="chat-45")
    out.print(f"a plugin's tool, in the same session: {answer.output or answer.error}")


async def csv_summary(pool: SandboxPool, manifest: Manifest, session: str) -> tuple[float, ToolResult]:
    """Milliseconds of a call of the tool, with all that it waits for, and its result."""
    plan = plan_tool(manifest.find("csv_summary"), pool.settings)
    began = anyio.current_time()
    result = await pool.run_tool(plan, {"text": ORDERS}, session=session)
    if not result.ok:
        raise SystemExit(f"the tool failed: {result.error}")
    return (anyio.current_time() - began) * 1000, result


def shown(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.1f} ms", f"{max(values):.1f} ms"


async def crash(session: Session) -> None:
    out.rule("a crash, healed")
    before = session.generation
    result = await session.call(["sh", "-c", "nohup sleep 600 & sleep 60"], timeout=1.0)
    left = await session.call(code=COUNT_SLEEPERS)
    out.print(
        f"a call past its deadline: timed_out={result.timed_out}; sleepers left of it: {left.stdout.decode().strip()}"
    )
    try:
        await session.call(code="import os; os.kill(-1, 9)")
        raise SystemExit("the runner outlived a SIGKILL; this cannot be")
    except SandboxDied as error:
        out.print(
            f"a call that kills all that it can: {type(error).__name__}, cause {error.cause}, started {error.started}"
        )
    result = await session.call(code="print('hello again')")
    out.print(f"the same session's next call: {result.stdout.decode().strip()!r} in {result.generation} (was {before})")


async def refusal() -> None:
    out.rule("a refusal, never a weaker place")
    with tempfile.TemporaryDirectory(prefix="emberpool-demo-") as directory:
        settings = Settings(
            sandbox={"image": "localhost/no-such-image:1"},
            pool={"state_dir": str(Path(directory) / "state"), "overcommit": True},
        )
        async with SandboxPool(settings) as pool:
            with anyio.move_on_after(30):
                while (error := await refused(pool)).retryable:
                    out.print(f"{type(error).__name__}: {error}")
                    await anyio.sleep(1)
            out.print(f"{type(error).__name__}: {error}")


async def refused(pool: SandboxPool) -> EmberpoolError:
    try:
        await pool.acquire("researcher", "chat-44")
    except EmberpoolError as error:
        return error
    raise SystemExit("a session was granted without an image; this must never happen")


async def demo(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="emberpool-demo-") as directory:
        settings = Settings(
            pool={"state_dir": str(Path(directory) / "state"), "name": "demo", "overcommit": True},
            agents={"analyst": {"env": ["REPORT_CURRENCY"]}, "legacy": {"python_tools": "limits"}},
        )
        async with SandboxPool(settings) as pool:
            session = await sessions(pool)
            await hostile(pool)
            await latency(pool, session, rounds)
            await tools(pool, rounds)
            await crash(session)
            await session.release()
    await refusal()
    out.rule("nothing is left: the pool is closed and its containers are gone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="calls of each kind to time (default 10)")
    parser.add_argument(
        "--log-level", default="error", help="show the pool's own log from this level on (default error)"
    )
    options = parser.parse_args()
    try:
        configure_logs(options.log_level)
    except KeyError:
        parser.error(f"--log-level {options.log_level!r} is none of debug, info, warning, error")
    try:
        interrupts.run(demo, max(1, options.rounds))
    except EmberpoolError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted; the pool was closed and its containers removed", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
