"""Become the caller's code: prepare a fresh-looking interpreter, wait for the call, run it, and end."""

import _operator
import fcntl
import functools
import gc
import itertools
import json
import os
import resource
import signal
import sys

from executor.inside.runner.exit import NO_HOOK, SOURCE, ExitCheck
from executor.inside.runner.fork import ASK, ASK_READY, expose

CANNOT_RUN, NOT_FOUND = 126, 127  # the exit statuses that a shell uses
PRESENT = set()  # the modules that a call finds loaded


class Prepared:
    """In the child, ahead of the call: an interpreter like a fresh one, with a nameless file for the call's source.

    The file is real, so that tracebacks, ``inspect`` and the processes of ``multiprocessing`` can open it. Every page that
    a call writes to is written to once here: a forked process copies a page at its first write, and a waiting child has
    the time for it.
    """

    def __init__(self, libc, config, hidden, beside):
        self._libc, self._hidden, self._beside = libc, hidden, beside
        os.environ.clear()
        os.environ.update(config["env"])
        os.chdir(config["cwd"])
        if config["cpu_seconds"]:
            resource.setrlimit(resource.RLIMIT_CPU, (config["cpu_seconds"], config["cpu_seconds"] + 1))
        libc.keep_memory()  # after the call's limits are set: its code can make that process work for it
        low = os.memfd_create("call.py")
        # A high number, as programs count on the low ones to be free; inherited, as a program may run itself again.
        self.fd = fcntl.fcntl(low, fcntl.F_DUPFD, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024) - 1)
        os.close(low)
        self.name = "/proc/%d/fd/%d" % (os.getpid(), self.fd)
        self._stream = libc.file(os.dup(self.fd))
        self._results, self._watched = [], []
        self._steps = []
        sys.path_importer_cache[self.name] = None
        for module in set(sys.modules) - PRESENT:  # `wait4` imports one by itself
            del sys.modules[module]
        sys.argv = [self.name]
        if hasattr(sys, "orig_argv"):
            sys.orig_argv = ["python3", "-I", "-B", self.name]
        self.rehearse()
        gc.collect()
        self.exit_check = ExitCheck()

    def rehearse(self):
        """Run a small program in the way in which the call's code is run."""
        self.store(REHEARSAL.encode("utf-8"))
        self._libc.run_file(self._libc.file(os.dup(self.fd)), os.fsencode(self.name), 1, None)
        os.lseek(self.fd, 0, os.SEEK_SET)
        os.ftruncate(self.fd, 0)

    def store(self, data):
        """Write the source into the nameless file."""
        written = 0
        while written < len(data):
            written += os.write(self.fd, data[written:])
        os.lseek(self.fd, 0, os.SEEK_SET)

    def hook(self):
        """Return the callable that carries out the call. The interpreter calls it as ``sys.excepthook``, with no frame of ours left.

        Between it and the caller's code there is only C, so that the code finds no frame below its own, and errors, exits
        and the end are handled by the interpreter's own code. Each step is a callable without arguments whose result is
        false; ``any`` calls them in order. ``max`` takes the three arguments of a hook and passes each to ``key``, which
        drops it.
        """
        call = functools.partial.__call__
        run = map(self._libc.run_file, [self._stream], [os.fsencode(self.name)], [1], [None])
        watching = map(_operator.is_not, self._watched, itertools.repeat(None))
        self._steps += (
            functools.partial(self.begin),
            functools.partial(self._results.extend, run),
            # A tracer or profiler of the caller's code must not see the code that runs after it.
            functools.partial(self._watched.extend, map(call, map(functools.partial, (sys.gettrace, sys.getprofile)))),
            functools.partial(any, map(call, itertools.compress(QUIET, watching))),
            functools.partial(self.finish),
        )
        steps = functools.partial(any, map(call, self._steps))
        return functools.partial(max, key=functools.partial(next, itertools.chain(map(call, [steps]), (0, 0))))

    def begin(self):
        """Wait for the call, and become the process that its code expects."""
        self.exit_check.rehearse(SOURCE)
        self.rehearse()  # again: the exit check has changed which memory is used next
        gc.collect()
        self.exit_check.settle()
        os.write(ASK_READY, b"1")
        os.close(ASK_READY)
        request, code = await_call()
        if self._hidden:
            if self._beside:
                expose(self._libc)
            else:
                self._libc.unprotect()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
        sys.excepthook = sys.__excepthook__
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            sys.__dict__.pop(name, None)
        if "argv" in request:
            os.close(self.fd)
            replace(request["argv"][0], request["argv"])
        try:
            self.store(code)
        except OSError as error:
            refuse("the call's code", error)
        if request.get("interpreter"):
            replace(sys.executable or "python3", request["interpreter"] + [self.name])
        if request.get("unbuffered"):
            self.unbuffer()
        main = sys.modules["__main__"] = type(sys)("__main__")
        main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
        # Together these move all objects to the oldest generation, so that the young ones will be the call's.
        gc.freeze()
        gc.unfreeze()
        gc.enable()

    def unbuffer(self):
        """Turn the standard streams into those of ``python3 -u``. They stay the same objects, as modules may hold them already."""
        self._libc.unbuffer()
        sys.stdin.reconfigure(write_through=True)
        for stream in (sys.stdout, sys.stderr):
            encoding, errors = stream.encoding, stream.errors
            stream.__init__(stream.detach().detach(), encoding, errors, "\n", write_through=True)
        if hasattr(sys, "orig_argv"):
            sys.orig_argv.insert(3, "-u")

    def finish(self):
        """End the process after the caller's code: at once where nothing could notice, else by the interpreter's own end."""
        failed = self._results[0] != 0
        try:
            # After an interrupt only the interpreter can end the process by SIGINT. A hook may have hidden the interrupt.
            interrupted = failed and (sys.excepthook is not SHOW or sys.last_type is KeyboardInterrupt)
            if not interrupted and self.exit_check.allows_exit():
                sys.stdout.flush()
                sys.stderr.flush()
                QUIT(1 if failed else 0)
        except BaseException:  # noqa: S110 - the interpreter's own end reports it
            pass
        trace, profile = self._watched
        if trace is not None:
            self._steps.append(functools.partial(sys.settrace, trace))
        if profile is not None:
            self._steps.append(functools.partial(sys.setprofile, profile))
        if not failed:
            # After a failure the interpreter ends as after any other one: with 1, or by SIGINT.
            self._steps.append(functools.partial(EXIT, 0))


QUIET = functools.partial(sys.settrace, None), functools.partial(sys.setprofile, None)
EXIT, QUIT, SHOW = sys.exit, os._exit, sys.excepthook  # as they were before any code of a call


def refuse(what, error):
    """End the call before its code has begun, with a message on stderr."""
    os.write(2, os.fsencode("%s: %s\n" % (what, os.strerror(error.errno or 0))))
    os._exit(CANNOT_RUN)


def replace(path, argv):
    """Become another program. Where that fails, end with a message on stderr and a shell's exit status."""
    for name in ("SIGPIPE", "SIGXFSZ"):  # the interpreter ignores these; a program must find them at their defaults
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(path, argv)
    except OSError as error:
        os.write(2, os.fsencode("%s: %s\n" % (argv[0], os.strerror(error.errno or 0))))
        os._exit(NOT_FOUND if isinstance(error, (FileNotFoundError, NotADirectoryError)) else CANNOT_RUN)


REHEARSAL = """
import sys
def rehearse(many):
    return {str(one): [one, one * 1.5, (one,)] for one in range(many)}
class Rehearsal:
    def method(self):
        return "%s" % rehearse(3)
Rehearsal().method()
print(end="")
sys.stdout.write("")
sys.stdout.flush()
"""


def await_call():
    """In the child: wait for the request on descriptor ``ASK``. Returns what differs from a plain call, and the code."""
    data = bytearray()

    def read_to(size):
        while len(data) < size:
            # A large read costs new memory each time.
            chunk = os.read(ASK, min(1 << 20, max(4096, size - len(data))))
            if not chunk:
                os._exit(0)  # the runner has ended, so no call will come
            data.extend(chunk)

    read_to(8)
    more, size = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:8], "big")
    read_to(8 + more + size)
    request = json.loads(data[8 : 8 + more]) if more else {}
    os.close(ASK)
    if "env" in request:
        os.environ.update(request["env"])
    if "cwd" in request:
        try:
            os.chdir(request["cwd"])
        except OSError as error:
            refuse(request["cwd"], error)
    return request, data[8 + more :]


def prepare_child(libc, config, hidden=False, beside=False):
    """In the child: prepare for the call.

    A child that will wait beside other calls' code is protected from it (``hidden``) until its own call has come. One that
    was forked beside that code (``beside``) has been protected from the start.
    """
    prepared = Prepared(libc, config, hidden, beside)
    sys.addaudithook(NO_HOOK.pop)
    if hidden:
        libc.hide()
    return prepared
