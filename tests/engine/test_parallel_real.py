"""Several calls at once in one real sandbox: they meet, they end alone, and nothing of them stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import pytest

from executor.errors import SandboxDied
from executor.result import CallResult
from executor.sandbox.request import Call
from executor.sandbox.runner_client import RunnerState
from executor.sandbox.sandbox import Sandbox
from tests.engine.conftest import Room
from tests.support.pools import outcome, until

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

MEET = """
import os, time
def meet(name, others):
    open('/tmp/here-' + name, 'w').close()
    while not all(os.path.exists('/tmp/here-' + other) for other in others):
        time.sleep(0.005)
"""
COUNT = """
import os
def strays(mark):
    found = 0
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            found += mark in open(f'/proc/{pid}/cmdline').read()
        except OSError:
            pass
    return found
"""
WAYS = {
    "child": "subprocess.Popen(MARK)",
    "setsid": "subprocess.Popen(MARK, start_new_session=True)",
    "double fork": "if os.fork() == 0:\n    os.setsid()\n    subprocess.Popen(MARK, start_new_session=True)\n    os._exit(0)\nos.wait()",
    "ignored signals": "subprocess.Popen(MARK, preexec_fn=lambda: [signal.signal(n, 1) for n in (1, 2, 15)])",
    "own subreaper": "ctypes.CDLL(None).prctl(36, 1)\nif os.fork() == 0:\n    subprocess.Popen(MARK)\n    os._exit(0)\nos.wait()",
}
LEAVE = "import ctypes, os, signal, subprocess\nMARK = ['sleep', '98765.4321']\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the host's side is not what is tested here


async def together(box: Sandbox, *calls: Call) -> list[object]:
    """The outcomes of calls that begin at once."""
    answers: list[object] = [None] * len(calls)

    async def one(number: int, call: Call) -> None:
        answers[number] = await outcome(partial(box.call, call))

    async with anyio.create_task_group() as tasks:
        for number, call in enumerate(calls):
            tasks.start_soon(one, number, call)
    return answers


async def told(box: Sandbox, code: str, fits: Callable[[bytes], bool]) -> None:
    """Ask the sandbox from inside until the answer fits."""
    with anyio.fail_after(30):
        while not fits((await box.call(Call(code=code))).stdout):  # noqa: ASYNC110 - the sandbox is asked, it tells nothing
            # A call right after an answer runs beside that call's clean-up; only a pause lets the sandbox come to rest.
            await anyio.sleep(0.5)


async def rested(box: Sandbox) -> None:
    """Wait until every runner waits for a call."""
    runners = box._runners
    assert runners is not None
    await until(
        lambda: all(one is not None and one.state is RunnerState.ARMED for one in runners.lanes.runners), limit=30
    )


def printed(answer: object) -> bytes:
    assert isinstance(answer, CallResult), answer
    assert (answer.exit_code, answer.stderr) == (0, b"")
    return answer.stdout


@pytest.mark.parametrize("calls", [0, 1])
async def test_three_calls_run_at_the_same_time_again_and_again(real_engine: Room, calls: int) -> None:
    async with real_engine.armed(parallel=3, calls=calls) as box:
        for turn in range(4):
            mine = [f"{turn}{name}" for name in "abc"]
            answers = await together(
                box, *(Call(code=f"{MEET}\nmeet({n!r}, {mine!r})\nprint({n!r})", timeout=30) for n in mine)
            )
            assert [printed(one) for one in answers] == [f"{n}\n".encode() for n in mine]
        assert box.poisoned == ""


@pytest.mark.parametrize("calls", [0, 1])
async def test_output_that_no_pipe_holds_arrives_whole_beside_another_call(real_engine: Room, calls: int) -> None:
    loud = Call(code="import os\nos.write(1, b'o' * 300_000)\nos.write(2, b'e' * 300_000)\nos._exit(0)", timeout=20)
    still = Call(code="import time\ntime.sleep(0.5)\nprint('still')", timeout=20)
    async with real_engine.armed(parallel=2, calls=calls) as box:
        for _ in range(6):
            first, second = await together(box, loud, still)
            assert printed(second) == b"still\n"
            for one in (first, await box.call(loud)):
                assert isinstance(one, CallResult)
                assert (one.exit_code, one.stdout, one.stderr) == (0, b"o" * 300_000, b"e" * 300_000)
        assert box.poisoned == ""


@pytest.mark.parametrize("how", ["times out", "is killed", "is cancelled", "kills its group", "is a program"])
async def test_one_that_is_ended_leaves_the_others_right(real_engine: Room, how: str) -> None:
    stop = {
        "times out": "signal.signal(15, 1); os.fork(); time.sleep(600)",
        "is killed": "os.fork(); os.kill(os.getpid(), 9)",
        "is cancelled": "signal.signal(15, 1); os.fork(); time.sleep(600)",
        "kills its group": "os.fork(); os.killpg(0, 9)",
        "is a program": "os.execvp('sh', ['sh', '-c', 'sleep 600 & kill -9 $$'])",
    }[how]
    other = f"{MEET}\nmeet('a', ['b'])\nmeet('a', ['go'])\nprint('right', flush=True)"
    async with real_engine.armed(parallel=3, grace=0.1) as box:
        answers: dict[str, object] = {}
        scope = anyio.CancelScope()

        async def run(name: str, call: Call) -> None:
            answers[name] = await outcome(partial(box.call, call))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "a", Call(code=other, timeout=50))
            with scope:
                async with anyio.create_task_group() as inner:
                    code = f"import signal\n{MEET}\nmeet('b', ['a'])\n{stop}"
                    inner.start_soon(run, "b", Call(code=code, timeout=1 if how == "times out" else 50))
                    if how == "is cancelled":
                        await told(
                            box, "import os\nprint(os.path.exists('/tmp/here-b'))", lambda said: said == b"True\n"
                        )
                        scope.cancel()
            assert "a" not in answers
            # The place of the one that was ended is free again: these two meet beside the first.
            both = (f"{MEET}\nmeet({name!r}, 'xy')\nopen('/tmp/here-go', 'w').close()" for name in "xy")
            met = await together(box, *(Call(code=code, timeout=30) for code in both))
            assert [printed(one) for one in met] == [b"", b""]
        assert printed(answers["a"]) == b"right\n"
        if how == "is cancelled":
            assert "b" not in answers
        else:
            ended = answers["b"]
            assert isinstance(ended, CallResult)
            assert (ended.signal, ended.timed_out, ended.oom_killed) == (9, how == "times out", False)
        assert box.poisoned == ""


async def test_what_one_call_leaves_dies_with_it_while_others_run_on(real_engine: Room) -> None:
    async with real_engine.armed(parallel=3) as box, anyio.create_task_group() as tasks:
        answers: list[object] = []
        mark = ["sleep", "12345.678"]

        async def stays() -> None:
            code = f"import subprocess\nsubprocess.Popen({mark!r})\n{MEET}\nmeet('a', ['go'])\nprint('stayed')"
            answers.append(await outcome(partial(box.call, Call(code=code, timeout=50))))

        tasks.start_soon(stays)
        await told(box, f"{COUNT}\nprint(strays('12345.678'))", lambda said: said == b"1\n")
        for way, code in WAYS.items():
            assert printed(await box.call(Call(code=f"{LEAVE}{code}\nprint('left')"))) == b"left\n", way
            await told(box, f"{COUNT}\nprint(strays('9876' + '5.4321'))", lambda said: said == b"0\n")
            # And nothing of the one that runs on.
            await told(box, f"{COUNT}\nprint(strays('12345' + '.678'))", lambda said: said == b"1\n")
        assert answers == []
        await box.call(Call(code="open('/tmp/here-go', 'w').close()"))
        await until(lambda: answers, limit=30)
        assert printed(answers[0]) == b"stayed\n"


async def test_after_the_last_call_nothing_is_left_but_what_waits(real_engine: Room) -> None:
    leaves = [f"{LEAVE}{code}" for code in WAYS.values()]
    async with real_engine.armed(parallel=len(leaves), calls=1) as box:
        names = [str(number) for number in range(len(leaves))]
        answers = await together(
            box, *(Call(code=f"{MEET}\nmeet({n!r}, {names!r})\n{code}") for n, code in zip(names, leaves, strict=True))
        )
        assert [printed(one) for one in answers] == [b""] * len(leaves)
        await box.ready()
        await told(box, f"{COUNT}\nprint(strays('9876' + '5.4321'))", lambda said: said == b"0\n")
        # PID 1 and its child, and for each place a runner, whose child waits or is this very call, and who keeps its memory.
        whole = b"%d\n" % (2 + 3 * len(leaves))
        count = "import os\nprint(sum(map(str.isdigit, os.listdir('/proc'))))"
        await told(box, count, lambda said: said == whole)
        assert box.poisoned == ""


async def test_code_cannot_get_at_what_waits_for_another_call(real_engine: Room) -> None:
    code = """
import os
me, runner = os.getpid(), os.getppid()
for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
    if pid in (me, 1) or os.getsid(pid) == os.getsid(0):
        continue  # what keeps this call's own memory is open to it
    for what in ('mem', 'environ', 'fd'):
        try:
            if what == 'fd':
                os.listdir(f'/proc/{pid}/fd')
            else:
                open(f'/proc/{pid}/{what}', 'rb').close()
            print('open', pid, what)
        except PermissionError:
            pass
"""
    async with real_engine.armed(parallel=3) as box:
        assert printed(await box.call(Call(code=code))) == b""
        code = "import os\nprint(os.access('/proc/self/mem', os.W_OK), os.listdir('/proc/self/fd') != [])"
        assert printed(await box.call(Call(code=code))) == b"True True\n"  # its own is open to it


async def test_out_of_memory_is_told_to_each_call_that_dies_of_it(real_engine: Room) -> None:
    hog = f"{MEET}\nmeet(NAME, ['a', 'b'])\nx = []\nwhile True:\n    x.append(bytearray(8 << 20))"
    # Children that fill the memory are killed one by one; this one keeps itself out of the way and sees it happen.
    async with real_engine.armed(parallel=3) as box:
        answers = await together(
            box,
            Call(code=hog.replace("NAME", "'a'"), timeout=60),
            Call(code=hog.replace("NAME", "'b'"), timeout=60),
            Call(code=f"{MEET}\nmeet('c', ['a', 'b'])\nprint('small')", timeout=60),
        )
        for one in answers[:2]:
            told_so = one.oom_killed if isinstance(one, CallResult) else getattr(one, "cause", "") == "oom"
            assert told_so, one
        if box.poisoned == "":
            assert printed(answers[2]) == b"small\n"
            assert printed(await box.call(Call(code="print('on')"))) == b"on\n"


async def test_sigkill_of_its_own_is_not_told_as_out_of_memory_because_of_an_earlier_one(real_engine: Room) -> None:
    async with real_engine.armed(parallel=4) as box, anyio.create_task_group() as tasks:
        answers: list[object] = []

        async def stays() -> None:
            answers.append(await outcome(partial(box.call, Call(code=f"{MEET}\nmeet('a', ['go'])", timeout=50))))

        tasks.start_soon(stays)
        await told(box, "import os\nprint(os.path.exists('/tmp/here-a'))", lambda said: said == b"True\n")
        first = await box.call(Call(code="x = []\nwhile True:\n    x.append(bytearray(8 << 20))", timeout=60))
        assert first.oom_killed
        ends = f"{MEET}\nmeet(NAME, '123')\nos.kill(os.getpid(), 9)"
        for one in await together(box, *(Call(code=ends.replace("NAME", repr(n)), timeout=30) for n in "123")):
            assert isinstance(one, CallResult)
            assert (one.signal, one.oom_killed) == (9, False)
        await box.call(Call(code="open('/tmp/here-go', 'w').close()"))
        await until(lambda: answers, limit=30)


# What a call finds of itself that a neighbour could have changed before it came.
FINDS = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
IOPRIO_GET = 252 if os.uname().machine == 'x86_64' else 31
kinds = [getattr(resource, name) for name in dir(resource) if name.startswith('RLIMIT_')]
print(list(map(resource.getrlimit, kinds)), os.getpriority(0, 0), os.sched_getscheduler(0), os.sched_getaffinity(0))
print(libc.syscall(IOPRIO_GET, 1, 0), open('/proc/self/oom_score_adj').read())
print([line for line in open('/proc/self/status') if line.startswith(('TracerPid', 'Sig', 'Shd', 'NoNew'))])
open('/tmp/go', 'w').close()
"""
ATTACKS = """
import ctypes, os, resource, signal, time
libc = ctypes.CDLL(None)
IOPRIO_SET = 251 if os.uname().machine == 'x86_64' else 30
runners = {int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('PPid')}
def parent(pid):
    return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
others = [pid for pid in map(int, filter(str.isdigit, os.listdir('/proc'))) if pid != 1 and os.getsid(pid) != os.getsid(0)]
waiting = [pid for pid in others if parent(pid) not in (0, 1)]
assert len(waiting) == 2, waiting
for pid in waiting:
    ATTACK
os.write(1, b'attacked')
while not os.path.exists('/tmp/go'):
    time.sleep(0.005)
os.unlink('/tmp/go')
"""
CHANGES = {
    "memory": "resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))",
    "open files": "resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))",
    "a soft limit": "resource.prlimit(pid, resource.RLIMIT_NPROC, (0, resource.prlimit(pid, resource.RLIMIT_NPROC)[1]))",
    "file size": "resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))",
    "CPU time": "resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))",
    "nice": "os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "idle": "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
    "reset on fork": "os.sched_setscheduler(pid, os.SCHED_RESET_ON_FORK, os.sched_param(0))",
    "affinity": "os.sched_setaffinity(pid, list(os.sched_getaffinity(0))[:1])",
    "I/O priority": "assert libc.syscall(IOPRIO_SET, 1, pid, 3 << 13) == 0",
    "SIGSTOP": "os.kill(pid, signal.SIGSTOP)",
    "SIGSTOP and on": "os.kill(pid, signal.SIGSTOP); os.kill(pid, signal.SIGCONT)",
    "SIGINT": "os.kill(pid, signal.SIGINT)",
    "SIGTERM": "os.kill(pid, signal.SIGTERM)",
    "SIGUSR1": "os.kill(pid, signal.SIGUSR1)",
    "real-time signal": "os.kill(pid, signal.SIGRTMIN)",
}


async def test_call_is_right_whatever_a_neighbour_did_to_the_process_that_waited_for_it(real_engine: Room) -> None:
    # The engine's own filter: ours refuses some of this.
    async with real_engine.armed(profile={"seccomp": "engine"}, parallel=2) as box:
        expected = printed(await box.call(Call(code=FINDS)))
        await box.call(Call(code="import os\nos.unlink('/tmp/go')"))
        for name, change in CHANGES.items():
            await rested(box)
            answer: object = None
            async with box.stream(Call(code=ATTACKS.replace("ATTACK", change), timeout=20)) as events:
                async for event in events:
                    if isinstance(event, CallResult):
                        assert (event.exit_code, event.timed_out) == (0, False), (name, answer)
                    elif event.stream == "stderr":
                        pytest.fail(f"{name}: {event.data.decode()}")
                    else:
                        answer = await outcome(partial(box.call, Call(code=FINDS, timeout=10)))
            assert printed(answer) == expected, name
        assert box.poisoned == ""


async def test_waiting_process_that_a_neighbour_kills_costs_no_answer_but_the_sandbox(real_engine: Room) -> None:
    async with real_engine.armed(parallel=2) as box:
        await rested(box)
        change = "os.kill(pid, signal.SIGKILL)"
        answer = await outcome(partial(box.call, Call(code=ATTACKS.replace("ATTACK", change), timeout=20)))
        assert isinstance(answer, SandboxDied)
        assert answer.cause == "runner"
