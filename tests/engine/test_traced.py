"""A call that makes its runner its tracer, or traces and is traced beside it: what stops is no end, and ends are told right.

The engine's own filter is in force here, since a stricter one refuses ``ptrace`` altogether.
"""

from __future__ import annotations

import pytest

from executor.sandbox.request import Call
from tests.engine.conftest import Room
from tests.engine.test_hostile import usable_or_gone

ENGINES = {"seccomp": "engine"}
pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the host's side is not what is tested here


PRELUDE = """
import ctypes, os, signal, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
TRACEME, CONT, DETACH, SEIZE, INTERRUPT = 0, 7, 17, 0x4206, 0x4207
def trace(*args):
    if libc.ptrace(*args, *(0, None, None)[len(args) - 1 :]):
        raise OSError(ctypes.get_errno(), 'ptrace')
def on(*_):
    os.write(1, b'handled ')
def continued_later():
    me = os.getpid()
    if os.fork() == 0:
        time.sleep(0.2)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
signal.signal(signal.SIGUSR1, on)
"""
ON = "\nos.write(1, b'on')\nos._exit(3)"
RAISE = "os.kill(os.getpid(), signal.{})"
# Code, and how it ends: exit code, signal, stdout.
TRACED: dict[str, tuple[str, int | None, int | None, bytes]] = {
    "handled signal": (f"trace(TRACEME)\n{RAISE.format('SIGUSR1')}", 3, None, b"handled on"),
    "fatal signal": (f"trace(TRACEME)\n{RAISE.format('SIGUSR2')}", None, 12, b""),
    "segmentation fault": ("trace(TRACEME)\nctypes.string_at(0)", None, 11, b""),
    "SIGKILL": (f"trace(TRACEME)\n{RAISE.format('SIGKILL')}", None, 9, b""),
    "raised trap": ("trace(TRACEME)\nsignal.raise_signal(signal.SIGTRAP)", None, 5, b""),
    "ignored signal": (f"trace(TRACEME)\n{RAISE.format('SIGWINCH')}", 3, None, b"on"),
    "stop": (f"continued_later()\ntrace(TRACEME)\n{RAISE.format('SIGSTOP')}", 3, None, b"on"),
    "exec": ("trace(TRACEME)\nos.execvp('sh', ['sh', '-c', 'printf on; exit 3'])", 3, None, b"on"),
    "no signal at all": ("trace(TRACEME)", 3, None, b"on"),
    "again and again": (
        f"for _ in range(300):\n    trace(TRACEME)\n    {RAISE.format('SIGWINCH')}",
        3, None, b"on",
    ),
    "thread": (
        "def traced():\n    trace(TRACEME)\n    signal.pthread_kill(threading.get_ident(), signal.SIGWINCH)\n"
        "one = threading.Thread(target=traced)\none.start()\none.join()",
        3, None, b"on",
    ),
    "orphan": (
        "r, w = os.pipe()\nif os.fork() == 0:\n    if os.fork() == 0:\n        while os.getppid() != RUNNER:\n            time.sleep(0.005)\n"
        f"        trace(TRACEME)\n        {RAISE.format('SIGUSR1')}\n        os.write(w, b'x')\n        os._exit(0)\n    os._exit(0)\n"
        "os.wait()\nos.read(r, 1)",
        3, None, b"handled on",
    ),
    "own child": (
        f"child = os.fork()\nif child == 0:\n    trace(TRACEME)\n    {RAISE.format('SIGUSR1')}\n    os._exit(7)\n"
        "pid, status = os.waitpid(child, 0)\nassert os.WIFSTOPPED(status)\ntrace(CONT, child, None, signal.SIGUSR1)\n"
        "pid, status = os.waitpid(child, 0)\nassert os.WEXITSTATUS(status) == 7",
        3, None, b"handled on",
    ),
    "seized by its child": (
        "r, w = os.pipe()\nme = os.getpid()\nif os.fork() == 0:\n    trace(SEIZE, me)\n    os.write(w, b'x')\n    time.sleep(0.3)\n"
        "    os._exit(0)\nos.read(r, 1)",
        3, None, b"on",
    ),
    "seized and stopped by a child that dies": (
        "r, w = os.pipe()\nme = os.getpid()\nif os.fork() == 0:\n    trace(SEIZE, me)\n    trace(INTERRUPT, me)\n    os.write(w, b'x')\n"
        "    os.waitpid(me, 0x40000000)\n    os.kill(os.getpid(), 9)\nos.read(r, 1)",
        3, None, b"on",
    ),
}  # fmt: skip


async def test_traced_call_ends_as_an_untraced_one(real_engine: Room) -> None:
    async with real_engine.armed(profile=ENGINES) as box:
        for name, (code, exit_code, number, stdout) in TRACED.items():
            result = await box.call(Call(code=f"{PRELUDE}RUNNER = os.getppid()\n{code}{ON}", timeout=10))
            told = (result.exit_code, result.signal, result.stdout, result.timed_out)
            assert told == (exit_code, number, stdout, False), (name, result.stderr)
            assert await usable_or_gone(box), name
        assert box.poisoned == ""


STORM = "import itertools\nfor _ in range(20):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork():\n            os._exit(0)\n        while os.getppid() != RUNNER:\n            pass\n        while True:\n            trace(TRACEME)\n            os.kill(os.getpid(), signal.SIGWINCH)\n"


@pytest.mark.parametrize("parallel", [1, 2])
async def test_storm_of_stops_holds_neither_an_answer_nor_a_deadline(real_engine: Room, parallel: int) -> None:
    code = f"{PRELUDE}RUNNER = os.getppid()\n{STORM}"
    async with real_engine.armed(profile=ENGINES, grace=0.1, parallel=parallel) as box:
        result = await box.call(Call(code=f"{code}time.sleep(0.2){ON}", timeout=20))
        assert (result.exit_code, result.stdout, result.timed_out) == (3, b"on", False)
        result = await box.call(Call(code=f"{code}time.sleep(600)", timeout=1))
        assert (result.timed_out, result.exit_code) == (True, None)
        assert (await box.call(Call(code="print('on')"))).stdout == b"on\n"
        assert box.poisoned == ""
