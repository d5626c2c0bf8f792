"""A tool directory to stage, a place to stage it in, and what a test does to both."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from executor.errors import EmberpoolError, InvalidCall
from executor.staging.versions import Fingerprints, StageLimits, Staging


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Site:
    """An allowed directory with one tool in it, and a staging place. ``pauses`` are what staging would have slept."""

    root: Path
    clock: Clock = field(default_factory=Clock)
    limits: StageLimits = field(default_factory=StageLimits)
    pauses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allowed, self.place = self.root / "tools", self.root / "place"
        self.tool = self.allowed / "tool"
        self.tool.mkdir(parents=True)
        self.place.mkdir()
        (self.place / "nonce").write_text("n")
        self.fingerprints = Fingerprints(self.clock)
        self.staging = self.another(self.place)

    def another(self, place: Path, **limits: int) -> Staging:
        """A ``Staging`` that shares the fingerprints."""
        place.mkdir(exist_ok=True)
        return Staging(place, replace(self.limits, **limits), self.fingerprints)

    def fast(self, monkeypatch: pytest.MonkeyPatch) -> Site:
        """The same; it notes the pauses and does not sleep."""
        monkeypatch.setattr("executor.staging.versions.time.sleep", self.pauses.append)
        return self

    def stage(self, source: Path | None = None, *, hold: bool = False) -> str:
        return self.staging.stage(source or self.tool, [self.allowed], hold=hold)

    def write(self, name: str, data: str | bytes) -> Path:
        """A file of the tool."""
        path = self.tool / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    def settle(self) -> None:
        """Stage until the tool's looks are trusted."""
        for _ in range(2):
            self.stage()
            self.clock.now += 60

    def versions(self) -> set[str]:
        """What stands in the place beside the nonce: only whole versions may."""
        names = {path.name for path in self.place.iterdir()} - {"nonce"}
        assert all(len(name) == 32 for name in names), f"left behind: {names}"
        return names

    def refuses(self, *words: str, kind: type[EmberpoolError] = InvalidCall) -> None:
        """Staging the tool is refused, in these words, and leaves nothing."""
        before = self.versions()
        with pytest.raises(kind) as refused:
            self.stage()
        for word in words:
            assert word in str(refused.value)
        assert not refused.value.started
        assert "\n" not in str(refused.value)
        assert self.versions() == before


def once(monkeypatch: pytest.MonkeyPatch, call: str, name: str, act: Callable[[], object], *, times: int = 1) -> None:
    """Do something just before the next calls of ``os.<call>`` on something of this name."""
    real: Callable[..., Any] = getattr(os, call)
    left = [times]

    def hooked(*args: Any, **kwargs: Any) -> Any:
        path = Path(f"/proc/self/fd/{args[0]}").readlink() if isinstance(args[0], int) else Path(args[0])
        if left[0] and path.name == name:
            left[0] -= 1
            act()
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, hooked)


def fails(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """``os.<call>`` fails from now on for what is opened through a directory, or is open."""
    real: Callable[..., Any] = getattr(os, call)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if call in ("read", "write") or kwargs.get("dir_fd") is not None:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the bytes of each ``os.read``."""
    real, sizes = os.read, list[int]()

    def counted(fd: int, size: int) -> bytes:
        data = real(fd, size)
        sizes.append(len(data))
        return data

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", counted)
        yield sizes


def tree(top: Path) -> dict[str, tuple[str, bool, bytes]]:
    """All that a copy must be equal in: kind, whether it runs, and content, by path."""
    found = {}
    for path in top.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            entry = ("link", False, os.fsencode(path.readlink()))
        elif stat.S_ISDIR(mode):
            entry = ("folder", False, b"")
        else:
            entry = ("file", bool(mode & 0o111), path.read_bytes())
        found[str(path.relative_to(top))] = entry
    return found
