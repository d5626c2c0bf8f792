"""The joined runner on every Python that an image may hold: it compiles, says hello and carries out calls.

A call needs a PID namespace of its own, since a runner kills every process that it can reach: ``unshare`` makes one, and
nothing is run where it cannot.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO

import pytest

from executor import inside
from executor.sandbox import wire
from executor.sandbox.request import LOADER, Call
from executor.sandbox.runner_client import RunnerConfig

RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = sorted({"3.8", "3.9", "3.10", "3.11", "3.12", "3.13", RUNNING}, key=lambda it: int(it[2:]))
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
ALONE = "import os\nassert os.getpid() == 1, 'not a PID namespace of its own'\n"
"""Put before the loader, so that a runner never starts among the processes of this machine."""

PURE = """
assert encode(OUT, 2, b"ab") == b"\\x13\\0\\0\\0\\2\\0\\0\\0\\2ab"
class Plain: pass
class Closing:
    def __del__(self): pass
assert [classify(one) for one in (int, Plain, type, weakref.ref, Closing)] == [PLAIN, PLAIN, CLASS, REFERENCE, FINALIZED]
assert read_file("/proc/self/cmdline") and read_file("/no/such/file") == b"" and witness() == 22
assert limits_of(Libc()) == limits_of(Libc(), os.getpid())
check = ExitCheck()
assert len(check._collections()) == 2
check.rehearse(SOURCE)
print("good")
"""


@cache
def interpreter(version: str) -> str | None:
    """Where a version is installed on this machine; pyenv's come first, as its shims on PATH may lead nowhere."""
    if version == RUNNING:
        return sys.executable
    pyenv = Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")
    on_path = (shutil.which(f"python{version}"), f"/usr/bin/python{version}")
    for path in chain(map(str, sorted(pyenv)), on_path):
        if path is not None and Path(path).exists() and _says(path) == version:
            return path
    return None


def _says(path: str) -> str:
    asked = (path, "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout.strip()


@cache
def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, timeout=20, check=False).returncode == 0


@pytest.fixture(params=VERSIONS)
def python(request: pytest.FixtureRequest) -> str:
    path = interpreter(request.param)
    if path is None:
        pytest.skip(f"Python {request.param} is not installed here: not in ~/.pyenv/versions, /usr/bin or PATH")
    return path


def test_every_part_compiles_and_its_functions_run(python: str) -> None:
    texts = inside.parts("runner")
    enter = texts.pop("runner/enter.py")
    program = f"{inside.join(texts)}\ncompile({enter!a}, 'enter.py', 'exec')\n{PURE}"
    done = subprocess.run(
        (python, "-I", "-B", "-"), input=program.encode(), capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"good\n", b"")


class Host:
    """The host's end of one runner, without time limits: the test has one."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.stdin, self._stdout = stdin, stdout
        self._frames = self._read()

    def _read(self) -> Iterator[wire.Frame]:
        decoder = wire.Decoder()
        while data := self._stdout.read1(65_536):  # type: ignore[attr-defined]
            yield from decoder.feed(data)

    def call(self, seq: int, call: Call) -> tuple[wire.Report, bytes, bytes]:
        assert next(self._frames) == wire.Frame(wire.ARMED, seq, b"")
        header = wire.call_header(timeout=20, grace=1, max_output=10_000, credit=None)
        self.stdin.write(wire.encode(wire.CALL, seq, header + request(call)))
        self.stdin.write(wire.encode(wire.INPUT, seq, call.stdin) + wire.encode(wire.INPUT_END, seq))
        self.stdin.flush()
        seen = {wire.OUT: b"", wire.ERR: b"", wire.TAKEN: b"", wire.CLEANING: b""}
        while (frame := next(self._frames)).kind != wire.DONE:
            seen[frame.kind] += frame.payload
        assert next(frame for frame in self._frames if frame.kind != wire.CLEANING).kind == wire.CLEAN
        return wire.parse_report(frame.payload), seen[wire.OUT], seen[wire.ERR]

    def hello(self) -> dict[str, object]:
        frame = next(self._frames)
        assert (frame.kind, frame.seq) == (wire.HELLO, 0)
        return wire.parse_object(frame.payload)


def request(call: Call) -> bytes:
    """A call as its process reads it."""
    unusual = json.dumps({"argv": call.argv}).encode() if call.argv else b""
    code = (call.code or "").encode()
    return len(unusual).to_bytes(4, "big") + len(code).to_bytes(4, "big") + unusual + code


def test_a_runner_says_hello_and_carries_out_calls(python: str) -> None:
    if not can_unshare():
        pytest.skip("no PID namespace can be made here, and outside of one a runner would kill what it can reach")
    config = RunnerConfig(keeper="0", files=("/proc/self/status",), calls=3, cpu_seconds=20)
    with subprocess.Popen(
        (*NAMESPACE, python, "-I", "-B", "-c", ALONE + LOADER),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as runner:  # fmt: skip
        try:
            assert runner.stdin is not None
            assert runner.stdout is not None
            assert runner.stderr is not None
            host = Host(runner.stdin, runner.stdout)
            host.stdin.write(config.payload())
            host.stdin.flush()
            hello = host.hello()
            assert {key: hello[key] for key in ("problem", "undumpable", "subreaper", "alone", "parent")} == {
                "problem": "", "undumpable": True, "subreaper": True, "alone": True, "parent": "",
            }  # fmt: skip
            assert _version(hello["python"]) == _says(python)

            code = "import sys\nprint(sys.stdin.read(), sys._getframe().f_back)\nsys.exit(3)"
            report, out, err = host.call(1, Call(code=code, stdin=b"in"))
            assert (report.exit_code, out, err) == (3, b"in None\n", b"")

            report, out, err = host.call(2, Call(argv=("sh", "-c", "cat; echo said >&2"), stdin=b"given"))
            assert (report.exit_code, out, err) == (0, b"given", b"said\n")

            report, out, err = host.call(3, Call(code="def f():\n    1/0\nf()\n"))
            assert (report.exit_code, out) == (1, b"")
            lines = re.sub(rb"/proc/\d+/fd/\d+", b"FILE", err).splitlines()
            assert lines[:2] == [b"Traceback (most recent call last):", b'  File "FILE", line 3, in <module>']
            assert lines[-1] == b"ZeroDivisionError: division by zero"
            assert b"emberpool" not in err
            host.stdin.close()
            assert (runner.stderr.read(), runner.wait(20)) == (b"", 0)
        finally:
            runner.kill()


def _version(full: object) -> str:
    return ".".join(str(full).split(".")[:2])
