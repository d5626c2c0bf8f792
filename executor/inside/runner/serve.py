"""Follow one call: its input, its output, its deadline, and how it ends."""

import fcntl
import os
import select
import signal
import time

from executor.inside.runner.wire import (
    BUFFERED,
    CANCEL,
    CHUNK,
    CREDIT,
    ERR,
    INPUT,
    INPUT_END,
    NO_CODE,
    NO_LIMIT,
    OOM_KNOWN,
    OUT,
    TAKEN,
)

F_GETPIPE_SZ = 1032  # the fcntl module knows it since Python 3.10


class RunningCall:
    """A call under way: its pipes, its credit, its deadline, and how it ended."""

    def __init__(self, wire, processes, child, header, began):
        self.wire, self.processes, self.child, self.began = wire, processes, child, began
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
        self.rest = {}  # once the main process has ended: by descriptor, how many bytes in its pipe may be its own
        self.poll, self.polled = None, ()  # the last wait, and which descriptors of output it was for
        self.ooms = processes.ooms

    def take(self, kind, data):
        """Handle a frame of the host."""
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
        """Send SIGTERM to the call's process group; ``enforce_deadline`` kills it once its grace is over."""
        if self.stopping is None:
            self.stopping = now
            self.signal(signal.SIGTERM)

    def signal(self, number):
        # The group is the child's own. Once the child is reaped, its ID may belong to another process.
        if self.status is None:
            try:
                os.killpg(self.child.pid, number)
            except (ProcessLookupError, PermissionError):
                try:
                    os.kill(self.child.pid, number)
                except (ProcessLookupError, PermissionError):
                    pass

    def enforce_deadline(self, now):
        """Stop the call at its deadline, kill it after its grace; the seconds until this has something to do again."""
        if self.stopping is None and now >= self.deadline:
            self.timed_out = True
            self.stop(now)
        if self.stopping is None:
            return self.deadline - now
        left = self.stopping + self.grace - now
        if left <= 0 and not self.killed:
            self.killed = True
            self.processes.kill_call()
        return max(left, 0.05)

    def ended(self, status, usage, empty=()):
        """Note how the main process ended. ``empty`` are the descriptors of output that have been read to the end since."""
        self.status = status
        # All that it wrote is in its pipes by now. Without a bound, a process that it left could refill them for ever.
        self.rest = {fd: 0 if fd in empty else fcntl.fcntl(fd, F_GETPIPE_SZ) for fd in self.sources}
        self.cpu_seconds, self.max_rss = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024

    def silent(self):
        """Return which descriptors of output that the last wait was for hold nothing now."""
        ready = [fd for fd, _ in self.poll.poll(0)]
        return [fd for fd in self.polled if fd not in ready]

    def readable(self, stream):
        """Whether the host takes more of a stream's output, or it would be dropped anyway."""
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
        """Wait until a pipe is ready, or for so many seconds; move its bytes; return the descriptors that were ready."""
        poll = select.poll()
        if not self.wire.host_gone:
            poll.register(self.wire.input_fd, select.POLLIN)
        poll.register(self.processes.wake_r, select.POLLIN)
        held = self.wire.holding(time.monotonic()) if self.wire.outbox else 0.0
        if held:
            seconds = min(seconds, held)
        elif self.wire.outbox:
            poll.register(self.wire.output_fd, select.POLLOUT)
        self.poll, self.polled = poll, []
        if len(self.wire.outbox) < BUFFERED:
            for fd, stream in self.sources.items():
                if self.readable(stream) and self.rest.get(fd, 1) > 0:
                    poll.register(fd, select.POLLIN)
                    self.polled.append(fd)
        if self.child.stdin is not None and (self.input or not self.input_open):
            poll.register(self.child.stdin, select.POLLOUT)
        if self.child.unsent:
            poll.register(self.child.ask, select.POLLOUT)
        ready = [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000 + 0.5)]
        for fd in ready:
            if fd in self.sources:
                self.pull(fd, self.sources[fd])
            elif fd == self.child.stdin:
                self.push()
            elif fd == self.child.ask:
                self.child.send_rest()
        if self.wire.outbox and not self.wire.holding(time.monotonic()):
            self.wire.flush()
        return ready

    def pull(self, fd, stream):
        """Read from a stream and queue what its cap and credit allow; whether there may be more."""
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
            self.wire.hold(stream, kept)
        return True

    def push(self):
        """Write what the call's stdin takes of its input."""
        try:
            if self.input:
                count = os.write(self.child.stdin, self.input)
                del self.input[:count]
                self.taken += count
                if self.taken >= CHUNK or not self.input:
                    self.wire.send(TAKEN, self.taken.to_bytes(8, "big"))
                    self.taken = 0
        except BlockingIOError:
            return
        except OSError:
            # The process no longer reads its stdin; further input is dropped.
            self.input.clear()
            self.child.close_stdin()
            return
        if not self.input and not self.input_open:
            self.child.close_stdin()

    def report(self):
        """Return how the call ended, in the form of executor.sandbox.wire.Report.

        Only a process that was killed may have run out of memory, so only then is the counter read.
        """
        code, number, ooms = NO_CODE, 0, None
        if os.WIFSIGNALED(self.status):
            number, ooms = os.WTERMSIG(self.status), self.processes.cgroup.oom_kills()
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
