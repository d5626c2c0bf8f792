"""Read facts about the container and its processes."""

import os
import resource

WITNESS_WHICH = 0x454D4250  # the same number as in executor.sandbox.seccomp


def read_file(path, size=262144):
    """Return at most ``size`` bytes of a file; none where it cannot be read."""
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


def witness():
    """Return the error number by which the host's seccomp profile is recognised: see executor.sandbox.seccomp.

    No other system call distinguishes it from another filter.
    """
    try:
        os.getpriority(WITNESS_WHICH, 0)
    except OSError as error:
        return error.errno
    return 0


def limits_of(libc, pid=0):
    """Return what code of the same uid can change of a process (0 is this one) without tracing it.

    That is what ``prlimit``, ``sched_setaffinity``, ``setpriority``, ``sched_setscheduler``, ``sched_setattr`` and ``ioprio_set``
    reach. The rest was tried against an undumpable
    process and is out of reach: everything in /proc/PID that can be written (oom_score_adj,
    timerslack_ns, autogroup, coredump_filter, comm, attr), core scheduling cookies, where its pages are, its process
    group, its control group, and whatever needs to trace it.
    """
    # `getrlimit` is the quicker one of the two.
    limits = tuple([resource.prlimit(pid, kind) if pid else resource.getrlimit(kind) for kind in LIMITS])
    nice, policy = os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
    return limits, os.sched_getaffinity(pid), nice, policy, libc.scheduling(pid)


LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
CPU_AT = LIMITS.index(resource.RLIMIT_CPU)


class Cgroup:
    """Read the container's own counters, from either cgroup version. An unreadable one is ``None``."""

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


def parent():
    """Return the command of the process in this container that started this one; empty where the engine did."""
    pid = os.getppid()
    return read_file("/proc/%d/cmdline" % pid).replace(b"\0", b" ").decode("utf-8", "replace") or "?" if pid else ""
