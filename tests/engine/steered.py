"""What a test of faults has hold of besides the daemon: the machine's processes, and a docker command that it steers."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# --- processes as the host sees them ----------------------------------------------------------------------------------


def processes(*words: str) -> list[int]:
    """The pids of this machine's processes that have all the words in their argv."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                argv = (place / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue  # it has just ended
            if all(word in argv for word in words):
                found.append(int(place.name))
    return found


def parent(pid: int) -> int:
    """The pid of a process's parent; 0 where the process has just ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def clients(*words: str) -> list[int]:
    """The engine clients of this very process that have all the words in their argv."""
    return [pid for pid in processes(*words) if parent(pid) == os.getpid()]


def kill_clients(*words: str) -> None:
    """SIGKILL the engine clients of this process that have these words in their argv."""
    found = clients(*words)
    assert found, words
    for pid in found:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)


# --- a docker that is steered -----------------------------------------------------------------------------------------

_SCRIPT = """#!/bin/sh
# Rules are files, named by the word that is asked of docker, or "all"; "once" rules are used up by whoever is first.
case "$1" in container | image) word=$1-$2 ;; *) word=$1 ;; esac
how=
for name in "$word" all; do
    if [ -e "{rules}/$name.once" ] && mv "{rules}/$name.once" "{rules}/used.$$" 2>/dev/null; then
        how=$(cat "{rules}/used.$$")
        break
    elif [ -e "{rules}/$name" ]; then
        how=$(cat "{rules}/$name")
        break
    fi
done
[ -z "$how" ] || echo "$word" >>"{rules}/met.log"
case "$how" in
    slow) sleep 0.3 ;;
    fail) echo "Error response from daemon: the test says no" >&2; exit 1 ;;
    garbage) printf '\\\\377]}}{{ "Id": no\\\\n\\\\0'; exit 0 ;;
    flood) head -c 5000000 /dev/zero | tr '\\0' x >&2 ;;
    hold) while [ -e "{rules}/$word" ]; do sleep 0.02; done ;;
    filter) exec "{python}" -I -S "{filter}" "{rules}/events.filter" "{docker}" "$@" ;;
esac
exec "{docker}" "$@"
"""
_FILTER = """
import ctypes, json, signal, subprocess, sys, time

def with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

place, *argv = sys.argv[1:]
docker = subprocess.Popen(argv, stdout=subprocess.PIPE, preexec_fn=with_parent)
for line in docker.stdout:
    how = open(place).read()
    if how == "lose":
        continue
    if how == "late":
        time.sleep(0.5)
    for _ in range(2 if how == "twice" else 1):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
"""


@dataclass(frozen=True)
class Steered:
    """A docker command of its own: what it is asked for goes wrong by rule. Rules by the word that is asked (``run``,
    ``container-inspect``, ``exec``, ``ps``, ...; ``all``): ``slow fail garbage flood hold``, and ``filter`` for events."""

    place: Path

    @classmethod
    def made(cls, place: Path) -> Steered:
        (place / "rules").mkdir()
        (place / "filter.py").write_text(_FILTER)
        (place / "rules" / "events.filter").write_text("")
        real = shutil.which("docker")
        assert real is not None
        command = place / "docker"
        command.write_text(
            _SCRIPT.format(rules=place / "rules", docker=real, filter=place / "filter.py", python=sys.executable)
        )
        command.chmod(0o755)
        return cls(place)

    @property
    def binary(self) -> str:
        return str(self.place / "docker")

    def rule(self, word: str, how: str, *, once: bool = False) -> None:
        draft = self.place / "draft"
        draft.write_text(how)
        draft.replace(self.place / "rules" / (f"{word}.once" if once else word))

    def lift(self, word: str) -> None:
        for name in (word, f"{word}.once"):
            (self.place / "rules" / name).unlink(missing_ok=True)

    def events(self, how: str) -> None:
        """What becomes of the events from now on: ``""``, ``lose``, ``late``, ``twice``."""
        draft = self.place / "draft"
        draft.write_text(how)
        draft.replace(self.place / "rules" / "events.filter")

    def met(self) -> list[str]:
        """What a rule has been applied to so far."""
        log = self.place / "rules" / "met.log"
        return log.read_text().split() if log.exists() else []

    @contextmanager
    def holding(self, word: str) -> Iterator[None]:
        self.rule(word, "hold")
        try:
            yield
        finally:
            self.lift(word)
