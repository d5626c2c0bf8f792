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

from executor.errors import EmberpoolError, FileFailed, InvalidCall
from executor.result import CallResult
from executor.sandbox import files
from executor.sandbox.files import FileInfo

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
    with failure("EFBIG", "it is 200000 bytes; a file may grow to 100000 (sandbox.file_size_mb)"):
        write(place / "file", b"n" * 200_000, file_size=100_000)
    assert [path.name for path in place.iterdir()] == ["file"]
    assert (place / "file").read_bytes() == b"old"


def test_a_write_that_is_asked_to_end_leaves_nothing_half_written(place: Path) -> None:
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


def test_a_file_that_is_too_large_is_not_read_and_its_size_is_reported(place: Path) -> None:
    (place / "file").write_bytes(b"x" * 11)
    assert read(place / "file", 11) == b"x" * 11
    with failure("EFBIG", "it is 11 bytes", "at most 10"):
        read(place / "file", 10)


def test_a_listing_reports_kinds_sizes_and_times_of_every_name(place: Path) -> None:
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
        ({"stdout": b"12345", "stdout_total": 7_000}, "EFBIG", "the answer is 7000 bytes; at most 5 are read"),
        ({"exit_code": 3, "stderr": b"not JSON"}, "", "exit status 3: not JSON"),
        ({"exit_code": 3, "stderr": b"[]"}, "", "exit status 3"),
    ],
)
def test_every_other_end_of_the_program_is_a_failure_that_says_how(
    changes: dict[str, object], code: str, words: str
) -> None:
    with pytest.raises(FileFailed, match=f"reading.*{words}") as failed:
        files.answer(result(**changes), "reading 'x'")
    assert failed.value.code == code
    assert (failed.value.reason, failed.value.started) == ("file_failed", True)


GOOD = {"name": "x", "kind": "file", "size": 1, "modified": 1.5}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("name", [
            "", ".", "..", "/", "a/b", "../x", "/etc/passwd", "a\0b", "\0", "x" * 4_096, "\ud800", "\udc00", 7, None, ["x"],
        ]),
        ("kind", ["", "FILE", None, 1, ["file"], {}]),
        ("size", [-1, 2**63, 10**400, 1.0, True, "1", None, [1]]),
        ("modified", [10**400, -(10**400), 2**64, -(2**64), 1e19, True, "1", None, [1.0]]),
    ],
)  # fmt: skip
def test_an_entry_with_a_field_that_no_kernel_gives_is_a_typed_failure(field: str, values: list[object]) -> None:
    for value in values:
        row = list({**GOOD, field: value}.values())
        with pytest.raises(FileFailed, match="listing: the answer from inside is not a listing"):
            files.parse_listing(json.dumps([list(GOOD.values()), row]).encode(), "listing")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5_000])
@pytest.mark.parametrize("field", [2, 3])
def test_a_number_that_is_none_is_a_typed_failure(number: str, field: int) -> None:
    row = ['"x"', '"file"', "1", "1"]
    row[field] = number
    with pytest.raises(FileFailed):
        files.parse_listing(f"[[{','.join(row)}]]".encode(), "listing")


@pytest.mark.parametrize(
    "text", ["{}", '"abcd"', "null", "7", '{"a": [1]}', '["abcd"]', '[{"x": 1}]', "[[]]", "[" * 100_000]
)
def test_a_listing_of_another_form_is_a_typed_failure(text: str) -> None:
    with pytest.raises(FileFailed):
        files.parse_listing(text.encode(), "listing")


@pytest.mark.parametrize("number", [0, -(2**63), 2**63 - 1, 1e18, -0.5])
def test_every_time_that_a_file_can_be_given_is_listed(number: float) -> None:
    [entry] = files.parse_listing(json.dumps([["x", "file", 2**63 - 1, number]]).encode(), "listing")
    assert entry == FileInfo(name="x", kind="file", size=2**63 - 1, modified=float(number))


def test_a_listing_is_sorted_here_whatever_its_order_inside() -> None:
    rows = [["b", "file", 0, 0], ["a", "file", 0, 0], ["\udcff", "file", 0, 0]]
    assert [entry.name for entry in files.parse_listing(json.dumps(rows).encode(), "listing")] == ["a", "b", "\udcff"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"code": 7}, "exit status 3"),
        ({"code": ["ENOENT"]}, "exit status 3"),
        ({"code": "\x1b[31m"}, "exit status 3"),
        ({"code": "E" * 40}, "exit status 3"),
        ({"code": "enoent\n"}, "exit status 3"),
        ({"kind": "other"}, "exit status 3"),
        ({"kind": ["invalid"]}, "exit status 3"),
        ({"message": None}, "exit status 3"),
        ({"message": [[["x"]]]}, "exit status 3"),
        ({"message": ""}, "exit status 3"),
        ({"message": "no\x1b]0;owned\x07 such\nemberpool: all is well\r\u202e file\udcff"}, "owned"),
        ({"message": "x" * 100_000}, "xxx"),
    ],
)
@pytest.mark.parametrize("kind", ["invalid", "failed"])
def test_a_refusal_is_taken_field_by_field_and_its_words_steer_nothing(
    changes: dict[str, object], words: str, kind: str
) -> None:
    said = {"kind": kind, "code": "ENOENT", "message": "no such file", **changes}
    with pytest.raises((FileFailed, InvalidCall), match=words) as failed:
        files.answer(result(exit_code=3, stderr=json.dumps(said).encode()), "reading 'x'")
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) < 1_200
    assert getattr(failed.value, "code", "") in ("", "ENOENT")


def test_a_longer_answer_than_was_asked_for_is_a_typed_failure() -> None:
    assert files.answer(result(stdout=b"12345"), "reading 'x'", most=5) == b"12345"
    with pytest.raises(FileFailed, match="reading 'x': the answer from inside has 6 bytes; at most 5 were asked for"):
        files.answer(result(stdout=b"123456"), "reading 'x'", most=5)
    with pytest.raises(FileFailed, match="at most 0"):
        files.answer(result(stdout=b"done"), "writing 'x'", most=0)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(
    lambda value: json.dumps(value).encode()
))  # fmt: skip
def test_whatever_comes_from_inside_is_a_listing_or_a_typed_failure(data: bytes) -> None:
    for act in (lambda: files.parse_listing(data, ""), lambda: files.answer(result(exit_code=3, stderr=data), "")):
        try:
            act()
        except EmberpoolError:
            continue
