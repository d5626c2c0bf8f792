"""A call is checked before anything starts, and call_input inside byte for byte."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engine.attached import PROVED, REFUSED
from executor.errors import EngineUnavailable, InvalidCall
from executor.sandbox.profile import CALL_ENV
from executor.sandbox.request import (
    DEFAULT_PATH,
    LOADER,
    MAX_ARGUMENT,
    MAX_CODE,
    Call,
    base_env,
    call_input,
    check_code,
    new_token,
)
from executor.sandbox.seccomp import WITNESS_ERRNO
from pool.config.load import Settings
from pool.supervisor.requests import checked_call
from tests.support.wire import request

BAD: dict[str, tuple[str, Callable[[], object]]] = {
    "neither": ("argv .* or code", Call),
    "both": ("not both", lambda: Call(argv=("ls",), code="1")),
    "argv text": ("argv must be a list", lambda: Call(argv="ls")),  # type: ignore[arg-type]
    "argv bytes": ("argv must be a list", lambda: Call(argv=b"ls")),  # type: ignore[arg-type]
    "argv none": ("argv must be a list", lambda: Call(argv=None, code="1")),  # type: ignore[arg-type]
    "argv empty program": (r"argv\[0\]", lambda: Call(argv=("",))),
    "argv number": (r"argv\[1\] must be a string", lambda: Call(argv=("ls", 5))),  # type: ignore[arg-type]
    "argv nul": (r"argv\[1\] holds a NUL", lambda: Call(argv=("ls", "a\0b"))),
    "argv surrogate": (r"argv\[1\] holds a lone surrogate", lambda: Call(argv=("ls", "\ud800"))),
    "argv word too long": (r"argv\[1\] is 131072 bytes", lambda: Call(argv=("ls", "x" * (MAX_ARGUMENT + 1)))),
    "argv word too long in bytes": (r"argv\[1\] is", lambda: Call(argv=("ls", "é" * 65_536))),
    "argv too long": ("argv is .* in all", lambda: Call(argv=("ls", *["x" * 100_000] * 11))),
    "argv of too many words": ("argv is .* in all", lambda: Call(argv=("x",) * 200_000)),
    "code bytes": ("code must be a string", lambda: Call(code=b"1")),  # type: ignore[arg-type]
    "code surrogate": ("code holds a lone surrogate at 2", lambda: Call(code="a=\udfff")),
    "stdin text": ("stdin must be bytes, not str", lambda: Call(code="1", stdin="x")),  # type: ignore[arg-type]
    "stdin none": ("stdin must be bytes", lambda: Call(code="1", stdin=None)),  # type: ignore[arg-type]
    "stdin too long": ("11 bytes together; at most 10", lambda: Call(code="1", stdin=b"x" * 10, max_input=10)),
    "code too long": ("together", lambda: Call(code="#" * 11, max_input=10)),
    "env list": ("env must be a mapping", lambda: Call(code="1", env=[("A", "b")])),  # type: ignore[arg-type]
    "env none": ("env must be a mapping", lambda: Call(code="1", env=None)),  # type: ignore[arg-type]
    "env empty name": ("env: a name", lambda: Call(code="1", env={"": "x"})),
    "env sign in name": ("env: a name", lambda: Call(code="1", env={"A=B": "x"})),
    "env nul in name": ("env: a name", lambda: Call(code="1", env={"A\0": "x"})),
    "env number as name": ("env: a name", lambda: Call(code="1", env={1: "x"})),  # type: ignore[dict-item]
    "env number as value": ("env 'A' must be a string", lambda: Call(code="1", env={"A": 1})),  # type: ignore[dict-item]
    "env nul in value": ("env 'A'.* NUL", lambda: Call(code="1", env={"A": "x\0"})),
    "env surrogate": ("env 'A' holds a lone surrogate", lambda: Call(code="1", env={"A": "\ud800"})),
    "env surrogate in name": ("env name holds a lone", lambda: Call(code="1", env={"\ud800": "x"})),
    "env value too long": ("env 'A' is", lambda: Call(code="1", env={"A": "x" * MAX_ARGUMENT})),
    "env too long": ("env is .* in all", lambda: Call(code="1", env={f"A{n}": "x" * 100_000 for n in range(11)})),
    "timeout zero": ("timeout", lambda: Call(code="1", timeout=0)),
    "timeout negative": ("timeout", lambda: Call(code="1", timeout=-1)),
    "timeout nan": ("timeout", lambda: Call(code="1", timeout=float("nan"))),
    "timeout infinite": ("timeout", lambda: Call(code="1", timeout=float("inf"))),
    "timeout text": ("timeout", lambda: Call(code="1", timeout="5")),  # type: ignore[arg-type]
    "timeout none": ("timeout", lambda: Call(code="1", timeout=None)),  # type: ignore[arg-type]
    "timeout bool": ("timeout", lambda: Call(code="1", timeout=True)),
    "output negative": ("max_output", lambda: Call(code="1", max_output=-1)),
    "output fraction": ("max_output", lambda: Call(code="1", max_output=1.5)),  # type: ignore[arg-type]
    "output none": ("max_output", lambda: Call(code="1", max_output=None)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", BAD)
def test_bad_call_is_refused_and_its_field_is_named(case: str) -> None:
    message, build = BAD[case]
    with pytest.raises(InvalidCall, match=message) as caught:
        build()
    assert len(str(caught.value)) < 300


LEAKY: list[Callable[[], object]] = [
    lambda: Call(code="1", env={"A": "secret\0"}),
    lambda: Call(code="secret\ud800"),
    lambda: Call(argv=("ls", "secret\0")),
    lambda: Call(argv=("secret" * 30_000,)),
]


@pytest.mark.parametrize("build", LEAKY)
def test_refusal_repeats_no_value(build: Callable[[], object]) -> None:
    with pytest.raises(InvalidCall) as caught:
        build()
    assert "secret" not in str(caught.value)


def test_what_a_kernel_takes_is_accepted() -> None:
    assert Call(argv=("ls", "", "-x", "é\n", "x" * MAX_ARGUMENT)).kind == "argv"
    assert Call(code="", stdin=b"\0\xff", env={"a-b.c": "\n", "É": ""}, timeout=0.001, max_output=0).kind == "python"


def test_client_argv_holds_the_loader_and_a_token_and_nothing_of_the_call() -> None:
    call = Call(code="secret", env={"secret": "secret"}, stdin=b"secret")
    assert call.client_argv("t0ken") == ("python3", "-I", "-B", "-c", LOADER, "t0ken")
    assert new_token() != new_token()
    assert new_token().isalnum()


def frames(data: bytes) -> list[bytes]:
    found = []
    while data:
        (size,) = struct.unpack(">I", data[:4])
        found.append(data[4 : 4 + size])
        assert len(found[-1]) == size
        data = data[4 + size :]
    return found


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@given(st.lists(texts, max_size=4), texts, st.dictionaries(texts.filter(lambda key: key and "=" not in key), texts))
def test_payload_carries_the_request_and_nothing_else(rest: list[str], code: str, env: dict[str, str]) -> None:
    for call, part in (
        (Call(argv=("prog", *rest), env=env), "\0".join(["prog", *rest])),
        (Call(code=code, env=env), code),
        (Call(code=code, env=env, unbuffered=True), code),
    ):
        image_env = ["PATH=/image/bin", "A-OF-IMAGE=1=2", "USER=image"]
        program, place, sent, body = frames(call.payload(image_env))
        assert program.endswith(b"main()\n")
        expected = {"PATH": "/image/bin", "A-OF-IMAGE": "1=2", **CALL_ENV, **env}
        isolated = ["-I"] * (not any(key.startswith("PYTHON") for key in env))
        interpreter = ["python3", *isolated, "-B", *["-u"] * call.unbuffered]
        assert place.decode().split("\0") == ["/tmp", call.kind, "", *interpreter]
        assert dict(item.split("=", 1) for item in sent.decode().split("\0")) == expected
        assert body.decode() == part
        asked = request(call.request())
        assert {**base_env(image_env), **asked["env"]} == expected
        assert asked.get("code", "\0".join(asked.get("argv", []))) == part
        assert call.payload() != call.payload(["PATH=/image/bin"])


def test_image_without_a_path_gets_the_one_that_engines_use() -> None:
    assert base_env(["BROKEN"]) == {"PATH": DEFAULT_PATH, **CALL_ENV}


def test_image_without_python_takes_its_environment_from_a_private_file_that_goes_away() -> None:
    call = Call(argv=("env",), env={"A": "b c=#d ", "B": ""}, stdin=b"in")
    with call_input(call, python=False) as (stdin, path):
        assert stdin == (b"in",)
        file = Path(path)
        assert file.read_text("utf-8") == "".join(
            f"{k}={v}\n" for k, v in {**CALL_ENV, "A": "b c=#d ", "B": ""}.items()
        )
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not file.exists()
    with call_input(call, python=True) as (stdin, path):
        assert (stdin, path) == ((call.payload(), b"in"), "")


@pytest.mark.parametrize(
    "call",
    [
        Call(code="1"),
        *(Call(argv=("env",), env={"A": value}) for value in ("a\nb", "a\rb", "x" * 65_534)),
        *(Call(argv=("env",), env={key: "x"}) for key in ("#A", "A B", "1A", " A", "É", "A\n")),
    ],
)
def test_what_an_env_file_cannot_hold_is_refused(call: Call) -> None:
    with pytest.raises(InvalidCall, match="no python3") as caught, call_input(call, python=False):
        pass
    assert len(str(caught.value)) < 300


# From here on: the loader and the bootstrap, run by this interpreter as an engine would run them.


def inside(call: Call, *, stdin: bytes | None = None, **more: Any) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, *call.client_argv("token")[1:]]
    data = call.payload([f"PATH={os.environ['PATH']}"]) + (call.stdin if stdin is None else stdin)
    env = {"HTTP_PROXY": "http://user:secret@proxy", "LC_CTYPE": "C", "PATH": "/nowhere"}
    done = subprocess.run(argv, input=data, capture_output=True, timeout=60, check=False, env=env, **more)
    assert done.stdout[:1] == PROVED  # before anything of the call's own
    done.stdout = done.stdout[1:]
    return done


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 3000, b"\n\0\r\n"])
def test_stdin_after_the_request_is_the_calls_own_to_the_byte(data: bytes) -> None:
    code = "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())"
    assert inside(Call(code=code, stdin=data)).stdout == data
    assert inside(Call(argv=("cat",), stdin=data)).stdout == data


def test_stdin_arrives_in_pieces_of_any_size() -> None:
    call = Call(code="import sys\nprint(len(sys.stdin.read()), 'é')", stdin=b"y" * 100_000)
    data = call.payload() + call.stdin
    child = subprocess.Popen(
        [sys.executable, *call.client_argv("t")[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert child.stdin is not None
    for cut in [*range(0, 40), *range(40, len(data), 1009)]:
        end = cut + 1 if cut < 40 else cut + 1009
        child.stdin.write(data[cut:end])
    assert child.communicate()[0] == PROVED + "100000 é\n".encode()
    assert child.returncode == 0


def test_environment_is_exactly_the_requests_own() -> None:
    env = {"MINE": "a\nb é", "a-b": "c"}
    code = "import json, os\nprint(json.dumps([dict(os.environ), os.getcwd()]))"
    expected = {"PATH": os.environ["PATH"], **CALL_ENV, **env}
    assert json.loads(inside(Call(code=code, env=env)).stdout) == [expected, "/tmp"]
    shown = inside(Call(argv=(sys.executable, "-I", "-c", code), env=env))
    # A Python that is started anew may add what its locale needs.
    assert {**json.loads(shown.stdout)[0], "LC_CTYPE": ""} == {**expected, "LC_CTYPE": ""}


@pytest.mark.parametrize(
    ("code", "status", "stderr"),
    [
        ("", 0, ""),
        ("import sys\nsys.exit()", 0, ""),
        ("import sys\nsys.exit(0)", 0, ""),
        ("import sys\nsys.exit(7)", 7, ""),
        ("import sys\nsys.exit(256 + 7)", 7, ""),
        ("import sys\nsys.exit(True)", 1, ""),
        ("import sys\nsys.exit('why')", 1, "why\n"),
        ("import sys\nsys.exit(['a'])", 1, "['a']\n"),
        ("raise SystemExit", 0, ""),
        ("import os\nos._exit(9)", 9, ""),
        ("import atexit, os\natexit.register(os.write, 2, b'last\\n')\nraise SystemExit(3)", 3, "last\n"),
    ],
)
def test_exit_status_is_what_the_code_asked_for(code: str, status: int, stderr: str) -> None:
    done = inside(Call(code=code))
    assert (done.returncode, done.stderr.decode()) == (status, stderr)


@pytest.mark.parametrize(
    ("code", "last", "shown"),
    [
        (
            "def f():\n    1 / 0\nf()",
            "ZeroDivisionError: division by zero",
            ["line 3, in <module>", "    f()", "    1 / 0"],
        ),
        ("x = (", "SyntaxError: '(' was never closed", ["line 1", "    x = ("]),
        ("try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('k') from e", "KeyError: 'k'", ["    1 / 0"]),
        ("a\0b", "", ["null bytes"]),
        ("class E(BaseException): pass\nraise E('own')", "E: own", ["line 2, in <module>"]),
        (
            "import sys\nsys.excepthook = lambda kind, *_: print('hook', kind.__name__, file=sys.stderr)\n1 / 0",
            "hook ZeroDivisionError",
            [],
        ),
    ],
)
def test_traceback_shows_the_code_and_none_of_our_frames(code: str, last: str, shown: list[str]) -> None:
    done = inside(Call(code=code))
    text = done.stderr.decode()
    assert done.returncode == 1
    assert text.rstrip().endswith(last)
    for part in shown:
        assert part in text
    for ours in ("<emberpool>", "<string>", "bootstrap", "run_code", "exec("):
        assert ours not in text


def test_call_within_other_seconds_is_otherwise_the_same_and_leaves_the_first_alone() -> None:
    call = Call(code="x", stdin=b"in", env={"A": "b"}, timeout=9.0)
    assert call.within(2.5) == Call(code="x", stdin=b"in", env={"A": "b"}, timeout=2.5)
    assert call.timeout == 9.0


def test_code_runs_as_main_without_our_names() -> None:
    code = """
import sys
import __main__
print(__name__, __main__.__dict__ is globals(), sys.argv)
print(sorted(name for name in globals() if not name.startswith('__')))
"""
    shown = re.sub(r"/proc/\d+/fd/\d+", "FILE", inside(Call(code=code)).stdout.decode())
    assert shown == "__main__ True ['FILE']\n['sys']\n"


def test_program_finds_signals_at_their_defaults_and_no_foreign_descriptor() -> None:
    # As an engine starts it, and not as a test run under nohup, or in a shell's background, would.
    def as_an_engine_does() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)

    status = inside(Call(argv=("cat", "/proc/self/status")), preexec_fn=as_an_engine_does).stdout.decode()
    if "SigIgn:\t" not in status:
        pytest.skip("no /proc here")
    ignored = int(status.split("SigIgn:\t")[1].split()[0], 16)
    blocked = int(status.split("SigBlk:\t")[1].split()[0], 16)
    assert (ignored, blocked) == (0, 0)
    listed = inside(Call(argv=("ls", "/proc/self/fd"))).stdout.split()
    assert listed == [b"0", b"1", b"2", b"3"]  # 3 is the listing itself


def test_program_that_writes_to_a_closed_pipe_ends_by_sigpipe() -> None:
    done = inside(Call(argv=("sh", "-c", "kill -PIPE $$; echo ignored")))
    assert (done.returncode, done.stdout) == (-13, b"")


def test_missing_program_is_127_and_unrunnable_one_126(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    plain.chmod(0o644)
    for program, status, words in (
        ("no-such-program", 127, "No such file or directory"),
        (str(tmp_path / "absent"), 127, "No such file or directory"),
        (f"{plain}/below", 127, "Not a directory"),
        (str(plain), 126, "Permission denied"),
        (str(tmp_path), 126, "Permission denied"),
    ):
        done = inside(Call(argv=(program, "x")))
        assert (done.returncode, done.stderr.decode()) == (status, f"{program}: {words}\n")


def test_program_keeps_its_name_its_arguments_and_its_exit_status() -> None:
    assert shutil.which("sh")
    done = inside(Call(argv=("sh", "-c", 'printf "%s|" "$0" "$@"; exit 42', "name", "", "é", "-x", "a b\n")))
    assert (done.returncode, done.stdout.decode()) == (42, "name||é|-x|a b\n|")


@pytest.mark.parametrize("kept", [0, 3, 4, 100, -1])
def test_request_that_is_cut_off_runs_nothing(kept: int) -> None:
    call = Call(code="print('ran')")
    payload = call.payload()
    done = subprocess.run(
        [sys.executable, *call.client_argv("t")[1:]], input=payload[:kept], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.removeprefix(PROVED)) == (125, b"")


def test_call_whose_boundary_is_not_in_force_runs_nothing() -> None:
    call = Call(code="print('ran')")
    done = subprocess.run(
        [sys.executable, *call.client_argv("t")[1:]],
        input=call.payload(witness=str(WITNESS_ERRNO)), capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (126, REFUSED, b"")


def test_file_of_an_environment_that_cannot_be_written_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("executor.sandbox.request.tempfile.NamedTemporaryFile", full)
    with pytest.raises(EngineUnavailable, match="No space left"), call_input(Call(argv=("true",)), python=False):
        raise AssertionError("there is no file")


@pytest.mark.parametrize(("file_size_mb", "limit"), [(1, 1 << 20), (64, MAX_CODE), (None, MAX_CODE)])
def test_code_is_refused_beyond_what_a_file_and_a_frame_take_counted_in_bytes(
    file_size_mb: int | None, limit: int
) -> None:
    for letter in ("x", "é"):
        fits = letter * (limit // len(letter.encode()))
        check_code(Call(code=fits, max_input=1 << 30), file_size_mb)
        with pytest.raises(InvalidCall, match=f"code is {limit + 1} bytes; at most {limit} are taken") as caught:
            check_code(Call(code=fits + "x", max_input=1 << 30), file_size_mb)
        assert ("sandbox.file_size_mb" in str(caught.value)) is (file_size_mb == 1)
    check_code(Call(argv=("true",), stdin=b"x" * (1 << 21)), 1)


@pytest.mark.parametrize("agent", ["a", "b"])
def test_code_of_a_session_is_held_to_the_limit_for_files_before_anybody_waits(agent: str) -> None:
    settings = Settings(sandbox={"file_size_mb": 1}, agents={"b": {}})
    with pytest.raises(InvalidCall, match=r"sandbox\.file_size_mb"):
        checked_call(settings, agent, None, "x" * ((1 << 20) + 1), b"", None, None, None)
