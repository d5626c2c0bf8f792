"""Fork the process of the next call ahead of it, and send it the call."""

import fcntl
import os
import resource
import select
import signal

from executor.inside.runner.facts import CPU_AT, limits_of, read_file

# The descriptors from which a waiting child reads its call, and on which it says that it is prepared.
ASK, ASK_READY = 3, 4
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


class WaitingChild:
    """The process of the next call, seen from the processes. ``end`` is its (status, usage) if it dies before its call."""

    def __init__(self, pid, ask, stdin, out, err, ready):
        self.pid, self.ask, self.stdin, self.out, self.err, self._ready = pid, ask, stdin, out, err, ready
        self.unsent, self.end = b"", None
        for fd in (ask, stdin, out, err):
            os.set_blocking(fd, False)

    def wait_until_prepared(self, processes):
        """Wait until the child has prepared itself; false where it has died."""
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        poll.register(processes.wake_r, select.POLLIN)
        # The end of this pipe would not show a death: the process that keeps the child's memory holds it open too.
        while self.end is None and not any(fd == self._ready for fd, _ in poll.poll()):
            processes.drain_wakeups()
            for pid, status, usage in processes.reap():
                if pid == self.pid:
                    self.end = status, usage
        os.close(self._ready)
        return self.end is None

    def send(self, request):
        """Write what the pipe takes of the call's request."""
        self.unsent = memoryview(request)  # a large request is written piece by piece, without a copy
        self.send_rest()

    def send_rest(self):
        """Write what the pipe takes of the rest of the request; close the pipe after its end."""
        try:
            self.unsent = self.unsent[os.write(self.ask, self.unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self.unsent = b""  # it has died; its status says so
        if not self.unsent:
            self.close_ask()

    def unchanged(self, libc, limits, cpu_seconds):
        """Whether no other process has limited, stopped, signalled or traced it; ``limits`` are the runner's."""
        status = read_file("/proc/%d/status" % self.pid)
        fields = dict(line.split(b":\t", 1) for line in status.splitlines() if b":\t" in line)
        if self.end is not None or fields.get(b"State", b"?")[:1] not in b"RSD":
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
    """Fork the process of the next call: a ``WaitingChild`` in the runner, ``None`` in the child.

    ``hidden``: other runners' calls may start before this child's call comes. ``beside``: they run already.
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
        return WaitingChild(pid, ask_w, in_w, out_r, err_r, ready_r)
    signal.set_wakeup_fd(-1)
    os.setsid()
    # Close everything but its own pipes before any process may look: close-on-exec does not act on a fork.
    for fd, place in ((in_r, 0), (out_w, 1), (err_w, 2)):
        os.dup2(fd, place)
    # Both are copied out of the way first: either may have the other's number.
    ask_r, ready_w = fcntl.fcntl(ask_r, fcntl.F_DUPFD_CLOEXEC, 32), fcntl.fcntl(ready_w, fcntl.F_DUPFD_CLOEXEC, 32)
    os.dup2(ask_r, ASK, inheritable=False)
    os.dup2(ready_w, ASK_READY, inheritable=False)
    os.closerange(5, min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if hidden:
        # No signal of other calls' code may reach this call's. A pending one shows the runner that there was one.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if not beside:
        expose(libc)
    for number in SIGNALS + (signal.SIGCHLD,):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    return None


def expose(libc):
    """In the child: drop the runner's protection, and be the first to be killed when memory runs out."""
    libc.unprotect()
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"500")
        os.close(fd)
    except OSError:
        pass
