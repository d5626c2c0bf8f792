"""Turn how an attached client and its container ended into a call's result."""

from __future__ import annotations

import signal

from executor.common.printable import printable
from executor.engine.attached import PROVED, REFUSED, Attached
from executor.errors import EmberpoolError, EngineFailed, ProfileMismatch
from executor.result import CallResult

LIMIT_SIGNAL_CODE = 128 + int(getattr(signal, "SIGXCPU", 24))
KILL_CODE, TERM_CODE = 128 + 9, 128 + 15
CANNOT_RUN, NOT_FOUND = 126, 127


def not_started(end: Attached) -> CallResult:
    """Return the result of a program that the engine could not start in a sound container: what a shell would answer.

    The runtime's message is on either stream, by the engine's version; the program itself has written nothing.
    """
    said = bytes(end.stdout.kept) + bytes(end.stderr.kept)
    missing = b"not found" in said or b"no such file or directory" in said
    return CallResult(
        exit_code=NOT_FOUND if missing else CANNOT_RUN,
        stdout=b"",
        stderr=said,
        stdout_total=0,
        stderr_total=end.stdout.total + end.stderr.total,
        duration=end.duration,
    )


def client_lost(end: Attached, exit_code: int) -> bool:
    """Whether a client ended before what it ran, which ended with ``exit_code``: its output, and the proof that the call
    began, may be lost with it."""
    return end.ended_by == "client" and end.code != exit_code


def missing_proof(end: Attached) -> EmberpoolError | None:
    """Return why a call that ended by itself never began: it did not first prove that the boundary is in force. ``None``
    where it did."""
    if end.proof == PROVED:
        return None
    if end.proof == REFUSED:
        return ProfileMismatch(
            "the strict seccomp profile is not in force in the container, and the call never began: the engine or its runtime "
            'ignores the profile; use another one, or set sandbox.seccomp = "engine"'
        )
    said = printable(bytes(end.stderr.kept))[-300:]
    return EngineFailed(f"the image's python3 did not take the call, which never began: {said or 'it said nothing'}")


def exec_result(
    end: Attached, *, exit_code: int | None = None, timed_out: bool = False, oom: bool = False, cpu: bool = False
) -> CallResult:
    """Return the result of a call by plain exec or plain run.

    An engine reports 128 + n for a signal n, which looks like ``exit(128 + n)``: ``signal`` is set only where something else
    explains the death, an out-of-memory event (``oom``) or a used-up CPU limit (``cpu``).
    """
    killed_by: int | None = None
    if oom and exit_code == KILL_CODE:
        killed_by = KILL_CODE - 128
    elif cpu:
        killed_by = LIMIT_SIGNAL_CODE - 128
    return CallResult(
        exit_code=None if killed_by is not None else exit_code,
        signal=killed_by,
        timed_out=timed_out,
        oom_killed=oom and killed_by is not None and not cpu,
        cpu_limit=cpu,
        stdout=bytes(end.stdout.kept),
        stderr=bytes(end.stderr.kept),
        stdout_total=end.stdout.total,
        stderr_total=end.stderr.total,
        duration=end.duration,
    )
