"""What the stream of a ``docker exec`` alone costs: as many bytes as a small call has, there and back, nothing run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from benchmarks.floor import Floor, FloorError

PROGRAM = "import os\nos.write(1, b'+')\nwhile True:\n d = os.read(0, 65536)\n if not d: break\n os.write(1, d)\n"
ECHO_COMMAND = ("python3", "-I", "-B", "-c", PROGRAM)
MESSAGE = bytes(512)
"""About what the request of a small call is with its environment."""


class Echo(Floor):
    """The host's end, as ``Floor``'s."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        super().__init__(argv, env)
        self._take(1)

    def once(self) -> float:
        """Seconds from the writing of ``MESSAGE`` to having all of it back."""
        began = time.perf_counter()
        os.write(self._ask, MESSAGE)
        back = self._take(len(MESSAGE))
        seconds = time.perf_counter() - began
        if back != MESSAGE:
            raise FloorError("the bytes that came back are not those that were sent")
        return seconds
