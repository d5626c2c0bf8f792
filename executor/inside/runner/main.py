"""Say hello, then serve calls one after another until there are no more."""

import gc
import json
import os
import resource
import select
import signal
import sys
import time

from executor.inside.runner.child import PRESENT, prepare_child
from executor.inside.runner.facts import limits_of, parent, read_file, witness
from executor.inside.runner.fork import SIGNALS, WaitingChild, fork_ahead
from executor.inside.runner.libc import Libc
from executor.inside.runner.process import NO_PROCESS, Processes
from executor.inside.runner.serve import RunningCall
from executor.inside.runner.start import BASELINE, BASELINE_PATHS
from executor.inside.runner.wire import (
    ARMED,
    CALL,
    CALL_HEADER,
    CLEAN,
    DIRTY,
    DONE,
    FINISH,
    HELLO,
    INPUT_END,
    LEAVE,
    NO_LIMIT,
    POISONED,
    Wire,
    encode,
)

REHEARSED_CALL = b"".join(number.to_bytes(8, "big") for number in (10000000, 1000000, 0, NO_LIMIT))
MAX_FORKS = 3  # how often a waiting child that other calls' code has changed is replaced, before its call is refused


class Runner:
    """What the runner does between two calls and around one."""

    def __init__(self, config, libc):
        self.config, self.libc = config, libc
        self.wire = Wire()
        self.processes = Processes(config, libc, self.wire)
        self.dev_null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.processes.wake_w, warn_on_full_buffer=False)

    def next_call(self, waiting):
        """Wait for a call: its payload and the frames that came with it.

        ``None`` once the host has gone or asks the runner to leave, ``False`` when the waiting child has died.
        """
        wire, processes = self.wire, self.processes
        poll = select.poll()
        poll.register(wire.input_fd, select.POLLIN)
        poll.register(processes.wake_r, select.POLLIN)
        if waiting is not None and waiting.end:
            return False
        while True:
            frames = wire.read_frames()
            for index, frame in enumerate(frames):
                if frame[0] == CALL and frame[1] == wire.seq:
                    return frame[2], frames[index + 1 :]
                if frame[0] == LEAVE:
                    return None
            if wire.host_gone:
                return None
            if any(fd == processes.wake_r for fd, _ in poll.poll()):
                processes.drain_wakeups()
                if any(waiting is not None and pid == waiting.pid for pid, _, _ in processes.reap()):
                    return False

    def cleans_everything(self):
        """Wait until the host says whether to clean up after all calls (true), or after the call that has just ended.

        A runner that has the sandbox to itself need not ask. A host that has gone will not use the sandbox again.
        """
        if not self.config["shared"]:
            return True
        wire, processes = self.wire, self.processes
        while True:
            for kind, seq, data in wire.read_frames():
                if kind == FINISH and seq == wire.seq:
                    return data == b"\x01"
            if wire.host_gone:
                return True
            poll = select.poll()
            poll.register(wire.input_fd, select.POLLIN)
            poll.register(processes.wake_r, select.POLLIN)
            if wire.outbox:
                # The host answers the report, which may still be queued here behind much output.
                poll.register(wire.output_fd, select.POLLOUT)
            poll.poll()
            wire.flush()
            processes.drain_wakeups()
            processes.reap()

    def rehearse(self, child):
        """Serve a simulated call, so that every page that a call writes to is copied before a call comes.

        After a fork this process, too, copies each page that it first writes to, and now it has the time. The simulated
        call's frames come from a pipe of its own, its process does not exist, and its report goes to /dev/null. Returns
        whether ``child`` has prepared itself.
        """
        wire, processes = self.wire, self.processes
        (input_r, input_w), (ask_r, ask), (in_r, stdin), (out, out_w), (err, err_w) = [os.pipe() for _ in range(5)]
        os.set_blocking(input_r, False)
        simulated = WaitingChild(NO_PROCESS, ask, stdin, out, err, None)
        for kind, payload in (CALL, REHEARSED_CALL + bytes(8)), (INPUT_END, b""):
            os.write(input_w, encode(kind, wire.seq, payload))
        os.write(out_w, b"1")
        processes.wake()
        kept, wire.inbox, wire.outbox = (wire.inbox, wire.outbox), bytearray(), bytearray()
        wire.input_fd, wire.output_fd = input_r, self.dev_null
        processes.simulated_end = NO_PROCESS, 0, resource.getrusage(resource.RUSAGE_SELF)
        call = self.serve(simulated, *self.next_call(None))
        self.wire.send(DONE, call.report())
        wire.input_fd, wire.output_fd, processes.simulated_end = 0, 1, None
        wire.inbox, wire.outbox = kept
        simulated.close()
        for fd in (input_r, input_w, ask_r, in_r, out_w, err_w):
            os.close(fd)
        processes.wake()  # a real wake-up may have been taken for a part of this
        processes.note_oom_kills()
        limits_of(self.libc)
        return child.wait_until_prepared(processes)

    def run_first_call(self, child):
        """Carry out a call that does nothing and is not reported, so that no real call is the first one."""
        if not self.rehearse(child):
            return False
        self.serve(child, REHEARSED_CALL + bytes(8), []).report()
        child.close()
        self.wire.outbox.clear()
        return self.processes.clean_own() is not None

    def serve(self, child, payload, frames):
        """Carry out one call, and return it once its main process has ended and its output is taken."""
        began = time.monotonic()
        wire, processes = self.wire, self.processes
        child.send(payload[CALL_HEADER:])  # first of all: the child is at work while this goes on
        call = RunningCall(wire, processes, child, payload[:CALL_HEADER], began)
        if child.end:
            call.ended(*child.end)
        while True:
            for kind, seq, data in frames:
                if seq == wire.seq:
                    call.take(kind, data)
            now = time.monotonic()
            if wire.host_gone:
                call.stop(now)
            wait = call.enforce_deadline(now)
            if call.finished():
                break
            ready = call.wait(wait)
            if processes.wake_r in ready:
                processes.drain_wakeups()
                for pid, status, usage in processes.reap(child.pid):
                    if pid == child.pid:
                        call.ended(status, usage, call.silent())
            frames = wire.read_frames() if wire.input_fd in ready else ()
        return call

    def discard(self, child):
        """End a waiting child and all its descendants; whether none is left. ``None`` is no child."""
        if child is None:
            return True
        child.close()
        return self.processes.clean_own() is not None


def run(config):
    """Serve calls until there are no more. Returns only in a child: what it needs to become the caller's code."""
    try:
        libc = Libc()
        dumpable, subreaper = libc.protect()
    except Exception as error:  # without ctypes the runner cannot protect itself
        libc, dumpable, subreaper = None, False, False
        config["problem"] = "the image's python3 lacks what the runner needs: %r" % error
    runner = Runner(config, libc)
    wire, processes, shared = runner.wire, runner.processes, config["shared"]
    # Beside other runners the count of processes has no resting value.
    resting = None if shared else processes.cgroup.pids()
    files = {path: read_file(path).decode("utf-8", "replace") for path in config["files"]}
    hello = {
        "files": files,
        "nonce": read_file("/tool/nonce").decode("utf-8", "replace").strip(),
        "undumpable": dumpable,
        "subreaper": subreaper,
        "alone": processes.alone(),
        "python": sys.version.split()[0],
        "parent": parent(),
        "problem": config.get("problem", ""),
        "witness": witness(),
    }
    if libc is not None:
        warm_up(config["preload"], hello)
        child = fork_ahead(libc, hidden=shared)
        if child is None:
            return prepare_child(libc, config, hidden=shared)
        if not runner.run_first_call(child):
            hello["problem"] = "a first call failed, under the limits of [sandbox]"
    wire.send(HELLO, json.dumps(hello).encode("ascii"))
    if libc is None:
        wire.flush_all()
        os._exit(4)
    limits, left, beside = limits_of(libc), config["calls"], False
    while True:
        wire.seq += 1
        child = None
        if not beside:
            child = fork_ahead(libc, hidden=shared)
            if child is None:
                return prepare_child(libc, config, hidden=shared)
            runner.rehearse(child)
        wire.send(ARMED)
        if limits_of(libc) != limits:
            wire.send_last(POISONED, b"the runner's limits changed")
            break
        asked = runner.next_call(child)
        if asked is None:
            break
        # Nothing that could change the limits has run since the last look, unless it runs beside this runner.
        if asked is False or (shared and limits_of(libc) != limits):
            reason = b"the waiting process was killed" if asked is False else b"the runner's limits changed"
            wire.send_last(POISONED, reason)
            break
        forks = 0
        while shared and (child is None or not child.unchanged(libc, limits, config["cpu_seconds"])):
            # Where other calls' code runs, no child waits: each call pays for its fork. The child that waited for the first
            # call may have been changed by that code, and so may the one that is forked now. Then the call gets another.
            if forks == MAX_FORKS or not runner.discard(child):
                child = None
                break
            forks += 1
            try:
                child = fork_ahead(libc, hidden=True, beside=True)
            except OSError:
                child = None
                break
            if child is None:
                return prepare_child(libc, config, hidden=True, beside=True)
            runner.rehearse(child)
        if child is None:
            wire.send_last(POISONED, b"no process for the call could be made, or none that was left alone")
            break
        if shared:
            processes.note_oom_kills()  # other calls have moved the counter meanwhile
        call = runner.serve(child, *asked)
        wire.send(DONE, call.report())
        child.close()
        beside = not runner.cleans_everything()
        processes.host_waits = True
        spent = processes.clean_own() if beside else processes.clean(resting)
        processes.host_waits = False
        wire.send_last(CLEAN if spent is not None else DIRTY, repr(spent).encode("ascii"))
        # Beside other calls no new runner can be started, so this one stays, even after a cancelled call.
        if spent is None or wire.host_gone or (call.cancelled and not beside):
            break
        if left and not beside:
            left -= 1
            if not left:
                break
    if shared:
        processes.kill_own()
    else:
        processes.clean(resting)
    os._exit(0)


def warm_up(preload, hello):
    """Do once, before any fork, what every call would pay for: the parser's types, the imports, a clean heap."""
    exec(compile("def _warm(x):\n    return [i for i in range(x)]\n_warm(3)\n", "<warm>", "exec"), {})
    # The runner's own imports are hidden from calls. What is preloaded then gets copies of its own, and those stay: that is
    # the one difference that the configuration asks for.
    for name in set(sys.modules) - BASELINE:
        del sys.modules[name]
    for path in set(sys.path_importer_cache) - BASELINE_PATHS:
        del sys.path_importer_cache[path]
    # The host reads frames on stdout; what a module prints must not get there.
    kept = os.dup(1)
    os.dup2(2, 1)
    for name in preload:
        try:
            __import__(name)
        except BaseException as error:
            hello["problem"] = hello["problem"] or "sandbox.preload: %s cannot be imported: %r" % (name, error)
    sys.stdout.flush()
    os.dup2(kept, 1)
    os.close(kept)
    PRESENT.update(sys.modules)
    if len(os.listdir("/proc/self/task")) > 1:
        hello["problem"] = "sandbox.preload: a module left a thread, with which no call can be forked"
    gc.collect()
    gc.disable()
    gc.freeze()
