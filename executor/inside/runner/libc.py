"""Call C functions that Python has no names for."""

import os
import signal
import sys

from executor.inside.runner.facts import read_file

QUEUES = "/dev/mqueue"
IPC_BYTES = 1 << 23  # of a list of System V objects that are read at a time: most of what a namespace may have


class Libc:
    """C functions, looked up once.

    Two settings protect the runner from code of its own uid (both are read back), a process keeps another's memory, and
    one function is what the interpreter itself runs a file with.
    """

    PR_SET_DUMPABLE, PR_GET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 4, 3, 36, 37
    PTRACE_DETACH, PTRACE_GETSIGINFO = 17, 0x4202
    CLONE_VM, CLONE_PARENT = 0x100, 0x8000
    STACK = 16384

    def __init__(self):
        import ctypes

        self._ctypes = ctypes
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

    def detach(self, pid, number):
        """Stop tracing a stopped process that made this one its tracer. It gets the signal that it was stopped for.

        A traced process is also stopped by a trap when it has become another program. That trap is not passed on: without
        a tracer it would not have come.
        """
        if number == signal.SIGTRAP:
            self._siginfo.raw = bytes(128)
            self._ptrace(self.PTRACE_GETSIGINFO, pid, None, self._siginfo)
            if self._siginfo.raw[8:12] == bytes(4):  # no fault of the program: si_code is that of kill(2)
                number = 0
        self._ptrace(self.PTRACE_DETACH, pid, None, number)

    def scheduling(self, pid):
        """Return a process's scheduling attributes (with slice and clamps) and its I/O priority; ``None`` on other machines."""
        if self._numbers is None:
            return None
        attributes, ioprio = self._numbers
        done = self._syscall(attributes, pid, self._scheduling, 56, 0)
        return done, self._scheduling.raw, self._syscall(ioprio, 1, pid)

    def keep_memory(self):
        """Start a process that shares this one's memory and only waits, until the clean-up kills it.

        Without it the kernel frees the memory before it reports this process's end, and that was half of a short call's
        time. With it, the memory is freed after the answer. It blocks all signals: a handler would run in this very
        memory. Where it is missing, a call is only slower.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._clone(self._pause, self._stack_top, self.CLONE_VM | self.CLONE_PARENT | signal.SIGCHLD, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def unbuffer(self):
        """Make C's own streams write at once, as the interpreter does with -u."""
        for stream in self._streams:
            self._setvbuf(stream, None, 2, 0)

    def file(self, fd):
        """Open a C stream that reads a descriptor."""
        return self._fdopen(fd, b"rb")

    def remove_ipc(self, time_left):
        """Remove this uid's System V objects and POSIX message queues, which no kill frees; whether none is left.

        ``time_left`` is called between two removals; once it is false, this gives up.
        """
        for kind, remove in self._ipc:
            found = None
            while found != (left := self._left(kind)):
                found = left
                for number in left:
                    remove(number)
                    if not time_left():
                        return False
            if left:
                return False
        return self._remove_queues(time_left)

    def _left(self, kind):
        """Return the IDs of this uid's System V objects of a kind, by their creator: the owner can be changed, the creator not."""
        mine, maker, found = str(os.getuid()).encode("ascii"), 9 if kind != "sem" else 6, []
        for line in read_file("/proc/sysvipc/" + kind, IPC_BYTES).splitlines()[1:]:
            fields = line.split()
            if len(fields) > maker and fields[maker] == mine:
                found.append(int(fields[1]))
        return found

    def _remove_queues(self, time_left):
        """Remove this uid's POSIX message queues; whether none is left."""
        mine, found = os.getuid(), None
        while True:
            try:
                with os.scandir(QUEUES) as entries:
                    left = [one.path for one in entries if one.stat(follow_symlinks=False).st_uid == mine]
                if not left or left == found:
                    return not left
                for path in left:
                    os.unlink(path)
                    if not time_left():
                        return False
            except FileNotFoundError:  # this engine mounts no such directory
                return True
            found = left
