"""Which uid:gid a sandbox's calls run as, and which its keeper (PID 1) does. Pure, but for looking at mount sources."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from executor.engine.protocol import ImageInfo
from executor.errors import ProfileMismatch
from executor.sandbox.mount import Mount
from pool.config.types import UidRange


@dataclass(frozen=True, slots=True)
class UserPolicy:
    """How users are chosen. ``setting`` is ``auto``, ``image`` or ``uid:gid``; ``mounts`` are the containers' own."""

    setting: str
    uids: UidRange
    mounts: tuple[Mount, ...] = ()

    @property
    def keeper(self) -> str:
        """PID 1's user: never the calls', so that tool code can neither signal nor trace nor re-score it."""
        return f"{self.uids.start}:{self.uids.start}"

    def calls_user(self, image: ImageInfo, taken: Iterable[str], *, offset: int) -> str:
        """The user of one sandbox's calls. Raises ``ProfileMismatch`` where that would be root.

        A gateway that is root gives every sandbox a uid of its own: a shared uid shares kernel quotas (inotify instances,
        pipe buffers), and one sandbox could use up another's. ``taken`` are users in use; the search for a free uid
        begins ``offset`` places into the range.
        """
        if self.setting == "image":
            return _image_user(image)
        if self.setting != "auto":
            return self.setting
        for mount in self.mounts:
            if not mount.read_only:
                return _owner(mount.source)
        if os.geteuid() != 0:
            return f"{os.geteuid()}:{os.getegid()}"
        used = set(taken)
        for step in range(self.uids.count - 1):
            uid = self.uids.start + 1 + (offset + step) % (self.uids.count - 1)
            if f"{uid}:{uid}" not in used:
                return f"{uid}:{uid}"
        raise ProfileMismatch("every uid of sandbox.uid_range is in use; widen it")

    def allows(self, uid: int, image: ImageInfo) -> bool:
        """Whether ``calls_user`` may choose this uid. An image's user that is only named may have any but root's."""
        chosen = self.calls_user(image, (), offset=0).partition(":")[0]
        if not chosen.isdecimal():
            return uid != 0
        own = range(self.uids.start + 1, self.uids.start + self.uids.count)
        return uid == int(chosen) or (int(chosen) in own and uid in own and self.setting == "auto")


def _image_user(image: ImageInfo) -> str:
    name = image.user.partition(":")[0]
    if name in ("", "0", "root"):
        raise ProfileMismatch('sandbox.user is "image", and the image\'s own user is root; use "auto" or a uid:gid')
    return image.user


def _owner(source: str) -> str:
    try:
        facts = Path(source).stat()
    except OSError as error:
        raise ProfileMismatch(f"the mount source {source} cannot be used: {error.strerror}") from error
    if facts.st_uid == 0:
        raise ProfileMismatch(
            f"the writable mount source {source} belongs to root, and calls never run as root; "
            f"give it an owner, for example: chown 1000:1000 {source}"
        )
    return f"{facts.st_uid}:{facts.st_gid}"
