"""Parts of the runner, each alone."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from executor.inside.runner import exit as exits
from executor.inside.runner import facts, fork, process, serve
from executor.inside.runner import wire as inner
from executor.sandbox import wire


@pytest.fixture
def piped() -> Iterator[tuple[Any, int, int]]:
    """A runner's wire over two pipes, with the host's ends: where to write, and where to read."""
    (input_r, input_w), (output_r, output_w) = os.pipe(), os.pipe()
    os.set_blocking(input_r, False)
    os.set_blocking(output_w, False)
    end = inner.Wire()
    end.input_fd, end.output_fd = input_r, output_w
    yield end, input_w, output_r
    for fd in (input_r, input_w, output_r, output_w):
        with suppress(OSError):  # a test may have closed it
            os.close(fd)


# --- the wire -----------------------------------------------------------------------------------------------------------


def test_both_ends_have_the_same_numbers_for_frames() -> None:
    for name in [
        "CALL",
        "INPUT",
        "INPUT_END",
        "CREDIT",
        "CANCEL",
        "LEAVE",
        "FINISH",
        "HELLO",
        "ARMED",
        "OUT",
        "ERR",
        "TAKEN",
        "DONE",
        "CLEAN",
        "DIRTY",
        "POISONED",
        "CLEANING",
    ]:
        assert getattr(inner, name) == getattr(wire, name), name
    assert inner.encode(inner.OUT, 7, b"abc") == wire.encode(wire.OUT, 7, b"abc")


def test_frames_are_read_whole_however_they_arrive(piped: tuple[Any, int, int]) -> None:
    end, host, _ = piped
    data = wire.encode(wire.CALL, 1, b"x" * 20) + wire.encode(wire.INPUT_END, 1)
    os.write(host, data[:15])
    assert end.read_frames() == []
    os.write(host, data[15:])
    assert end.read_frames() == [(wire.CALL, 1, b"x" * 20), (wire.INPUT_END, 1, b"")]
    assert not end.host_gone
    os.close(host)
    assert end.read_frames() == []
    assert end.host_gone


def test_a_full_pipe_keeps_frames_queued_and_in_order(piped: tuple[Any, int, int]) -> None:
    end, _, host = piped
    payload = b"y" * 60_000
    for _ in range(3):
        end.send(inner.OUT, payload)
    assert end.outbox  # a pipe holds 64 KiB
    frames: list[wire.Frame] = []
    decoder = wire.Decoder()
    while len(frames) < 3:
        frames += decoder.feed(os.read(host, 65_536))
        end.flush()
    assert frames == [wire.Frame(wire.OUT, 0, payload)] * 3
    assert not end.outbox


def test_held_output_leaves_with_the_next_frame(piped: tuple[Any, int, int]) -> None:
    end, _, host = piped
    end.hold(inner.OUT, b"1")
    assert not select.select([host], [], [], 0)[0]
    end.send(inner.DONE, b"")
    assert os.read(host, 100) == wire.encode(wire.OUT, 0, b"1") + wire.encode(wire.DONE, 0)


def test_a_host_that_has_closed_its_end_is_gone(piped: tuple[Any, int, int]) -> None:
    end, _, host = piped
    os.close(host)
    end.send(inner.ARMED)
    assert end.host_gone
    assert not end.outbox


# --- processes ----------------------------------------------------------------------------------------------------------


class NoLibc:
    """Stands for ``Libc`` where no C function is needed."""

    def scheduling(self, pid: int) -> None:
        return None


@pytest.fixture
def processes(piped: tuple[Any, int, int]) -> Iterator[Any]:
    made = process.Processes({"shared": True, "keeper": "0"}, NoLibc(), piped[0])
    yield made
    os.close(made.wake_r)
    os.close(made.wake_w)


def test_descendants_and_no_other_processes_are_killed(processes: Any) -> None:
    other = subprocess.Popen(("sleep", "60"), start_new_session=True)
    try:
        family = (
            "import os, subprocess, sys\n"
            "subprocess.Popen(['sleep', '60'])\n"
            "sys.path.insert(0, sys.argv[1])\n"
            "from executor.inside.runner import process, wire\n"
            "process.Processes({'shared': True, 'keeper': '0'}, None, wire.Wire()).kill_own()\n"
            "print(os.waitpid(-1, 0)[1])\n"
        )
        done = subprocess.run(
            (sys.executable, "-c", family, str(Path.cwd())), capture_output=True, timeout=30, check=True
        )
        assert done.stdout == b"9\n"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_simulated_end_is_reaped_once(processes: Any) -> None:
    processes.simulated_end = process.NO_PROCESS, 0, resource.getrusage(resource.RUSAGE_SELF)
    assert [pid for pid, _, _ in processes.reap()] == [process.NO_PROCESS]
    assert processes.simulated_end is None


def test_limits_that_another_process_changes_are_seen() -> None:
    with subprocess.Popen(("sleep", "60")) as child:
        try:
            before = facts.limits_of(NoLibc(), child.pid)
            assert facts.limits_of(NoLibc(), child.pid) == before
            os.setpriority(os.PRIO_PROCESS, child.pid, 5)
            assert facts.limits_of(NoLibc(), child.pid) != before
        finally:
            child.kill()


# --- a call -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(piped: tuple[Any, int, int], processes: Any) -> Iterator[tuple[Any, dict[str, int]]]:
    """A call of a process that does not exist, with 8 bytes of output allowed, and the process's ends of its pipes."""
    (ask_r, ask), (in_r, stdin), (out, out_w), (err, err_w) = [os.pipe() for _ in range(4)]
    child = fork.WaitingChild(process.NO_PROCESS, ask, stdin, out, err, None)
    header = wire.call_header(timeout=10, grace=2, max_output=8, credit=None)
    call = serve.RunningCall(piped[0], processes, child, header, 100.0)
    yield call, {"ask": ask_r, "stdin": in_r, "out": out_w, "err": err_w}
    child.close()
    for fd in (ask_r, in_r, out_w, err_w):
        os.close(fd)


def test_a_call_is_stopped_at_its_deadline_and_killed_after_its_grace(
    running: tuple[Any, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, _ = running
    kills: list[float] = []
    monkeypatch.setattr(call.processes, "kill_call", lambda: kills.append(1))
    assert call.enforce_deadline(101.0) == 9.0
    assert not call.timed_out
    assert call.enforce_deadline(110.0) == 2.0
    assert (call.timed_out, kills) == (True, [])
    call.enforce_deadline(112.0)
    call.enforce_deadline(113.0)
    assert kills == [1]


def test_output_beyond_the_cap_is_counted_and_dropped(
    running: tuple[Any, dict[str, int]], piped: tuple[Any, int, int]
) -> None:
    call, ends = running
    os.write(ends["out"], b"0123456789")
    call.ended(0, resource.getrusage(resource.RUSAGE_SELF))
    assert call.finished()
    report = wire.parse_report(call.report())
    assert (report.exit_code, report.stdout_total, report.stderr_total) == (0, 10, 0)
    piped[0].flush()
    assert os.read(piped[2], 100) == wire.encode(wire.OUT, 0, b"01234567")


def test_a_call_that_was_killed_reports_its_signal(running: tuple[Any, dict[str, int]]) -> None:
    call, _ = running
    assert not call.finished()
    call.ended(signal.SIGKILL, resource.getrusage(resource.RUSAGE_SELF))
    report = wire.parse_report(call.report())
    assert (report.exit_code, report.signal) == (None, signal.SIGKILL)


# --- the end of a process -----------------------------------------------------------------------------------------------


class Plain:
    pass


class Closing:
    def __del__(self) -> None:
        pass


class OfClosing(Closing):
    pass


class Meta(type):
    pass


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (int, exits.PLAIN), (Plain, exits.PLAIN), (Closing, exits.FINALIZED), (OfClosing, exits.FINALIZED),
        (type((lambda: (yield))()), exits.FINALIZED), (weakref.ProxyType, exits.FINALIZED), (Meta, exits.CLASS),
        (weakref.ref, exits.REFERENCE),
    ],
)  # fmt: skip
def test_types_are_classified_by_what_the_end_of_an_instance_may_run(made: type, verdict: int) -> None:
    assert exits.classify(made) == verdict
