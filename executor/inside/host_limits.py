# mypy: ignore-errors
"""The program that a call on the host starts as: it sets the limits of its own process and becomes the call's program.

Its arguments are a descriptor to report on, ``strict`` or ``lenient``, limits as ``name:RLIMIT_NAME:soft:hard``, ``--``, and
the program with its own. Its stdin begins with the program's environment (a length in 4 bytes, entries with a NUL between
them), which so has no say in this interpreter; the rest is the program's. On the descriptor it says a line for each limit
that could not be set, and ``go`` at last; nobody else can, since it is closed when the program begins. It imports only
what a starting interpreter has imported already, and `resource`.
"""

import _signal  # the C half of `signal`: the other half builds enums for some milliseconds
import os
import sys

CANNOT_RUN, NOT_FOUND = 126, 127  # what a shell answers, and people know


def write(fd, text):
    os.write(fd, text.encode("utf-8", "backslashreplace"))


def set_limit(kind, soft, hard):
    import resource

    number = getattr(resource, kind)
    # A limit that is there already and lower is stricter, and stays.
    most = resource.getrlimit(number)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(number, (soft, hard))


def read_exactly(size):
    data = b""
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            os._exit(CANNOT_RUN)
        data += chunk
    return data


def become(program, env):
    # Python ignores two of these, and the process that started this may ignore others: a program must find them at their defaults.
    for number in range(1, _signal.NSIG):
        try:
            _signal.signal(number, _signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # SIGKILL, SIGSTOP, and what the C library keeps to itself
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
    try:
        os.execvpe(program[0], program, env)  # noqa: S606 - no shell is meant
    except OSError as error:
        write(2, f"{program[0]}: {os.strerror(error.errno or 0)}\n")
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        os._exit(NOT_FOUND if missing else CANNOT_RUN)


def main():
    report, strict, end = int(sys.argv[1]), sys.argv[2] == "strict", sys.argv.index("--")
    os.set_inheritable(report, False)
    failed = False
    for word in sys.argv[3:end]:
        name, kind, soft, hard = word.split(":")
        try:
            set_limit(kind, int(soft), int(hard))
        except Exception as error:
            failed = True
            write(report, f"{name}: {error}\n")
    if failed and strict:
        os._exit(CANNOT_RUN)
    entries = read_exactly(int.from_bytes(read_exactly(4), "big"))
    env = dict(entry.split(b"=", 1) for entry in entries.split(b"\0") if entry)
    write(report, "go\n")
    become(sys.argv[end + 1 :], env)


main()
