"""Whether a call's code is unbuffered: what it asks for itself, or else what the configuration says."""

from __future__ import annotations

from typing import Any

import pytest

from executor.errors import InvalidCall
from executor.sandbox.request import Call
from pool.config.load import Settings
from pool.supervisor.requests import checked_call


def asked(unbuffered: Any = None, *, configured: bool = False) -> bool:
    settings = Settings(call={"unbuffered": configured})
    return checked_call(settings, "agent", None, "print(1)", b"", None, None, None, unbuffered).unbuffered


def test_a_call_has_what_it_asks_for_and_else_what_is_configured() -> None:
    assert [asked(own) for own in (None, True, False)] == [False, True, False]
    assert [asked(own, configured=True) for own in (None, True, False)] == [True, True, False]


@pytest.mark.parametrize("value", [1, "yes", 0.0, []])
def test_anything_else_than_true_or_false_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidCall, match="unbuffered must be True or False"):
        asked(value)


def test_only_code_can_be_unbuffered() -> None:
    assert b"unbuffered" in Call(code="1", unbuffered=True).request()
    assert b"unbuffered" not in Call(argv=("python3",), unbuffered=True).request()
    assert b'"-u"' in Call(code="1", unbuffered=True, env={"PYTHONHASHSEED": "0"}).request()
