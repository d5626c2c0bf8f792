"""Calls on the host under resource limits: real processes, each limit really met, and nothing left of any of them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from executor import inside
from executor.common import proc
from executor.errors import EngineFailed, InvalidCall, ProfileMismatch
from executor.host import process
from executor.host.call import HostLimits, host_call
from executor.result import CallResult
from executor.sandbox.request import Call
from executor.tool import Tool, encode_arguments, tool_code, tool_result

pytestmark = [pytest.mark.anyio, pytest.mark.drawn]  # real processes
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows who came of whom")

LENIENT = HostLimits(strict=False)
INSIDE = inside.path("host_limits")


async def run(code: str, *, limits: HostLimits | None = None, grace: float = 30.0, **more: Any) -> CallResult:
    call = Call(code=code, **{"timeout": 60.0, **more})
    return await host_call(call, limits=limits or HostLimits(), env={}, grace=grace)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that its new parent has not taken yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def members(session: int) -> list[int]:
    """The processes of a session that run."""
    return [pid for pid in proc.pids() if alive(pid) and proc.stat_number(pid, 3) == session]


def names(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()]


def children() -> set[int]:
    """The children of this process, running or not yet reaped; a test's own engine may be one."""
    return {pid for pid in proc.pids() if proc.stat_number(pid, 1) == os.getpid()}


async def written(file: Path, lines: int = 1) -> list[int]:
    """The process IDs in a file, once so many stand there."""
    place = anyio.Path(file)
    with anyio.fail_after(30):
        while not (await place.exists() and (await place.read_text()).count("\n") >= lines):  # noqa: ASYNC110 - another process writes it
            await anyio.sleep(0.01)
    return [int(line) for line in (await place.read_text()).split()]


# --- what a call is given, and what comes of it -------------------------------------------------------------------------


async def test_code_answers_with_its_status_and_both_streams() -> None:
    done = await run(
        "import sys\nprint(sys.stdin.read() + 'é')\nprint('err', file=sys.stderr)\nsys.exit(3)", stdin=b"in"
    )
    assert (done.exit_code, done.signal, done.stdout, done.stderr) == (3, None, "iné\n".encode(), b"err\n")
    assert (done.stdout_total, done.stderr_total, done.timed_out, done.generation) == (5, 4, False, "host")
    assert done.duration > 0
    assert done.cpu_seconds is not None
    assert done.cpu_seconds > 0


async def test_program_is_found_on_the_calls_own_path_and_keeps_its_arguments(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nprintf "%s|" "$@"\nkill -USR1 $$\n')
    program.chmod(0o755)
    call = Call(argv=("program", "", "é", "--", "a b\n"), env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    done = await host_call(call, limits=HostLimits(), env={})
    assert (done.exit_code, done.signal, done.stdout.decode()) == (None, signal.SIGUSR1, "|é|--|a b\n|")


@pytest.mark.parametrize(("program", "status"), [("no-such-program", 127), ("/etc", 126), ("/etc/passwd/below", 127)])
async def test_program_that_cannot_run_is_told_as_by_a_shell(program: str, status: int) -> None:
    done = await host_call(Call(argv=(program,)), limits=HostLimits(), env={})
    assert done.exit_code == status
    assert done.stderr.decode().startswith(f"{program}: ")


async def test_code_is_the_main_module_of_a_real_file_and_shows_in_no_command_line() -> None:
    code = """
import json, pathlib, sys
print(json.dumps([__name__, sys.argv == [__file__], open(__file__).read(), pathlib.Path('/proc/self/cmdline').read_text()]))
def secret():
    1 / 0
secret()
"""
    done = await run(code)
    name, argv, source, line = json.loads(done.stdout)
    assert (name, argv, source) == ("__main__", True, code)
    assert "secret" not in line
    assert b"in secret\n    1 / 0\n" in done.stderr


async def test_environment_is_what_was_let_through_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "secret")
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("TMPDIR", "/tmp")
    call = Call(argv=("env", "-0"), env={"MINE": "a\nb=é", "HOME": "/mine"})
    done = await host_call(call, limits=HostLimits(), env={"ALLOWED": "yes", "MINE": "no", "HOME": "/allowed"})
    shown = dict(entry.split("=", 1) for entry in done.stdout.decode().split("\0") if entry)
    assert shown == {
        "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TMPDIR": "/tmp", "HOME": "/mine", "ALLOWED": "yes",
        "MINE": "a\nb=é",
    }  # fmt: skip
    for key in ("HOME", "LANG", "TMPDIR"):
        monkeypatch.delenv(key)
    done = await host_call(Call(argv=("env",)), limits=HostLimits(), env={})
    assert done.stdout.decode() == f"PATH={os.environ['PATH']}\n"


async def test_environment_of_a_call_has_no_say_in_what_sets_its_limits(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("raise SystemExit('foreign')")
    show = "import os, resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.environ['PYTHONPATH'])"
    done = await run(show, env={"PYTHONPATH": str(tmp_path / "none"), "PYTHONHOME": "", "LD_PRELOAD": "/no/such.so"})
    assert done.stdout.decode() == f"256 {tmp_path / 'none'}\n"
    assert done.stderr.count(b"no/such.so") == 1  # the linker's complaint comes from the program alone


async def test_python_listens_to_variables_that_are_meant_for_it_and_is_isolated_otherwise(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("NAME = 'found'")
    assert (await run("import helper; print(helper.NAME)", env={"PYTHONPATH": str(tmp_path)})).stdout == b"found\n"
    assert (await run("import sys; print(sys.flags.isolated, sys.flags.dont_write_bytecode)")).stdout == b"1 1\n"


async def test_call_works_in_a_private_directory_that_is_removed() -> None:
    done = await run(
        "import os, stat\nopen('left', 'w').close()\nos.mkdir('sub')\nos.chmod('sub', 0)\n"
        "print(os.getcwd(), os.listdir(), stat.S_IMODE(os.stat('..').st_mode) & 0o077)"
    )
    place, *rest = done.stdout.decode().split(" ", 1)
    assert sorted(rest[0]) == sorted("['left', 'sub'] 0\n")
    assert not Path(place).parent.exists()


async def test_call_works_in_its_own_tmpdir_which_stays(tmp_path: Path) -> None:
    done = await run("import os; print(os.getcwd()); open('left', 'w').close()", env={"TMPDIR": str(tmp_path)})
    assert done.stdout.decode() == f"{tmp_path}\n"
    assert (tmp_path / "left").exists()
    for bad in (str(tmp_path / "secret"), "relative", str(tmp_path / "left")):
        with pytest.raises(InvalidCall, match="TMPDIR") as caught:
            await run("", env={"TMPDIR": bad})
        assert "secret" not in str(caught.value)


async def test_call_works_in_the_directory_that_it_names(tmp_path: Path) -> None:
    done = await run("import os; print(os.getcwd())", cwd=str(tmp_path), env={"TMPDIR": "/"})
    assert done.stdout.decode() == f"{tmp_path}\n"
    with pytest.raises(InvalidCall, match="cwd must be"):
        await run("", cwd=str(tmp_path / "absent"))


async def test_program_finds_signals_at_their_defaults_and_three_descriptors() -> None:
    done = await host_call(
        Call(argv=("sh", "-c", "ls /proc/self/fd; cat /proc/self/status")), limits=HostLimits(), env={}
    )
    text = done.stdout.decode()
    if "SigIgn:\t" not in text:
        pytest.skip("no /proc here")
    assert text.split()[:4] == ["0", "1", "2", "3"]  # 3 is the listing itself
    assert [int(text.split(f"{name}:\t")[1].split()[0], 16) for name in ("SigIgn", "SigBlk")] == [0, 0]


async def test_tool_runs_here_as_it_does_in_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("NAME = 'sibling'")
    (tmp_path / "tool.py").write_text(
        "import helper, multiprocessing\ndef double(n): return n * 2\n"
        "def tool(n, method):\n    print('chat')\n"
        "    with multiprocessing.get_context(method).Pool(1) as pool:\n"
        "        return {helper.NAME: pool.map(double, [n])}\n"
    )
    tool = Tool(name="tool", file=tmp_path / "tool.py")
    for method in ("fork", "spawn"):
        stdin = encode_arguments({"n": 2, "method": method}, max_input=1_000)
        call = Call(code=tool_code(tool, str(tool.directory)), stdin=stdin)
        done = tool_result(tool, await host_call(call, limits=HostLimits(memory_mb=2_048), env={}))
        assert (done.error, done.output, done.result.stderr) == ("", '{"sibling": [4]}', b"chat\n")


# --- limits -------------------------------------------------------------------------------------------------------------

SHOW = """
import resource
for name in ("CPU", "AS", "NOFILE", "FSIZE", "CORE"):
    print(name, *resource.getrlimit(getattr(resource, "RLIMIT_" + name)))
"""


async def test_limits_are_those_that_were_asked_for() -> None:
    done = await run(SHOW, limits=HostLimits(cpu_seconds=7, memory_mb=256, open_files=50, file_size_mb=3))
    assert done.stdout.decode().splitlines() == [
        "CPU 7 8", "AS 268435456 268435456", "NOFILE 50 50", "FSIZE 3145728 3145728", "CORE 0 0",
    ]  # fmt: skip


@pytest.mark.parametrize("field", ["cpu_seconds", "memory_mb", "open_files", "file_size_mb"])
def test_limit_below_one_is_refused_and_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
        HostLimits(**{field: 0})  # type: ignore[arg-type]


def test_lower_limit_that_is_there_already_stays() -> None:
    import resource

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        resource.setrlimit(resource.RLIMIT_CPU, (5, 5))

    said, tell = os.pipe()
    words = ["open_files:RLIMIT_NOFILE:256:256", "cpu_seconds:RLIMIT_CPU:30:31", "file_size_mb:RLIMIT_FSIZE:1:1"]
    done = subprocess.run(
        [sys.executable, "-I", str(INSIDE), str(tell), "strict", *words, "--", sys.executable, "-I", "-c", SHOW],
        input=b"\0\0\0\0", pass_fds=(tell,), preexec_fn=lower, capture_output=True, check=True,
    )  # fmt: skip
    os.close(tell)
    with os.fdopen(said) as file:
        assert file.read() == "go\n"
    lines = done.stdout.decode().splitlines()
    assert (lines[0], lines[2], lines[3]) == ("CPU 5 5", "NOFILE 40 40", "FSIZE 1 1")


async def test_memory_beyond_the_limit_is_the_codes_own_error() -> None:
    done = await run("x = bytearray(400_000_000)", limits=HostLimits(memory_mb=256))
    assert (done.exit_code, done.oom_killed) == (1, False)
    assert done.stderr.endswith(b"MemoryError\n")
    assert (await run("x = bytearray(100_000_000)", limits=HostLimits(memory_mb=256))).ok


async def test_file_beyond_the_limit_cannot_be_written() -> None:
    code = "import os\nwith open('f', 'wb') as f:\n    for _ in range(3):\n        f.write(bytes(500_000))\n        f.flush()"
    done = await run(code, limits=HostLimits(file_size_mb=1))
    assert done.stderr.endswith(b"File too large\n")
    call = Call(argv=("dd", "if=/dev/zero", "of=file", "bs=1000000", "count=3"))
    done = await host_call(call, limits=HostLimits(file_size_mb=1), env={})
    assert (done.exit_code, done.signal) == (None, signal.SIGXFSZ)


async def test_output_is_not_held_to_the_size_of_a_file() -> None:
    done = await run("print('x' * 3_000_000)", limits=HostLimits(file_size_mb=1), max_output=5_000_000)
    assert (done.exit_code, done.stdout_total) == (0, 3_000_001)


async def test_descriptors_beyond_the_limit_cannot_be_opened() -> None:
    done = await run(
        "import os\nfor n in range(100):\n    fd = os.dup(0)\n    print(fd)", limits=HostLimits(open_files=20)
    )
    assert done.stderr.endswith(b"OSError: [Errno 24] Too many open files\n")
    assert done.stdout.split()[-1] == b"19"


@pytest.mark.parametrize(("ignoring", "number"), [(False, signal.SIGXCPU), (True, signal.SIGKILL)])
async def test_cpu_time_beyond_the_limit_ends_the_call_and_is_told(ignoring: bool, number: int) -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n" if ignoring else ""
    done = await run(f"{code}while True: pass", limits=HostLimits(cpu_seconds=1))
    assert (done.exit_code, done.signal, done.cpu_limit, done.timed_out) == (None, number, True, False)
    assert done.cpu_seconds is not None
    assert 0.8 < done.cpu_seconds < 4


async def test_kill_that_no_limit_explains_is_no_cpu_limit() -> None:
    done = await run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (done.signal, done.cpu_limit) == (signal.SIGKILL, False)


async def test_memory_figure_is_the_calls_own_or_none() -> None:
    done = await run("x = bytearray(700_000_000)", limits=HostLimits(memory_mb=1_024))
    assert done.max_rss is not None
    assert 700_000_000 < done.max_rss < 900_000_000
    assert (await run("")).max_rss is None


def broken_words(self: HostLimits) -> list[str]:
    return ["memory_mb:RLIMIT_NOTHING:1:1", f"open_files:RLIMIT_NOFILE:{self.open_files}:{self.open_files}"]


async def test_limit_that_cannot_be_set_refuses_the_call_and_nothing_of_it_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(HostLimits, "words", broken_words)
    with pytest.raises(ProfileMismatch, match=r"cannot be set: memory_mb: .*limits_strict = false") as caught:
        await run(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert not caught.value.started
    assert names(tmp_path) == []


async def test_lenient_limits_are_set_as_far_as_they_can_and_the_rest_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostLimits, "words", broken_words)
    with capture_logs() as logs:
        done = await run(SHOW, limits=LENIENT)
    assert "NOFILE 256 256" in done.stdout.decode()
    assert [(line["event"], line["limit"]) for line in logs] == [("host.limit_not_set", "memory_mb")]


@pytest.mark.parametrize("limits", [HostLimits(), LENIENT])
async def test_call_whose_limits_were_never_set_never_began(
    monkeypatch: pytest.MonkeyPatch, limits: HostLimits, tmp_path: Path
) -> None:
    monkeypatch.setattr(HostLimits, "words", lambda _: ["nonsense"])
    with pytest.raises(EngineFailed, match=r"did not begin.*: ValueError") as caught:
        await run(f"open({str(tmp_path / 'ran')!r}, 'w')", limits=limits)
    assert not caught.value.started
    assert names(tmp_path) == []


async def test_code_cannot_speak_for_what_set_its_limits() -> None:
    done = await run(
        "import os\nfor fd in range(3, 256):\n    try:\n        os.write(fd, b'memory_mb: forged\\n')\n"
        "        print(fd)\n    except OSError:\n        pass"
    )
    assert (done.exit_code, done.stdout) == (0, b"")


async def test_call_that_cannot_be_started_is_an_error_and_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EngineFailed, match="could not be started") as caught:
        await run("")
    assert not caught.value.started


# --- streams ------------------------------------------------------------------------------------------------------------


async def test_output_beyond_the_cap_is_dropped_and_counted() -> None:
    code = "import os\nfor _ in range(1000):\n    os.write(1, b'o' * 10_000)\n    os.write(2, b'e' * 5_000)"
    done = await run(code, max_output=1_500)
    assert (done.stdout, done.stderr) == (b"o" * 1_500, b"e" * 1_500)
    assert (done.stdout_total, done.stderr_total, done.exit_code, done.truncated) == (10_000_000, 5_000_000, 0, True)
    whole = await run(code, max_output=10_000_000)
    assert whole.stdout == b"o" * 10_000_000
    assert not whole.truncated


async def test_stdin_that_is_not_read_is_no_error() -> None:
    assert (await run("print(1)", stdin=b"x" * 5_000_000)).stdout == b"1\n"
    closing = await run("import os\nos.close(0)\nprint(1)", stdin=b"x" * 5_000_000)
    assert closing.stdout == b"1\n"


async def test_stdin_and_output_flow_side_by_side() -> None:
    data = os.urandom(5_000_000)
    done = await host_call(Call(argv=("cat",), stdin=data, max_output=6_000_000), limits=HostLimits(), env={})
    assert done.stdout == data
    assert (await run("import sys; print(len(sys.stdin.read()))")).stdout == b"0\n"


@linux
async def test_what_was_written_last_is_read_although_its_end_is_known_first(tmp_path: Path) -> None:
    file, go = tmp_path / "pid", tmp_path / "go"
    code = f"""
import fcntl, os
fcntl.fcntl(1, 1031, 1 << 20)  # F_SETPIPE_SZ: more than one read takes
with open({str(file)!r}, "w") as f:
    f.write(f"{{os.getpid()}}\\n")
while not os.path.exists({str(go)!r}):
    pass
os.write(1, b"x" * 1_000_000)
"""
    results = []

    async def ask() -> None:
        results.append(await run(code))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        (pid,) = await written(file)
        go.touch()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - nothing may be read while this waits
    assert (results[0].exit_code, results[0].stdout_total) == (0, 1_000_000)


async def test_calls_beside_each_other_do_not_mix() -> None:
    answers = {}

    async def one(number: int) -> None:
        answers[number] = (
            await run(f"import sys; print({number}, sys.stdin.read())", stdin=str(number).encode())
        ).stdout

    async with anyio.create_task_group() as tasks:
        for number in range(12):
            tasks.start_soon(one, number)
    assert answers == {number: f"{number} {number}\n".encode() for number in range(12)}


@linux
async def test_no_call_leaves_a_descriptor_a_zombie_or_a_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def all_ends() -> None:
        await run("print(1)")
        await run("while True: pass", timeout=0.2)
        with anyio.move_on_after(0.2):
            await run("while True: pass")
        with pytest.raises(InvalidCall):
            await run("", env={"TMPDIR": "no"})
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/no/such/python")
            with pytest.raises(EngineFailed):
                await run("")

    others = children()
    await all_ends()
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - names, not paths
    await all_ends()
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    assert names(tmp_path) == []
    assert children() <= others


# --- deadlines, cancels, and what a call started ------------------------------------------------------------------------


async def test_deadline_is_a_result_with_what_was_written_until_then() -> None:
    done = await run("import time\nprint('begun', flush=True)\ntime.sleep(600)", timeout=1.5)
    assert (done.timed_out, done.exit_code, done.signal, done.stdout) == (True, None, signal.SIGTERM, b"begun\n")


async def test_code_may_use_its_grace_to_end_in_order() -> None:
    code = """
import signal, sys, time
def end(*_):
    sys.stdout.write("x" * 1_000_000)
    sys.exit(5)
signal.signal(signal.SIGTERM, end)
time.sleep(600)
"""
    done = await run(code, timeout=1.5)
    assert (done.timed_out, done.exit_code, done.stdout_total) == (True, 5, 1_000_000)


async def test_code_that_ignores_signals_is_killed_once_its_grace_is_over() -> None:
    done = await run(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass", timeout=1.0, grace=0.1
    )
    assert (done.timed_out, done.signal, done.cpu_limit) == (True, signal.SIGKILL, False)


FAMILY = """
import os, signal, subprocess, sys, time
file = {file!r}
def note():
    with open(file, "a") as f:
        f.write(f"{{os.getpid()}}\\n")
def child(act):
    if os.fork() == 0:
        act()
        note()
        while True:
            time.sleep(600)
child(lambda: None)
child(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
child(os.setsid)
child(lambda: (os.setsid(), child(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))))
child(lambda: os.setpgid(0, 0))
while open(file).read().count("\\n") < 6:
    time.sleep(0.01)
note()
"""


@linux
@pytest.mark.parametrize("ignoring", [False, True])
async def test_deadline_ends_the_whole_family(tmp_path: Path, ignoring: bool) -> None:
    file = tmp_path / "pids"
    file.touch()
    code = FAMILY.format(file=str(file)) + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if ignoring else "")
    done = await run(code + "time.sleep(600)", timeout=3.0, grace=0.2)
    pids = await written(file, 7)
    assert done.timed_out
    assert [pid for pid in pids if alive(pid)] == []


async def cancelled(ask: Callable[[], Coroutine[Any, Any, object]], file: Path, lines: int) -> list[int]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        pids = await written(file, lines)
        tasks.cancel_scope.cancel()
    return pids


@linux
async def test_cancel_ends_the_whole_family(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    file.touch()
    code = FAMILY.format(file=str(file)) + "time.sleep(600)"
    pids = await cancelled(lambda: run(code, grace=0.2), file, 7)
    assert [pid for pid in pids if alive(pid)] == []


@linux
async def test_cancel_gives_grace_too(tmp_path: Path) -> None:
    file, last = tmp_path / "pid", tmp_path / "last"
    code = (
        "import os, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(last)!r}, 'w').close(), sys.exit()))\n"
        f"with open({str(file)!r}, 'w') as f: f.write(f'{{os.getpid()}}\\n')\n"
        "time.sleep(600)"
    )
    (pid,) = await cancelled(lambda: run(code), file, 1)
    assert not alive(pid)
    assert last.exists()


@linux
async def test_start_under_a_cancelled_scope_leaves_no_process(tmp_path: Path) -> None:
    others = children()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await run("import time\ntime.sleep(600)", env={"TMPDIR": str(tmp_path)})
    assert scope.cancelled_caught
    assert children() <= others


@linux
@pytest.mark.parametrize("leaving", ["", "os.setpgid(0, 0)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
async def test_what_a_call_leaves_running_delays_no_answer_and_is_ended(tmp_path: Path, leaving: str) -> None:
    file = tmp_path / "pid"
    code = f"""
import os, signal, sys, time
r, w = os.pipe()
if os.fork() == 0:
    {leaving or "pass"}
    with open({str(file)!r}, "w") as f:
        f.write(f"{{os.getpid()}}\\n")
    os.close(w)
    while True:
        time.sleep(600)
os.close(w)
os.read(r, 1)
print("answer")
"""
    done = await run(code, timeout=50.0)
    assert (done.stdout, done.timed_out, done.exit_code) == (b"answer\n", False, 0)
    (pid,) = await written(file)
    assert not alive(pid)


async def test_flood_of_what_a_call_left_running_holds_up_nothing() -> None:
    done = await host_call(Call(argv=("sh", "-c", "yes & echo answer"), timeout=50.0), limits=HostLimits(), env={})
    assert (done.timed_out, done.exit_code) == (False, 0)
    assert b"answer\n" in done.stdout or done.truncated


@linux
async def test_fork_bomb_ends_with_its_call() -> None:
    code = "import os, sys\nprint(os.getpid(), flush=True)\nfor _ in range(6):\n    os.fork()\nwhile True: pass"
    done = await run(code, timeout=1.5, grace=0.1)
    assert done.timed_out
    assert members(int(done.stdout.split()[0])) == []


async def test_survivors_are_told_of_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "KILL_PATIENCE", 0.0)
    with capture_logs() as logs:
        await run("print(1)")
    assert [line["event"] for line in logs] == ["host.survivors"]


async def test_system_without_handles_on_processes_serves_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    done = await run("import sys\nprint(sys.stdin.read())\nsys.exit(3)", stdin=b"in")
    assert (done.exit_code, done.stdout) == (3, b"in\n")
    done = await host_call(Call(argv=("sh", "-c", "sleep 600 & sleep 600"), timeout=0.5), limits=HostLimits(), env={})
    assert (done.timed_out, done.signal) == (True, signal.SIGTERM)


async def test_exit_status_collected_by_another_waiter_is_an_error_and_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    def thief(pid: int, options: int) -> tuple[int, int, object]:
        taken.append(os.waitpid(pid, 0)[0])
        raise ChildProcessError

    monkeypatch.setattr(os, "wait4", thief)
    with pytest.raises(EngineFailed, match="what it did is unknown") as caught:
        await run("print(1)")
    assert caught.value.started
    assert len(taken) == 1


async def test_a_call_without_a_place_to_work_in_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(EngineFailed, match="look after the disk"):
        await host_call(Call(code="print(1)"), limits=HostLimits(), env={})
