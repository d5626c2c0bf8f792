"""What a soak's clients do, drawn from its seed: the same seed and client number give the same turns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from executor.result import CallResult

AGENTS = 3
STEP_TIMEOUT = 10.0
FLOOD = 3_000_000
"""Bytes that a flooding call writes to each of its streams."""
CHUNKS, CHUNK = 40, 5_000
GIVE_UP = 0.4
SIGKILL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that a client does on its session. ``kind`` says how to carry it out; ``ends`` how its code must end, in
    the words of ``ending``; ``stdout`` what it must print (``None``: nobody looks). Seconds."""

    kind: str
    code: str = ""
    argv: tuple[str, ...] = ()
    token: str = ""
    stdout: bytes | None = None
    ends: str = "exit 0"
    timeout: float = STEP_TIMEOUT
    give_up: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One acquire, some steps, and the handle's end. ``patience`` is the acquire's timeout, ``give_up`` the seconds after
    which its caller cancels it, ``gap`` the seconds of idling afterwards."""

    session: str
    patience: float
    steps: tuple[Step, ...]
    give_up: float | None = None
    close: bool = False
    gap: float = 0.0


def ending(result: CallResult) -> str:
    """How a call ended, in two words."""
    if result.timed_out:
        return "timed out"
    if result.oom_killed:
        return "out of memory"
    return f"signal {result.signal}" if result.signal is not None else f"exit {result.exit_code}"


def wrong(step: Step, result: CallResult, *, wounded: bool) -> str:
    """Why a result cannot be what the step's code did; ``""`` where it can.

    Time waited counts, so any call may time out. While its container is being killed (``wounded``), a call may see the
    SIGKILL that its sandbox is dying of.
    """
    end = ending(result)
    if end == "timed out" or (wounded and end == f"signal {SIGKILL}"):
        return ""
    if end != step.ends:
        said = result.stderr[-200:].decode("utf-8", "replace").strip()
        return f"{step.kind}: ended with {end}, not {step.ends} ({said!r})"
    if step.stdout is not None and result.stdout != step.stdout:
        return f"{step.kind}: printed {result.stdout[:60]!r}, not {step.stdout[:60]!r}"
    if step.kind == "flood" and not (result.truncated and result.stdout_total == result.stderr_total == FLOOD):
        return f"flood: {result.stdout_total} and {result.stderr_total} bytes counted, not {FLOOD} of each"
    return ""


def probe(token: str) -> Step:
    """The simplest call."""
    return Step(kind="python", code=f"print({token!r})", stdout=f"{token}\n".encode())


def _python(dice: Random, token: str) -> Step:
    if dice.random() < 0.2:
        return Step(
            kind="python", code=f"import sys\nprint({token!r}, file=sys.stderr)\nraise SystemExit(3)", ends="exit 3"
        )
    return probe(token)


def _argv(dice: Random, token: str) -> Step:
    code = dice.choice((0, 0, 0, 5))
    argv = ("sh", "-c", f'printf %s "$1"; exit {code}', "sh", token)
    return Step(kind="argv", argv=argv, stdout=token.encode(), ends=f"exit {code}")


def _stream(dice: Random, token: str) -> Step:
    code = f"import sys\nfor n in range({CHUNKS}):\n sys.stdout.write(chr(97 + n % 26) * {CHUNK}); sys.stdout.flush()"
    return Step(kind="stream", code=code, stdout=b"".join(bytes([97 + n % 26]) * CHUNK for n in range(CHUNKS)))


def _leave(dice: Random, token: str) -> Step:
    return Step(kind="leave", code="import time\nprint('here', flush=True)\ntime.sleep(30)")


def _files(dice: Random, token: str) -> Step:
    return Step(kind="files", token=token, stdout=token.encode() * dice.choice((1, 100, 4_000)))


def _tool(dice: Random, token: str) -> Step:
    return Step(kind="tool", token=token, stdout=f"<{token}>".encode())


def _cold(dice: Random, token: str) -> Step:
    return Step(kind="cold", code=f"print({token!r})", stdout=f"{token}\n".encode())


def _timeout(dice: Random, token: str) -> Step:
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if dice.random() < 0.3 else ""
    waits = dice.choice(("import time\ntime.sleep(60)", "while True: pass"))
    return Step(kind="timeout", code=stubborn + waits, ends="timed out", timeout=0.2 + 0.4 * dice.random())


def _flood(dice: Random, token: str) -> Step:
    code = f"import os\nfor n in (1, 2):\n left = {FLOOD}\n while left: left -= os.write(n, b'x' * min(left, 60000))"
    return Step(kind="flood", code=code)


def _oom(dice: Random, token: str) -> Step:
    return Step(kind="oom", code="hoard = []\nwhile True: hoard.append(b'x' * 4_000_000)", ends="out of memory")


def _leftover(dice: Random, token: str) -> Step:
    code = (
        "import subprocess, sys\n"
        "for _ in range(3): subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"print({token!r})"
    )
    return Step(kind="leftover", code=code, stdout=f"{token}\n".encode())


def _cancel(dice: Random, token: str) -> Step:
    return Step(kind="cancel", code="import time\ntime.sleep(30)", give_up=GIVE_UP * dice.random())


def _kill_runner(dice: Random, token: str) -> Step:
    # The line before the kill reports its moment to the process that waits outside; it needs the runner to get there.
    code = "import os, signal, time\nprint('now', flush=True)\ntime.sleep(0.1)\nos.kill(os.getppid(), signal.SIGKILL)"
    return Step(kind="kill_runner", code=code, ends="no answer")


KINDS: dict[str, tuple[int, Callable[[Random, str], Step]]] = {
    "python": (30, _python),
    "argv": (12, _argv),
    "stream": (8, _stream),
    "leave": (3, _leave),
    "files": (10, _files),
    "tool": (6, _tool),
    "cold": (4, _cold),
    "timeout": (4, _timeout),
    "flood": (5, _flood),
    "oom": (3, _oom),
    "leftover": (4, _leftover),
    "cancel": (6, _cancel),
    "kill_runner": (2, _kill_runner),
}
"""Every kind of step: how often of all, in parts of their sum, and what makes one."""


def step_of(kind: str, dice: Random, token: str) -> Step:
    """A step of one kind; ``token`` is what its code says and nobody else's does."""
    return KINDS[kind][1](dice, token)


def agent_of(session: str) -> str:
    """Whose session it is: a few agents share them all."""
    return f"agent-{int(session.rpartition('-')[2]) % AGENTS}"


def turns(seed: str, client: int, sessions: int) -> Iterator[Turn]:
    """The turns of one client over so many sessions, without end. Everything is drawn ahead of its doing, so that what happens on the way
    (an error, a cancel) changes nothing of what comes after."""
    dice = Random(f"{seed}/client/{client}")  # noqa: S311 - a schedule that can be had again
    number = 0
    while True:
        session, steps = f"session-{dice.randrange(sessions)}", []
        for kind in dice.choices(list(KINDS), [weight for weight, _ in KINDS.values()], k=dice.choice((1, 2, 4, 8))):
            number += 1
            steps.append(step_of(kind, dice, f"{client}-{number}"))
        yield Turn(
            session=session,
            patience=dice.choice((0.3, 20.0, 20.0, 20.0)),
            give_up=GIVE_UP * dice.random() if dice.random() < 0.05 else None,
            steps=tuple(steps),
            close=dice.random() < 0.1,
            gap=dice.choice((0.0, 0.0, 0.1, 0.3, 1.0)) * dice.random() + (4.0 if dice.random() < 0.08 else 0.0),
        )


@dataclass(frozen=True, slots=True)
class Blow:
    """The kill of a container, ``pause`` seconds after the last one: that of the session at ``where`` (0 to 1) of all that
    have one then."""

    pause: float
    where: float


@dataclass(frozen=True, slots=True)
class Size:
    """A change of the pool's size, ``pause`` seconds after the last one."""

    pause: float
    min_standby: int
    max_sandboxes: int


def kills(seed: str, every: float) -> Iterator[Blow]:
    """Kills of containers, one every ``every`` seconds in the mean."""
    dice = Random(f"{seed}/kills")  # noqa: S311 - a schedule that can be had again
    while True:
        yield Blow(dice.expovariate(1 / every), dice.random())


def sizes(seed: str, every: float, min_standby: int, max_sandboxes: int) -> Iterator[Size]:
    """Changes of the pool's size, down to three quarters of what it begins with and to half of the standbys, and never
    beyond; one every ``every`` seconds in the mean."""
    dice = Random(f"{seed}/sizes")  # noqa: S311 - a schedule that can be had again
    while True:
        most = dice.randint(max(1, max_sandboxes * 3 // 4), max_sandboxes)
        yield Size(dice.expovariate(1 / every), dice.randint(min_standby // 2, min(min_standby, most)), most)
