"""A directory or file of the host that a container sees: read from ``/source:/target:options``, checked, and written back.

Pure. Paths are a Linux container's and a Linux host's on every system, so the rules are the same on Windows.
"""

from __future__ import annotations

from dataclasses import dataclass

from executor.common.printable import has_control

OPTIONS = frozenset({"ro", "rw", "z", "Z", "private", "rprivate"})
"""The options of ``docker run -v`` that a mount may have: access, SELinux labels, and propagation that stays inside."""
RESERVED = ("/", "/tmp", "/tool", "/proc", "/sys", "/dev")  # noqa: S108 - the container's own places
"""Targets that belong to the sandbox itself; but for ``/`` and ``/tmp``, what lies below them does too."""

_FORM = "a mount is /host/path:/container/path or /host/path:/container/path:ro"


@dataclass(frozen=True, slots=True)
class Mount:
    """One bind mount: the absolute paths ``source`` (host) and ``target`` (container) as they were written, and ``options``.

    ``str`` gives the value for ``docker run -v``. Raises ``ValueError`` for a relative path, ``.`` or ``..`` in a path, a
    target that belongs to the sandbox itself, an unknown option, or a character that the form cannot hold.
    """

    source: str
    target: str
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        spec = str(self)
        if spec.count(":") != (2 if self.options else 1) or has_control(spec):
            raise ValueError(f"mount {spec[:80]!r}: {_FORM}")
        if not self.source.startswith("/") or not self.target.startswith("/"):
            raise ValueError(f"mount {spec[:80]!r}: both paths must be absolute; {_FORM}")
        if any(part in ("..", ".") for part in (*self.source.split("/"), *self.target.split("/"))):
            raise ValueError(f"mount {spec[:80]!r}: paths must not contain . or ..")
        target = normalized(self.target)
        if target in RESERVED or target.startswith(("/tool/", "/proc/", "/sys/", "/dev/")):
            raise ValueError(f"mount {spec[:80]!r}: {target} belongs to the sandbox itself; choose another target")
        for option in self.options:
            if option not in OPTIONS:
                raise ValueError(f"mount {spec[:80]!r}: unknown option {option[:20]!r}; known: {sorted(OPTIONS)}")

    @classmethod
    def parse(cls, spec: str) -> Mount:
        """The mount that ``spec`` writes: ``/source:/target`` or ``/source:/target:option,...``. Raises ``ValueError``."""
        parts = spec.split(":")
        if len(parts) not in (2, 3):
            raise ValueError(f"mount {spec[:80]!r}: {_FORM}")
        return cls(parts[0], parts[1], tuple(parts[2].split(",")) if len(parts) == 3 else ())

    def __str__(self) -> str:
        paths = f"{self.source}:{self.target}"
        return f"{paths}:{','.join(self.options)}" if self.options else paths

    @property
    def read_only(self) -> bool:
        """Whether nothing in the container may write to it."""
        return "ro" in self.options


def normalized(path: str) -> str:
    """An absolute path as engines record it: without doubled or trailing slashes."""
    return "/" + "/".join(part for part in path.split("/") if part)


def lies_inside(path: str, directory: str) -> bool:
    """Whether a normalized path is below a normalized directory; a directory is not inside itself."""
    return path != directory and path.startswith(f"{directory.rstrip('/')}/")
