"""Small images for tests, made of programs of this machine: one without Python, one that declares a volume."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from executor.engine import ImageInfo
from tests.engine.conftest import Room

_PROGRAMS = ("cat", "sleep", "sh", "env")


def pack(path: Path) -> Path:
    """A root filesystem with a few programs and the libraries that they need."""
    files: set[str] = set()
    for program in _PROGRAMS:
        place = shutil.which(program)
        if place is None:
            pytest.skip(f"this machine has no {program} to make an image of")
        files.add(place)
        needs = subprocess.run(["ldd", place], capture_output=True, text=True, check=False).stdout
        files.update(re.findall(r"(/\S+)", needs))
    with tarfile.open(path, "w") as tar:
        for name in ("tmp", "proc", "sys", "dev", "tool", "etc", "data"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for file in sorted(files):
            target = f"bin/{Path(file).name}" if Path(file).name in _PROGRAMS else file.lstrip("/")
            tar.add(Path(file).resolve(), target)
    return path


async def tiny_image(room: Room, place: Path) -> ImageInfo:
    return await room.import_image(pack(place / "tiny.tar"))


async def volume_image(room: Room, place: Path) -> ImageInfo:
    return await room.import_image(pack(place / "volume.tar"), "VOLUME /data")
