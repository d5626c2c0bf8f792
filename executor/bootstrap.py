"""The program that carries out one call inside the container; the loader of ``executor.call`` feeds it to Python.

It runs in the image's own Python (3.8 or newer), imports only the standard library, and finds ``r`` (read exactly so many
bytes of stdin, unbuffered) in its globals, so that the call's own stdin begins right after the request.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# (annotations would need `typing`, which costs an interpreter some milliseconds)

import json
import os
import signal
import sys

CANNOT_RUN, NOT_FOUND = 126, 127  # what a shell answers, and people know


def read_request():
    size = int.from_bytes(r(4), "big")  # type: ignore[name-defined] # noqa: F821 - the loader's own reader
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, min(size - len(data), 1 << 20))
        if not chunk:
            os._exit(125)
        data += chunk
    return json.loads(bytes(data))


def run_program(argv):
    # The interpreter ignores these; a program must find them at their defaults.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is meant
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        os.write(2, os.fsencode("%s: %s\n" % (argv[0], os.strerror(error.errno or 0))))
        os._exit(NOT_FOUND if missing else CANNOT_RUN)


def run_code(source):
    import linecache
    import types

    name = "<call>"
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [name]
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    try:
        exec(compile(source, name, "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        # Shown without this file's own frame: the first line is the caller's code.
        trace = error.__traceback__
        error = error.with_traceback(trace.tb_next if trace is not None else None)
        if sys.excepthook is sys.__excepthook__:
            # The interpreter's own hook looks for source lines in files; this one finds the caller's in linecache.
            import traceback

            traceback.print_exception(type(error), error, error.__traceback__)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def main():
    request = read_request()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if "argv" in request:
        run_program(request["argv"])
    else:
        run_code(request["code"])


main()
