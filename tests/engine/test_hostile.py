"""Tool code against its runner: each attack ends in a truthful outcome, and the next call is right or refused."""

from __future__ import annotations

import contextlib
import signal

import anyio
import pytest

from executor.errors import SandboxDied
from executor.sandbox.profile import Limits
from executor.sandbox.request import Call
from executor.sandbox.runner_client import ArmedRunner
from executor.sandbox.sandbox import Sandbox
from tests.engine.conftest import Room
from tests.support.pools import until

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

WHO = """
import os
def line(pid):
    fields = dict(l.split(':\\t', 1) for l in open(f'/proc/{pid}/status').read().splitlines() if ':\\t' in l)
    return fields['Name'], fields['PPid'], fields['Uid'].split()[0]
known = {1, os.getpid(), os.getppid()}
for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
    # What keeps this call's memory is of its session; nothing that an earlier call left could be.
    if pid in known or os.getsid(pid) == os.getsid(0):
        continue
    if line(pid)[1] != '1' or line(pid)[2] == str(os.getuid()):
        print('stray', line(pid))
print('next')
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the host's side is not what is tested here


async def usable_or_gone(box: Sandbox, *, at_any_time: bool = False) -> bool:
    """Whether the next call is answered, and then rightly: nothing of the last one is left. Refused otherwise.

    ``at_any_time``: the kernel may also end the runner once it has the call, and then nobody knows how far that one got.
    """
    try:
        after = await box.call(Call(code=WHO))
    except SandboxDied as error:
        assert at_any_time or not error.started  # noqa: PT017 - either end is right
        return False
    assert (after.exit_code, after.stdout, after.stderr) == (0, b"next\n", b"")
    return True


# --- nothing survives -------------------------------------------------------------------------------------------------

WAIT = "\nimport time\nprint('begun', flush=True)\nwhile True:\n    time.sleep(60)\n"
LEAVES = {
    "setsid": "import os\nif os.fork() == 0:\n    os.setsid()",
    "double fork": "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork():\n        os._exit(0)",
    "nohup": "import subprocess\nsubprocess.Popen(['nohup', 'sleep', '600'], start_new_session=True)",
    "ignored signals": "import signal, os\nfor n in range(1, 32):\n    if n not in (9, 19):\n        signal.signal(n, 1)\nos.fork()",
    "blocked signals": "import signal, os\nsignal.pthread_sigmask(0, range(1, 65))\nos.fork()",
    "stopped child": "import os, signal, time\np = os.fork()\nif p == 0:\n    time.sleep(600)\nos.kill(p, signal.SIGSTOP)",
    "stopped itself": "import os\nprint('begun', flush=True)\nos.kill(0, 19)",
    "threads": "import threading, time\ntry:\n    while True:\n        threading.Thread(target=time.sleep, args=(600,)).start()\nexcept RuntimeError:\n    pass",
    "fork bomb": "import os\nprint('begun', flush=True)\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "own subreaper": "import ctypes, os\nctypes.CDLL(None).prctl(36, 1)\nif os.fork() == 0:\n    os.fork()",
    "new group": "import os\nif os.fork() == 0:\n    os.setpgid(0, 0)",
}


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "times out"])
async def test_nothing_of_a_call_outlives_it(real_engine: Room, ends: bool) -> None:
    async with real_engine.armed(grace=0.2) as box:
        for name, code in LEAVES.items():
            if ends and "begun" in code:
                continue
            # What is forked goes on sleeping; at the end of a call its main process goes.
            quick = "\nimport os\nif os.getppid() == parent:\n    print('begun', flush=True)\n    os._exit(0)\n" + WAIT
            source = "import os\nparent = os.getppid()\n" + code + (quick if ends else WAIT)
            result = await box.call(Call(code=source, timeout=20 if ends else 1.5))
            assert (result.timed_out, result.exit_code) == ((False, 0) if ends else (True, None)), name
            assert result.stdout.startswith(b"begun"), name
            assert await usable_or_gone(box), name


async def test_call_ends_with_its_main_process_although_a_child_holds_its_pipes(real_engine: Room) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('main')"
    async with real_engine.armed(calls=1) as box:
        for _ in range(3):
            result = await box.call(Call(code=code))
            assert (result.exit_code, result.stdout, result.timed_out) == (0, b"main\n", False)
            assert await usable_or_gone(box)


# --- forging, blocking, outliving ---------------------------------------------------------------------------------------

PRELUDE = """
import os, signal, resource, ctypes, errno, time
runner = os.getppid()
sleep = next(int(p) for p in os.listdir('/proc') if p.isdigit() and p != '1' and open(f'/proc/{p}/comm').read() == 'sleep\\n')
targets = {'runner': runner, 'init': 1, 'sleep': sleep}
libc = ctypes.CDLL(None, use_errno=True)
IOPRIO_SET, SCHED_SETATTR = (251, 314) if os.uname().machine == 'x86_64' else (30, 274)
def attempt(what, do, *args):
    try:
        done = do(*args)
    except OSError as error:
        return
    if done != -1:
        print('reached', what)
"""

DENIED = """
for name, pid in targets.items():
    attempt(name + ' ptrace attach', libc.ptrace, 16, pid, 0, 0)
    attempt(name + ' ptrace seize', libc.ptrace, 0x4206, pid, 0, 0)
    attempt(name + ' pidfd_getfd', libc.syscall, 438, os.pidfd_open(pid), 0, 0)
    local = ctypes.create_string_buffer(8)
    iov = (ctypes.c_void_p * 2)(ctypes.addressof(local), 8)
    attempt(name + ' process_vm_readv', libc.process_vm_readv, pid, ctypes.byref(iov), 1, ctypes.byref(iov), 1, 0)
    attempt(name + ' process_vm_writev', libc.process_vm_writev, pid, ctypes.byref(iov), 1, ctypes.byref(iov), 1, 0)
    for file in ('mem', 'environ', 'maps', 'fd/0', 'fd/1', 'stack', 'syscall', 'auxv', 'map_files', 'io', 'personality'):
        for flags in (os.O_RDONLY, os.O_WRONLY):
            attempt(f'{name} {file}', lambda: os.read(os.open(f'/proc/{pid}/{file}', flags), 1))
    attempt(name + ' fds', os.listdir, f'/proc/{pid}/fd')
    for file in ('oom_score_adj', 'coredump_filter', 'timerslack_ns', 'clear_refs', 'attr/current'):
        attempt(f'{name} {file}', lambda: os.write(os.open(f'/proc/{pid}/{file}', os.O_WRONLY), b'0'))
for name in ('init', 'sleep'):
    for number in range(1, 65):
        if number not in (32, 33):
            attempt(f'{name} signal {number}', os.kill, targets[name], number)
    attempt(name + ' nice', os.setpriority, os.PRIO_PROCESS, targets[name], 19)
    attempt(name + ' affinity', os.sched_setaffinity, targets[name], [0])
    attempt(name + ' scheduler', os.sched_setscheduler, targets[name], 5, os.sched_param(0))
    for kind in range(16):
        attempt(f'{name} limit {kind}', resource.prlimit, targets[name], kind, (0, 0))
print('denied')
"""


async def test_runner_init_and_sleep_can_be_neither_traced_nor_read_nor_written(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        result = await box.call(Call(code=PRELUDE + DENIED))
        assert (result.stdout, result.stderr) == (b"denied\n", b"")
        assert await usable_or_gone(box)


IGNORED = {name: f"os.kill(runner, signal.{name})\nprint('on')" for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT")}
FATAL = {
    "everything of its uid": "os.kill(-1, signal.SIGKILL)",
    "SIGKILL": "os.kill(runner, signal.SIGKILL)",
    "SIGKILL later": "if os.fork() == 0:\n    time.sleep(0.05)\n    os.kill(runner, signal.SIGKILL)",
    "SIGXCPU": "os.kill(runner, signal.SIGXCPU)",
    "SIGSEGV": "os.kill(runner, signal.SIGSEGV)",
    "real-time signal": "os.kill(runner, signal.SIGRTMIN)",
}


async def test_signals_that_ask_a_runner_to_end_are_nothing_to_it(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        for name, code in IGNORED.items():
            result = await box.call(Call(code=PRELUDE + code))
            assert (result.exit_code, result.stdout) == (0, b"on\n"), name
            assert await usable_or_gone(box), name


@pytest.mark.parametrize("name", FATAL)
async def test_runner_that_its_call_killed_is_a_death_and_no_result(real_engine: Room, name: str) -> None:
    async with real_engine.armed() as box:
        with pytest.raises(SandboxDied) as caught:
            await box.call(Call(code=PRELUDE + FATAL[name] + "\nprint('forged')\ntime.sleep(600)", timeout=20))
        assert (caught.value.cause, caught.value.started) == ("runner", True)
        assert box.poisoned
        assert not await usable_or_gone(box)


async def test_stopped_runner_cannot_hold_a_call_beyond_its_deadline(real_engine: Room) -> None:
    async with real_engine.armed(grace=0.2) as box:
        result = await box.call(Call(code=PRELUDE + "os.kill(runner, signal.SIGSTOP)" + WAIT, timeout=1.0))
        assert result.timed_out
        assert box.poisoned
        assert not await usable_or_gone(box)


STOPS_ITS_RUNNER = """
main = os.getpid()
if os.fork() == 0:
    os.setsid()
    while os.getppid() == main:
        pass
    time.sleep(0.1)
    os.kill(runner, signal.SIGSTOP)
    time.sleep(600)
"""


async def test_runner_that_is_stopped_after_its_answer_costs_the_sandbox_within_a_second(
    real_engine: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean_up = ArmedRunner.clean_up

    async def late(runner: ArmedRunner, *, sweep: bool) -> None:
        await anyio.sleep(0.5)
        await clean_up(runner, sweep=sweep)

    # With several runners an answered one waits until it is asked to clean up: time for who is left to stop it.
    monkeypatch.setattr(ArmedRunner, "clean_up", late)
    async with real_engine.armed(parallel=2) as box:
        result = await box.call(Call(code=PRELUDE + STOPS_ITS_RUNNER))
        assert (result.exit_code, result.timed_out) == (0, False)
        await until(lambda: box.poisoned, limit=30)
        with pytest.raises(SandboxDied, match="no heartbeat or progress within 1 s while cleaning") as caught:
            await box.call(Call(code=WHO))
        assert not caught.value.started


LOWERED = {
    **{
        f"limit {name}": f"resource.prlimit(runner, resource.RLIMIT_{name}, ({value}, {value}))"
        for name, value in (("NOFILE", 0), ("NPROC", 0), ("CPU", 0), ("FSIZE", 0), ("MEMLOCK", 0), ("STACK", 65536))
    },
    "soft limit": "resource.prlimit(runner, resource.RLIMIT_NOFILE, (3, resource.prlimit(runner, 7)[1]))",
    "nice": "os.setpriority(os.PRIO_PROCESS, runner, 19)",
    "idle": "os.sched_setscheduler(runner, os.SCHED_IDLE, os.sched_param(0))",
    "batch": "os.sched_setscheduler(runner, os.SCHED_BATCH, os.sched_param(0))",
    "affinity": "os.sched_setaffinity(runner, list(os.sched_getaffinity(0))[:1])",
    "reset on fork": "os.sched_setscheduler(runner, os.SCHED_RESET_ON_FORK, os.sched_param(0))",
    "I/O priority": "assert libc.syscall(IOPRIO_SET, 1, runner, 3 << 13) == 0",
    # A slice is an attribute since Linux 6.12.
    "slice": "import struct\nslice = struct.pack('<IIQiIQQQII', 56, 0, 0, 0, 0, 10_000_000, 0, 0, 0, 0)\n"
    "assert libc.syscall(SCHED_SETATTR, runner, slice, 0) == 0\n"
    "if tuple(map(int, os.uname().release.split('.')[:2])) < (6, 12):\n    os.setpriority(os.PRIO_PROCESS, runner, 19)",
}


@pytest.mark.parametrize("name", LOWERED)
async def test_call_under_limits_that_another_call_set_on_the_runner_is_refused(real_engine: Room, name: str) -> None:
    async with real_engine.armed(profile={"seccomp": "engine"}) as box:
        with contextlib.suppress(SandboxDied):
            result = await box.call(Call(code=PRELUDE + LOWERED[name] + "\nprint('lowered')"))
            assert (result.exit_code, result.stdout) == (0, b"lowered\n"), result.stderr
        # One that could not fork again, or whose time was up, may have ended after its proof: another one takes its place.
        usable = await usable_or_gone(box, at_any_time=name == "limit CPU")  # enforced at a tick, whenever that comes
        assert not usable or name in ("limit NPROC", "limit CPU")


FRAMES = """
import os, struct, json
report = {'exit_code': 0, 'signal': None, 'timed_out': False, 'cancelled': False, 'oom': False, 'stdout_total': 0,
          'stderr_total': 0, 'cpu_seconds': 0.0, 'max_rss': 0, 'duration': 0.0}
done = json.dumps(report).encode()
forged = b''.join(struct.pack('>BII', 22, seq, len(done)) + done + struct.pack('>BII', 23, seq, 1) + b'0' for seq in range(9))
written = 0
for fd in range(1024):
    try:
        written += os.write(fd, forged) == len(forged)
    except OSError:
        pass
"""
EXHAUST = {
    "zombies": (
        "import os\nfor _ in range(100):\n    if os.fork() == 0:\n        os._exit(0)\nprint('done')",
        b"done\n",
    ),
    "orphans": (
        "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        if os.fork() == 0:\n            os._exit(0)\n"
        "        os._exit(0)\n    os.wait()\nprint('done')",
        b"done\n",
    ),
    "pids": (
        "import os, time\nn = 0\ntry:\n    while n < 500:\n        if os.fork() == 0:\n            time.sleep(600)\n        n += 1\n"
        "except BlockingIOError:\n    print(n > 50)",
        b"True\n",
    ),
    "descriptors": (
        "import os\ntry:\n    while True:\n        os.pipe()\nexcept OSError as e:\n    print(e.errno)",
        b"24\n",
    ),
    "pipes": ("import os\nos.write(1, b'x' * 9_000_000)\nos.write(2, b'y' * 9_000_000)", b"x" * 1_048_576),
    "renamed": (
        "import os\ntry:\n    os.rename('/tmp', '/gone')\nexcept OSError as e:\n    print('refused')",
        b"refused\n",
    ),
    "own directory": (
        "import os\nos.mkdir('/tmp/d')\nos.chdir('/tmp/d')\nos.rmdir('/tmp/d')\nprint('done')",
        b"done\n",
    ),
    "signal storm": (
        "import os, signal\nfor _ in range(20000):\n    os.kill(os.getppid(), signal.SIGCHLD)\nprint('done')",
        b"done\n",
    ),
    "closed streams": ("import os\nos.closerange(0, 1024)\nos._exit(0)", b""),
}


async def test_frames_that_tool_code_writes_are_output_and_nothing_else(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        result = await box.call(Call(code=FRAMES + "print(written)\nos._exit(7)", stdin=b"x"))
        assert result.exit_code == 7
        assert result.stdout.count(b'"exit_code": 0') == result.stderr.count(b'"exit_code": 0') == 9
        assert await usable_or_gone(box)


async def test_exhausting_what_a_sandbox_has_harms_no_later_call(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        for name, (code, expected) in EXHAUST.items():
            result = await box.call(Call(code=code, timeout=30))
            assert (result.stdout[: len(expected)], result.timed_out) == (expected, False), (name, result.stderr)
            assert await usable_or_gone(box), name


async def test_full_tmp_stays_full_and_each_call_is_told_by_its_own_error(real_engine: Room) -> None:
    fill = "import os\nfd = os.open('/tmp/fill', os.O_WRONLY | os.O_CREAT)\ntry:\n    while True:\n        os.write(fd, b'x' * 65536)\nexcept OSError as e:\n    print(e.errno)"
    async with real_engine.armed(profile={"tmpfs_mb": 8}) as box:
        assert (await box.call(Call(code=fill))).stdout == b"28\n"
        assert await usable_or_gone(box)
        again = await box.call(Call(code="open('/tmp/more', 'w').write('x' * 100000)"))
        assert again.exit_code == 1
        assert b"No space left on device" in again.stderr
        assert (await box.call(Call(code="import os\nos.unlink('/tmp/fill')\nprint('freed')"))).stdout == b"freed\n"


MEMORY = {
    "heap": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))",
    "memfd": "import os\nopen('/proc/self/oom_score_adj', 'w').write(os.environ.get('SCORE', '0'))\n"
    "fd = os.memfd_create('hog')\nresource = __import__('resource')\nwhile True:\n    fd = os.memfd_create('hog')\n"
    "    for _ in range(8):\n        os.write(fd, b'x' * (1 << 20))",
    "shared": "import os\nfd = os.open('/dev/shm/fill', os.O_WRONLY | os.O_CREAT)\ntry:\n    while True:\n        os.write(fd, b'x' * 65536)\n"
    "except OSError:\n    x = [bytearray(1 << 20) for _ in range(400)]",
}


@pytest.mark.parametrize("name", MEMORY)
async def test_call_that_takes_all_memory_is_told_of_it_or_its_sandbox_is(real_engine: Room, name: str) -> None:
    async with real_engine.armed(profile={"limits": Limits(memory_mb=128)}) as box:
        try:
            result = await box.call(Call(code=MEMORY[name], timeout=30))
        except SandboxDied as error:
            assert (error.cause, error.started) == ("oom", True)  # noqa: PT017 - either end is right
            assert box.poisoned
        else:
            assert (result.oom_killed, result.signal) == (True, signal.SIGKILL), result.stderr
            await usable_or_gone(box)


async def test_deaths_of_a_calls_own_making_are_told_apart(real_engine: Room) -> None:
    async with real_engine.armed(profile={"limits": Limits(cpu_seconds=1)}) as box:
        own = await box.call(Call(code="import os\nos.kill(os.getpid(), 9)"))
        assert (own.signal, own.exit_code, own.oom_killed, own.cpu_limit) == (9, None, False, False)
        shell = await box.call(Call(argv=("sh", "-c", "exit 137")))
        assert (shell.signal, shell.exit_code) == (None, 137)
        spent = await box.call(Call(code="while True: pass"))
        assert (spent.signal, spent.cpu_limit, spent.timed_out) == (signal.SIGXCPU, True, False)
        raised = await box.call(Call(code="import os\nos.kill(os.getpid(), 24)"))
        assert (raised.signal, raised.cpu_limit) == (signal.SIGXCPU, False)
        assert await usable_or_gone(box)


# --- what a call leaves that is no process ----------------------------------------------------------------------------

LEAVES_MEMORY = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget(0, 100 << 20, 0o1600)
ctypes.memset(libc.shmat(segment, None, 0), 1, 100 << 20)
assert segment >= 0 and libc.msgget(7, 0o1600) >= 0 and libc.semget(7, 1, 0o1600) >= 0
"""
# More than fits into one read of their list, and some of their names given away.
LEAVES_MANY = """
import ctypes, os
libc = ctypes.CDLL(None)
for n in range(2500):
    assert libc.shmget(0, 4096, 0o1600) >= 0 and libc.msgget(0, 0o1600) >= 0 and libc.semget(0, 2, 0o1600) >= 0
for n in range(9):
    os.close(os.open(f'/dev/mqueue/{n}', os.O_CREAT | os.O_RDWR, 0o600))
"""
SEES_MEMORY = """
import os
print('queues', len(os.listdir('/dev/mqueue')))
for kind in ('shm', 'msg', 'sem'):
    print(kind, len(open('/proc/sysvipc/' + kind).readlines()) - 1)
"""


NO_MEMORY = b"queues 0\nshm 0\nmsg 0\nsem 0\n"


async def test_system_v_memory_of_a_call_is_gone_with_it(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        left = await box.call(Call(code=LEAVES_MEMORY + SEES_MEMORY))
        assert (left.stdout, left.stderr) == (b"queues 0\nshm 1\nmsg 1\nsem 1\n", b"")
        assert (await box.call(Call(code=SEES_MEMORY))).stdout == NO_MEMORY
        assert box.poisoned == ""


@pytest.mark.parametrize("parallel", [1, 2])
async def test_objects_that_belong_to_no_process_are_all_gone_with_the_last_call(
    real_engine: Room, parallel: int
) -> None:
    async with real_engine.armed(parallel=parallel) as box:
        left = await box.call(Call(code=LEAVES_MANY + SEES_MEMORY))
        assert (left.stdout, left.stderr) == (b"queues 9\nshm 2500\nmsg 2500\nsem 2500\n", b"")
        with anyio.fail_after(20):
            # With several runners a call that begins now may run beside that one's clean-up.
            while (await box.call(Call(code=SEES_MEMORY))).stdout != NO_MEMORY:
                assert parallel > 1
                await anyio.sleep(0.2)
        assert box.poisoned == ""


async def test_what_shared_memory_names_is_kept_like_tmp_until_a_call_removes_it(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        assert (await box.call(Call(code="open('/dev/shm/kept', 'w').write('x')"))).exit_code == 0
        assert (await box.call(Call(code="import os\nprint(os.listdir('/dev/shm'))"))).stdout == b"['kept']\n"


REFILLS = """
import os
os.write(1, b'answer\\n')
for _ in range(20):
    if os.fork() == 0:
        while True:
            os.write(1, b'x' * 65536)
"""


async def test_what_a_call_left_cannot_hold_its_answer_by_writing_on(real_engine: Room) -> None:
    async with real_engine.armed() as box:
        result = await box.call(Call(code=REFILLS, timeout=30))
        assert (result.exit_code, result.timed_out) == (0, False)
        assert result.stdout.startswith(b"answer\n")
        assert await usable_or_gone(box)


async def test_what_keeps_a_calls_memory_has_the_calls_cpu_limit(real_engine: Room) -> None:
    code = """
import os, resource
keeper, = [int(n) for n in os.listdir('/proc') if n.isdigit() and int(n) not in (1, os.getpid())
           and os.getsid(int(n)) == os.getsid(0)]
print(resource.prlimit(keeper, resource.RLIMIT_CPU) == resource.getrlimit(resource.RLIMIT_CPU) == (30, 31))
"""
    async with real_engine.armed() as box:
        assert (await box.call(Call(code=code))).stdout == b"True\n"


# --- nobody speaks for a runner ------------------------------------------------------------------------------------------

FORGERS = {
    "kills it after the answer": "time.sleep(0.0005)\nos.kill(runner, 9)",
    "stops and kills it": "os.kill(runner, 19)\ntime.sleep(0.05)\nos.kill(runner, 9)",
}
FORGE = """
import os, time
me, runner = os.getpid(), os.getppid()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    for fd in (0, 1, 2):
        os.close(fd)
    os.open('/dev/null', os.O_RDWR), os.dup(0), os.dup(0)
    log = os.open('/tmp/breach', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    while os.path.exists('/proc/%d' % me):
        pass
    try:
        DO
    except OSError:
        pass
    end = time.time() + 20
    while time.time() < end:
        for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
            try:
                if pid not in (1, os.getpid(), runner) and open('/proc/%d/stat' % pid).read().rpartition(')')[2].split()[1] == '0':
                    os.open('/proc/%d/fd/1' % pid, os.O_WRONLY)
                    os.write(log, b'breach\\n')
            except OSError:
                pass
    os._exit(0)
time.sleep(0.1)
print('main ends')
"""


@pytest.mark.parametrize("how", FORGERS)
@pytest.mark.parametrize("parallel", [1, 2])
async def test_stray_never_meets_the_next_runner_while_no_event_comes(
    real_engine: Room, monkeypatch: pytest.MonkeyPatch, how: str, parallel: int
) -> None:
    """A new runner can be stopped, and spoken for, until it protects itself."""
    code = FORGE.replace("DO", FORGERS[how].replace("\n", "\n        "))
    async with real_engine.armed(calls=1, parallel=parallel) as box:
        monkeypatch.setattr(real_engine.hub, "publish", lambda event: None)
        await box.call(Call(code=code, timeout=10))
        seen = "import os\nprint(open('/tmp/breach').read() if os.path.exists('/tmp/breach') else '')"
        try:
            after = await box.call(Call(code=seen, timeout=10))
        except SandboxDied as error:
            assert not error.started  # noqa: PT017 - either end is right
            assert box.poisoned
        else:
            assert (after.stdout, after.stderr) == (b"\n", b"")
