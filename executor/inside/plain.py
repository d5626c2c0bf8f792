# mypy: ignore-errors
"""The program that carries out one call by plain exec or plain run; the loader of ``executor.sandbox.request`` feeds it to Python.

It runs in the image's own Python (3.8 or newer) and finds ``r`` (read exactly so many bytes of stdin, unbuffered) in its
globals, so that the call's own stdin begins right after the request. It imports only what a starting interpreter has
imported already: `json`, `signal` and `linecache` would cost each call some 5 to 10 ms.
"""

import os
import sys

WITNESS_WHICH = 0x454D4250  # as executor.sandbox.seccomp has it
PROVED, REFUSED = b"\x06", b"\x15"  # the first byte of stdout, as executor.engine.attached reads it
CANNOT_RUN, NOT_FOUND = 126, 127  # what a shell answers, and people know


def read_field():
    size = int.from_bytes(r(4), "big")  # noqa: F821 - the loader's own reader
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, min(size - len(data), 1 << 20))
        if not chunk:
            os._exit(125)
        data += chunk
    return bytes(data)


def read_words():
    text = read_field().decode("utf-8")
    return text.split("\0") if text else []


def run_program(argv):
    # The C half of `signal`: the other half builds enums for some milliseconds.
    import _signal

    # The interpreter ignores these; a program must find them at their defaults.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(_signal, name):
            _signal.signal(getattr(_signal, name), _signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is meant
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        os.write(2, os.fsencode("%s: %s\n" % (argv[0], os.strerror(error.errno or 0))))
        os._exit(NOT_FOUND if missing else CANNOT_RUN)


def run_code(source, interpreter):
    """Become ``python3 -I -B FILE``: same bytes, same behaviour, and nothing of this program below the caller's code."""
    import fcntl

    # A real but nameless file, so that tracebacks and everything else that looks for source lines can open it.
    low = os.memfd_create("call.py")
    left = memoryview(source)
    try:
        while left:
            left = left[os.write(low, left) :]
    except OSError as error:
        os.write(2, os.fsencode("the call's code: %s\n" % os.strerror(error.errno or 0)))
        os._exit(CANNOT_RUN)
    os.lseek(low, 0, os.SEEK_SET)
    # Out of the way of descriptors that are counted on to be free, and inherited by the interpreter.
    fd = fcntl.fcntl(low, fcntl.F_DUPFD, min(os.sysconf("SC_OPEN_MAX"), 1024) - 1)
    os.close(low)
    program = sys.executable or "python3"
    try:
        os.execvp(program, [*interpreter, "/proc/%d/fd/%d" % (os.getpid(), fd)])  # noqa: S606 - no shell is meant
    except OSError as error:
        os.write(2, os.fsencode("%s: %s\n" % (program, os.strerror(error.errno or 0))))
        os._exit(CANNOT_RUN)


def prove(expected):
    """Say that the boundary is in force, before anything of the call is even read; without it there is no call.

    Nothing of the call's can come before this byte on stdout, so its code cannot say it either.
    """
    found = ""
    try:
        os.getpriority(WITNESS_WHICH, 0)
    except OSError as error:
        found = str(error.errno)
    if expected and found != expected:
        os.write(1, REFUSED)
        os._exit(CANNOT_RUN)
    os.write(1, PROVED)


def main():
    cwd, kind, witness, *interpreter = read_words()
    prove(witness)
    env, body = read_words(), read_field()
    os.environ.clear()
    for entry in env:
        key, _, value = entry.partition("=")
        os.environ[key] = value
    try:
        os.chdir(cwd)
    except OSError as error:
        os.write(2, os.fsencode("%s: %s\n" % (cwd, os.strerror(error.errno or 0))))
        os._exit(CANNOT_RUN)
    if kind == "argv":
        run_program(body.decode("utf-8").split("\0"))
    else:
        run_code(body, interpreter)


main()
