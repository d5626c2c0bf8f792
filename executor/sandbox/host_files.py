"""Check, before a container's start, the files that it needs on this host: mount sources and its seccomp profile."""

from __future__ import annotations

import json
from pathlib import Path

from executor.common.printable import printable
from executor.errors import ProfileMismatch
from executor.sandbox.profile import ContainerProfile


def require_host_files(profile: ContainerProfile) -> None:
    """Raise ``ProfileMismatch`` naming the first file that is missing or unusable.

    An engine would create a missing mount source, as root, and run the container with an empty directory. Its message about
    a bad seccomp profile looks like a failure of its own that a retry could cure.
    """
    for mount in profile.mounts:
        try:
            Path(mount.source).stat()
        except OSError as error:
            raise ProfileMismatch(
                f"the mount source {printable(mount.source, name=True)} cannot be used: {error.strerror}; create it, then try again"
            ) from error
    if profile.seccomp not in ("strict", "engine"):
        try:
            content = json.loads(Path(profile.seccomp).read_text("utf-8"))
            problem = "" if isinstance(content, dict) and "defaultAction" in content else "it has no defaultAction"
        except (OSError, ValueError, RecursionError) as error:
            problem = str(error)
        if problem:
            raise ProfileMismatch(
                f"the seccomp profile {printable(profile.seccomp, name=True)} cannot be used: {problem}"
            )
