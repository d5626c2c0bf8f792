"""What a container's start needs on this host: the sources of its mounts and its seccomp profile, looked at before it."""

from __future__ import annotations

import json
from pathlib import Path

from executor.common.printable import printable
from executor.errors import ProfileMismatch
from executor.sandbox.profile import ContainerProfile


def require_host_files(profile: ContainerProfile) -> None:
    """Raise ``ProfileMismatch`` naming the first that is missing or unusable.

    An engine would make a missing mount source, as root, and run the container with an empty directory; what is wrong with a
    seccomp profile it says in words that look like a failure of its own, which could pass.
    """
    for mount in profile.mounts:
        try:
            Path(mount.source).stat()
        except OSError as error:
            raise ProfileMismatch(
                f"the mount source {printable(mount.source, name=True)} cannot be used: {error.strerror}; make it, then try again"
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
