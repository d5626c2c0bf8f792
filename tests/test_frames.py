"""What a runner says is hostile: whatever bytes come, the host's end answers with frames or with ``ProtocolError``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from executor import frames
from executor.frames import Decoder, Frame, ProtocolError, Report, encode, parse_object, parse_report
from executor.profile import ContainerProfile
from executor.verify import INSIDE_FILES, check_files

KINDS = {
    frames.HELLO: 2_000_000, frames.ARMED: 0, frames.OUT: 65_536, frames.ERR: 65_536, frames.TAKEN: 8,
    frames.DONE: 4_096, frames.CLEAN: 64, frames.DIRTY: 64, frames.POISONED: 256,
}  # fmt: skip
REPORT: dict[str, Any] = {
    "exit_code": 0, "signal": None, "timed_out": False, "cancelled": False, "oom": None, "stdout_total": 1,
    "stderr_total": 0, "cpu_seconds": 0.5, "max_rss": 1024, "duration": 1,
}  # fmt: skip
SEQUENCE = st.integers(0, 2**32 - 1)
FRAMES = st.lists(
    st.sampled_from(sorted(KINDS)).flatmap(
        lambda kind: st.builds(Frame, st.just(kind), SEQUENCE, st.binary(max_size=min(KINDS[kind], 40)))
    ),
    max_size=6,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def _encoded(wanted: list[Frame]) -> bytes:
    return b"".join(encode(frame.kind, frame.seq, frame.payload) for frame in wanted)


def _decoded(*chunks: bytes) -> tuple[list[Frame], Decoder]:
    decoder, got = Decoder(), list[Frame]()
    for chunk in chunks:
        got += decoder.feed(chunk)
    return got, decoder


# --- the decoder ------------------------------------------------------------------------------------------------------


@given(FRAMES)
def test_frames_come_back_as_they_were_sent(wanted: list[Frame]) -> None:
    got, decoder = _decoded(_encoded(wanted))
    assert (got, decoder.partial) == (wanted, 0)


@given(FRAMES)
def test_frames_may_be_split_at_every_byte(wanted: list[Frame]) -> None:
    data = _encoded(wanted)
    for at in range(len(data) + 1):
        assert _decoded(data[:at], data[at:])[0] == wanted
    assert _decoded(*(bytes((byte,)) for byte in data))[0] == wanted


@given(FRAMES, st.integers(0, 200))
def test_of_a_cut_off_stream_only_whole_frames_count(wanted: list[Frame], cut: int) -> None:
    data = _encoded(wanted)
    got, decoder = _decoded(data[: max(0, len(data) - cut)])
    assert got == wanted[: len(got)]
    assert len(_encoded(got)) + decoder.partial == max(0, len(data) - cut)


@given(st.lists(st.binary(max_size=60), max_size=6))
@example([b"\x11\x00\x00\x00\x00\xff\xff\xff\xff"])
@example([b"\x00" * 9])
@example([b"HTTP/1.1 200 OK\r\n\r\n"])
def test_any_bytes_are_frames_or_a_protocol_error(chunks: list[bytes]) -> None:
    decoder, got = Decoder(), list[Frame]()
    try:
        for chunk in chunks:
            got += decoder.feed(chunk)
    except ProtocolError:
        return
    assert all(len(frame.payload) <= KINDS[frame.kind] for frame in got)
    assert _encoded(got) == b"".join(chunks)[: len(_encoded(got))]


@given(FRAMES, st.data())
def test_a_flipped_byte_is_other_frames_or_a_protocol_error(wanted: list[Frame], data: st.DataObject) -> None:
    damaged = bytearray(_encoded(wanted))
    if damaged:
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] ^= data.draw(st.integers(1, 255))
        try:
            got = _decoded(bytes(damaged))[0]
        except ProtocolError:
            return
        assert got != wanted


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_frame_beyond_its_types_size_is_refused_before_its_payload_has_come(kind: int) -> None:
    most = KINDS[kind]
    assert _decoded(encode(kind, 1, b"x" * most))[0][0].payload == b"x" * most
    header = bytes((kind,)) + (1).to_bytes(4, "big") + (most + 1).to_bytes(4, "big")
    with pytest.raises(ProtocolError, match=f"at most {most} are allowed"):
        _decoded(header)


@pytest.mark.parametrize("kind", [kind for kind in range(256) if kind not in KINDS])
def test_a_type_that_no_runner_has_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown type {kind}"):
        _decoded(encode(kind, 1))


def test_what_came_whole_before_a_violation_is_still_told() -> None:
    got = list[Frame]()
    with pytest.raises(ProtocolError):  # noqa: PT012 - the loop is what raises
        for frame in Decoder().feed(encode(frames.OUT, 1, b"ok") + b"\xff" * 9):
            got.append(frame)
    assert got == [Frame(frames.OUT, 1, b"ok")]


# --- reports ----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"9" * 10_000)
@example(b"\xff\xfe{")
def test_any_payload_is_a_report_or_a_protocol_error(payload: bytes) -> None:
    for parse in (parse_report, parse_object):
        try:
            got = parse(payload)
        except ProtocolError:
            continue
        assert isinstance(got, Report | dict)


@given(st.sampled_from(sorted(REPORT)), JSON)
@example("duration", float("nan"))
@example("cpu_seconds", float("inf"))
@example("stdout_total", True)
@example("stdout_total", 2**70)
@example("max_rss", -1)
@example("timed_out", 1)
def test_a_report_with_any_one_value_is_sound_or_a_protocol_error(field: str, value: Any) -> None:
    try:
        report = parse_report(json.dumps({**REPORT, field: value}).encode())
    except ProtocolError:
        return
    assert (report.exit_code is None) != (report.signal is None)
    assert 0 <= (report.exit_code or 0) <= 255
    assert 0 <= (report.signal or 0) <= 127
    for number in (report.stdout_total, report.stderr_total, report.max_rss):
        assert type(number) is int
        assert 0 <= number < 2**63
    for seconds in (report.cpu_seconds, report.duration):
        assert type(seconds) in (int, float)
        assert 0 <= seconds < 2**63
    assert type(report.timed_out) is type(report.cancelled) is bool
    assert report.oom in (None, True, False)


def test_a_report_round_trips() -> None:
    assert parse_report(json.dumps(REPORT).encode()) == Report(**REPORT)


@pytest.mark.parametrize("ending", [(0, 9), (None, None), (256, None), (None, 128), (-1, None), (None, -9)])
def test_a_report_says_in_exactly_one_way_how_the_process_ended(ending: tuple[int | None, int | None]) -> None:
    code, signal = ending
    with pytest.raises(ProtocolError):
        parse_report(json.dumps({**REPORT, "exit_code": code, "signal": signal}).encode())


@pytest.mark.parametrize("field", sorted(REPORT))
def test_a_report_with_a_field_missing_or_added_is_refused(field: str) -> None:
    short = {name: value for name, value in REPORT.items() if name != field}
    for content in (short, {**REPORT, f"{field}s": 1}):
        with pytest.raises(ProtocolError, match="other fields"):
            parse_report(json.dumps(content).encode())


# --- the files of a hello ---------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(INSIDE_FILES) | st.text(max_size=5), st.text(max_size=80)))
@example(dict.fromkeys(INSIDE_FILES, ""))
@example(dict.fromkeys(INSIDE_FILES, "CapInh:\tzz\nUid:\t\n - \n"))
@example(dict.fromkeys(INSIDE_FILES, "1 0 0:1 / / ro - "))
def test_any_files_of_a_hello_are_judged_and_none_of_them_passes(files: dict[str, str]) -> None:
    findings = check_files(files, ContainerProfile(), user="1:1")
    assert [finding for finding in findings if finding.verdict != "equal"]
