"""The floor: the barest loop over one ``docker exec`` that still runs each call in a forked interpreter of its own.

Frozen: this file never changes, so that ``resident / floor`` of one release can be compared with that of another. It
shares nothing with emberpool. A warmed Python waits in the container with the next child forked ahead; the host writes
the code, and reads the child's output and status. No pool, no event loop, no verification, no limits, no clean-up.

By itself: ``python benchmarks/floor.py COUNT docker exec -i [-u UID:GID] CONTAINER`` prints the median in milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

PROGRAM = """\
import gc, os, sys
exec(compile("print(end='')", "<call>", "exec"), {})
gc.collect()
gc.disable()
gc.freeze()
while True:
    ask_r, ask_w = os.pipe()
    out_r, out_w = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(0)
        os.close(ask_w)
        os.close(out_r)
        os.dup2(out_w, 1)
        os.close(out_w)
        exec(compile("print(end='', flush=True)", "<call>", "exec"), {"__name__": "__main__"})
        os.write(1, b"+")
        code = os.read(ask_r, 65536)
        if code:
            gc.enable()
            exec(compile(code, "<call>", "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
        os._exit(0)
    os.close(ask_r)
    os.close(out_w)
    os.write(1, os.read(out_r, 1))
    code = os.read(0, 65536)
    if not code:
        break
    os.write(ask_w, code)
    os.close(ask_w)
    output = b""
    while True:
        chunk = os.read(out_r, 65536)
        if not chunk:
            break
        output += chunk
    status = os.waitpid(pid, 0)[1]
    os.close(out_r)
    os.write(1, status.to_bytes(2, "big") + len(output).to_bytes(4, "big") + output)
"""
"""What runs in the container. It says ``+`` once the next child waits, and answers with status, length and output."""

COMMAND = ("python3", "-I", "-B", "-c", PROGRAM)
CODE, OUTPUT = b"print(1)", b"1\n"


class FloorError(Exception):
    """The loop broke, or a call did not print what it must."""


class Floor:
    """The host's end. ``argv`` is the whole ``docker exec`` command, ``COMMAND`` included. Everything blocks."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            list(argv), env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None  # noqa: S101 - both are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._ask, self._answer = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._buffer = b""

    def once(self) -> float:
        """Seconds from the writing of one call to its whole answer; it begins once the next child waits, unmeasured."""
        if self._take(1) != b"+":
            raise FloorError("the program in the container said something else than that its next child waits")
        began = time.perf_counter()
        os.write(self._ask, CODE)
        head = self._take(6)
        output = self._take(int.from_bytes(head[2:], "big"))
        seconds = time.perf_counter() - began
        if (head[:2], output) != (b"\0\0", OUTPUT):
            raise FloorError(f"a call failed: status {int.from_bytes(head[:2], 'big')}, output {output[:40]!r}")
        return seconds

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = os.read(self._answer, 65536)
            if not data:
                raise FloorError(f"the docker exec ended (exit status {self._process.wait()})")
            self._buffer += data
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def close(self) -> None:
        """End the client; the program in the container ends with its stdin."""
        with self._process:
            self._process.kill()


def main() -> None:
    """Measure COUNT calls after one that does not count."""
    count, *client = sys.argv[1:]
    floor = Floor([*client, *COMMAND])
    try:
        floor.once()
        seconds = sorted(floor.once() for _ in range(int(count)))
    finally:
        floor.close()
    print(f"{seconds[(len(seconds) - 1) // 2] * 1000:.3f}")


if __name__ == "__main__":
    main()
