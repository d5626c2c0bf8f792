"""Where the library's log lines go, by what the program that uses it has configured, and what a failing sink costs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from executor.common.log import get_logger, lost_lines
from pool import logs
from tests.support import ROOT

PROGRAM = """
import sys, tempfile
from pathlib import Path
import anyio
from executor.errors import EngineUnavailable
from pool.pool import SandboxPool
from tests.support.pools import settings_of
from tests.support.scripted import ScriptedEngine

{before}

async def main(place):
    async with ScriptedEngine() as engine:
        async with SandboxPool(settings_of(place), find=engine.find) as pool:
            session = await pool.acquire("agent", "session")
            assert (await session.call(code="echo x")).ok
            if {trouble}:
                engine.cut_events()
                while pool.snapshot().engine == "up":
                    await anyio.sleep(0.01)

with tempfile.TemporaryDirectory(prefix="ember-", dir="/tmp") as place:
    anyio.run(main, Path(place) / "state")
"""


def _run(before: str = "", *, trouble: bool) -> tuple[str, str]:
    """stdout and stderr of a program that uses a pool; with ``trouble`` there is something to warn of."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before, trouble=trouble)],
        capture_output=True, text=True, timeout=60, check=True, cwd=ROOT,
    )  # fmt: skip
    return done.stdout, done.stderr


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


# --- a whole program --------------------------------------------------------------------------------------------------


def test_a_program_that_configures_nothing_sees_no_line_while_all_is_well() -> None:
    assert _run(trouble=False) == ("", "")


def test_a_warning_goes_to_stderr_where_nothing_is_configured_and_never_to_stdout() -> None:
    out, err = _run(trouble=True)
    assert out == ""
    assert [line.partition(" ")[0] for line in err.splitlines()] == ["pool.engine_down"]


def test_a_program_that_configures_logging_has_it_there() -> None:
    out, err = _run('import logging; logging.basicConfig(level="INFO", format="%(name)s %(message)s")', trouble=False)
    assert out == ""
    events = [line.split(" ")[:2] for line in err.splitlines() if line.startswith("emberpool.")]
    assert ["emberpool.pool", "pool.started"] in events
    assert ["emberpool.pool", "call.ended"] in events


def test_a_program_that_wants_no_line_at_all_says_so_to_logging() -> None:
    silent = 'import logging; logging.getLogger("emberpool").addHandler(logging.NullHandler())'
    assert _run(silent, trouble=True) == ("", "")


def test_a_program_that_configures_structlog_has_it_there_alone() -> None:
    out, err = _run(
        "import structlog; structlog.configure(processors=[structlog.processors.JSONRenderer()])", trouble=True
    )
    events = [json.loads(line)["event"] for line in out.splitlines()]
    assert events[0] == "pool.started"
    assert {"call.ended", "pool.engine_down"} <= set(events)
    assert err == ""


# --- one line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_a_line_is_a_record_of_the_standard_librarys_with_its_fields(
    caplog: pytest.LogCaptureFixture, level: str
) -> None:
    caplog.set_level("DEBUG", logger="emberpool")
    getattr(get_logger("emberpool.pool").bind(pool="p", name="n"), level)("a.b", sandbox="x\n\x1b[1m", count=3)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("emberpool.pool", level.upper())
    # One line, whatever a field holds.
    assert record.getMessage() == "a.b pool='p' name='n' sandbox='x\\n\\x1b[1m' count=3"
    assert record.__dict__["emberpool"] == {
        "event": "a.b",
        "pool": "p",
        "name": "n",
        "sandbox": "x\n\x1b[1m",
        "count": 3,
    }
    assert (record.filename, record.funcName) == (
        "test_log.py",
        "test_a_line_is_a_record_of_the_standard_librarys_with_its_fields",
    )


def test_an_exception_goes_along(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("emberpool.pool").error("a.b", exc_info=ValueError("why"))
    assert "ValueError: why" in caplog.text


def test_a_logger_follows_what_is_configured_after_it_was_made() -> None:
    log, out = get_logger("emberpool.pool").bind(pool="p"), io.StringIO()
    log.info("a.b")
    logs.configure("info", out)
    log.info("c.d")
    log.debug("e.f")
    told = json.loads(out.getvalue())
    assert (told["event"], told["pool"], told["level"]) == ("c.d", "p", "info")


def test_structlogs_own_way_to_the_standard_library_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.add_logger_name, structlog.processors.JSONRenderer()],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )  # fmt: skip
    get_logger("emberpool.pool").info("a.b", count=3)
    (record,) = caplog.records
    assert json.loads(record.getMessage()) == {"event": "a.b", "count": 3, "logger": "emberpool.pool"}


# --- sinks that fail --------------------------------------------------------------------------------------------------


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("not now")


def _deep(*args: Any) -> Any:
    return _deep(*args)


def _raise(error: BaseException) -> Any:
    def sink(*args: Any) -> Any:
        raise error

    return sink


@pytest.mark.parametrize(
    "sink", [_raise(OSError()), _raise(UnicodeEncodeError("ascii", "é", 0, 1, "no")), _raise(MemoryError()), _deep]
)
@pytest.mark.parametrize("place", ["processor", "factory", "logging"])
def test_what_a_sink_raises_costs_its_line_and_is_counted(place: str, sink: Any) -> None:
    logger = logging.getLogger("emberpool.test")
    if place == "processor":
        structlog.configure(processors=[sink])
    elif place == "factory":
        structlog.configure(logger_factory=sink)
    else:
        logger.addFilter(sink)
    before = lost_lines()
    try:
        get_logger("emberpool.test").bind(pool="p").warning("a.b")
    finally:
        logger.removeFilter(sink)
    assert lost_lines() == before + 1


def test_a_field_that_cannot_be_shown_costs_its_line(caplog: pytest.LogCaptureFixture) -> None:
    before = lost_lines()
    get_logger("emberpool.pool").warning("a.b", what=_Unprintable())
    assert (lost_lines(), caplog.records) == (before + 1, [])


def test_a_line_that_nobody_wants_costs_nothing() -> None:
    before = lost_lines()
    get_logger("emberpool.pool").debug("a.b", what=_Unprintable())
    assert lost_lines() == before


def test_a_closed_stream_costs_its_line() -> None:
    stream = io.StringIO()
    logs.configure("info", stream)
    stream.close()
    before = lost_lines()
    get_logger("emberpool.pool").info("a.b")
    assert lost_lines() == before + 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError(), GeneratorExit()])
def test_what_is_no_failure_of_a_sink_comes_out(error: BaseException) -> None:
    structlog.configure(processors=[_raise(error)])
    before = lost_lines()
    with pytest.raises(type(error)):
        get_logger("emberpool.pool").info("a.b")
    assert lost_lines() == before
