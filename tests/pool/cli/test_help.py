"""The help of each command wraps at the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import structlog
from typer.testing import CliRunner

from pool.cli.main import app

COMMANDS = ["call", "cleanup", "doctor", "launch-check", "tool run", "config check"]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("command", COMMANDS)
def test_paragraphs_of_the_help_are_filled(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    text = [line.strip() for line in result.stdout.partition("─")[0].splitlines()]
    assert len(text) > 6
    for line, following in pairwise(text):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 78, line
