# mypy: ignore-errors
# (annotations would need `typing`, which costs an interpreter some milliseconds)
"""The program at the container's end of a ``docker exec``: it waits for a call, forks for it, and tells the truth of it.

It runs in the image's own Python (3.8 or newer) with nothing but the standard library, one thread, no user code. The
loader of ``executor.sandbox.request`` feeds it to Python; ``executor.sandbox.wire`` describes what it and the host say to each other.
A call's process is a child that was forked ahead of the call and waits for it; it comes back from ``run`` to the bottom of
this file, and leaves it to become the caller's code. The runner itself never comes back.
"""

import sys

# What a fresh interpreter holds; the rest is taken away before a call's code begins.
BASELINE, BASELINE_PATHS = frozenset(sys.modules), frozenset(sys.path_importer_cache)
# What a call's code puts into the built-in names must not reach what comes after it.
__builtins__ = dict(sys.modules["builtins"].__dict__)

import _operator
import _thread
import _warnings
import atexit
import fcntl
import functools
import gc
import itertools
import json
import os
import resource
import select
import signal
import time
import weakref

# Frames, as executor.sandbox.wire has them: type, sequence number, length, payload.
CALL, INPUT, INPUT_END, CREDIT, CANCEL, LEAVE, FINISH = 1, 2, 3, 4, 5, 6, 7
HELLO, ARMED, OUT, ERR, TAKEN, DONE, CLEAN, DIRTY, POISONED, CLEANING = 17, 18, 19, 20, 21, 22, 23, 24, 25, 26
HEADER = 9
ASK, ASK_READY = 3, 4  # the descriptors on which a waiting child is given its call, and says that it is prepared
CHUNK = 65536
F_GETPIPE_SZ = 1032  # the fcntl module knows it since Python 3.10
MAX_FRAME = 1 << 26
CALL_HEADER = 32  # of a call: timeout and grace in microseconds, bytes of output, credit; 8 bytes each
NO_LIMIT, NO_CODE, OOM_KNOWN = 2**64 - 1, 0xFFFF, 4
REHEARSED_CALL = b"".join(number.to_bytes(8, "big") for number in (10000000, 1000000, 0, NO_LIMIT))
BUFFERED = 1 << 18  # bytes that wait for the host before the runner stops reading the call's output
REAP_SECONDS = 4.0
REAPED_AT_ONCE = 1000  # then the deadline is looked at again, however fast there are more to reap
SIGN_SECONDS = 0.2  # between two signs of life while cleaning up; the host waits longer than for a few of them
FRESH_CHILDREN = 3  # how often a waiting child that was changed from beside it is replaced before its call is refused
NOBODY = 1 << 30  # more than any process ID
HOLD_SECONDS = 0.002  # a short call's output and its end then leave in one write, and the host wakes up once
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
WITNESS_WHICH = 0x454D4250  # as executor.sandbox.seccomp has it
CANNOT_RUN, NOT_FOUND = 126, 127  # what a shell answers, and people know


def read_file(path, size=262144):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        chunks = []
        while size > 0:
            chunk = os.read(fd, min(size, 262144))
            if not chunk:
                break
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)
    except OSError:
        return b""
    finally:
        os.close(fd)


class Libc:
    """What only C can do: the two settings that protect the runner from the code of its own uid (both are read back), a
    process that keeps another's memory, and the function with which the interpreter itself runs a file."""

    PR_SET_DUMPABLE, PR_GET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 4, 3, 36, 37
    PTRACE_DETACH, PTRACE_GETSIGINFO = 17, 0x4202
    CLONE_VM, CLONE_PARENT = 0x100, 0x8000
    STACK = 16384

    def __init__(self):
        import ctypes

        self._ctypes, self._deepened = ctypes, None
        libc = ctypes.CDLL(None)
        self._prctl = libc.prctl
        self._fdopen = libc.fdopen
        self._ipc = (
            ("shm", lambda number: libc.shmctl(number, 0, None)),
            ("msg", lambda number: libc.msgctl(number, 0, None)),
            ("sem", lambda number: libc.semctl(number, 0, 0)),
        )
        self._fdopen.argtypes, self._fdopen.restype = (ctypes.c_int, ctypes.c_char_p), ctypes.c_void_p
        self._ptrace = libc.ptrace
        self._ptrace.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
        self._siginfo = ctypes.create_string_buffer(128)
        # Of sched_getattr and ioprio_get, for which not every C library has functions.
        numbers = {"x86_64": (315, 252), "ppc64le": (356, 274), "s390x": (346, 283)}
        numbers.update(dict.fromkeys(("aarch64", "riscv64", "loongarch64"), (275, 31)))
        known = numbers.get(os.uname().machine) if sys.maxsize > 1 << 32 else None
        self._syscall, self._numbers = libc.syscall, known
        self._scheduling = ctypes.create_string_buffer(56)
        # Made here: a class that is made during a call looks like the call's own.
        self.fields_type = ctypes.c_int * 2
        self._clone, self._pause = libc.clone, ctypes.cast(libc.pause, ctypes.c_void_p)
        self._stack = ctypes.create_string_buffer(self.STACK)
        self._stack_top = ctypes.c_void_p((ctypes.addressof(self._stack) + self.STACK - 64) & ~15)
        self._setvbuf = libc.setvbuf
        self._setvbuf.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
        self._streams = [ctypes.c_void_p.in_dll(libc, name).value for name in ("stdin", "stdout", "stderr")]
        self.run_file = ctypes.pythonapi.PyRun_SimpleFileExFlags
        self.run_file.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)

    def protect(self):
        self._prctl(self.PR_SET_DUMPABLE, 0, 0, 0, 0)
        self._prctl(self.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        subreaper = self._ctypes.c_int(0)
        self._prctl(self.PR_GET_CHILD_SUBREAPER, self._ctypes.byref(subreaper), 0, 0, 0)
        return self._prctl(self.PR_GET_DUMPABLE, 0, 0, 0, 0) == 0, subreaper.value == 1

    def hide(self):
        self._prctl(self.PR_SET_DUMPABLE, 0, 0, 0, 0)

    def unprotect(self):
        self._prctl(self.PR_SET_DUMPABLE, 1, 0, 0, 0)
        self._prctl(self.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def let_go(self, pid, number):
        """End the tracing of a stopped process that made this one its tracer; it gets the signal that it was stopped for.

        What a process is stopped for when it has become another program is a trap that nobody sends who does not trace.
        """
        if number == signal.SIGTRAP:
            self._siginfo.raw = bytes(128)
            self._ptrace(self.PTRACE_GETSIGINFO, pid, None, self._siginfo)
            if self._siginfo.raw[8:12] == bytes(4):  # the cause is no fault of the program's, but as if by kill(2)
                number = 0
        self._ptrace(self.PTRACE_DETACH, pid, None, number)

    def scheduling(self, pid):
        """What only these calls show of a process: its scheduling attributes with slice and clamps, and its I/O priority."""
        if self._numbers is None:
            return None
        attributes, ioprio = self._numbers
        done = self._syscall(attributes, pid, self._scheduling, 56, 0)
        return done, self._scheduling.raw, self._syscall(ioprio, 1, pid)

    def keep_memory(self):
        """Start a process that shares this one's memory and does nothing but wait for the sweep that kills it.

        Else the kernel takes the memory apart before it tells of this process's end, and that was half of a short call's
        time; so it is done after the answer. It blocks all signals: a handler would run in this very memory. Where there
        is no such process, a call is only slower.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._clone(self._pause, self._stack_top, self.CLONE_VM | self.CLONE_PARENT | signal.SIGCHLD, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def unbuffer(self):
        """Let C's own streams write at once, as the interpreter does with -u."""
        for stream in self._streams:
            self._setvbuf(stream, None, 2, 0)

    def file(self, fd):
        """A C stream for reading a descriptor."""
        return self._fdopen(fd, b"rb")

    def remove_ipc(self, sign):
        """Remove what this uid's processes left in memory that belongs to none of them, and that no kill frees: System V
        objects and POSIX message queues; whether nothing of it is left. ``sign`` is called now and then; false is no time left.
        """
        for kind, remove in self._ipc:
            found = None
            while found != (left := self._left(kind)):
                found = left
                for number in left:
                    remove(number)
                    if not sign():
                        return False
            if left:
                return False
        return self._remove_queues(sign)

    def _left(self, kind):
        """The numbers of this uid's System V objects of a kind. Who made one stands in it for good, who owns it does not."""
        mine, maker, found = str(os.getuid()).encode("ascii"), 9 if kind != "sem" else 6, []
        for line in read_file("/proc/sysvipc/" + kind, IPC_BYTES).splitlines()[1:]:
            fields = line.split()
            if len(fields) > maker and fields[maker] == mine:
                found.append(int(fields[1]))
        return found

    def _remove_queues(self, sign):
        mine, found = os.getuid(), None
        while True:
            try:
                with os.scandir(QUEUES) as entries:
                    left = [one.path for one in entries if one.stat(follow_symlinks=False).st_uid == mine]
                if not left or left == found:
                    return not left
                for path in left:
                    os.unlink(path)
                    if not sign():
                        return False
            except FileNotFoundError:  # an engine that mounts no such place
                return True
            found = left

    def deepen(self):
        """Give back the levels of recursion that calls below the caller's code use up.

        Only 3.11 counts calls of C together with those of Python down from the limit. The fields of its thread state are
        known by the limit that stands beside the count.
        """
        if sys.version_info[:2] == (3, 11):
            state = self._ctypes.pythonapi.PyThreadState_Get
            state.restype = self._ctypes.c_void_p
            fields = self.fields_type.from_address(state() + 32)
            if fields[1] == sys.getrecursionlimit() and 0 < fields[1] - fields[0] < 64:
                fields[0] += RECURSION
                self._deepened = fields

    def restore_depth(self):
        if self._deepened is not None:
            self._deepened[0] -= RECURSION


def witness():
    """The error by which the host's seccomp profile is recognised: executor.sandbox.seccomp says what is asked. No call but
    this one tells it from another filter."""
    try:
        os.getpriority(WITNESS_WHICH, 0)
    except OSError as error:
        return error.errno
    return 0


def limits_of(libc, pid=0):
    """What code of the same uid can change of a process (0 is this one) although it cannot trace it.

    That is what ``prlimit``, ``sched_setaffinity``, ``setpriority``, ``sched_setscheduler``, ``sched_setattr`` and ``ioprio_set``
    reach. Out of reach of an undumpable process, each was tried: everything in /proc/PID that can be written (oom_score_adj,
    timerslack_ns, autogroup, coredump_filter, comm, attr), core scheduling cookies, where its pages are, its process
    group, its control group, and whatever needs to trace it.
    """
    # `getrlimit` is the quicker one of the two.
    limits = tuple([resource.prlimit(pid, kind) if pid else resource.getrlimit(kind) for kind in LIMITS])
    nice, policy = os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
    return limits, os.sched_getaffinity(pid), nice, policy, libc.scheduling(pid)


LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
CPU_AT = LIMITS.index(resource.RLIMIT_CPU)
QUEUES = "/dev/mqueue"
IPC_BYTES = 1 << 23  # of a list of System V objects that are read at a time: most of what a namespace may have


KEPT = set()  # the modules that a call finds loaded


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
    def __init__(self, config, libc):
        self.config, self.libc = config, libc
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.host_gone = False
        self.held_since = 0.0
        self.cgroup = Cgroup()
        self.ooms = None
        self.seq = 0
        self.asks, self.says = 0, 1  # where the host's frames come from, and where those for it go
        self.nowhere = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
        self.pretended = None  # in a rehearsal, the end of a child that never was
        self.clean_until = self.sign_due = 0.0
        self.watched = False  # whether the host waits for the end of a clean-up
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
                count = os.write(self.says, self.outbox)
            except BlockingIOError:
                return
            except OSError:
                self.host_gone = True
                self.outbox.clear()
                return
            del self.outbox[:count]

    def hold(self, kind, payload):
        """Queue a frame of output, to leave in one write with what comes within the next moment, if anything does."""
        if not self.outbox:
            self.held_since = time.monotonic()
        self.outbox += bytes((kind,)) + self.seq.to_bytes(4, "big") + len(payload).to_bytes(4, "big") + payload
        if len(self.outbox) > CHUNK:
            self.flush()

    def holding(self, now):
        """Seconds for which what is queued may still wait; 0.0 when it should leave, or already tried to."""
        return max(0.0, self.held_since + HOLD_SECONDS - now)

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
                data = os.read(self.asks, CHUNK)
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
        poll.register(self.asks, select.POLLIN)
        poll.register(self.wake_r, select.POLLIN)
        if spare is not None and spare.gone:
            return False
        while True:
            frames = self.read_frames()
            for index, frame in enumerate(frames):
                if frame[0] == CALL and frame[1] == self.seq:
                    return frame[2], frames[index + 1 :]
                if frame[0] == LEAVE:
                    return None
            if self.host_gone:
                return None
            if any(fd == self.wake_r for fd, _ in poll.poll()):
                self.drain_wakeups()
                if any(spare is not None and pid == spare.pid for pid, _, _ in self.reap()):
                    return False

    def told_to_sweep(self):
        """Whether everything is to be cleaned up, and not only what came of the call that has just ended.

        A runner that has the sandbox to itself need not ask. A host that is gone will not use the sandbox again.
        """
        if not self.config["shared"]:
            return True
        while True:
            for kind, seq, data in self.read_frames():
                if kind == FINISH and seq == self.seq:
                    return data == b"\x01"
            if self.host_gone:
                return True
            poll = select.poll()
            poll.register(self.asks, select.POLLIN)
            poll.register(self.wake_r, select.POLLIN)
            if self.outbox:
                # The host answers the report, which may still stand here behind much output.
                poll.register(self.says, select.POLLOUT)
            poll.poll()
            self.flush()
            self.drain_wakeups()
            self.reap()

    def wake(self):
        try:
            os.write(self.wake_w, b"1")
        except BlockingIOError:  # it is as full of them as can be
            pass

    def drain_wakeups(self):
        try:
            os.read(self.wake_r, 4096)
        except BlockingIOError:
            pass

    def reap(self, until=0):
        """All that has ended, or as much of it as it takes to find ``until``."""
        if self.pretended is not None:
            # A real end is left to those who want to know of it.
            gone, self.pretended = [self.pretended], None
            try:
                os.wait4(NOBODY, os.WNOHANG)
            except ChildProcessError:
                pass
            return gone
        gone = []
        for _ in range(REAPED_AT_ONCE):
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return gone
            if pid == 0:
                return gone
            if os.WIFSTOPPED(status):
                # Whoever asks to be traced by its parent makes this process its tracer, and stops for each signal.
                self.libc.let_go(pid, os.WSTOPSIG(status))
                continue
            gone.append((pid, status, usage))
            if pid == until:
                return gone
        self.wake()  # there may be more
        return gone

    def rehearse(self, child):
        """Touch what a call will touch: after a fork this process copies its pages too, and now it has the time.

        So it carries a call out, whose frames come from a pipe of its own, whose process never was, and of which nobody is told.
        """
        (asks, asked), (ask_r, ask), (in_r, stdin), (out, out_w), (err, err_w) = [os.pipe() for _ in range(5)]
        os.set_blocking(asks, False)
        pretender = Child(NOBODY, ask, stdin, out, err, None)
        for kind, payload in (CALL, REHEARSED_CALL + bytes(8)), (INPUT_END, b""):
            os.write(asked, bytes((kind,)) + self.seq.to_bytes(4, "big") + len(payload).to_bytes(4, "big") + payload)
        os.write(out_w, b"1")
        self.wake()
        kept, self.inbox, self.outbox = (self.inbox, self.outbox), bytearray(), bytearray()
        self.asks, self.says = asks, self.nowhere
        self.pretended = NOBODY, 0, resource.getrusage(resource.RUSAGE_SELF)
        call = self.serve(pretender, *self.next_call(None))
        self.send(DONE, call.report())
        self.asks, self.says, self.pretended = 0, 1, None
        self.inbox, self.outbox = kept
        pretender.close()
        for fd in (asks, asked, ask_r, in_r, out_w, err_w):
            os.close(fd)
        self.wake()  # what was to wake it in earnest may have been taken for a part of this
        self.ooms = self.cgroup.oom_kills()
        limits_of(self.libc)
        return child.prepared(self)

    def practise(self, child):
        """Carry out a call that does nothing, and say nothing of it: the first call that counts is then not the first."""
        if not self.rehearse(child):
            return False
        self.serve(child, REHEARSED_CALL + bytes(8), []).report()
        child.close()
        self.outbox.clear()
        return self.clean_own() is not None

    # --- one call -----------------------------------------------------------------------------------------------------

    def serve(self, child, payload, frames):
        """Carry one call out; everything that is said about it. Ends when its main process has."""
        began = time.monotonic()
        child.give(payload[CALL_HEADER:])  # first of all: it is at work while this goes on
        call = Served(self, child, payload[:CALL_HEADER], began)
        if child.gone:
            call.ended(*child.gone)
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
            ready = call.wait(wait)
            if self.wake_r in ready:
                self.drain_wakeups()
                for pid, status, usage in self.reap(child.pid):
                    if pid == child.pid:
                        call.ended(status, usage, call.silent())
            frames = self.read_frames() if self.asks in ready else ()
        return call

    def clean(self, resting):
        """Kill whatever is left of this uid, reap it, and prove that nothing is; the seconds it took, or ``None``."""
        began = self.begin_cleaning()
        while self.cleaning():
            try:
                os.kill(-1, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            if self.reap_all() and ((resting is not None and self.cgroup.pids() == resting) or self.scan()):
                return time.monotonic() - began if self.libc.remove_ipc(self.cleaning) else None
            time.sleep(0.001)
        return None

    def clean_own(self):
        """Beside other runners' calls: kill and reap what came of this one's; the seconds it took, or ``None``.

        All that a call orphans comes home to here, so that no children are a proof of no descendants. Whose the objects
        are that belong to no process cannot be known here: they stay until everything is cleaned up.
        """
        began = self.begin_cleaning()
        while self.cleaning():
            self.kill_own()
            if self.reap_all(wait=False):
                return time.monotonic() - began
            time.sleep(0.001)
        return None

    def begin_cleaning(self):
        now = time.monotonic()
        self.clean_until, self.sign_due = now + REAP_SECONDS, now + SIGN_SECONDS
        return now

    def discard(self, child):
        """End a process that waited for a call, and all that came of it; whether nothing is left. ``None`` is none."""
        if child is None:
            return True
        child.close()
        return self.clean_own() is not None

    def cleaning(self):
        """Whether there is time left to clean up. Tells the host now and then that this process is alive."""
        now = time.monotonic()
        if self.watched and now > self.sign_due:
            self.sign_due = now + SIGN_SECONDS
            self.send(CLEANING)
        return now < self.clean_until

    def kill_call(self):
        """SIGKILL all that belongs to the call: all of this uid, or where other calls run too, all that came of it."""
        if self.config["shared"]:
            self.kill_own()
            return
        try:
            os.kill(-1, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def kill_own(self):
        parents = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                # The name of a program may hold spaces and brackets; what comes after the last bracket is ours to read.
                fields = read_file("/proc/" + name + "/stat").rpartition(b")")[2].split()
                if len(fields) > 1:
                    parents.setdefault(int(fields[1]), []).append(int(name))
        family = parents.pop(os.getpid(), [])
        while family:
            pid = family.pop()
            family += parents.pop(pid, [])
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def reap_all(self, wait=True):
        """Reap until there is no child, which is true, or no time; or, unless it is to ``wait``, none that has ended.

        A child that has only stopped, for this process as its tracer, stays so: it has been killed.
        """
        while self.cleaning():
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    if not wait:
                        return False
                    time.sleep(0.0005)
            except ChildProcessError:
                return True
        return False

    def alone(self):
        """Whether nothing else runs here; where runners are started side by side, as soon as no other is half-way in."""
        if not self.config["shared"]:
            return self.scan()
        began = time.monotonic()
        while not self.scan(runners=True):
            if time.monotonic() - began > REAP_SECONDS:
                return False
            time.sleep(0.005)
        return True

    def scan(self, runners=False):
        """Whether the whole of /proc holds this process, PID 1 and PID 1's own child, and nothing else.

        With ``runners``, others of this runner's kind (started by the engine with the same command) and their waiting
        children may be there too.
        """
        mine, kin, sleepers = os.getpid(), {os.getpid()}, 0
        command = read_file("/proc/self/cmdline").split(b"\0")[:5]
        if runners:
            for name in os.listdir("/proc"):
                if name.isdigit() and read_file("/proc/" + name + "/cmdline").split(b"\0")[:5] == command:
                    kin.add(int(name))
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in (1, mine):
                continue
            status = read_file("/proc/" + name + "/status").decode("ascii", "replace")
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            if not fields:
                continue  # it ended while we looked
            if runners and int(name) in kin and (fields.get("PPid") == "0" or int(fields.get("PPid", 0)) in kin):
                continue
            if fields.get("PPid") != "1" or fields.get("Uid", "").split("\t")[0] != self.config["keeper"]:
                return False
            if sleepers or read_file("/proc/" + name + "/cmdline").split(b"\0")[0] != b"sleep":
                return False
            sleepers += 1
        return True


class Served:
    """A call under way: its pipes, its credit, its deadline, and how it ended."""

    def __init__(self, runner, child, header, began):
        self.runner, self.child, self.began = runner, child, began
        timeout, grace, self.cap, credit = (int.from_bytes(header[at : at + 8], "big") for at in (0, 8, 16, 24))
        self.deadline, self.grace = began + timeout / 1e6, grace / 1e6
        self.input = bytearray()
        self.input_open, self.taken = True, 0
        if credit == NO_LIMIT:
            credit = None  # as much as the cap allows
        self.credit = {OUT: credit, ERR: credit}
        self.total = {OUT: 0, ERR: 0}
        self.sources = {child.out: OUT, child.err: ERR}
        self.stopping = None
        self.killed = self.timed_out = self.cancelled = False
        self.status, self.cpu_seconds, self.max_rss = None, 0.0, 0
        self.rest = {}  # by descriptor, what may still be of the main process once it has ended
        self.poll, self.watched = None, ()  # what the last wait was for, and which of it is the call's output
        self.ooms = runner.ooms

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
            self.runner.kill_call()
        return max(left, 0.05)

    def ended(self, status, usage, empty=()):
        """``empty`` are descriptors of its output that held nothing since then."""
        self.status = status
        # What it wrote is in its pipes by now; without a bound, whoever it left could refill them for ever.
        self.rest = {fd: 0 if fd in empty else fcntl.fcntl(fd, F_GETPIPE_SZ) for fd in self.sources}
        self.cpu_seconds, self.max_rss = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024

    def silent(self):
        """Which of the descriptors that the last wait was for hold nothing now."""
        ready = [fd for fd, _ in self.poll.poll(0)]
        return [fd for fd in self.watched if fd not in ready]

    def readable(self, stream):
        credit = self.credit[stream]
        return credit is None or credit > 0 or self.total[stream] >= self.cap

    def finished(self):
        """Whether the main process has ended and all that it wrote has been taken."""
        if self.status is None:
            return False
        for fd, stream in list(self.sources.items()):
            while self.rest[fd] > 0 and self.readable(stream) and self.pull(fd, stream):
                pass
        waits = any(self.rest[fd] > 0 and not self.readable(stream) for fd, stream in self.sources.items())
        return not waits or self.killed

    def wait(self, seconds):
        """Do what there is to do with the call's pipes, once there is something; the descriptors that were ready."""
        poll = select.poll()
        if not self.runner.host_gone:
            poll.register(self.runner.asks, select.POLLIN)
        poll.register(self.runner.wake_r, select.POLLIN)
        held = self.runner.holding(time.monotonic()) if self.runner.outbox else 0.0
        if held:
            seconds = min(seconds, held)
        elif self.runner.outbox:
            poll.register(self.runner.says, select.POLLOUT)
        self.poll, self.watched = poll, []
        if len(self.runner.outbox) < BUFFERED:
            for fd, stream in self.sources.items():
                if self.readable(stream) and self.rest.get(fd, 1) > 0:
                    poll.register(fd, select.POLLIN)
                    self.watched.append(fd)
        if self.child.stdin is not None and (self.input or not self.input_open):
            poll.register(self.child.stdin, select.POLLOUT)
        if self.child.untold:
            poll.register(self.child.ask, select.POLLOUT)
        ready = [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000 + 0.5)]
        for fd in ready:
            if fd in self.sources:
                self.pull(fd, self.sources[fd])
            elif fd == self.child.stdin:
                self.push()
            elif fd == self.child.ask:
                self.child.tell()
        if self.runner.outbox and not self.runner.holding(time.monotonic()):
            self.runner.flush()
        return ready

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
        if self.status is not None:
            data = data[: self.rest[fd]]
            self.rest[fd] -= len(data)
        kept = data[: max(0, self.cap - self.total[stream])]
        self.total[stream] += len(data)
        if kept:
            if credit is not None:
                self.credit[stream] -= len(kept)
            self.runner.hold(stream, kept)
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
        """How it ended, as executor.sandbox.wire.Report has it. Only a process that was killed may have been so for want of
        memory, so only then the counter is asked."""
        code, number, ooms = NO_CODE, 0, None
        if os.WIFSIGNALED(self.status):
            number, ooms = os.WTERMSIG(self.status), self.runner.cgroup.oom_kills()
        else:
            code = os.WEXITSTATUS(self.status)
        flags = self.timed_out | self.cancelled << 1
        if ooms is not None and self.ooms is not None:
            flags |= OOM_KNOWN | (ooms > self.ooms) << 3
        numbers = (
            self.total[OUT],
            self.total[ERR],
            int(self.cpu_seconds * 1e6),
            self.max_rss,
            int((time.monotonic() - self.began) * 1e6),
        )
        return code.to_bytes(2, "big") + bytes((number, flags)) + b"".join(one.to_bytes(8, "big") for one in numbers)


class Child:
    """The waiting process, from the runner's side."""

    def __init__(self, pid, ask, stdin, out, err, ready):
        self.pid, self.ask, self.stdin, self.out, self.err, self._ready = pid, ask, stdin, out, err, ready
        self.untold, self.gone = b"", None
        for fd in (ask, stdin, out, err):
            os.set_blocking(fd, False)

    def prepared(self, runner):
        """Wait until the child has prepared itself; whether it has, and did not die of it."""
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        poll.register(runner.wake_r, select.POLLIN)
        # Not by the end of the pipe: the process that keeps the child's memory has it too.
        while self.gone is None and not any(fd == self._ready for fd, _ in poll.poll()):
            runner.drain_wakeups()
            for pid, status, usage in runner.reap():
                if pid == self.pid:
                    self.gone = status, usage
        os.close(self._ready)
        return self.gone is None

    def give(self, request):
        self.untold = memoryview(request)  # a large request is written piece by piece, and copied by none of them
        self.tell()

    def tell(self):
        """Write what the pipe takes of the request; the rest is told as the child reads."""
        try:
            self.untold = self.untold[os.write(self.ask, self.untold) :]
        except BlockingIOError:
            return
        except OSError:
            self.untold = b""  # it has died; its status says so
        if not self.untold:
            self.close_ask()

    def unchanged(self, libc, limits, cpu_seconds):
        """Whether nobody has limited, stopped, signalled or traced it, as far as can be seen; ``limits`` are the runner's."""
        status = read_file("/proc/%d/status" % self.pid)
        fields = dict(line.split(b":\t", 1) for line in status.splitlines() if b":\t" in line)
        if self.gone is not None or fields.get(b"State", b"?")[:1] not in b"RSD":
            return False
        if any(int(fields.get(name, b"0"), 16) for name in (b"TracerPid", b"SigPnd", b"ShdPnd")):
            return False
        own = list(limits[0])
        if cpu_seconds:
            own[CPU_AT] = cpu_seconds, cpu_seconds + 1
        try:
            return limits_of(libc, self.pid) == (tuple(own), *limits[1:])
        except OSError:
            return False

    def close_ask(self):
        if self.ask is not None:
            os.close(self.ask)
            self.ask = None

    def close_stdin(self):
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None

    def close(self):
        self.close_ask()
        self.close_stdin()
        os.close(self.out)
        os.close(self.err)


def fork_ahead(libc, hidden=False, beside=False):
    """Fork the process of the next call: a ``Child`` in the runner, ``None`` in the child, which is ready to wait.

    ``hidden`` and ``beside`` are as ``become`` has them.
    """
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
    if hidden:
        # No signal of other calls' code may reach this call's; one that waits tells the runner that there was one.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if not beside:
        expose(libc)
    for number in SIGNALS + (signal.SIGCHLD,):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    return None


def expose(libc):
    """In the child: be a process like any other, and the first to go when memory runs out."""
    libc.unprotect()
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"500")
        os.close(fd)
    except OSError:
        pass


class Prepared:
    """In the child, ahead of the call: the interpreter as a fresh one would be, with a nameless file for the call's source.

    The file is real, so that tracebacks, ``inspect`` and the processes of ``multiprocessing`` can open it. Everything that
    a call will touch is touched once here: a forked process copies each page when it first writes to it, and that is time
    that a waiting child has and a call has not.
    """

    def __init__(self, libc, config, hidden, beside):
        self._libc, self._hidden, self._beside = libc, hidden, beside
        os.environ.clear()
        os.environ.update(config["env"])
        os.chdir(config["cwd"])
        if config["cpu_seconds"]:
            resource.setrlimit(resource.RLIMIT_CPU, (config["cpu_seconds"], config["cpu_seconds"] + 1))
        libc.keep_memory()  # under the call's limits too: its code can make that process work for it
        low = os.memfd_create("call.py")
        # Out of the way of descriptors that are counted on to be free, and inherited: a program may run itself again.
        self.fd = fcntl.fcntl(low, fcntl.F_DUPFD, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024) - 1)
        os.close(low)
        self.name = "/proc/%d/fd/%d" % (os.getpid(), self.fd)
        self._stream = libc.file(os.dup(self.fd))
        self._results, self._watched = [], []
        self._steps = []
        sys.path_importer_cache[self.name] = None
        for module in set(sys.modules) - KEPT:  # `wait4` imports one by itself
            del sys.modules[module]
        sys.argv = [self.name]
        if hasattr(sys, "orig_argv"):
            sys.orig_argv = ["python3", "-I", "-B", self.name]
        self.rehearse()
        gc.collect()
        self.unchanged = Unchanged()

    def rehearse(self):
        self.store(REHEARSAL.encode("utf-8"))
        self._libc.deepen()
        self._libc.run_file(self._libc.file(os.dup(self.fd)), os.fsencode(self.name), 1, None)
        self._libc.restore_depth()
        os.lseek(self.fd, 0, os.SEEK_SET)
        os.ftruncate(self.fd, 0)

    def store(self, data):
        written = 0
        while written < len(data):
            written += os.write(self.fd, data[written:])
        os.lseek(self.fd, 0, os.SEEK_SET)

    def hook(self):
        """What the interpreter calls, as ``sys.excepthook``, once every frame of this file is gone: the whole of the call.

        Between it and the caller's code there is only C, so that the code finds nothing below itself, and an error, an exit
        and an end are dealt with by the interpreter's own code. Each step is a call without arguments that returns nothing
        true; ``any`` makes them in order. ``max`` takes the three arguments of a hook and gives each to ``key``, which drops it.
        """
        call = functools.partial.__call__
        run = map(self._libc.run_file, [self._stream], [os.fsencode(self.name)], [1], [None])
        watching = map(_operator.is_not, self._watched, itertools.repeat(None))
        self._steps += (
            functools.partial(self.begin),
            functools.partial(self._results.extend, run),
            # What watches the caller's code must not see what comes after it.
            functools.partial(self._watched.extend, map(call, map(functools.partial, (sys.gettrace, sys.getprofile)))),
            functools.partial(any, map(call, itertools.compress(QUIET, watching))),
            functools.partial(self.finish),
        )
        steps = functools.partial(any, map(call, self._steps))
        return functools.partial(max, key=functools.partial(next, itertools.chain(map(call, [steps]), (0, 0))))

    def begin(self):
        """Wait for the call, and be the process that its code expects."""
        self.unchanged.rehearse(SOURCE, self._libc.fields_type)
        self.rehearse()  # anew: looking at everything has moved which memory is used next
        gc.collect()
        self.unchanged.settle()
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
        self._libc.deepen()
        gc.freeze()  # what is young now is not the call's
        gc.unfreeze()
        gc.enable()

    def unbuffer(self):
        """Turn the standard streams into those of ``python3 -u``; the same objects, as others may hold them already."""
        self._libc.unbuffer()
        sys.stdin.reconfigure(write_through=True)
        for stream in (sys.stdout, sys.stderr):
            encoding, errors = stream.encoding, stream.errors
            stream.__init__(stream.detach().detach(), encoding, errors, "\n", write_through=True)
        if hasattr(sys, "orig_argv"):
            sys.orig_argv.insert(3, "-u")

    def finish(self):
        """The caller's code has ended, and an error of it was shown: leave, at once where nobody could tell."""
        failed = self._results[0] != 0
        try:
            # Of an interrupt only the interpreter knows, and ends by its signal; a hook may have made it look otherwise.
            interrupted = failed and (sys.excepthook is not SHOW or sys.last_type is KeyboardInterrupt)
            if not interrupted and self.unchanged.holds():
                sys.stdout.flush()
                sys.stderr.flush()
                QUIT(1 if failed else 0)
        except BaseException:  # noqa: S110 - the interpreter says what there is to say
            pass
        self._libc.restore_depth()
        trace, profile = self._watched
        if trace is not None:
            self._steps.append(functools.partial(sys.settrace, trace))
        if profile is not None:
            self._steps.append(functools.partial(sys.setprofile, profile))
        if not failed:
            # After a failure the interpreter ends as after any other one: with 1, or by SIGINT.
            self._steps.append(functools.partial(EXIT, 0))


QUIET = functools.partial(sys.settrace, None), functools.partial(sys.setprofile, None)
EXIT, QUIT, SHOW, THREADS = sys.exit, os._exit, sys.excepthook, _thread._count  # as they were before any code of a call
RECURSION = 8  # levels that 3.11 counts between the bottom and the code that ``Prepared.hook`` runs


def refuse(what, error):
    """End the call before its code has begun, and say what was wrong."""
    os.write(2, os.fsencode("%s: %s\n" % (what, os.strerror(error.errno or 0))))
    os._exit(CANNOT_RUN)


def replace(path, argv):
    """Become another program; only a failure is told from here."""
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
    """In the child: wait for the request on descriptor ``ASK``: what is unusual about it, and the code, which ends it."""

    data = bytearray()

    def read_to(size):
        while len(data) < size:
            chunk = os.read(
                ASK, min(1 << 20, max(4096, size - len(data)))
            )  # to ask for much costs memory that is new each time
            if not chunk:
                os._exit(0)  # the runner has ended, and so there will be no call
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


class Unchanged:
    """Whether nobody could tell if the process ended without its interpreter being taken apart.

    Taking an interpreter apart writes to most of its pages, which a forked process first has to copy: more than half of a
    short call's time. Only few things can observe it: exit handlers, threads, finalizers, weak references' callbacks,
    suspended generators, and what some extension modules do when they go. So this looks for whatever may be one of those,
    without running any of the caller's code, and says no when in doubt.
    """

    def __init__(self):
        self._streams = id(sys.stdout), id(sys.stderr)
        self._filters = list(_warnings.filters)
        self.settle()

    def settle(self):
        """What is there by now was here before the call."""
        self._collected = self._collections()

    def _collections(self):
        return [one["collections"] for one in gc.get_stats()[1:]]

    def rehearse(self, *types):
        """Look at all that will be looked at after a call; ``types`` are of what the call itself brings."""
        self._quiet(), self._plain_modules(), self._noticing()
        for made in [*types, *map(type, gc.get_objects(generation=0)), *map(type, gc.get_objects(generation=1))]:
            verdict = judge(made)
            if not FLAGS(made) & HEAPTYPE:
                LASTING[id(made)] = verdict

    def holds(self):
        return self._quiet() and self._plain_modules() and not self._noticing()

    def _quiet(self):
        if atexit._ncallbacks() or THREADS() or not AUDIT or gc.callbacks or gc.get_debug() or gc.get_freeze_count():
            return False
        if (id(sys.stdout), id(sys.stderr)) != self._streams:
            return False
        warnings = sys.modules.get("warnings", _warnings)
        if type(warnings) is not MODULE or warnings.__dict__.get("filters") != self._filters:
            return False
        threading = sys.modules.get("threading")
        if threading is None:
            return True
        if type(threading) is not MODULE or threading.__dict__.get("_threading_atexits"):
            return False
        shutdown = threading.__dict__.get("_shutdown")
        return type(shutdown) is type(replace) and shutdown.__code__.co_filename == threading.__dict__.get("__file__")

    def _plain_modules(self):
        if type(sys.modules) is not dict:
            return False
        for name in sys.modules:
            if name in BASELINE:
                continue
            module = sys.modules[name]
            if type(module) is not MODULE:
                return False
            loader = getattr(module.__dict__.get("__spec__"), "loader", None)
            compiled = loader is BUILTIN or type(loader).__name__ == "ExtensionFileLoader"
            if compiled and name not in SILENT:
                return False
        return True

    def _noticing(self):
        if self._collections() != self._collected:
            return True  # what is young cannot be told from what was here before
        verdicts = {}
        for young in (0, 1):
            for thing in gc.get_objects(generation=young):
                made = type(thing)
                verdict = LASTING.get(id(made)) or verdicts.get(id(made))
                if verdict is None:
                    verdict = verdicts[id(made)] = judge(made)
                if verdict == FINALIZED:
                    return True
                if verdict == CLASS and finalizes(thing):
                    return True
                if verdict == REFERENCE:
                    # Callbacks that are built in and so named only tidy caches, those of abstract base classes.
                    callback = CALLBACK(thing)
                    if callback is not None and not (type(callback) is type(len) and callback.__name__ == "_destroy"):
                        return True
        return False


PLAIN, FINALIZED, CLASS, REFERENCE = 1, 2, 3, 4
MODULE, BUILTIN = type(sys), sys.modules["_frozen_importlib"].BuiltinImporter
SOURCE = sys.modules["_frozen_importlib_external"].SourceFileLoader
CALLBACK, BASES, NAMES, FLAGS = (
    weakref.ref.__callback__.__get__,
    type.__dict__["__mro__"].__get__,
    type.__dict__["__dict__"].__get__,
    type.__dict__["__flags__"].__get__,
)
HEAPTYPE = 1 << 9  # of a type that is not built in: only such a one can be changed
LASTING = {}  # what was found of built-in types, ahead of the call
# Compiled modules that do nothing when an interpreter is taken apart.
SILENT = frozenset((
    "array", "atexit", "binascii", "cmath", "errno", "fcntl", "gc", "grp", "itertools", "math", "pwd", "pyexpat",
    "resource", "select", "syslog", "unicodedata", "zlib", "_abc", "_ast", "_asyncio", "_bisect", "_blake2", "_bz2",
    "_codecs", "_collections", "_contextvars", "_csv", "_datetime", "_decimal", "_elementtree", "_functools",
    "_hashlib", "_heapq", "_imp", "_io", "_json", "_locale", "_lzma", "_md5", "_opcode", "_operator", "_pickle",
    "_posixsubprocess", "_queue", "_random", "_sha1", "_sha2", "_sha256", "_sha3", "_sha512", "_signal", "_socket",
    "_sre", "_ssl", "_stat", "_statistics", "_string", "_struct", "_symtable", "_thread", "_tokenize",
    "_tracemalloc", "_typing", "_uuid", "_warnings", "_weakref", "_zoneinfo",
))  # fmt: skip
# Emptied by the first audit hook that is added after this one, and otherwise without an effect.
AUDIT = {"sys.addaudithook": True}


def finalizes(made):
    """Whether instances of a class are told of their end; asks the class itself and none of its own code."""
    return any("__del__" in NAMES(base) for base in BASES(made))


def judge(made):
    bases = BASES(made)
    if finalizes(made) or made is weakref.ProxyType or made is weakref.CallableProxyType:
        return FINALIZED
    if any(base is type for base in bases):
        return CLASS
    return REFERENCE if any(base is weakref.ref for base in bases) else PLAIN


def run(config):
    """Serve calls until there are no more; comes back only in a child."""
    try:
        libc = Libc()
        dumpable, subreaper = libc.protect()
    except Exception as error:  # without ctypes the runner cannot protect itself, and says so
        libc, dumpable, subreaper = None, False, False
        config["problem"] = "the image's python3 has not what a runner needs: %r" % error
    runner = Runner(config, libc)
    # Beside other runners the count of processes has no resting value.
    resting = None if config["shared"] else runner.cgroup.pids()
    facts = {path: read_file(path).decode("utf-8", "replace") for path in config["files"]}
    facts = {
        "files": facts,
        "nonce": read_file("/tool/nonce").decode("utf-8", "replace").strip(),
        "undumpable": dumpable,
        "subreaper": subreaper,
        "alone": runner.alone(),
        "python": sys.version.split()[0],
        "parent": parent(),
        "problem": config.get("problem", ""),
        "witness": witness(),
    }
    if libc is not None:
        warm_up(config["preload"], facts)
        child = fork_ahead(libc, hidden=config["shared"])
        if child is None:
            return become(libc, config, hidden=config["shared"])
        if not runner.practise(child):
            facts["problem"] = "a first call failed, under the limits of [sandbox]"
    runner.send(HELLO, json.dumps(facts).encode("ascii"))
    if libc is None:
        runner.flush_all()
        os._exit(4)
    shared = config["shared"]
    limits, left, beside = limits_of(libc), config["calls"], False
    while True:
        runner.seq += 1
        child = None
        if not beside:
            child = fork_ahead(libc, hidden=shared)
            if child is None:
                return become(libc, config, hidden=shared)
            runner.rehearse(child)
        runner.send(ARMED)
        if limits_of(libc) != limits:
            runner.send(POISONED, b"the runner's limits changed")
            runner.flush_all()
            break
        asked = runner.next_call(child)
        if asked is None:
            break
        # Nothing that could change them has run since they were last looked at, unless it runs beside this.
        if asked is False or (shared and limits_of(libc) != limits):
            runner.send(
                POISONED, b"the waiting process was killed" if asked is False else b"the runner's limits changed"
            )
            runner.flush_all()
            break
        forks = 0
        while shared and (child is None or not child.unchanged(libc, limits, config["cpu_seconds"])):
            # After the first call nothing waits beside other calls' code: each pays for its fork. What waited for the first
            # one may have been changed by that code, and what is forked now too: this call gets another process then.
            if forks == FRESH_CHILDREN or not runner.discard(child):
                child = None
                break
            forks += 1
            try:
                child = fork_ahead(libc, hidden=True, beside=True)
            except OSError:
                child = None
                break
            if child is None:
                return become(libc, config, hidden=True, beside=True)
            runner.rehearse(child)
        if child is None:
            runner.send(POISONED, b"no process for the call could be made, or none that was left alone")
            runner.flush_all()
            break
        if shared:
            runner.ooms = runner.cgroup.oom_kills()  # other calls have moved it meanwhile
        call = runner.serve(child, *asked)
        runner.send(DONE, call.report())
        child.close()
        beside = not runner.told_to_sweep()
        runner.watched = True
        spent = runner.clean_own() if beside else runner.clean(resting)
        runner.watched = False
        runner.send(CLEAN if spent is not None else DIRTY, repr(spent).encode("ascii"))
        runner.flush_all()
        # Beside other calls nobody can take this runner's place, so it stays, also after a cancelled one.
        if spent is None or runner.host_gone or (call.cancelled and not beside):
            break
        if left and not beside:
            left -= 1
            if not left:
                break
    if config["shared"]:
        runner.kill_own()
    else:
        runner.clean(resting)
    os._exit(0)


def parent():
    """The command of the process that started this one in here, empty where the engine did."""
    pid = os.getppid()
    return read_file("/proc/%d/cmdline" % pid).replace(b"\0", b" ").decode("utf-8", "replace") or "?" if pid else ""


def become(libc, config, hidden=False, beside=False):
    """In the child: be prepared for the call.

    A child that is to wait beside other calls' code is out of its reach (``hidden``) until its own call has come; one that
    was forked beside that code (``beside``) has been so from the first.
    """
    prepared = Prepared(libc, config, hidden, beside)
    sys.addaudithook(AUDIT.pop)
    if hidden:
        libc.hide()
    return prepared


def warm_up(preload, facts):
    """Pay once, before any fork, for what every call would pay: the parser's types, the imports, a clean heap."""
    exec(compile("def _warm(x):\n    return [i for i in range(x)]\n_warm(3)\n", "<warm>", "exec"), {})
    # This file's own imports are nobody else's. What is preloaded then gets copies of its own, and those stay: the one
    # difference that was asked for.
    for name in set(sys.modules) - BASELINE:
        del sys.modules[name]
    for path in set(sys.path_importer_cache) - BASELINE_PATHS:
        del sys.path_importer_cache[path]
    # What a module prints is not for the host, which reads frames there.
    kept = os.dup(1)
    os.dup2(2, 1)
    for name in preload:
        try:
            __import__(name)
        except BaseException as error:
            facts["problem"] = facts["problem"] or "sandbox.preload: %s cannot be imported: %r" % (name, error)
    sys.stdout.flush()
    os.dup2(kept, 1)
    os.close(kept)
    KEPT.update(sys.modules)
    if len(os.listdir("/proc/self/task")) > 1:
        facts["problem"] = "sandbox.preload: a module left a thread, with which no call can be forked"
    gc.collect()
    gc.disable()
    gc.freeze()


# --- in the child, at the outermost level ---------------------------------------------------------------------------------

sys.excepthook = run(json.loads(r(int.from_bytes(r(4), "big")))).hook()  # noqa: F821 - the loader's own reader
raise Exception("the way out of every frame below the caller's code")  # noqa: TRY002 - nobody sees it
