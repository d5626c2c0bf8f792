"""The parent cgroup that a pool's containers share: the engine makes it and never removes it, so the pool does."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def remove_parent(name: str, root: Path = ROOT) -> None:
    """Remove the empty cgroups called ``name`` from every hierarchy of this host; those in use, or not ours, stay."""
    if not name:
        return
    places = [root / name.strip("/"), *(part / name.strip("/") for part in root.iterdir())] if root.is_dir() else []
    for place in places:
        try:
            place.rmdir()  # the kernel refuses while any container is left in it
        except OSError:
            continue
