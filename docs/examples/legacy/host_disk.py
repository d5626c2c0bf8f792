"""A tool that has to see the host: how full the disk is that holds a directory. It therefore runs under limits alone."""

from __future__ import annotations

import shutil

GIB = 1024**3


def host_disk(path: str = "/") -> dict[str, float]:
    """Total, used and free GiB of the disk that holds ``path``. Raises ``ValueError`` where there is no such path."""
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise ValueError(f"path must be an absolute path; it is {path!r:.40}")
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    shares = {name: round(getattr(usage, name) / GIB, 2) for name in ("total", "used", "free")}
    return {**shares, "used_percent": round(100 * usage.used / usage.total, 1) if usage.total else 0.0}
