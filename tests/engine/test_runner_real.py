"""Calls by runners on a real engine: exact bytes, what calls leave running, and nothing that grows with their number."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path

import anyio
import pytest

from executor.errors import FileFailed, InvalidCall, SandboxDied
from executor.sandbox import files
from executor.sandbox.profile import Limits
from executor.sandbox.request import Call
from executor.sandbox.sandbox import Sandbox
from tests.engine.conftest import Room
from tests.engine.test_sandbox_real import clients

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

WRITE = "import sys\nd = sys.stdin.buffer.read()\nsys.stdout.buffer.write(d)\nsys.stdout.flush()\nsys.stderr.buffer.write(d[::-1])"
BYTES = {
    "nothing": b"",
    "no final newline": b"text",
    "NUL": b"\0a\0\0",
    "invalid UTF-8": bytes(range(256)),
    "a character across chunks": b"x" * 65_535 + "é".encode() + b"x" * 65_534 + "日".encode(),
    "160,910 characters": "é".encode() * 160_910,
    "10,000,000 characters": "日".encode() * 10_000_000,
}


async def test_bytes_of_both_streams_are_exact_for_code_and_for_programs(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        for name, data in BYTES.items():
            size = len(data) + 1
            code = await box.call(Call(code=WRITE, stdin=data, max_output=size))
            assert code.stdout == data, name
            assert code.stderr == data[::-1], name
            program = await box.call(Call(argv=("sh", "-c", "tee /dev/stderr"), stdin=data, max_output=size))
            assert program.stdout == program.stderr == data, name
            assert not code.truncated
            assert code.stdout.decode("utf-8", "replace") is not None


async def test_each_stream_is_in_order_where_both_are_written_in_turns(real_engine: Room) -> None:
    code = "import os\nfor n in range(5000):\n    os.write(1, b'o%d\\n' % n)\n    os.write(2, b'e%d\\n' % n)"
    async with real_engine.armed() as box:
        result = await box.call(Call(code=code))
    for stream, letter in ((result.stdout, "o"), (result.stderr, "e")):
        assert stream == "".join(f"{letter}{n}\n" for n in range(5000)).encode()


async def test_output_beyond_the_cap_is_counted_for_each_stream(real_engine: Room) -> None:
    code = "import os\nfor _ in range(100):\n    os.write(1, b'o' * 1000)\nos.write(2, b'e' * 99)"
    async with real_engine.armed() as box:
        result = await box.call(Call(code=code, max_output=100))
        assert (result.stdout, result.stdout_total, result.stderr_total) == (b"o" * 100, 100_000, 99)
        assert result.truncated
        nothing = await box.call(Call(code="print('x')", max_output=0))
        assert (nothing.stdout, nothing.stdout_total) == (b"", 2)


@pytest.mark.parametrize("streams", ["None", "subprocess.DEVNULL"])
async def test_what_a_call_leaves_running_does_not_outlive_it(real_engine: Room, streams: str) -> None:
    code = f"import subprocess\nsubprocess.Popen(['sleep', '600'], stdout={streams}, stderr={streams})\nprint('done')"
    async with real_engine.armed(calls=1) as box:
        result = await box.call(Call(code=code))
        assert (result.exit_code, result.stdout) == (0, b"done\n")
        after = await box.call(Call(argv=("sh", "-c", "cat /proc/[0-9]*/comm | grep -c '^sleep$'")))
        assert after.stdout == b"1\n"  # PID 1's own
        assert box.poisoned == ""


async def test_cancelled_call_takes_its_tree_with_it_and_the_sandbox_lives(real_engine: Room) -> None:
    code = "import os, signal, time\nsignal.signal(15, 1)\nos.fork()\nopen('/tmp/begun', 'w').close()\ntime.sleep(600)"
    async with real_engine.armed(calls=1, grace=0.1) as box:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(box.call, Call(code=code))
            await forked(real_engine, box.name)
            tasks.cancel_scope.cancel()
        after = await box.call(Call(code="import os\nprint(sum(n.isdigit() for n in os.listdir('/proc')))"))
        assert after.stdout == b"5\n"  # PID 1, its child, the runner, the call, and what keeps its memory
        assert box.poisoned == ""


async def test_crash_leaves_no_core_file(real_engine: Room) -> None:
    crash = Call(code="import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    left = Call(code="import os, resource\nprint(os.listdir('/tmp'), resource.getrlimit(resource.RLIMIT_CORE))")
    async with real_engine.armed() as box:
        assert (await box.call(crash)).signal == signal.SIGSEGV
        assert (await box.call(left)).stdout == b"[] (0, 0)\n"
    assert (await real_engine.cold(left)).stdout == b"[] (0, 0)\n"


async def test_last_words_beside_the_ends_of_others_arrive_whole(real_engine: Room) -> None:
    """The end of a main process may be told together with those of orphans, before anybody has looked into its pipes."""
    code = (
        "import os\nfor n in range(30):\n    if os.fork() == 0:\n        if os.fork() == 0:\n            os._exit(0)\n"
        "        os._exit(0)\nos.write(1, b'o' * 5000)\nos.write(2, b'e' * 5000)\nos._exit(0)"
    )
    async with real_engine.armed() as box:
        for _ in range(60):
            result = await box.call(Call(code=code))
            assert (result.stdout, result.stderr) == (b"o" * 5000, b"e" * 5000)


async def test_call_of_a_client_that_stands_still_ends_at_its_deadline(real_engine: Room) -> None:
    async with real_engine.armed(grace=0.2) as box:
        assert (await box.call(Call(code="print(1)"))).ok
        await box.ready()
        (cmdline,) = clients(box.name)
        os.kill(int(cmdline.parent.name), signal.SIGSTOP)
        result = await box.call(Call(code="print(2)", timeout=0.5))
        assert (result.timed_out, result.stdout) == (True, b"")
        assert box.poisoned


async def test_result_measures_time_and_memory_of_the_call(real_engine: Room) -> None:
    code = (
        "import time\nx = bytearray(50 << 20)\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    )
    async with real_engine.armed() as box:
        result = await box.call(Call(code=code))
    assert result.cpu_seconds is not None
    assert result.max_rss is not None
    assert 0.2 <= result.cpu_seconds < 2
    assert 50 << 20 < result.max_rss < 200 << 20


@pytest.mark.parametrize("calls", [0, 1])
async def test_nothing_grows_with_the_number_of_calls(real_engine: Room, calls: int) -> None:
    async with real_engine.armed(calls=calls) as box:
        for _ in range(10):
            await box.call(Call(code="print(1)"))
        before = await held(box)
        for number in range(40 if calls else 300):
            result = await box.call(Call(code=f"print({number})", stdin=b"x"))
            assert result.stdout == b"%d\n" % number
        for _ in range(20):
            after = await held(box)
            if after["children"] <= before["children"] and after["inside"] == before["inside"]:
                break
            await anyio.sleep(0.1)  # the last exec's client may still be ending
    assert after["fds"] <= before["fds"] + 2
    assert after["threads"] <= before["threads"] + 1
    assert after["children"] <= before["children"]
    assert after["inside"] == before["inside"]
    assert after["runner_fds"] == before["runner_fds"]
    assert after["rss"] <= before["rss"] + (8 << 20)
    assert after["runner_rss"] <= before["runner_rss"] + (1 << 20)


async def held(box: Sandbox) -> dict[str, int]:
    """What this process and the sandbox hold right now."""
    code = (
        "import os\nprint(sum(n.isdigit() for n in os.listdir('/proc')))\n"
        "print([l.split()[1] for l in open(f'/proc/{os.getppid()}/status') if l.startswith('VmRSS')][0])\n"
        "print([l.split()[1] for l in open(f'/proc/{os.getppid()}/status') if l.startswith('FDSize')][0])"
    )
    inside, rss, fds = map(int, (await box.call(Call(code=code))).stdout.split())
    return {**own(), "inside": inside, "runner_rss": rss << 10, "runner_fds": fds}


def own() -> dict[str, int]:
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "rss": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
    }


async def test_runner_that_loses_its_host_ends_with_everything_of_its_call(real_engine: Room) -> None:
    code = "import os, signal, time\nsignal.signal(15, 1)\nos.fork()\ntime.sleep(600)"
    async with real_engine.armed(grace=0.1) as box:
        async with anyio.create_task_group() as tasks:

            async def lose() -> None:
                await forked(real_engine, box.name)
                for place in clients(box.name):
                    if b"\0exec\0" in place.read_bytes():
                        os.kill(int(place.parent.name), 9)

            tasks.start_soon(lose)
            with pytest.raises(SandboxDied) as caught:
                await box.call(Call(code=code))
        assert caught.value.started
        assert box.poisoned


async def forked(room: Room, name: str) -> None:
    """Return once a call's process and its child run in the container: with PID 1, its child and the runner, five."""
    with anyio.fail_after(30):
        while True:
            shown = await anyio.run_process(
                [*room.engine.endpoint.argv, "top", name, "-o", "pid"], check=False, stderr=subprocess.DEVNULL
            )
            if len(shown.stdout.split(b"\n")) > 6:
                return
            await anyio.sleep(0.02)


KEEPER = """
import os, signal, time
def keepers():
    pids = [int(name) for name in os.listdir('/proc') if name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and pid != 1 and os.getsid(pid) == os.getsid(0)]
"""


async def test_what_keeps_a_calls_memory_is_nothing_that_its_code_would_notice(real_engine: Room) -> None:
    code = f"""{KEEPER}
keeper, = keepers()
try:
    os.wait()
except ChildProcessError:
    print('no child')
interrupts = 0
for _ in range(3):
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(0.05)
    except KeyboardInterrupt:
        interrupts += 1
print(interrupts, keepers() == [keeper])
os.kill(keeper, signal.SIGKILL)
print('on')
"""
    async with real_engine.armed() as box:
        for _ in range(2):
            result = await box.call(Call(code=code))
            assert (result.exit_code, result.stdout, result.stderr) == (0, b"no child\n3 True\non\n", b"")
        assert (await box.call(Call(code="print(1)"))).stdout == b"1\n"
        assert box.poisoned == ""


async def test_code_that_is_larger_than_a_pipe_arrives_whole(real_engine: Room) -> None:
    text = "é" * 3_000_000
    async with real_engine.armed() as box:
        result = await box.call(Call(code=f"x = {text!r}\nprint(len(x))"))
        assert result.stdout == b"3000000\n"
        result = await box.call(Call(argv=("cat",), stdin=b"x", env={"LONG": "y" * 100_000}))
        assert result.stdout == b"x"


async def test_code_that_no_file_can_hold_is_refused_before_it_is_sent_and_what_just_fits_runs(
    real_engine: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, size = "\nprint('ran')", 1 << 20
    fits, larger = Call(code="#" * (size - len(end)) + end), Call(code="#" * (size + 1))
    limits = Limits(file_size_mb=1)
    named = rf"code is {size + 1} bytes; at most {size} are taken \(sandbox.file_size_mb"
    async with (
        real_engine.armed(profile={"limits": limits}) as box,
        real_engine.sandbox(profile={"limits": limits}) as plain,
    ):
        for call in (box.call, plain.call, partial(real_engine.cold, limits=limits)):
            with pytest.raises(InvalidCall, match=named):
                await call(larger)
            assert (await call(fits)).stdout == b"ran\n"
        async with box.stream(larger) as events:
            with pytest.raises(InvalidCall, match=named):
                await anext(events)
        for module in ("sandbox", "cold"):
            monkeypatch.setattr(f"executor.sandbox.{module}.check_code", lambda call, file_size_mb: None)
        for call in (box.call, plain.call, partial(real_engine.cold, limits=limits)):
            result = await call(larger)
            assert (result.exit_code, result.stdout) == (126, b"")
            assert result.stderr == b"the call's code: File too large\n"
        assert (await box.call(fits)).stdout == b"ran\n"


async def test_code_that_memory_cannot_hold_is_a_death_for_memory_and_no_result(real_engine: Room) -> None:
    large = Call(code=f"x = {'x' * 30_000_000!r}", timeout=30)
    async with real_engine.armed(profile={"limits": Limits(memory_mb=48)}) as box:
        try:
            result = await box.call(large)
        except SandboxDied as error:
            assert error.cause == "oom"  # noqa: PT017 - either end is right
        else:
            assert (result.oom_killed, result.signal) == (True, signal.SIGKILL)
            assert (await box.call(Call(code="print('on')"))).stdout == b"on\n"


async def test_file_that_the_limit_for_files_does_not_allow_is_told_as_such(real_engine: Room) -> None:
    async with real_engine.armed(profile={"limits": Limits(file_size_mb=1)}) as box:
        request = files.write_request("large", b"x" * ((1 << 20) + 1), parents=False, max_input=4 << 20)
        result = await box.call(Call(code=files.program(), stdin=request))
        with pytest.raises(FileFailed) as caught:
            files.answer(result, "writing 'large'")
        assert caught.value.code == "EFBIG"
