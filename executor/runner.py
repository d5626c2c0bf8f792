# mypy: ignore-errors
# (annotations would need `typing`, which costs an interpreter some milliseconds)
"""The program at the container's end of a ``docker exec``: it waits for a call, forks for it, and tells the truth of it.

It runs in the image's own Python (3.8 or newer) with nothing but the standard library, one thread, no user code. The
loader of ``executor.call`` feeds it to Python; ``executor.frames`` describes what it and the host say to each other.
A call's process is a child that was forked ahead of the call and waits for it; it comes back from ``run`` to the bottom of
this file, and there becomes the caller's code. The runner itself never comes back.
"""

import sys

BASELINE = frozenset(sys.modules)  # what a fresh interpreter holds; the rest is taken away before a call's code begins

import atexit
import fcntl
import gc
import json
import os
import resource
import select
import signal
import time
import weakref

# Frames, as executor.frames has them: type, sequence number, length, payload.
CALL, INPUT, INPUT_END, CREDIT, CANCEL, LEAVE = 1, 2, 3, 4, 5, 6
HELLO, ARMED, OUT, ERR, TAKEN, DONE, CLEAN, DIRTY, POISONED = 17, 18, 19, 20, 21, 22, 23, 24, 25
HEADER = 9
ASK, ASK_READY = 3, 4  # the descriptors on which a waiting child is given its call, and says that it is prepared
CHUNK = 65536
MAX_FRAME = 1 << 26
BUFFERED = 1 << 18  # bytes that wait for the host before the runner stops reading the call's output
REAP_SECONDS = 4.0
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
CANNOT_RUN, NOT_FOUND = 126, 127  # what a shell answers, and people know


def read_file(path, size=262144):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        data = b""
        while len(data) < size:
            chunk = os.read(fd, size - len(data))
            if not chunk:
                break
            data += chunk
        return data
    except OSError:
        return b""
    finally:
        os.close(fd)


class Libc:
    """The two settings that protect the runner from the code of its own uid. Both are read back."""

    PR_SET_DUMPABLE, PR_GET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 4, 3, 36, 37

    def __init__(self):
        import ctypes

        self._ctypes = ctypes
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def protect(self):
        self._prctl(self.PR_SET_DUMPABLE, 0, 0, 0, 0)
        self._prctl(self.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        subreaper = self._ctypes.c_int(0)
        self._prctl(self.PR_GET_CHILD_SUBREAPER, self._ctypes.byref(subreaper), 0, 0, 0)
        return self._prctl(self.PR_GET_DUMPABLE, 0, 0, 0, 0) == 0, subreaper.value == 1

    def unprotect(self):
        self._prctl(self.PR_SET_DUMPABLE, 1, 0, 0, 0)
        self._prctl(self.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def own_limits():
    """What code of the same uid can take from this process with ``prlimit`` and its like, although it cannot trace it."""
    limits = tuple(resource.getrlimit(kind) for kind in LIMITS)
    return limits, os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)


LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


KEPT = set()  # modules that the operator had preloaded: the one difference that was asked for


class Cgroup:
    """The container's own counters, whichever cgroup version shows them; unreadable ones are ``None``."""

    def __init__(self):
        root = "/sys/fs/cgroup"
        self._pids = self._first(root + "/pids/pids.current", root + "/pids.current")
        self._events = self._first(root + "/memory/memory.oom_control", root + "/memory.events")

    def _first(self, *paths):
        for path in paths:
            if read_file(path):
                return path
        return None

    def pids(self):
        data = read_file(self._pids) if self._pids else b""
        return int(data) if data.strip().isdigit() else None

    def oom_kills(self):
        for line in read_file(self._events).splitlines() if self._events else ():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
        return None


class Runner:
    def __init__(self, config):
        self.config = config
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.host_gone = False
        self.cgroup = Cgroup()
        self.seq = 0
        self.wake_r, self.wake_w = os.pipe()
        for fd in (0, 1, self.wake_r, self.wake_w):
            os.set_blocking(fd, False)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)

    # --- the wire -----------------------------------------------------------------------------------------------------

    def send(self, kind, payload=b""):
        self.outbox += bytes((kind,)) + self.seq.to_bytes(4, "big") + len(payload).to_bytes(4, "big") + payload
        self.flush()

    def flush(self):
        while self.outbox:
            try:
                count = os.write(1, self.outbox)
            except BlockingIOError:
                return
            except OSError:
                self.host_gone = True
                self.outbox.clear()
                return
            del self.outbox[:count]

    def flush_all(self):
        deadline = time.monotonic() + 30.0
        while self.outbox and not self.host_gone and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(1, select.POLLOUT)
            poll.poll(1000)
            self.flush()

    def read_frames(self):
        """All whole frames that have arrived; notes the end of stdin."""
        while True:
            try:
                data = os.read(0, CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.host_gone = True
                break
            self.inbox += data
            if len(data) < CHUNK:
                break
        frames = []
        while len(self.inbox) >= HEADER:
            size = int.from_bytes(self.inbox[5:9], "big")
            if size > MAX_FRAME:
                os._exit(3)
            if len(self.inbox) < HEADER + size:
                break
            seq = int.from_bytes(self.inbox[1:5], "big")
            frames.append((self.inbox[0], seq, bytes(self.inbox[HEADER : HEADER + size])))
            del self.inbox[: HEADER + size]
        return frames

    def next_call(self, spare):
        """Wait for a call; ``None`` once the host has gone or says leave, ``False`` when the waiting child has died."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self.wake_r, select.POLLIN)
        while True:
            frames = self.read_frames()
            for index, frame in enumerate(frames):
                if frame[0] == CALL and frame[1] == self.seq:
                    return frame[2], frames[index + 1 :]
                if frame[0] == LEAVE:
                    return None
            if self.host_gone:
                return None
            poll.poll()
            self.drain_wakeups()
            if any(pid == spare.pid for pid, _, _ in self.reap()):
                return False

    def drain_wakeups(self):
        try:
            os.read(self.wake_r, 4096)
        except BlockingIOError:
            pass

    def reap(self):
        gone = []
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return gone
            if pid == 0:
                return gone
            gone.append((pid, status, usage))

    def rehearse(self, child):
        """Touch what a call will touch: after a fork this process copies its pages too, and now it has the time."""
        header = json.dumps({"timeout": 1.0, "grace": 1.0, "max_output": 1, "credit": None}).encode("ascii")
        call = Served(self, child, json.loads(header), time.monotonic())
        call.ended(0, resource.getrusage(resource.RUSAGE_SELF))
        json.dumps(call.report())
        own_limits()
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.poll(0)
        return child.prepared()

    # --- one call -----------------------------------------------------------------------------------------------------

    def serve(self, child, payload, frames):
        """Carry one call out; everything that is said about it. Ends when its main process has."""
        began = time.monotonic()
        size = int.from_bytes(payload[:4], "big")
        call = Served(self, child, json.loads(payload[4 : 4 + size]), began)
        child.give(payload[4 + size :])
        while True:
            for kind, seq, data in frames:
                if seq == self.seq:
                    call.take(kind, data)
            now = time.monotonic()
            if self.host_gone:
                call.stop(now)
            wait = call.pursue(now)
            if call.finished():
                break
            call.wait(wait)
            self.drain_wakeups()
            for pid, status, usage in self.reap():
                if pid == child.pid:
                    call.ended(status, usage)
            frames = self.read_frames()
        return call

    def clean(self, resting):
        """Kill whatever is left of this uid, reap it, and prove that nothing is; the seconds it took, or ``None``."""
        began = time.monotonic()
        while time.monotonic() - began < REAP_SECONDS:
            try:
                os.kill(-1, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            if self.reap_all(began) and (self.cgroup.pids() == resting or self.scan()):
                return time.monotonic() - began
            time.sleep(0.001)
        return None

    def reap_all(self, began):
        while time.monotonic() - began < REAP_SECONDS:
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.0005)
            except ChildProcessError:
                return True
        return False

    def scan(self):
        """Whether the whole of /proc holds this process, PID 1 and PID 1's own child, and nothing else."""
        mine = os.getpid()
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in (1, mine):
                continue
            status = read_file("/proc/" + name + "/status").decode("ascii", "replace")
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            if not fields:
                continue  # it ended while we looked
            if fields.get("PPid") != "1" or fields.get("Uid", "").split("\t")[0] != self.config["keeper"]:
                return False
        return True


class Served:
    """A call under way: its pipes, its credit, its deadline, and how it ended."""

    def __init__(self, runner, child, request, began):
        self.runner, self.child, self.began = runner, child, began
        self.deadline = began + request["timeout"]
        self.grace = request["grace"]
        self.cap = request["max_output"]
        self.input = bytearray()
        self.input_open, self.taken = True, 0
        self.credit = {OUT: request["credit"], ERR: request["credit"]}  # None: as much as the cap allows
        self.total = {OUT: 0, ERR: 0}
        self.sources = {child.out: OUT, child.err: ERR}
        self.stopping = None
        self.killed = self.timed_out = self.cancelled = False
        self.status, self.cpu_seconds, self.max_rss = None, 0.0, 0
        self.ooms = runner.cgroup.oom_kills()

    def take(self, kind, data):
        if kind == INPUT:
            self.input += data
        elif kind == INPUT_END:
            self.input_open = False
        elif kind == CREDIT:
            stream, more = data[0], int.from_bytes(data[1:9], "big")
            if self.credit.get(stream) is not None:
                self.credit[stream] += more
        elif kind == CANCEL:
            self.cancelled = True
            self.stop(time.monotonic())

    def stop(self, now):
        """Ask the call's process group to end; ``pursue`` kills it once its grace is over."""
        if self.stopping is None:
            self.stopping = now
            self.signal(signal.SIGTERM)

    def signal(self, number):
        # The group is the child's own; once the child is reaped its number may be somebody else's.
        if self.status is None:
            try:
                os.killpg(self.child.pid, number)
            except (ProcessLookupError, PermissionError):
                try:
                    os.kill(self.child.pid, number)
                except (ProcessLookupError, PermissionError):
                    pass

    def pursue(self, now):
        """Hold the call to its deadline; seconds until there is something to do again."""
        if self.stopping is None and now >= self.deadline:
            self.timed_out = True
            self.stop(now)
        if self.stopping is None:
            return self.deadline - now
        left = self.stopping + self.grace - now
        if left <= 0 and not self.killed:
            self.killed = True
            try:
                os.kill(-1, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        return max(left, 0.05)

    def ended(self, status, usage):
        self.status = status
        self.cpu_seconds, self.max_rss = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024

    def readable(self, stream):
        credit = self.credit[stream]
        return credit is None or credit > 0 or self.total[stream] >= self.cap

    def finished(self):
        """Whether the main process has ended and all that it wrote has been taken."""
        if self.status is None:
            return False
        for fd, stream in list(self.sources.items()):
            while self.readable(stream) and self.pull(fd, stream):
                pass
        return not any(not self.readable(stream) for stream in self.sources.values()) or self.killed

    def wait(self, seconds):
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self.runner.wake_r, select.POLLIN)
        if self.runner.outbox:
            poll.register(1, select.POLLOUT)
        if len(self.runner.outbox) < BUFFERED:
            for fd, stream in self.sources.items():
                if self.readable(stream):
                    poll.register(fd, select.POLLIN)
        if self.child.stdin is not None and (self.input or not self.input_open):
            poll.register(self.child.stdin, select.POLLOUT)
        for fd, _ in poll.poll(max(0.0, seconds) * 1000):
            if fd in self.sources:
                self.pull(fd, self.sources[fd])
            elif fd == self.child.stdin:
                self.push()
        self.runner.flush()

    def pull(self, fd, stream):
        """Take what a stream holds and pass on what its cap and credit allow; whether there may be more."""
        credit = self.credit[stream]
        size = CHUNK if credit is None or self.total[stream] >= self.cap else min(CHUNK, credit)
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return False
        if not data:
            del self.sources[fd]
            return False
        kept = data[: max(0, self.cap - self.total[stream])]
        self.total[stream] += len(data)
        if kept:
            if credit is not None:
                self.credit[stream] -= len(kept)
            self.runner.send(stream, kept)
        return True

    def push(self):
        try:
            if self.input:
                count = os.write(self.child.stdin, self.input)
                del self.input[:count]
                self.taken += count
                if self.taken >= CHUNK or not self.input:
                    self.runner.send(TAKEN, self.taken.to_bytes(8, "big"))
                    self.taken = 0
        except BlockingIOError:
            return
        except OSError:
            # Nobody reads it any more; what still comes is taken and thrown away.
            self.input.clear()
            self.child.close_stdin()
            return
        if not self.input and not self.input_open:
            self.child.close_stdin()

    def report(self):
        ooms = self.runner.cgroup.oom_kills()
        code = signal_number = None
        if os.WIFSIGNALED(self.status):
            signal_number = os.WTERMSIG(self.status)
        else:
            code = os.WEXITSTATUS(self.status)
        return {
            "exit_code": code,
            "signal": signal_number,
            "timed_out": self.timed_out,
            "cancelled": self.cancelled,
            "oom": None if ooms is None or self.ooms is None else ooms > self.ooms,
            "stdout_total": self.total[OUT],
            "stderr_total": self.total[ERR],
            "cpu_seconds": self.cpu_seconds,
            "max_rss": self.max_rss,
            "duration": time.monotonic() - self.began,
        }


class Child:
    """The waiting process, from the runner's side."""

    def __init__(self, pid, give, stdin, out, err, ready):
        self.pid, self._give, self.stdin, self.out, self.err, self._ready = pid, give, stdin, out, err, ready
        for fd in (stdin, out, err):
            os.set_blocking(fd, False)

    def prepared(self):
        """Wait until the child has prepared itself; whether it has."""
        ready = os.read(self._ready, 1) == b"1"
        os.close(self._ready)
        return ready

    def give(self, payload):
        data = len(payload).to_bytes(4, "big") + payload
        try:
            while data:
                data = data[os.write(self._give, data) :]
        except OSError:
            pass  # it has died; its status says so
        os.close(self._give)

    def close_stdin(self):
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None

    def close(self):
        self.close_stdin()
        os.close(self.out)
        os.close(self.err)


def fork_ahead(libc):
    """Fork the process of the next call: a ``Child`` in the runner, ``None`` in the child, which is ready to wait."""
    ask_r, ask_w = os.pipe()
    ready_r, ready_w = os.pipe()
    in_r, in_w = os.pipe()
    out_r, out_w = os.pipe()
    err_r, err_w = os.pipe()
    pid = os.fork()
    if pid:
        for fd in (ask_r, in_r, out_w, err_w, ready_w):
            os.close(fd)
        return Child(pid, ask_w, in_w, out_r, err_r, ready_r)
    signal.set_wakeup_fd(-1)
    os.setsid()
    # Everything but its own four pipes goes before anyone may look: close-on-exec does not act on a fork.
    for fd, place in ((in_r, 0), (out_w, 1), (err_w, 2)):
        os.dup2(fd, place)
    # Both are copied out of the way first: either may stand on the other's place.
    ask_r, ready_w = fcntl.fcntl(ask_r, fcntl.F_DUPFD_CLOEXEC, 32), fcntl.fcntl(ready_w, fcntl.F_DUPFD_CLOEXEC, 32)
    os.dup2(ask_r, ASK, inheritable=False)
    os.dup2(ready_w, ASK_READY, inheritable=False)
    os.closerange(5, min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    libc.unprotect()
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"500")
        os.close(fd)
    except OSError:
        pass
    for number in SIGNALS + (signal.SIGCHLD,):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    return None


class Prepared:
    """In the child, ahead of the call: the interpreter as a fresh one would be, with a nameless file for the call's source.

    The file is real, so that tracebacks, ``inspect`` and the processes of ``multiprocessing`` can open it. Everything that
    a call will touch is touched once here: a forked process copies each page when it first writes to it, and that is time
    that a waiting child has and a call has not.
    """

    def __init__(self):
        self.fd = os.memfd_create("call.py")
        self.name = "/proc/%d/fd/%d" % (os.getpid(), self.fd)
        for module in set(sys.modules) - BASELINE - KEPT:
            del sys.modules[module]
        self.main = type(sys)("__main__")
        loader = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", self.name)
        self.main.__dict__.update(
            __builtins__=__builtins__, __file__=self.name, __cached__=None, __annotations__={}, __loader__=loader
        )
        sys.modules["__main__"] = self.main
        sys.argv = [self.name]
        if hasattr(sys, "orig_argv"):
            sys.orig_argv = ["python3", "-I", "-B", self.name]
        self.rehearse()

    def rehearse(self):
        set_environment(json.loads(json.dumps({"env": dict(os.environ)}))["env"])
        self.store(REHEARSAL.encode("utf-8"))
        os.ftruncate(self.fd, 0)
        exec(compile(REHEARSAL, self.name, "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        os.chdir(os.getcwd())
        resource.setrlimit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU))
        try:
            raise SystemExit(0)
        except SystemExit:
            pass
        noticed()

    def store(self, data):
        written = 0
        while written < len(data):
            written += os.write(self.fd, data[written:])
        os.lseek(self.fd, 0, os.SEEK_SET)

    def compile(self, source):
        self.store(source.encode("utf-8"))
        return compile(source, self.name, "exec")


REHEARSAL = """
import sys
def rehearse(many):
    return {str(one): [one, one * 1.5, (one,)] for one in range(many)}
class Rehearsal:
    def method(self):
        return "%s" % rehearse(3)
Rehearsal().method()
sys.stdout.write("")
sys.stdout.flush()
"""


def set_environment(env):
    os.environ.clear()
    os.environ.update(env)


def await_call():
    """In the child: wait for the request on descriptor ``ASK``, and become ready to carry it out."""

    def exactly(size):
        data = bytearray()
        while len(data) < size:
            chunk = os.read(ASK, min(size - len(data), 1 << 20))
            if not chunk:
                os._exit(0)  # the runner has ended, and so there will be no call
            data += chunk
        return bytes(data)

    request = json.loads(exactly(int.from_bytes(exactly(4), "big")))
    os.close(ASK)
    gc.enable()
    if request["cpu_seconds"]:
        resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"], request["cpu_seconds"] + 1))
    set_environment(request["env"])
    os.chdir(request["cwd"])
    return request


def show(error, below):
    """Show an uncaught exception as the interpreter does, without the frames of this file."""
    trace = error.__traceback__
    for _ in range(below):
        trace = trace.tb_next if trace is not None else None
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, trace)


def leave(code):
    """End the process as the interpreter would, without taking it apart where nobody could tell.

    Taking an interpreter apart writes to most of its pages, which a forked process first has to copy: more than half of a
    short call's time. It is only observable through finalizers, weak references' callbacks and suspended generators, so
    where any object made since the fork may have one, this returns and the interpreter does it all.
    """
    if code is not None and not isinstance(code, int):
        return
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    if atexit._ncallbacks():
        atexit._run_exitfuncs()
    if noticed():
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return  # the interpreter says what there is to say
    os._exit((code or 0) & 255)


def noticed():
    """Whether an object made since the fork may notice that the interpreter is taken apart."""
    objects = gc.get_objects()
    if len(objects) > 20000:
        return True
    reference, kind, builtin = type(_REFERENCE), type, type(len)
    for thing in objects:
        made = kind(thing)
        if made is reference:
            # Callbacks that are built in only tidy caches, such as those of abstract base classes.
            if thing.__callback__ is not None and kind(thing.__callback__) is not builtin:
                return True
        elif hasattr(made, "__del__") or (made is kind and "__del__" in thing.__dict__):
            return True
    return False


class _Anchor:
    pass


_ANCHOR = _Anchor()
_REFERENCE = weakref.ref(_ANCHOR)


def run(config):
    """Serve calls until there are no more; comes back only in a child, with its request."""
    try:
        libc = Libc()
        dumpable, subreaper = libc.protect()
    except Exception as error:  # without ctypes the runner cannot protect itself, and says so
        libc, dumpable, subreaper = None, False, False
        config["problem"] = repr(error)
    runner = Runner(config)
    resting = runner.cgroup.pids()
    facts = {path: read_file(path).decode("utf-8", "replace") for path in config["files"]}
    facts = {
        "files": facts,
        "nonce": read_file("/tool/nonce").decode("utf-8", "replace").strip(),
        "undumpable": dumpable,
        "subreaper": subreaper,
        "alone": runner.scan(),
        "python": sys.version.split()[0],
        "problem": config.get("problem", ""),
    }
    if libc is not None:
        warm_up(config["preload"], facts)
    runner.send(HELLO, json.dumps(facts).encode("ascii"))
    if libc is None:
        runner.flush_all()
        os._exit(4)
    limits, left = own_limits(), config["calls"]
    while True:
        runner.seq += 1
        child = fork_ahead(libc)
        if child is None:
            prepared = Prepared()
            os.write(ASK_READY, b"1")
            os.close(ASK_READY)
            return prepared, await_call()
        runner.rehearse(child)
        runner.send(ARMED)
        asked = runner.next_call(child)
        if asked is None:
            break
        if asked is False or own_limits() != limits:
            runner.send(
                POISONED, b"the waiting process was killed" if asked is False else b"the runner's limits changed"
            )
            runner.flush_all()
            break
        call = runner.serve(child, *asked)
        runner.send(DONE, json.dumps(call.report()).encode("ascii"))
        child.close()
        spent = runner.clean(resting)
        runner.send(CLEAN if spent is not None else DIRTY, repr(spent).encode("ascii"))
        runner.flush_all()
        if spent is None or runner.host_gone or call.cancelled:
            break
        if left:
            left -= 1
            if not left:
                break
    runner.clean(resting)
    os._exit(0)


def warm_up(preload, facts):
    """Pay once, before any fork, for what every call would pay: the parser's types, the imports, a clean heap."""
    exec(compile("def _warm(x):\n    return [i for i in range(x)]\n_warm(3)\n", "<warm>", "exec"), {})
    before = set(sys.modules)
    for name in preload:
        try:
            __import__(name)
        except BaseException as error:
            facts["problem"] = "preload %s: %r" % (name, error)
    KEPT.update(set(sys.modules) - before)
    if len(os.listdir("/proc/self/task")) > 1:
        facts["problem"] = "a preloaded module left a thread"
    gc.collect()
    gc.disable()
    gc.freeze()


# --- in the child, at the outermost level: the fewer frames below the caller's code, the closer to a plain python3 --------

_prepared, _request = run(json.loads(r(int.from_bytes(r(4), "big"))))  # noqa: F821 - the loader's own reader
if "argv" in _request:
    for _name in ("SIGPIPE", "SIGXFSZ"):  # the interpreter ignores these; a program must find them at their defaults
        signal.signal(getattr(signal, _name), signal.SIG_DFL)
    try:
        os.execvp(_request["argv"][0], _request["argv"])
    except OSError as _error:
        os.write(2, os.fsencode("%s: %s\n" % (_request["argv"][0], os.strerror(_error.errno or 0))))
        os._exit(NOT_FOUND if isinstance(_error, (FileNotFoundError, NotADirectoryError)) else CANNOT_RUN)
else:
    try:
        _code = _prepared.compile(_request["code"])
    except BaseException as _error:
        show(_error, below=9)
        raise SystemExit(1) from None
    try:
        exec(_code, _prepared.main.__dict__)
    except SystemExit as _error:
        leave(_error.code)
        raise
    except BaseException as _error:
        show(_error, below=1)
        if isinstance(_error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None  # it has been shown; the interpreter still ends by SIGINT, as it should
            raise
        leave(1)
        raise SystemExit(1) from None
    else:
        leave(0)
