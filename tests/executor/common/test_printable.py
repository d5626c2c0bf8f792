"""Words of unknown origin: whatever they hold, what is shown of them steers no terminal and begins no line of its own."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import CapturingLogger

from executor import errors
from executor.common.printable import printable
from executor.errors import EmberpoolError, SandboxDied
from pool import logs

KEPT = {"\n", "\t"}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),
        (b"\x9b2J \xff", r"\x9b2J \xff"),
        ("back\b\b\x7f", r"back\x08\x08\x7f"),
        ("\u202egnp.exe\u2066\u2069\u200b\ufeff", r"\u202egnp.exe\u2066\u2069\u200b\ufeff"),
        ("\udcff\ud800", r"\udcff\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("naïve 文字 e\u0301 😀 שלום", "naïve 文字 e\u0301 😀 שלום"),
        (7, "7"),
        (ValueError("no\x1b"), r"no\x1b"),
        (b"", ""),
    ],
)
def test_what_a_terminal_would_obey_is_escaped_and_all_else_stays(said: object, shown: str) -> None:
    assert printable(said) == printable(said, lines=True) == printable(said, name=True) == shown


@pytest.mark.parametrize(
    ("said", "one", "lines", "name"),
    [
        (" a\r\n\tb  c\n", "a b  c", " a\\r\n\tb  c\n", r" a\r\n\tb  c\n"),
        ("a\u2028error: b\x0bc\x85d", "a error: b c d", r"a\u2028error: b\x0bc\x85d", r"a\u2028error: b\x0bc\x85d"),
        ("a\xa0\u3000b", "a b", "a\xa0\u3000b", r"a\xa0\u3000b"),
    ],
)
def test_white_space_becomes_one_line_or_stays_or_is_told_apart(said: str, one: str, lines: str, name: str) -> None:
    assert (printable(said), printable(said, lines=True), printable(said, name=True)) == (one, lines, name)


def test_names_that_differ_are_shown_differently() -> None:
    names: list[str | bytes] = ["a\x1b", "a\\x1b", "a\\\x1b", "a\n", "a\\n", b"a\xff", b"a\\xff", "a ", "a"]
    assert len({printable(name, name=True) for name in names}) == len(names)


def test_a_long_text_is_cut_and_says_so() -> None:
    assert printable("x" * 100, limit=10) == "xxxxxxx..."
    assert printable("x" * 10, limit=10) == "x" * 10
    assert len(printable(b"\xff" * 100, limit=50)) == 50


def test_no_character_of_unicode_comes_through_that_a_terminal_would_obey() -> None:
    harmful = [
        char for char in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    ]  # fmt: skip
    assert len(harmful) > 100_000
    for text in (printable("".join(harmful)), printable("".join(harmful), name=True)):
        assert text.isprintable()
    assert set(printable("".join(harmful), lines=True)) - KEPT <= set(map(chr, range(32, 127)))


@given(st.text() | st.binary())
def test_it_is_one_printable_line_and_done_twice_is_done_once(said: str | bytes) -> None:
    text = printable(said)
    assert text.isprintable()
    assert text == text.strip()
    assert printable(text) == text


@pytest.mark.parametrize("kind", [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, EmberpoolError)])  # fmt: skip
def test_every_error_says_what_it_says_in_one_printable_line(kind: type[EmberpoolError]) -> None:
    message = "it leads to /tmp/\x1b]0;owned\x07\nerror: all is well\r\u202e\udcff"
    error = kind(message, cause="killed") if issubclass(kind, SandboxDied) else kind(message)
    assert str(error) == r"it leads to /tmp/\x1b]0;owned\x07 error: all is well \u202e\udcff"


@pytest.mark.parametrize("terminal", [True, False])
def test_no_text_of_a_log_line_steers_the_terminal_that_shows_it(terminal: bool) -> None:
    event = logs._printable_values(
        CapturingLogger(), "info", {"event": "a\x1b[2J", "said": "x\r\ny\u202e", "exception": "a\n\tb\x1b", "n": 7}
    )
    assert event == {"event": r"a\x1b[2J", "said": r"x y\u202e", "exception": "a\n\tb\\x1b", "n": 7}
