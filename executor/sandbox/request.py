"""One call to a sandbox: its fields, checked before anything is started, and the bytes that carry it inside.

Nothing of a call shows in ``ps`` or in an engine's events: the engine's client is given a tiny loader and a random token,
and the program that carries the call out, its request and its stdin follow on the client's stdin.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from executor import inside
from executor.errors import EngineUnavailable, InvalidCall
from executor.sandbox.profile import CALL_ENV, check_argv

MAX_ARGUMENT = 131_071
"""Bytes that Linux allows in one argument or environment entry (MAX_ARG_STRLEN less its NUL)."""
MAX_ARGUMENTS = 1_048_576
"""Bytes that all arguments may have, and the environment as much again, each entry with its NUL and its pointer: together
what an 8 MiB stack limit allows."""
MAX_CODE = 60_000_000
"""Bytes of code that a call can have at all: what a runner takes in one frame, less room for the rest of a request."""
_ENTRY = 9
"""Bytes of an entry besides its text: a NUL and a pointer."""
MAX_PATH = 4_095
MAX_ENV_LINE = 65_535
"""Bytes of a line that engine clients read in an ``--env-file``."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH that engines use in an image that sets none."""

_AT_START = frozenset({"LANG", "LANGUAGE", "TZ", "GLIBC_TUNABLES"})
_ENV_KEY = re.compile(r"[^=\0]+\Z")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

LOADER = (
    "import os\n"
    "def r(n):\n"
    " b=b''\n"
    " while len(b)<n:\n"
    "  c=os.read(0,n-len(b))\n"
    "  if not c:os._exit(125)\n"
    "  b+=c\n"
    " return b\n"
    "exec(compile(r(int.from_bytes(r(4),'big')),'<emberpool>','exec'))"
)
"""The program in the client's argv, in the call's place: read a length, read a program, run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One execution: a program (``argv``) or Python source (``code``), exactly one of them.

    ``env`` is added to what every call gets (``executor.sandbox.profile.CALL_ENV``); it is the caller's explicit choice and nothing
    of the host's environment is ever added to it. ``timeout`` is seconds from the start of the call to its answer;
    ``max_output`` is the bytes kept of each of stdout and stderr; ``cwd`` is where it begins; ``unbuffered`` runs
    ``code`` as ``python3 -u`` would, so that what it prints is sent at once. Raises ``InvalidCall`` naming the field.
    """

    argv: tuple[str, ...] = ()
    code: str | None = None
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 60.0
    max_output: int = 1_048_576
    max_input: int = 33_554_432
    cwd: str = CALL_ENV["HOME"]
    unbuffered: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.argv, (tuple, list)):
            raise InvalidCall(f"argv must be a list of strings, not {type(self.argv).__name__}")
        if bool(self.argv) == (self.code is not None):
            raise InvalidCall("give either argv (a non-empty list: the program and its arguments) or code, not both")
        if not isinstance(self.stdin, bytes):
            raise InvalidCall(f"stdin must be bytes, not {type(self.stdin).__name__}")
        if self.code is None:
            _check_argv(self.argv)
        total = _text_size("code", self.code or "") + len(self.stdin)
        if total > self.max_input:
            raise InvalidCall(f"code and stdin are {total} bytes together; at most {self.max_input} are taken")
        if not isinstance(self.unbuffered, bool):
            raise InvalidCall(f"unbuffered must be True or False, not {type(self.unbuffered).__name__}")
        if not _is_number(self.timeout) or not 0 < self.timeout < 1e9:
            raise InvalidCall(f"timeout must be above 0 seconds; it is {self.timeout!r:.40}")
        if not isinstance(self.max_output, int) or not _is_number(self.max_output) or self.max_output < 0:
            raise InvalidCall(f"max_output must be 0 or more whole bytes; it is {self.max_output!r:.40}")
        if self.env or type(self.env) is not dict:
            _check_env(self.env)
        if self.cwd != CALL_ENV["HOME"]:
            self._check_cwd()

    def _check_cwd(self) -> None:
        if not self.cwd.startswith("/") or "\0" in self.cwd or _text_size("cwd", self.cwd) > MAX_PATH:
            raise InvalidCall(f"cwd must be an absolute path of at most {MAX_PATH} bytes; it is {self.cwd!r:.60}")

    def within(self, seconds: float) -> Call:
        """Return the same call with ``seconds`` left, not checked again; a difference below a millisecond is ignored."""
        if self.timeout - 0.001 <= seconds <= self.timeout:
            return self
        call = copy.copy(self)
        object.__setattr__(call, "timeout", seconds)
        return call

    def with_code(self, code: str) -> Call:
        """Return the same call with other Python source, which is our own and not checked."""
        call = copy.copy(self)
        object.__setattr__(call, "code", code)
        return call

    @property
    def kind(self) -> str:
        """``argv`` or ``python``, for logs."""
        return "argv" if self.code is None else "python"

    def client_argv(self, token: str) -> tuple[str, ...]:
        """The argv that the engine runs in an image with Python: the loader, and a token by which to recognise the exec."""
        return ("python3", "-I", "-B", "-c", LOADER, token)

    def request(self) -> bytes:
        """The call as a runner's child reads it: the lengths of its options and of its code (4 bytes each), then both.

        The options are a JSON object with the fields that differ from plain Python code in the base environment: ``env``,
        ``cwd``, ``argv``, ``interpreter`` or ``unbuffered``; empty bytes where there are none.
        """
        options: dict[str, Any] = {}
        if self.cwd != CALL_ENV["HOME"]:
            options["cwd"] = self.cwd
        if self.env:
            options["env"] = dict(self.env)
        if self.code is None:
            options["argv"] = list(self.argv)
        elif interpreter := _interpreter(self.env):
            options["interpreter"] = self._options(interpreter)
        elif self.unbuffered:
            options["unbuffered"] = True
        head = json.dumps(options).encode("ascii") if options else b""
        code = (self.code or "").encode("utf-8")
        return struct.pack(">II", len(head), len(code)) + head + code

    def _options(self, interpreter: list[str]) -> list[str]:
        return [*interpreter, *["-u"] * self.unbuffered]

    def payload(self, image_env: Iterable[str] = (), *, witness: str = "") -> bytes:
        """The bytes for the loader before the call's own stdin: the program, then its request, each length-prefixed.

        ``witness`` is the error number that shows the seccomp profile inside, empty where none is asked for.
        """
        env = "\0".join(f"{key}={value}" for key, value in {**base_env(image_env), **self.env}.items())
        body = self.code if self.code is not None else "\0".join(self.argv)
        interpreter = self._options(_interpreter(self.env) or ["python3", "-I", "-B"])
        fields = ("\0".join((self.cwd, self.kind, witness, *interpreter)), env, body)
        return _frame(_program()) + b"".join(_frame(text.encode("utf-8")) for text in fields)


def check_code(call: Call, file_size_mb: int | None) -> None:
    """Raise ``InvalidCall`` where a call's code is too large: inside it is a file, under the limit for files."""
    limit = MAX_CODE if file_size_mb is None else min(MAX_CODE, file_size_mb << 20)
    if call.code is None or len(call.code) * 4 <= limit:  # a character has at most 4 bytes
        return
    size = _text_size("code", call.code)
    if size > limit:
        why = " (sandbox.file_size_mb, since code is a file inside)" if limit < MAX_CODE else ""
        raise InvalidCall(
            f"code is {size} bytes; at most {limit} are taken{why}. Send data on stdin, or raise the limit"
        )


def base_env(image_env: Iterable[str]) -> dict[str, str]:
    """Return what every call's environment starts from, in an image and profile with ``image_env`` (``KEY=VALUE``).

    It is sent from the host, and the container's own environment is dropped: a client's configuration can have added
    proxies and their passwords to that one.
    """
    own = dict(item.split("=", 1) for item in image_env if "=" in item)
    return {"PATH": DEFAULT_PATH, **own, **CALL_ENV}


@contextmanager
def call_input(
    call: Call, *, python: bool, image_env: Iterable[str] = (), witness: str = ""
) -> Iterator[tuple[tuple[bytes, ...], str]]:
    """Yield how a call gets inside: what to write to the client's stdin, and the path for ``--env-file`` (``""`` for none).

    An image without Python has no loader: its calls are argv only, stdin is the call's own, and the environment goes by a
    private file, since no caller's value may enter the environment of the engine's client.
    """
    if python:
        yield (call.payload(image_env, witness=witness), call.stdin), ""
        return
    if call.code is not None:
        raise InvalidCall("the image has no python3, so it runs argv calls only; configure an image with Python")
    lines = [_env_line(key, value) for key, value in {**CALL_ENV, **call.env}.items()]
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="emberpool-env-", encoding="utf-8"))
            file.write("".join(lines))
            file.flush()
        except OSError as error:
            raise EngineUnavailable(f"the file with a call's environment cannot be written: {error}") from error
        yield (call.stdin,), file.name


def _env_line(key: str, value: str) -> str:
    if not _PLAIN_KEY.match(key) or "\n" in value or "\r" in value:
        raise InvalidCall(
            f"env {key[:40]!r}: the image has no python3, so a name must match {_PLAIN_KEY.pattern} and a value be one line"
        )
    line = f"{key}={value}"
    if len(line.encode()) > MAX_ENV_LINE:
        raise InvalidCall(f"env {key[:40]!r}: the image has no python3, so an entry is at most {MAX_ENV_LINE} bytes")
    return f"{line}\n"


def new_token() -> str:
    """Return a random word by which one exec is recognised in the engine's events."""
    return secrets.token_hex(8)


@cache
def _program() -> bytes:
    return inside.source("plain").encode()


def _frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text_size(name: str, text: str) -> int:
    if not isinstance(text, str):
        raise InvalidCall(f"{name} must be a string, not {type(text).__name__}")
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidCall(f"{name} holds a lone surrogate at {error.start}; it must be valid Unicode") from error


def _check_argv(argv: tuple[str, ...]) -> None:
    total = 0
    for index, word in enumerate(argv):
        size = _text_size(f"argv[{index}]", word)
        total += size + _ENTRY
        if size > MAX_ARGUMENT:
            raise InvalidCall(f"argv[{index}] is {size} bytes; the kernel takes {MAX_ARGUMENT}. Send it on stdin")
    if total > MAX_ARGUMENTS:
        raise InvalidCall(f"argv is {total} bytes in all; at most {MAX_ARGUMENTS} are taken. Send data on stdin")
    try:
        check_argv(argv)
    except ValueError as error:
        raise InvalidCall(str(error)) from error


def _interpreter(env: Mapping[str, str]) -> list[str]:
    """Return how to start the interpreter that a call's own environment needs; empty where a running one will do.

    ``PYTHON*`` needs an interpreter that reads it at its start. The others are read by the C library when a process starts.
    """
    if not env:
        return []
    if any(key.startswith("PYTHON") for key in env):
        return ["python3", "-B"]
    if any(key in _AT_START or key.startswith(("LC_", "LD_", "MALLOC_")) for key in env):
        return ["python3", "-I", "-B"]
    return []


def _check_env(env: Mapping[str, str]) -> None:
    if not isinstance(env, Mapping):
        raise InvalidCall(f"env must be a mapping of strings to strings, not {type(env).__name__}")
    total = 0
    for key, value in env.items():
        if not isinstance(key, str) or not _ENV_KEY.match(key):
            raise InvalidCall("env: a name must be a non-empty string without = and NUL")
        size = _text_size("an env name", key) + _text_size(f"env {key[:40]!r}", value) + 1
        total += size + _ENTRY
        if "\0" in value:
            raise InvalidCall(f"env {key[:40]!r}: the value holds a NUL byte, which no kernel accepts")
        if size > MAX_ARGUMENT:
            raise InvalidCall(f"env {key[:40]!r} is {size} bytes; the kernel takes {MAX_ARGUMENT}")
    if total > MAX_ARGUMENTS:
        raise InvalidCall(f"env is {total} bytes in all; at most {MAX_ARGUMENTS} are taken")
