"""Small images for tests: made of programs of this machine (without Python, with a volume), or changed from the usual one."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from executor.engine.protocol import ImageInfo
from tests.engine.conftest import Room

_PROGRAMS = ("cat", "sleep", "sh", "env")


def pack(path: Path, programs: Sequence[str] = _PROGRAMS, *, tmp: int | None = 0o755) -> Path:
    """A root filesystem with a few programs and the libraries that they need; ``tmp`` is the mode of its ``/tmp``."""
    files: set[str] = set()
    for program in programs:
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
            if name == "tmp":
                if tmp is None:
                    continue
                entry.mode = tmp
            tar.addfile(entry)
        for file in sorted(files):
            target = f"bin/{Path(file).name}" if Path(file).name in _PROGRAMS else file.lstrip("/")
            tar.add(Path(file).resolve(), target)
    return path


async def tiny_image(room: Room, place: Path) -> ImageInfo:
    return await room.import_image(pack(place / "tiny.tar"))


async def volume_image(room: Room, place: Path) -> ImageInfo:
    return await room.import_image(pack(place / "volume.tar"), "VOLUME /data")


async def changed_image(room: Room, place: Path, files: Mapping[str, str], *changes: str) -> ImageInfo:
    """The usual image with ``files`` (path in it to text, executable) put over it; ``changes`` are Dockerfile instructions."""
    root = place / "changed"
    for name, text in files.items():
        target = root / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o755)
    doing = "making a test's image"
    made = await room.engine._ask("create", "--network", "none", room.image.id, doing=doing)
    container = made.stdout.decode().strip()
    try:
        for top in root.iterdir() if files else ():
            await room.engine._ask("cp", str(top), f"{container}:/", doing=doing)
        reference = f"localhost/{room.pool}:{len(room.images)}"
        words = [word for change in changes for word in ("--change", change)]
        await room.engine._ask("commit", *words, container, reference, doing=doing)
    finally:
        await room.engine._ask("rm", "-f", container, doing=doing)
    room.images.append(reference)
    return await room.engine.image(reference)
