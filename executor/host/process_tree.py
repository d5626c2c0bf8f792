"""What came of a process on this host: its session, its process group and its descendants, found and ended.

By Linux's ``/proc``; elsewhere only the process group is known. A process that left session and group, and whose parent
had ended before anyone looked, is found by nobody.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from executor.common import proc
from executor.common.threads import in_thread

_ROUND = 0.005


@dataclass(slots=True)
class ProcessTree:
    """The processes that came of ``leader``, which began a session of its own and is not reaped yet.

    Who was seen once is known for good, by pid and start time: once its parent has ended nothing else connects it.
    """

    leader: int
    _known: dict[int, int] = field(default_factory=dict)

    async def look(self) -> None:
        """Find out who belongs to it now. Not on the event loop: a busy host has thousands of processes."""
        if sys.platform == "linux":
            await in_thread(self._look)

    async def kill(self, patience: float) -> bool:
        """SIGKILL to all of them until none is left, or ``patience`` seconds are over; whether none is left."""
        with anyio.move_on_after(patience):
            while True:
                await self.look()
                # All of the group at once: who forks as fast as it can outruns a loop that kills one after the other.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.leader, signal.SIGKILL)
                if not self._known:
                    return True
                self._kill_known()
                await anyio.sleep(_ROUND)
        return False

    def _look(self) -> None:
        table = {pid: stat for pid in proc.pids() if (stat := _stat(pid)) is not None}
        found = {pid for pid, stat in table.items() if self.leader in (pid, stat.group, stat.session)}
        found |= {pid for pid, began in self._known.items() if pid in table and table[pid].began == began}
        while more := {pid for pid, stat in table.items() if stat.parent in found} - found:
            found |= more
        self._known = {pid: table[pid].began for pid in found if table[pid].alive}

    def _kill_known(self) -> None:
        for pid, began in self._known.items():
            gone_or_not_ours = contextlib.suppress(ProcessLookupError, PermissionError)
            with proc.pidfd(pid, lambda p=pid, b=began: proc.start_time(p) == b) as fd, gone_or_not_ours:  # type: ignore[misc]
                if fd is not None:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    group: int
    session: int
    began: int
    alive: bool


def _stat(pid: int) -> _Stat | None:
    try:
        # The name in parentheses may hold anything, parentheses too: what counts begins after the last one.
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
        parent, group, session = (int(word) for word in words[1:4])
        return _Stat(parent, group, session, int(words[19]), words[0] not in ("Z", "X"))
    except (OSError, LookupError, ValueError):
        return None
