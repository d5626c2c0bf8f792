"""Kill what a call left, reap it, and prove that nothing of it is left."""

import os
import signal
import time

from executor.inside.runner.facts import Cgroup, read_file
from executor.inside.runner.wire import CLEANING

REAP_SECONDS = 4.0
REAPED_AT_ONCE = 1000  # then the call's deadline is checked again, however many more there are to reap
HEARTBEAT_SECONDS = 0.2  # between two signs of life during a clean-up; the host waits for several of them
NO_PROCESS = 1 << 30  # more than any process ID


class Processes:
    """The processes of this runner's calls. During a clean-up that the host waits for, signs of life go to ``wire``."""

    def __init__(self, config, libc, wire):
        self.config, self.libc, self.wire = config, libc, wire
        self.cgroup = Cgroup()
        self.simulated_end = None  # while a call is rehearsed: the end that ``reap`` reports next
        self.ooms = None
        self._clean_until = self._heartbeat_due = 0.0
        self.host_waits = False  # for the end of a clean-up
        self.wake_r, self.wake_w = os.pipe()
        os.set_blocking(self.wake_r, False)
        os.set_blocking(self.wake_w, False)

    def wake(self):
        """Make the next wait end at once, as SIGCHLD does."""
        try:
            os.write(self.wake_w, b"1")
        except BlockingIOError:  # the pipe is full of wake-ups
            pass

    def note_oom_kills(self):
        """Remember the out-of-memory counter, for comparison when the next call has ended."""
        self.ooms = self.cgroup.oom_kills()

    def drain_wakeups(self):
        try:
            os.read(self.wake_r, 4096)
        except BlockingIOError:
            pass

    def reap(self, until=0):
        """Reap what has ended, up to and including ``until``: pairs of (process ID, status, usage)."""
        if self.simulated_end is not None:
            # No real process is reaped here: `wait4` is called only so that its pages are copied.
            gone, self.simulated_end = [self.simulated_end], None
            try:
                os.wait4(NO_PROCESS, os.WNOHANG)
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
                # A process that asked to be traced by its parent has made this one its tracer, and stops for each signal.
                self.libc.detach(pid, os.WSTOPSIG(status))
                continue
            gone.append((pid, status, usage))
            if pid == until:
                return gone
        self.wake()  # there may be more
        return gone

    def clean(self, resting):
        """Kill every process of this uid, reap them, and prove that none is left.

        ``resting`` is the container's count of processes at rest, ``None`` where there is none. Returns the seconds it took,
        or ``None`` without a proof.
        """
        began = self._begin_cleaning()
        while self._time_left():
            try:
                os.kill(-1, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            if self._reap_all() and ((resting is not None and self.cgroup.pids() == resting) or self.scan()):
                return time.monotonic() - began if self.libc.remove_ipc(self._time_left) else None
            time.sleep(0.001)
        return None

    def clean_own(self):
        """Kill and reap this runner's descendants, beside other runners' calls; the seconds it took, or ``None``.

        This process adopts its orphaned descendants (it is their subreaper), so that having no child proves that there is
        no descendant. System V objects and message queues may be another call's: they stay until ``clean``.
        """
        began = self._begin_cleaning()
        while self._time_left():
            self.kill_own()
            if self._reap_all(wait=False):
                return time.monotonic() - began
            time.sleep(0.001)
        return None

    def _begin_cleaning(self):
        now = time.monotonic()
        self._clean_until, self._heartbeat_due = now + REAP_SECONDS, now + HEARTBEAT_SECONDS
        return now

    def _time_left(self):
        """Whether there is time left to clean up. Sends the host a sign of life when one is due."""
        now = time.monotonic()
        if self.host_waits and now > self._heartbeat_due:
            self._heartbeat_due = now + HEARTBEAT_SECONDS
            self.wire.send(CLEANING)
        return now < self._clean_until

    def kill_call(self):
        """Send SIGKILL to every process of this uid; where other calls run too, to this runner's descendants."""
        if self.config["shared"]:
            self.kill_own()
            return
        try:
            os.kill(-1, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def kill_own(self):
        """Send SIGKILL to this runner's descendants."""
        children = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                # The name of a program may hold spaces and brackets; the fields follow the last bracket.
                fields = read_file("/proc/" + name + "/stat").rpartition(b")")[2].split()
                if len(fields) > 1:
                    children.setdefault(int(fields[1]), []).append(int(name))
        family = children.pop(os.getpid(), [])
        while family:
            pid = family.pop()
            family += children.pop(pid, [])
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def _reap_all(self, wait=True):
        """Reap until no child is left (true) or no time (false). Without ``wait``, also stop where no child has ended.

        A child that has stopped for this process as its tracer is left alone: it has been killed.
        """
        while self._time_left():
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    if not wait:
                        return False
                    time.sleep(0.0005)
            except ChildProcessError:
                return True
        return False

    def alone(self):
        """Whether nothing else runs in the container. Where runners start side by side, wait until none is half started."""
        if not self.config["shared"]:
            return self.scan()
        began = time.monotonic()
        while not self.scan(runners=True):
            if time.monotonic() - began > REAP_SECONDS:
                return False
            time.sleep(0.005)
        return True

    def scan(self, runners=False):
        """Whether /proc shows this process, PID 1 and PID 1's own child, and nothing else.

        With ``runners``, other runners (started by the engine with the same command) and their waiting children are
        allowed too.
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
                continue  # it has ended meanwhile
            if runners and int(name) in kin and (fields.get("PPid") == "0" or int(fields.get("PPid", 0)) in kin):
                continue
            if fields.get("PPid") != "1" or fields.get("Uid", "").split("\t")[0] != self.config["keeper"]:
                return False
            if sleepers or read_file("/proc/" + name + "/cmdline").split(b"\0")[0] != b"sleep":
                return False
            sleepers += 1
        return True
