"""What a private daemon leaves behind when it is killed: containerd, containers, mounts. Only its own are touched."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import anyio

from executor.common.log import get_logger
from executor.common.proc import KILL_WAIT, argv_of, gone, pidfd, pids, shares_files, stat_number
from executor.engine import process
from executor.engine.paths import EnginePaths
from executor.machine.debian import system_environment

log = get_logger("emberpool.engine")


async def sweep_containerd(paths: EnginePaths) -> bool:
    """End a containerd that its daemon left behind; returns whether there was one."""
    words = ("--config", str(paths.containerd_config))
    return await _sweep(lambda argv: Path(argv[0]).name == "containerd" and words in pairwise(argv))


async def sweep_containers(paths: EnginePaths) -> bool:
    """End containers that a killed daemon left running: PID 1 of each, then its shim; returns whether any was left."""
    words = ("-address", str(paths.containerd_socket))

    def is_shim(argv: tuple[str, ...]) -> bool:
        return Path(argv[0]).name.startswith("containerd-shim") and words in pairwise(argv)

    for shim in [pid for pid in pids() if is_shim(argv_of(pid) or ("",)) and shares_files(pid)]:
        for pid in pids():
            with pidfd(pid, lambda pid=pid, shim=shim: stat_number(pid, 1) == shim) as fd:  # type: ignore[misc]
                if fd is not None:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
    return await _sweep(is_shim)


async def _sweep(wanted: Callable[[tuple[str, ...]], bool]) -> bool:
    found = False
    for pid in pids():
        # In a root directory of its own, a process with the same paths is another engine's.
        with pidfd(pid, lambda pid=pid: wanted(argv_of(pid) or ("",)) and shares_files(pid)) as fd:  # type: ignore[misc]
            if fd is None:
                continue
            found = True
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            await gone(fd, KILL_WAIT)
    return found


async def unmount(paths: EnginePaths) -> None:
    """Undo the mounts that a killed daemon left below its own places, so that they can be removed without harm."""
    table = await anyio.Path("/proc/self/mountinfo").read_text()
    for point in reversed(mounts_below(table, (paths.data, paths.run))):
        done = await process.run(["umount", "--lazy", "--", str(point)], system_environment(), timeout=15.0)
        log.info("engine.unmounted", point=str(point), code=done.code)


def mounts_below(mountinfo: str, places: Sequence[Path]) -> list[Path]:
    """The mount points at or below ``places``, in the order in which they were mounted. Pure.

    A whole filesystem that is mounted right at one of them is not among them: that is a disk which the operator gave it. A
    daemon mounts a place onto itself, which shows as a part of a filesystem.
    """
    found = []
    for line in mountinfo.splitlines():
        root, point = (Path(_OCTAL.sub(lambda m: chr(int(m[1], 8)), text)) for text in line.split()[3:5])
        if any(point.is_relative_to(place) for place in places) and not (point in places and root == Path("/")):
            found.append(point)
    return found


# The kernel writes blanks and backslashes of a path as \\040 and the like.
_OCTAL = re.compile(r"\\([0-7]{3})")
