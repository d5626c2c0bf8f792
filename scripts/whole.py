"""Run the whole test suite in two processes at once: the real-engine tests wait most of their time, and the others compute.

The others' output comes as it is written, that of the engine's tests at the end. The exit status is 0 where both passed.
Arguments go to both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

ENGINE = "tests/engine"


def main() -> int:
    """Start both, and wait for both; Ctrl-C reaches them by itself, and they tear their fixtures down."""
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile() as said:
        engine = subprocess.Popen([*pytest, ENGINE], stdout=said, stderr=subprocess.STDOUT)
        others = subprocess.Popen([*pytest, f"--ignore={ENGINE}"])
        codes = [wait(others), wait(engine)]
        said.seek(0)
        sys.stdout.write(f"\n== {ENGINE}\n")
        sys.stdout.flush()
        sys.stdout.buffer.write(said.read())
    return max(codes, key=abs)


def wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process, however often the wait is interrupted: it was interrupted too, and ends in order."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    sys.exit(main())
