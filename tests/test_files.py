"""Files of a session: what is asked, what the program inside does with it (on this machine's /tmp), what its answer means."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import files
from executor.files import FileInfo
from executor.result import CallResult, EmberpoolError, FileFailed, InvalidCall

MAX = 1_000_000


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory below /tmp, where the program writes."""
    with tempfile.TemporaryDirectory(prefix="ember-files-", dir="/tmp") as directory:
        yield Path(directory)


def ask(request: bytes, *, file_size: int | None = None) -> CallResult:
    """Run the program here, as a call would inside."""

    def limit() -> None:
        if file_size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", files.program()],
        input=request,
        capture_output=True,
        check=False,
        preexec_fn=limit,
    )
    return result(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def result(**changes: object) -> CallResult:
    facts = {"exit_code": 0, "stdout": b"", "stderr": b"", "duration": 0.0, **changes}
    totals = {f"{name}_total": len(facts[name]) for name in ("stdout", "stderr")}  # type: ignore[arg-type]
    return CallResult(**{**totals, **facts})  # type: ignore[arg-type]


def write(path: Path | str, data: bytes, *, parents: bool = False, file_size: int | None = None) -> None:
    request = files.write_request(str(path), data, parents=parents, max_input=4 * MAX)
    files.answer(ask(request, file_size=file_size), "writing")


def read(path: Path | str, max_bytes: int | None = None) -> bytes:
    return files.answer(ask(files.read_request(str(path), max_bytes, max_output=MAX)), "reading")


def entries(path: Path | str, max_output: int = MAX) -> list[FileInfo]:
    return files.parse_listing(files.answer(ask(files.list_request(str(path), max_output=max_output)), "listing"), "")


@contextmanager
def failure(code: str, *words: str) -> Iterator[None]:
    with pytest.raises(FileFailed) as failed:
        yield
    assert failed.value.code == code
    for word in words:
        assert word in str(failed.value)


# --- what the program does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\0\xff\xfe no newline", os.urandom(3 * MAX)], ids=["empty", "bytes", "large"])
def test_what_was_written_is_read_back_to_the_byte(place: Path, data: bytes) -> None:
    write(place / "file", data)
    assert (place / "file").read_bytes() == data
    assert (place / "file").stat().st_mode & 0o777 == 0o644
    if len(data) <= MAX:
        assert read(place / "file") == data


def test_a_relative_path_begins_at_tmp(place: Path) -> None:
    write(f"{place.name}/file", b"here")
    assert (place / "file").read_bytes() == b"here"
    assert read(f"{place.name}/../{place.name}/file") == b"here"


def test_directories_are_made_only_on_request(place: Path) -> None:
    with failure("ENOENT", "parents=True"):
        write(place / "a/b/file", b"x")
    assert list(place.iterdir()) == []
    write(place / "a/b/file", b"x", parents=True)
    assert (place / "a/b/file").read_bytes() == b"x"


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(place: Path) -> None:
    write(place / "file", b"old")
    with failure("EFBIG", "too large"):
        write(place / "file", b"n" * 200_000, file_size=100_000)
    assert [path.name for path in place.iterdir()] == ["file"]
    assert (place / "file").read_bytes() == b"old"


def test_a_write_that_is_told_to_end_leaves_nothing_half_written(place: Path) -> None:
    request = files.write_request(str(place / "file"), b"x" * 1_000, parents=False, max_input=MAX)
    command = [sys.executable, "-I", "-B", "-c", files.program()]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(request[:-500])
        process.stdin.flush()
        while not list(place.iterdir()):
            pass
        process.terminate()
        process.wait()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "path", ["/etc/hostname", "../etc/hostname", "/tmp/../etc/hostname", "/tmpfoo", "/", "/proc/self/mem"]
)
def test_a_path_outside_is_refused(path: str) -> None:
    for act in (read, entries, lambda path: write(path, b"")):
        with pytest.raises(InvalidCall, match="outside of /tmp, /dev/shm"):
            act(path)


def test_tool_may_be_read_and_not_written() -> None:
    with failure("ENOENT"):
        read("/tool/nothing-is-here")
    with pytest.raises(InvalidCall, match="outside"):
        write("/tool/file", b"")


def test_a_link_that_leads_out_is_refused_and_one_that_stays_inside_is_followed(place: Path) -> None:
    (place / "out").symlink_to("/etc/hostname")
    (place / "away").symlink_to("/etc")
    (place / "loop").symlink_to("loop")
    (place / "real").write_bytes(b"inside")
    (place / "in").symlink_to("real")
    for path in ("out", "away/hostname"):
        with pytest.raises(InvalidCall, match="leads to /etc"):
            read(place / path)
        with pytest.raises(InvalidCall, match="leads to /etc"):
            write(place / path, b"x")
    with pytest.raises(FileFailed):
        read(place / "loop")
    assert read(place / "in") == b"inside"
    write(place / "in", b"through")
    assert (place / "in").is_symlink()
    assert (place / "real").read_bytes() == b"through"


def test_only_regular_files_are_read_and_replaced(place: Path) -> None:
    os.mkfifo(place / "pipe")
    (place / "dir").mkdir()
    for name, code in (("pipe", "EINVAL"), ("dir", "EISDIR")):
        with failure(code):
            read(place / name)
        with failure(code):
            write(place / name, b"x")
    with failure("EISDIR"):
        write("/tmp", b"x")
    with failure("ENOTDIR"):
        write(place / "pipe/file", b"x")


def test_a_file_that_is_too_large_is_not_read_and_its_size_is_told(place: Path) -> None:
    (place / "file").write_bytes(b"x" * 11)
    assert read(place / "file", 11) == b"x" * 11
    with failure("EFBIG", "it is 11 bytes", "at most 10"):
        read(place / "file", 10)


def test_a_listing_tells_kinds_sizes_and_times_of_every_name(place: Path) -> None:
    odd = os.fsdecode(b"not-\xff-utf8\n")
    (place / odd).write_bytes(b"12345")
    (place / "dir").mkdir()
    (place / "link").symlink_to("nowhere")
    os.mkfifo(place / "pipe")
    os.utime(place / odd, (5.5, 5.5))
    found = {entry.name: entry for entry in entries(place)}
    assert list(found) == sorted(found)
    assert {name: entry.kind for name, entry in found.items()} == {
        odd: "file", "dir": "directory", "link": "symlink", "pipe": "other",
    }  # fmt: skip
    assert (found[odd].size, found[odd].modified) == (5, 5.5)
    assert read(place / odd) == b"12345"
    with failure("EFBIG", "4 entries"):
        entries(place, max_output=20)
    with failure("ENOTDIR"):
        entries(place / odd)


# --- what may be asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["", "a\0b", 7, "\ud800", "x" * 5_000], ids=["empty", "nul", "int", "surrogate", "long"]
)
def test_a_path_that_is_none_is_refused_before_anything_runs(path: str) -> None:
    with pytest.raises(InvalidCall, match="path"):
        files.list_request(path, max_output=MAX)


def test_data_beyond_what_a_call_takes_is_refused_with_what_is_taken() -> None:
    with pytest.raises(InvalidCall, match=r"data is 1000000 bytes; at most 9\d+ are taken"):
        files.write_request("file", b"x" * MAX, parents=False, max_input=MAX)
    with pytest.raises(InvalidCall, match="data must be bytes"):
        files.write_request("file", "text", parents=False, max_input=MAX)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [-1, MAX + 1, True, 1.5])
def test_max_bytes_has_its_ceiling(most: int) -> None:
    with pytest.raises(InvalidCall, match=r"call\.max_output"):
        files.read_request("file", most, max_output=MAX)


# --- what an answer means -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"exit_code": None, "signal": 15, "timed_out": True}, "ETIMEDOUT", "timeout"),
        ({"exit_code": None, "signal": 9, "oom_killed": True}, "ENOMEM", "memory"),
        ({"exit_code": 1, "stderr": b"Traceback\nMemoryError"}, "", "exit status 1: MemoryError"),
        ({"exit_code": None, "signal": 11}, "", "signal 11"),
        ({"stdout_total": 9}, "", "exit status 0"),
        ({"exit_code": 3, "stderr": b"not JSON"}, "", "refused"),
        ({"exit_code": 3, "stderr": b"[]"}, "", "refused"),
    ],
)
def test_every_other_end_of_the_program_is_a_failure_that_says_how(
    changes: dict[str, object], code: str, words: str
) -> None:
    with pytest.raises(FileFailed, match=f"reading.*{words}") as failed:
        files.answer(result(**changes), "reading 'x'")
    assert failed.value.code == code
    assert (failed.value.reason, failed.value.started) == ("file_failed", True)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(
    lambda value: json.dumps(value).encode()
))  # fmt: skip
def test_whatever_comes_from_inside_is_a_listing_or_a_typed_failure(data: bytes) -> None:
    for act in (lambda: files.parse_listing(data, ""), lambda: files.answer(result(exit_code=3, stderr=data), "")):
        try:
            act()
        except EmberpoolError:
            continue
