"""Code that goes by a plain exec or a cold container, and unbuffered code: each is what a file of ``python3`` is, too."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from executor.result import CallResult
from executor.sandbox.request import Call
from executor.sandbox.stream import Output
from tests.engine.conftest import Room
from tests.engine.corpus import PROGRAMS, STDIN
from tests.engine.test_fidelity import KNOWN, STORE, both, outcome

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

START = """
import sys, locale, os
print(sys.flags, sys.stdout.encoding, sys.stdout.errors, sys.getfilesystemencoding(), locale.setlocale(locale.LC_CTYPE))
print(sys.orig_argv[:-1], sys.argv == [__file__], sorted(os.environ), sorted(sys.modules['__main__'].__dict__))
"""
SOURCES = {
    "start": START,
    "coding_in_use": "# -*- coding: latin-1 -*-\nprint(ascii('\u00e9\u20ac'))\n",
    "coding_that_cannot_be": "# vim: set fileencoding=ascii :\nprint('\u00e9')\n",
    "bom_and_coding": "\ufeff# coding: latin-1\nprint(1)\n",
    **{
        name: PROGRAMS[name]
        for name in (
            "state.coding_unknown", "state.bom", "state.crlf", "state.carriage", "state.form_feed", "state.sys_names",
            "state.locale", "errors.null_byte", "errors.syntax_nonascii", "errors.recursion_depth", "errors.frames_current",
            "streams.objects", "streams.input",
        )
    },
}  # fmt: skip
IN_A_CONTAINER = ("start", "coding_in_use", "coding_that_cannot_be", "errors.null_byte", "streams.input")
"""Those that are tried in a cold container each; what carries them out is the same as for a plain exec."""
UNBUFFERED = {
    "start": START,
    "streams": "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n print(type(s.buffer), s.line_buffering, s.write_through, s.name, s.mode, s.newlines)\nprint(sys.__stdout__ is sys.stdout)\n",
    "of_c": "import ctypes\nc = ctypes.CDLL(None)\nc.printf(b'1')\nprint(2, end='')\nc.printf(b'3')\nc.puts(b'4')\nprint(5)\n",
    "lost": "import os, sys\nprint('kept')\nprint('too', file=sys.stderr, end='')\nsys.stdout.buffer.write(b'this')\nos._exit(3)\n",
    "child": "import subprocess, sys\nprint(1)\nsubprocess.run([sys.executable, '-c', 'print(2)'])\nprint(3)\n",
    "error": "print(1)\n1/0\n",
    "fork": "import os\nprint('once')\nif not os.fork(): os._exit(0)\nos.wait()\n",
}  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the host's side is not what is tested here


async def as_file(box: Any, source: str, *options: str) -> tuple[Any, ...]:
    await box.call(Call(code=STORE, stdin=source.encode()))
    return outcome(await box.call(Call(argv=("python3", "-I", "-B", *options, "/tmp/file.py"), stdin=STDIN)))


def differing(pairs: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.full  # a container for each program; the quick set compares runners
async def test_code_of_a_plain_exec_or_a_cold_container_is_a_file_of_python3_too(real_engine: Room) -> None:
    pairs: dict[str, tuple[Any, Any]] = {}
    async with real_engine.armed() as box, real_engine.sandbox() as plain:
        for name, source in SOURCES.items():
            expected, warm = await both(box, source)
            if name not in KNOWN:  # what differs in a session does not differ here
                pairs[f"warm {name}"] = expected, warm
            pairs[f"plain {name}"] = expected, outcome(await plain.call(Call(code=source, stdin=STDIN)))
            if name in IN_A_CONTAINER:
                pairs[f"cold {name}"] = expected, outcome(await real_engine.cold(Call(code=source, stdin=STDIN)))
    assert differing(pairs) == {}
    assert b"utf8_mode=0" in pairs["cold start"][1][3]


@pytest.mark.parametrize("env", [{"LC_ALL": "POSIX"}, {"PYTHONHASHSEED": "0", "PYTHONOPTIMIZE": "2"}])
async def test_variables_that_an_interpreter_reads_at_its_start_hold_in_a_plain_exec_and_a_cold_container(
    real_engine: Room, env: dict[str, str]
) -> None:
    call = Call(code=START + "print(hash('a') if not sys.flags.hash_randomization else 0)", env=env)
    async with real_engine.armed() as box, real_engine.sandbox() as plain:
        warm = outcome(await box.call(call))
        assert outcome(await plain.call(call)) == warm
    assert outcome(await real_engine.cold(call)) == warm


async def test_unbuffered_code_is_a_file_of_python3_u(real_engine: Room) -> None:
    pairs: dict[str, tuple[Any, Any]] = {}
    async with real_engine.armed() as box, real_engine.sandbox() as plain:
        for name, source in UNBUFFERED.items():
            expected, call = await as_file(box, source, "-u"), Call(code=source, stdin=STDIN, unbuffered=True)
            pairs[f"warm {name}"] = expected, outcome(await box.call(call))
            pairs[f"plain {name}"] = expected, outcome(await plain.call(call))
        pairs["cold"] = expected, outcome(await real_engine.cold(call))
    assert differing(pairs) == {}


async def test_what_unbuffered_code_printed_survives_its_timeout(real_engine: Room) -> None:
    def call(*, unbuffered: bool) -> Call:
        return Call(code="import time\nprint('here')\ntime.sleep(600)", timeout=1.0, unbuffered=unbuffered)

    async def kept(result: CallResult) -> bytes:
        assert result.timed_out
        return result.stdout

    async with real_engine.armed() as box:
        assert await kept(await box.call(call(unbuffered=False))) == b""
        assert await kept(await box.call(call(unbuffered=True))) == b"here\n"


async def test_unbuffered_output_is_streamed_as_it_is_printed(real_engine: Room) -> None:
    code = "import sys\nprint('first')\nprint('second', end='')\nsys.stdin.read()\nimport time; time.sleep(600)"
    async with real_engine.armed() as box, box.stream(Call(code=code, unbuffered=True)) as events:
        seen = b""
        with anyio.fail_after(30):
            async for event in events:
                assert isinstance(event, Output)
                seen += event.data
                if seen == b"first\nsecond":
                    return
