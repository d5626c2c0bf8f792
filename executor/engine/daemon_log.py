"""Keep the private engine's log from growing for ever: about 2 KB come with each sandbox.

The daemon keeps its log open and takes no signal to open another, so the log is copied aside and emptied in place; the daemon
appends to it and goes on at its beginning. Whoever starts a container looks at the log's size first.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from executor.common.locks import try_lock
from executor.common.log import get_logger
from executor.common.threads import in_thread

log = get_logger("emberpool.engine")

MAX_LOG = 10_000_000
"""Bytes of the log, and of the one before it, which is kept beside it."""


async def keep_small(path: Path) -> None:
    """Rotate the log where it has become too large. Never raises: a log must not be what keeps a container from starting."""
    try:
        if is_large(path):
            await in_thread(rotate, path)
    except OSError as error:
        log.warning("engine.log_not_rotated", path=str(path), error=str(error))


def is_large(path: Path) -> bool:
    """Whether a log is due to be rotated; one that is not there is not."""
    try:
        return path.stat().st_size > MAX_LOG
    except OSError:
        return False


def rotate(path: Path) -> None:
    """Copy the log to ``<name>.1`` and empty it; what is written between the two is lost. Raises ``OSError``.

    Any number of processes may come here at once: one does it. Where there is no room for a copy, the log is only emptied.
    """
    before, draft = path.with_name(f"{path.name}.1"), path.with_name(f".{path.name}.1.new")
    with try_lock(path) as free:
        if not free or not is_large(path):
            return
        try:
            shutil.copyfile(path, draft)
            draft.chmod(0o600)
            draft.replace(before)
        except OSError:
            for file in (draft, before):
                file.unlink(missing_ok=True)
        os.truncate(path, 0)
