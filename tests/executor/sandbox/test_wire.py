"""What a runner says is hostile: whatever bytes come, the host's end answers with frames or with ``ProtocolError``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from executor.sandbox import wire
from executor.sandbox.profile import ContainerProfile
from executor.sandbox.seccomp import WITNESS_ERRNO
from executor.sandbox.verify_inside import INSIDE_FILES, check_files
from executor.sandbox.wire import Decoder, Frame, ProtocolError, Report, call_header, encode, parse_object, parse_report
from tests.support.wire import call_header as wire_header
from tests.support.wire import report

KINDS = {
    wire.HELLO: 2_000_000, wire.ARMED: 0, wire.OUT: 65_536, wire.ERR: 65_536, wire.TAKEN: 8,
    wire.DONE: len(report()), wire.CLEAN: 64, wire.DIRTY: 64, wire.POISONED: 256,
    wire.CLEANING: 0,
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
    assert (got, len(decoder._buffer)) == (wanted, 0)


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
    assert len(_encoded(got)) + len(decoder._buffer) == max(0, len(data) - cut)


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


def test_what_came_whole_before_a_violation_still_counts() -> None:
    got = list[Frame]()
    with pytest.raises(ProtocolError):  # noqa: PT012 - the loop is what raises
        for frame in Decoder().feed(encode(wire.OUT, 1, b"ok") + b"\xff" * 9):
            got.append(frame)
    assert got == [Frame(wire.OUT, 1, b"ok")]


# --- reports ----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"9" * 10_000)
@example(b"\xff\xfe{")
def test_any_payload_is_an_object_or_a_protocol_error(payload: bytes) -> None:
    try:
        assert isinstance(parse_object(payload), dict)
    except ProtocolError:
        return


@given(st.binary(min_size=len(report()), max_size=len(report())) | st.binary(max_size=100))
@example(b"\xff" * len(report()))
@example(b"\0" * len(report()))
def test_any_payload_is_a_sound_report_or_a_protocol_error(payload: bytes) -> None:
    try:
        got = parse_report(payload)
    except ProtocolError:
        return
    assert (got.exit_code is None) != (got.signal is None)
    assert 0 <= (got.exit_code or 0) <= 255
    assert 0 <= (got.signal or 0) <= 127
    for number in (got.stdout_total, got.stderr_total, got.max_rss):
        assert 0 <= number < 2**63
    assert 0 <= got.cpu_seconds < 2**63
    assert 0 <= got.duration < 2**63


ENDINGS = st.integers(0, 255).map(lambda code: (code, None)) | st.integers(1, 127).map(lambda number: (None, number))


@given(ENDINGS, st.tuples(st.booleans(), st.booleans(), st.none() | st.booleans()), st.lists(
    st.integers(0, 2**40), min_size=5, max_size=5))  # fmt: skip
def test_a_report_round_trips(
    ending: tuple[int | None, int | None], flags: tuple[bool, bool, bool | None], numbers: list[int]
) -> None:
    fields: dict[str, Any] = {
        "exit_code": ending[0], "signal": ending[1], "timed_out": flags[0], "cancelled": flags[1], "oom": flags[2],
        "stdout_total": numbers[0], "stderr_total": numbers[1], "cpu_seconds": numbers[2] / 1e6, "max_rss": numbers[3],
        "duration": numbers[4] / 1e6,
    }  # fmt: skip
    assert parse_report(report(**fields)) == Report(**fields)


@pytest.mark.parametrize("ending", [(0, 9), (None, None), (256, None), (None, 128), (None, 255)])
def test_a_report_says_in_exactly_one_way_how_the_process_ended(ending: tuple[int | None, int | None]) -> None:
    code, signal = ending
    with pytest.raises(ProtocolError):
        parse_report(report(exit_code=code, signal=signal))


@pytest.mark.parametrize("flags", [8, 16, 32, 64, 128, 255])
def test_a_report_with_a_flag_that_means_nothing_is_refused(flags: int) -> None:
    data = bytearray(report(oom=None))
    data[3] = flags
    with pytest.raises(ProtocolError):
        parse_report(bytes(data))


@pytest.mark.parametrize("field", ["stdout_total", "stderr_total", "max_rss"])
def test_a_report_with_a_number_beyond_any_count_is_refused(field: str) -> None:
    with pytest.raises(ProtocolError):
        parse_report(report(**{field: 2**63}))


@pytest.mark.parametrize("length", [0, 1, len(report()) - 1, len(report()) + 1])
def test_a_report_that_is_cut_or_lengthened_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="a report of"):
        parse_report((report() * 2)[:length])


@given(st.floats(0, 1e9), st.floats(0, 1e6), st.integers(0, 2**62), st.none() | st.integers(0, 2**62))
def test_a_calls_header_round_trips(timeout: float, grace: float, most: int, credit: int | None) -> None:
    got = wire_header(call_header(timeout=timeout, grace=grace, max_output=most, credit=credit))
    assert (got["max_output"], got["credit"]) == (most, credit)
    assert got["timeout"] == pytest.approx(timeout, abs=1e-5)
    assert got["grace"] == pytest.approx(grace, abs=1e-5)


# --- the files of a hello ---------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(INSIDE_FILES) | st.text(max_size=5), st.text(max_size=80)))
@example(dict.fromkeys(INSIDE_FILES, ""))
@example(dict.fromkeys(INSIDE_FILES, "CapInh:\tzz\nUid:\t\n - \n"))
@example(dict.fromkeys(INSIDE_FILES, "1 0 0:1 / / ro - "))
def test_any_files_of_a_hello_are_judged_and_none_of_them_passes(files: dict[str, str]) -> None:
    findings = check_files(files, ContainerProfile(), user="1:1", witness=WITNESS_ERRNO)
    assert [finding for finding in findings if finding.verdict != "equal"]
