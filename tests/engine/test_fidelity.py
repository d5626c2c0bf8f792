"""A Python call is what ``python3 -I -B FILE`` is: programs of every kind, run both ways in one sandbox and compared."""

from __future__ import annotations

import re
from typing import Any

import pytest

from executor.result import CallResult
from executor.sandbox.request import Call
from executor.sandbox.sandbox import Sandbox
from tests.engine.conftest import Room
from tests.engine.corpus import PROGRAMS, STDIN, TABLES

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

STORE = "import sys\nopen('/tmp/file.py', 'wb').write(sys.stdin.buffer.read())"
ONE_DESCRIPTOR_MORE = {"processes.subprocess_fds", "processes.exec_status", "state.fds", "streams.fds_after_close"}
"""The source is a nameless file, held open by the highest descriptor: children inherit it, and who closes it loses it."""
RUNNERS_CLASSES = {"state.subclasses", "state.subclasses_of_int"}
"""Classes of the runner's own imports live on where nothing names them."""
CAUGHT_INTERRUPT = {"ends.keyboard_in_exec"}
"""CPython ends by SIGINT also where the interrupt came out of an ``exec`` and was caught; a call ends with 0."""
FEWER_LEVELS = {"errors.recursion", "errors.recursion_depth", "errors.recursion_mutual"}
"""Python 3.11 counts the calls of C below the caller's code among its levels of recursion."""
KNOWN = ONE_DESCRIPTOR_MORE | RUNNERS_CLASSES | CAUGHT_INTERRUPT | FEWER_LEVELS


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the host's side is not what is tested here


def outcome(result: CallResult) -> tuple[Any, ...]:
    return result.exit_code, result.signal, result.timed_out, plain(result.stdout), plain(result.stderr)


def plain(data: bytes) -> bytes:
    """Output without what differs from run to run: the file's name, addresses, thread idents, the collector's counts."""
    data = re.sub(rb"/proc/\d+/fd/\d+|/tmp/file\.py", b"FILE", data)
    data = re.sub(rb"0x[0-9a-f]{6,}", b"ADDRESS", data)
    return re.sub(rb"(started|process|pid=|P) ?\d+|gc: .*", b"N", data)


async def both(box: Sandbox, source: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """How a program ends as a file of ``python3 -I -B``, and how it ends as a call."""
    await box.call(Call(code=STORE, stdin=source.encode()))
    expected = await box.call(Call(argv=("python3", "-I", "-B", "/tmp/file.py"), stdin=STDIN))
    return outcome(expected), outcome(await box.call(Call(code=source, stdin=STDIN)))


@pytest.mark.parametrize("table", TABLES)
async def test_python_call_is_indistinguishable_from_a_file_of_python3(real_engine: Room, table: str) -> None:
    names = [name for name in PROGRAMS if name.startswith(f"{table}.")]
    differing = {}
    async with real_engine.armed() as box:
        for name in names:
            expected, got = await both(box, PROGRAMS[name])
            if expected != got:
                differing[name] = (expected, got)
    assert {name: pair for name, pair in differing.items() if name not in KNOWN} == {}
    assert {name for name in names if name in KNOWN} - differing.keys() == set(), "no longer differs"


ASK = """
import os, sys, time
print(sys.flags.isolated, sys.flags.ignore_environment, sys.flags.optimize, sys.flags.utf8_mode, sys.argv == [__file__])
print(sys.stdout.encoding, sys.stdout.line_buffering, sys.warnoptions, time.tzname, __debug__, hash('a'))
print(open(__file__).read()[:10], sys.stdin.buffer.read(), sorted(os.environ))
1/0
"""


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONHASHSEED": "0", "PYTHONOPTIMIZE": "1"},
        {"PYTHONUTF8": "1", "PYTHONHASHSEED": "5", "PYTHONWARNINGS": "error"},
        {"PYTHONIOENCODING": "latin-1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"},
    ],
)
async def test_call_whose_own_environment_names_python_gets_an_interpreter_that_listens(
    real_engine: Room, env: dict[str, str]
) -> None:
    async with real_engine.armed() as box:
        await box.call(Call(code=STORE, stdin=ASK.encode()))
        expected = await box.call(Call(argv=("python3", "-B", "/tmp/file.py"), stdin=STDIN, env=env))
        got = await box.call(Call(code=ASK, stdin=STDIN, env=env))
        assert outcome(got) == outcome(expected)
        assert got.stdout.startswith(b"0 0 ")
        assert b"import os, sys" in got.stdout or b"\nimport os" in got.stdout


@pytest.mark.parametrize("env", [{"LC_ALL": "POSIX"}, {"LANG": "C"}, {"TZ": "Asia/Tokyo"}, {"LD_LIBRARY_PATH": "/x"}])
async def test_locale_and_loader_variables_of_a_call_hold_as_from_a_process_start(
    real_engine: Room, env: dict[str, str]
) -> None:
    source = ASK.replace(", hash('a')", "")
    async with real_engine.armed() as box:
        await box.call(Call(code=STORE, stdin=source.encode()))
        expected = await box.call(Call(argv=("python3", "-I", "-B", "/tmp/file.py"), stdin=STDIN, env=env))
        assert outcome(await box.call(Call(code=source, stdin=STDIN, env=env))) == outcome(expected)


async def test_preloaded_modules_are_there_and_change_nothing_else(real_engine: Room) -> None:
    async with real_engine.armed(preload=("json", "threading", "logging")) as box:
        seen = await box.call(Call(code="import sys\nprint('json' in sys.modules, 'ctypes' in sys.modules)"))
        assert seen.stdout == b"True False\n"
        for name in ("processes.threads", "ends.threads_joined", "ends.atexit_order", "errors.stack_logged"):
            expected, got = await both(box, PROGRAMS[name])
            assert got == expected, name
