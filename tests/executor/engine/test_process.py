"""Engine clients: what they are given, how long they may take, and that none outlives its block."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import pytest

from executor.engine import pidfd
from executor.engine.channel import PipeChannel, attached
from executor.engine.process import Capped, Ends, client, client_environment, receive, run
from executor.engine.protocol import Channel
from executor.errors import EngineFailed, EngineUnavailable

pytestmark = [
    pytest.mark.anyio,
]

ENV = client_environment()


def alive(pid: int) -> bool:
    """Whether a process exists, be it as a zombie that nobody reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def written(file: Path) -> int:
    """The process ID in a file, once it stands there."""
    place = anyio.Path(file)
    with anyio.fail_after(30):
        while not (await place.exists() and (await place.read_text()).endswith("\n")):  # noqa: ASYNC110 - a shell writes it
            await anyio.sleep(0.01)
    return int(await place.read_text())


async def flood(channel: Channel) -> None:
    """Write more than any pipe holds."""
    for _ in range(100):
        await channel.send(b"x" * 65_536)


async def test_command_answers_with_its_status_and_both_streams() -> None:
    done = await run(["sh", "-c", "cat; echo err >&2; exit 3"], ENV, timeout=30, stdin=b"in")
    assert (done.code, done.stdout, done.stderr) == (3, b"in", b"err\n")


async def test_stdin_is_closed_where_nothing_is_given() -> None:
    assert (await run(["cat"], ENV, timeout=30)).stdout == b""


async def test_command_that_does_not_read_its_stdin_is_no_error() -> None:
    done = await run(["sh", "-c", "exec <&-; echo done"], ENV, timeout=30, stdin=b"x" * 1_000_000)
    assert (done.code, done.stdout) == (0, b"done\n")


async def test_command_past_its_deadline_is_unavailable_and_gone(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(EngineUnavailable, match=r"`sh -c` did not end within 1 s") as caught:
        await run(["sh", "-c", f"echo $$ >{file}; exec sleep 600"], ENV, timeout=1)
    assert caught.value.retry_after == 1
    assert not alive(await written(file))


async def test_command_that_a_signal_ended_answers_with_that_signal() -> None:
    assert (await run(["sh", "-c", "kill -9 $$"], ENV, timeout=30)).code == -9


async def test_status_that_somebody_else_took_is_no_success() -> None:
    async with client(["true"], ENV) as process:
        os.waitpid(process.pid, 0)  # noqa: ASYNC222 - it ends at once
        assert await process.wait() == 255


async def test_no_thread_is_held_while_clients_run() -> None:
    before = threading.active_count()
    async with client(["sleep", "600"], ENV), client(["sleep", "600"], ENV), client(["cat"], ENV):
        assert threading.active_count() == before


async def test_system_without_pidfds_runs_commands_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pidfd, "supported", lambda: False)
    done = await run(["sh", "-c", "cat; exit 3"], ENV, timeout=30, stdin=b"in")
    assert (done.code, done.stdout) == (3, b"in")


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_client_has_its_descriptors_closed_behind_it() -> None:
    await run(["true"], ENV, timeout=30)  # what the event loop opens once
    before = open_files()
    for _ in range(3):
        await run(["true"], ENV, timeout=30)
        with pytest.raises(EngineUnavailable):
            await run(["no-such-command"], ENV, timeout=30)
    assert open_files() == before


UNHEEDED = """
import sys, threading, anyio
from executor.engine.process import client_environment, run
from executor.errors import EngineUnavailable

async def main():
    return (await run(["sh", "-c", "exit 3"], client_environment(), timeout=30)).code

def told():
    try:
        anyio.run(main, backend=sys.argv[1])
    except EngineUnavailable as error:
        print(error)

thread = threading.Thread(target=told)
thread.start()
thread.join()
print(anyio.run(main, backend=sys.argv[1]))
"""


def test_ignored_sigchld_is_reset_or_reported(anyio_backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNHEEDED, anyio_backend], capture_output=True, text=True, timeout=60, check=True,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )  # fmt: skip
    told, code = [line for line in done.stdout.splitlines() if "sigchld_was" not in line]
    assert told.startswith("SIGCHLD is ignored in this process")
    assert code == "3"


async def test_flood_on_stdout_is_a_failure_and_on_stderr_is_cut() -> None:
    flood = "head -c 3000000 /dev/zero"
    with pytest.raises(EngineFailed, match="printed 3000000 bytes, more than the 1000"):
        await run(["sh", "-c", flood], ENV, timeout=60, max_output=1000)
    done = await run(["sh", "-c", f"{flood} >&2; exit 1"], ENV, timeout=60)
    assert (done.code, len(done.stderr)) == (1, 65_536)


async def test_missing_and_unrunnable_commands_are_unavailable(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="no 'no-such-engine' command"):
        await run(["no-such-engine", "ps"], ENV, timeout=30)
    plain = tmp_path / "plain"
    plain.write_text("")
    with pytest.raises(EngineUnavailable, match="cannot be started"):
        await run([str(plain)], ENV, timeout=30)


async def test_error_message_holds_no_argument_beyond_the_command() -> None:
    with pytest.raises(EngineUnavailable) as caught:
        await run(["sh", "-c", "exec sleep 600", "secret"], ENV, timeout=0.05)
    assert "secret" not in str(caught.value)


async def test_cancelled_command_is_killed_and_reaped(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            await run(["sh", "-c", f"echo $$ >{file}; exec sleep 600"], ENV, timeout=600)

        tasks.start_soon(ask)
        pid = await written(file)
        tasks.cancel_scope.cancel()
    assert not alive(pid)


async def test_start_under_a_cancelled_scope_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with client(["sh", "-c", f"echo $$ >{file}; exec sleep 600"], ENV) as process:
            pid = process.pid
            await anyio.sleep(600)
    assert scope.cancelled_caught
    assert not alive(pid)


async def test_leaving_the_block_by_an_error_ends_the_client() -> None:
    with pytest.raises(LookupError):
        async with client(["sleep", "600"], ENV) as process:
            raise LookupError
    assert process.returncode == -9
    assert not alive(process.pid)


async def test_client_that_ignores_signals_is_ended_too() -> None:
    async with client(["sh", "-c", "trap '' TERM INT HUP; echo up; while :; do sleep 1; done"], ENV) as process:
        assert process.stdout is not None
        assert await receive(process.stdout) == b"up\n"
    assert not alive(process.pid)


async def test_client_stands_in_a_session_of_its_own() -> None:
    async with client(["sleep", "600"], ENV) as process:
        assert os.getsid(process.pid) == process.pid
        assert os.getsid(process.pid) != os.getsid(0)


async def test_channel_ends_its_streams_and_refuses_to_write_to_nobody() -> None:
    async with attached(["sh", "-c", "exec <&-; echo out; echo err >&2"], ENV) as channel:
        assert await channel.receive_stdout() == b"out\n"
        assert await channel.receive_stderr() == b"err\n"
        assert await channel.receive_stdout() == b""
        assert await channel.receive_stderr() == b""
        assert await channel.wait() == 0
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await flood(channel)
        assert not channel.send_at_once(b"x")
        channel.kill()
        await channel.close_stdin()
        await channel.close_stdin()


async def test_channel_carries_what_no_pipe_holds_while_it_is_read() -> None:
    data, got = os.urandom(1_000_003), bytearray()
    async with attached(["cat"], ENV) as channel, anyio.create_task_group() as tasks:

        async def write() -> None:
            await channel.send(data)
            await channel.close_stdin()

        tasks.start_soon(write)
        while more := await channel.receive_stdout():
            got += more
    assert got == data


async def test_channel_that_nobody_reads_can_be_left_in_the_middle_of_a_write() -> None:
    before = os.listdir("/dev/fd")  # noqa: PTH208 - names, not paths
    with anyio.fail_after(30):
        async with attached(["sleep", "600"], ENV) as channel:
            with anyio.move_on_after(0.2) as scope:
                await channel.send(b"x" * 1_000_000)
            assert scope.cancelled_caught
            with anyio.move_on_after(0.2) as scope:
                await channel.receive_stdout()
            assert scope.cancelled_caught
    assert os.listdir("/dev/fd") == before  # noqa: PTH208


async def test_what_is_sent_at_once_is_sent_whole_or_not_at_all() -> None:
    async with attached(["sh", "-c", "sleep 1; cat"], ENV) as channel:
        assert isinstance(channel, PipeChannel)
        assert not channel.send_at_once(b"-" * 100_000)
        sent = 0
        while channel.send_at_once(b"x" * 4_000):
            sent += 4_000
        assert sent >= 4_000
        assert not channel.send_at_once(b"y" * 4_000)
        await channel.close_stdin()
        assert not channel.send_at_once(b"z")
        got = b""
        while more := await channel.receive_stdout():
            got += more
    assert got == b"x" * sent


async def test_writer_that_is_still_waiting_when_the_channel_goes_is_told() -> None:
    ends: list[type] = []
    # Something else holds the other end of the pipe, so that the client's death alone tells nobody.
    async with anyio.create_task_group() as tasks:
        async with attached(["sh", "-c", "exec 3<&0; sleep 600 <&3 & echo $!; wait"], ENV) as channel:
            holder = int(await channel.receive_stdout())

            async def write() -> None:
                try:
                    await channel.send(b"x" * 1_000_000)
                except BrokenPipeError as error:
                    ends.append(type(error))

            tasks.start_soon(write)
            await anyio.sleep(0.1)
        with anyio.fail_after(5):
            while not ends:  # noqa: ASYNC110 - a list has no event
                await anyio.sleep(0.01)
        # Its number is another's now, who may wait for it.
        async with attached(["sh", "-c", "sleep 0.2; cat >/dev/null; echo end"], ENV) as other:
            await other.send(b"x" * 200_000)
            await other.close_stdin()
            assert await other.receive_stdout() == b"end\n"
        os.kill(holder, signal.SIGKILL)
    assert ends == [BrokenPipeError]


async def test_out_of_descriptors_is_reported_as_engine_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = os.pipe
    made: list[tuple[int, int]] = []

    def scarce() -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(pipe())
        return made[0]

    monkeypatch.setattr("executor.engine.channel.os.pipe", scarce)
    with pytest.raises(EngineUnavailable, match="Too many open files"):
        async with attached(["true"], ENV):
            raise AssertionError("nothing was started")
    for fd in made[0]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


async def test_client_that_cannot_be_started_leaves_no_descriptor() -> None:
    before = os.listdir("/dev/fd")  # noqa: PTH208 - names, not paths
    with pytest.raises(EngineUnavailable):
        async with attached(["/no/such/client"], ENV):
            raise AssertionError("nothing was started")
    assert os.listdir("/dev/fd") == before  # noqa: PTH208


async def test_client_environment_holds_what_finds_an_engine_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("LD_PRELOAD", "PYTHONPATH", "AWS_SECRET_ACCESS_KEY", "HTTP_PROXY", "OPENAI_API_KEY", "BASH_ENV"):
        monkeypatch.setenv(key, "foreign")
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/x.sock")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    env = client_environment({"DOCKER_CONTEXT": "named"})
    assert "foreign" not in env.values()
    assert (env["DOCKER_HOST"], env["DOCKER_CONTEXT"], env["LC_ALL"]) == ("unix:///run/x.sock", "named", "C")
    done = await run(["env"], env, timeout=30)
    shown = dict(line.split("=", 1) for line in done.stdout.decode().splitlines())
    assert {key: shown[key] for key in env} == env
    assert set(shown) - set(env) <= {"PWD", "SHLVL", "_", "__CF_USER_TEXT_ENCODING"}


async def test_client_environment_has_a_path_even_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    assert client_environment()["PATH"] == os.defpath


def test_capped_keeps_the_beginning_and_counts_everything() -> None:
    capped = Capped(5)
    for part in (b"abc", b"defg", b"", b"hij"):
        capped.add(part)
    assert (bytes(capped.kept), capped.total) == (b"abcde", 10)
    nothing = Capped(0)
    nothing.add(b"x")
    assert (bytes(nothing.kept), nothing.total) == (b"", 1)


@pytest.mark.parametrize("sizes", [[], [3], [10, 10], [25], [1] * 25, [100, 1, 100]])
def test_of_a_flood_both_ends_are_kept(sizes: list[int]) -> None:
    whole = bytes(range(256)) * 2
    ends, at = Ends(10), 0
    for size in sizes:
        ends.add(whole[at : at + size])
        at += size
    said = whole[:at]
    assert ends.kept == (said if at <= 20 else said[:10] + said[-10:])
