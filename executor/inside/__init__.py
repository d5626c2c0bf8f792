"""The programs that run inside a container. They use Python 3.8 and the standard library, and import nothing of emberpool."""

from functools import cache
from pathlib import Path


def path(name: str) -> Path:
    """Where a program is on this host; ``name`` is its module's."""
    return Path(__file__).with_name(f"{name}.py")


@cache
def source(name: str) -> str:
    """Return the text of a program, read once."""
    return path(name).read_text("utf-8")
