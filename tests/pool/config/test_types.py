"""Durations, sizes and ranges of uids: what they are written as, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.config.types import (
    MAX_DURATION,
    MAX_SIZE,
    UidRange,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    parse_uid_range,
)

GIB = 1024**3


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (30, 30.0),
        (30.5, 30.5),
        ("30s", 30.0),
        ("10m", 600.0),
        ("2h", 7200.0),
        ("500ms", 0.5),
        ("1d", 86400.0),
        ("1.5h", 5400.0),
    ],
)
def test_duration_is_read_as_float_seconds(written: object, seconds: float) -> None:
    result = parse_duration(written)
    assert result == seconds
    assert type(result) is float


@pytest.mark.parametrize(
    "written",
    [
        *(True, False, None, [30], 0, 0.0, -1, float("inf"), float("-inf"), float("nan"), 10**400),
        *("", "30", "s", "30 s", " 30s", "30s\n", "10M", "-3s", "1e3s", "1.s", "٣s", "yes", "0s", "367d"),
        pytest.param("9" * 5_000 + "s", id="5000 digits"),
    ],
)
def test_what_is_no_positive_finite_duration_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"duration|must be above 0 and at most 366d"):
        parse_duration(written)


@given(st.integers(1, MAX_DURATION), st.sampled_from([("ms", 1000), ("s", 1), ("m", -60), ("h", -3600), ("d", -86400)]))
def test_every_whole_duration_means_the_same_in_every_unit(seconds: int, unit: tuple[str, int]) -> None:
    name, factor = unit
    count = seconds * factor if factor > 0 else max(1, seconds // -factor)
    expected = seconds if factor > 0 else count * -factor
    assert parse_duration(f"{count}{name}") == expected


@given(st.integers(1, MAX_DURATION * 1000))
def test_formatted_duration_reads_back_as_itself(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.text() | st.integers() | st.floats() | st.booleans() | st.none() | st.binary())
def test_parsers_are_total_and_their_messages_are_one_printable_line(value: object) -> None:
    for parse in (parse_duration, parse_size, parse_uid_range):
        message = ""
        try:
            parse(value)
        except ValueError as error:
            message = str(error)
        assert message.isprintable()
        assert len(message) < 250


@pytest.mark.parametrize(
    ("written", "size"),
    [
        *((1, 1), (4096, 4096), ("64MB", 64_000_000), ("64MiB", 67_108_864), ("16KiB", 16_384), ("1kB", 1000)),
        *(("1KB", 1000), ("7B", 7), ("1GB", 10**9), ("1GiB", GIB), ("1.5MiB", 1_572_864), ("0.3kB", 300)),
    ],
)
def test_size_is_read_as_whole_bytes(written: object, size: int) -> None:
    result = parse_size(written)
    assert result == size
    assert type(result) is int


@pytest.mark.parametrize(
    "written",
    [
        True,
        None,
        1.0,
        "",
        "64",
        "64mb",
        "64 MB",
        "64M",
        "-1B",
        "0.3B",
        "1.00001KiB",
        0,
        -1,
        "0MB",
        "1.1GiB",
        10**400,
        [1],
    ],
)
def test_what_is_no_positive_whole_size_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"size|whole number of bytes|at least 1 byte"):
        parse_size(written)


@given(st.integers(1, MAX_SIZE))
def test_formatted_size_reads_back_as_itself(size: int) -> None:
    assert parse_size(format_size(size)) == size
    assert parse_size(f"{size}B") == size


def test_uid_range_gives_the_keeper_a_uid_that_no_call_has() -> None:
    uids = parse_uid_range("5000:3")
    assert uids == UidRange(5000, 3)
    assert uids.keeper == 5000
    assert list(uids.calls) == [5001, 5002]
    assert str(uids) == "5000:3"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("5000", "start:count"),
        ("a:b", "start:count"),
        ("5000:3:1", "start:count"),
        ("-1:3", "start:count"),
        (5000, "start:count"),
        (True, "start:count"),
        ("0:100", "holds uid 0"),
        ("5000:1", "count below 2"),
        ("2147483647:2", "ends above 2147483647"),
        (UidRange(0, 10), "holds uid 0"),
    ],
)
def test_uid_range_outside_what_docker_accepts_is_refused(written: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_uid_range(written)


def test_uid_range_may_end_at_the_highest_uid_that_docker_accepts() -> None:
    assert parse_uid_range("2147483646:2").calls[-1] == 2147483647
