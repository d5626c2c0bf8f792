"""The soak benchmark: its books, its judgement, its plan, its refusals, and two short runs on a real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.soak import app
from benchmarks.soak_books import MOST_KEPT, Oddities, PoolState, Share, Tally, Wound
from benchmarks.soak_judge import LIMITS, Limit, Reading, grown, is_judged, miscounted, misled, unbalanced
from benchmarks.soak_load import Scale
from benchmarks.soak_log import LogTap
from benchmarks.soak_plan import FLOOD, KINDS, Step, kills, probe, sizes, step_of, turns, wrong
from benchmarks.soak_report import as_json, show
from benchmarks.soak_run import Soak, soaked
from benchmarks.soak_steps import Left, counted
from executor.errors import InvalidCall, PoolExhausted, SandboxDied
from executor.result import CallResult
from pool.config.load import Settings
from tests.benchmarks.test_latency import MACHINE, REPOSITORY, containers, real_engine

__all__ = ["real_engine"]

REST = Reading(
    descriptors=23,
    threads=5,
    memory=50_000_000,
    clients=4,
    containers=2,
    running=2,
    shims=2,
    shim_descriptors=96,
    daemons=2,
    daemon_descriptors=51,
    daemon_sockets=30,
    daemon_memory=140_000_000,
    others=0,
)
JUDGED = [limit for limit in LIMITS if limit.may_grow is not None]
UNJUDGED = [limit for limit in LIMITS if limit.may_grow is None]


@pytest.fixture(autouse=True)
def logs() -> Any:
    """A soak takes the log of the whole process over; no other test may log into its counters."""
    yield
    structlog.reset_defaults()


def result(code: int | None = 0, stdout: bytes = b"", **more: Any) -> CallResult:
    figures = {"stdout_total": len(stdout), "stderr": b"", "stderr_total": 0, "duration": 0.1, **more}
    return CallResult(exit_code=code, stdout=stdout, **figures)


# The books

ENDS = ("ok", "failed", "timed_out", "error", "cancelled")


@given(st.lists(st.sampled_from(ENDS), max_size=50), st.integers(0, 3))
def test_requests_balance_exactly_where_each_ended_once(ends: list[str], open_ones: int) -> None:
    tally = Tally(accepted=len(ends) + open_ones)
    for end in ends:
        if end == "error":
            tally.error(PoolExhausted("full"))
        elif end == "cancelled":
            tally.cancelled += 1
        else:
            tally.results[end] += 1
    faults = unbalanced("calls", tally)
    assert len(faults) == (1 if open_ones else 0)
    if faults:
        assert f"{tally.accepted} accepted, and {len(ends)} ended" in faults[0]


def test_a_request_that_ended_twice_does_not_balance() -> None:
    tally = Tally(accepted=1, cancelled=1)
    assert unbalanced("calls", tally) == []
    tally.results["ok"] += 1
    assert len(unbalanced("calls", tally)) == 1


def test_errors_are_told_by_reason_cause_and_whether_to_retry_with_the_first_message_of_each() -> None:
    tally = Tally()
    for error in (
        SandboxDied("one", cause="oom"),
        SandboxDied("two", cause="oom"),
        SandboxDied("three", cause="killed"),
        InvalidCall("four"),
    ):
        tally.error(error)
    assert tally.as_json()["errors"] == [
        {"reason": "invalid_call", "cause": "", "retryable": False, "n": 1, "first": "four"},
        {"reason": "sandbox_died", "cause": "killed", "retryable": True, "n": 1, "first": "three"},
        {"reason": "sandbox_died", "cause": "oom", "retryable": True, "n": 2, "first": "one"},
    ]


def test_a_result_is_ok_failed_or_timed_out_and_marked_for_what_cut_it_short() -> None:
    books = PoolState()
    for it in (
        result(),
        result(3),
        result(None, signal=9, oom_killed=True),
        result(None, timed_out=True),
        result(0, b"x", stdout_total=9),
    ):
        books.result(it)
    assert books.calls.results == Counter(ok=2, failed=2, timed_out=1)
    assert books.marks == Counter(oom_killed=1, truncated=1)


def test_a_session_has_recovered_with_the_first_good_call_in_another_sandbox() -> None:
    books = PoolState()
    books.wound("a", Wound(10.0, "i-1", "docker kill"))
    for late, it in ((10.1, result(generation="i-1")), (10.2, result(3, generation="i-2"))):
        books.answered("a", it, late)
    books.answered("b", result(generation="i-2"), 10.3)
    assert books.recovery() == {"n": 0}
    books.answered("a", result(generation="i-2"), 12.5)
    books.answered("a", result(generation="i-2"), 99.0)
    assert books.recovery() == {"n": 1, "p50_s": 2.5, "p99_s": 2.5, "max_s": 2.5}
    assert books.wounds == {}


def test_a_kill_of_what_hurts_already_heals_with_the_first() -> None:
    books = PoolState()
    books.wound("a", Wound(10.0, "i-1", "docker kill"))
    books.wound("a", Wound(11.0, "i-1", "the tool itself"))
    books.answered("a", result(generation="i-2"), 12.0)
    assert books.recoveries == [2.0]
    assert books.kills == Counter({"docker kill": 1, "the tool itself": 1})


def test_a_kill_that_found_nothing_or_whose_session_was_closed_is_no_recovery() -> None:
    books, late = PoolState(), Wound(10.0, "i-1", "docker kill")
    books.wound("a", late)
    books.missed("a", late)
    books.wound("b", Wound(10.0, "i-2", "docker kill"))
    books.closed("b")
    books.closed("c")
    assert books.wounds == {}
    assert +books.kills == Counter({"docker kill": 1, "missed": 1, "closed first": 1})


def test_a_share_of_nothing_has_no_rate() -> None:
    share = Share()
    assert share.as_json() == {"n": 0, "of": 0, "rate": None}
    share.add(True)
    share.add(False)
    assert share.as_json() == {"n": 1, "of": 2, "rate": 0.5}


def test_only_the_first_oddities_are_told_and_all_are_counted() -> None:
    odd = Oddities()
    for n in range(MOST_KEPT + 5):
        odd.add(f"{n}")
    assert (odd.count, odd.first) == (MOST_KEPT + 5, [str(n) for n in range(MOST_KEPT)])


# Requests


@pytest.mark.anyio
async def test_every_way_in_which_a_request_can_end_is_booked_once() -> None:
    books, tally = PoolState(), Tally()

    async def ends(how: BaseException | None) -> str:
        await anyio.lowlevel.checkpoint()
        if how is not None:
            raise how
        return "fine"

    assert await counted(books, tally, lambda: ends(None)) == "fine"
    tally.results["ok"] += 1
    full = PoolExhausted("full")
    assert await counted(books, tally, lambda: ends(full)) is full
    assert await counted(books, tally, lambda: ends(Left())) is None
    assert (tally.accepted, tally.ended, tally.cancelled) == (3, 3, 1)
    assert unbalanced("calls", tally) == []
    assert await counted(books, tally, lambda: ends(KeyError("oh"))) is None
    assert (books.strange.count, books.strange.first) == (1, ["KeyError: 'oh'"])
    assert len(unbalanced("calls", tally)) == 1


@pytest.mark.anyio
async def test_a_request_whose_caller_gives_up_is_booked_as_cancelled_and_stays_cancelled() -> None:
    books, tally = PoolState(), Tally()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await counted(books, tally, anyio.sleep_forever)
    assert scope.cancelled_caught
    assert (tally.accepted, tally.cancelled, tally.ended) == (1, 1, 1)


# The judgement


@pytest.mark.parametrize("limit", JUDGED, ids=lambda it: it.name)
def test_growth_beyond_what_is_allowed_is_a_fault_that_names_it(limit: Limit) -> None:
    allowed, value = limit.may_grow or 0, getattr(REST, limit.name)
    assert grown(REST, replace(REST, **{limit.name: value + allowed})) == []
    faults = grown(REST, replace(REST, **{limit.name: value + allowed + 1}))
    assert len(faults) == 1
    assert faults[0].startswith(f"{limit.about} grew from {value:,} to {value + allowed + 1:,}")


@pytest.mark.parametrize("limit", LIMITS, ids=lambda it: it.name)
def test_what_shrinks_or_could_not_be_read_is_no_fault(limit: Limit) -> None:
    assert grown(REST, replace(REST, **{limit.name: 0})) == []
    if limit.name != "containers":  # the engine always lists them
        unread: dict[str, Any] = {limit.name: None}
        assert grown(replace(REST, **unread), REST) == []
        assert grown(REST, replace(REST, **unread)) == []


def test_descriptors_processes_and_containers_may_not_grow_by_one() -> None:
    assert {limit.name for limit in JUDGED if limit.may_grow == 0} == {
        "descriptors", "threads", "clients", "containers", "shims", "shim_descriptors", "daemons", "daemon_descriptors",
    }  # fmt: skip


def test_the_daemons_memory_and_sockets_are_only_shown() -> None:
    assert [limit.name for limit in UNJUDGED] == ["daemon_sockets", "daemon_memory"]
    assert grown(REST, replace(REST, daemon_memory=10**12, daemon_sockets=10**6)) == []


def test_the_daemon_is_not_judged_while_others_use_it_and_all_else_is() -> None:
    more = replace(REST, daemon_descriptors=10**6, daemons=9)
    assert len(grown(REST, more)) == 2
    for before, after in ((replace(REST, others=1), more), (REST, replace(more, others=1))):
        assert grown(before, after) == []
        assert [it.name for it in JUDGED if not is_judged(it, before, after)] == ["daemons", "daemon_descriptors"]
    assert len(grown(REST, replace(more, others=1, descriptors=24))) == 1


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({}, 0),
        ({"containers": 3}, 1),
        ({"running": 1, "shims": 1}, 1),
        ({"shims": 3}, 1),
        ({"containers": 0, "running": 0, "shims": 0}, 1),
        ({"shims": None}, 0),
    ],
)
def test_at_rest_there_are_min_standby_running_containers_and_a_shim_for_each(change: Any, faults: int) -> None:
    assert len(miscounted(replace(REST, **change), 2)) == faults


def test_two_readings_agree_at_rest_whatever_memory_and_others_do() -> None:
    assert replace(REST, memory=1, daemon_memory=1, daemon_sockets=1, others=7).steady() == REST.steady()
    for name in ("descriptors", "threads", "clients", "containers", "running", "shims", "daemon_descriptors"):
        assert replace(REST, **{name: 1_000}).steady() != REST.steady()


def test_the_pools_log_and_the_callers_must_have_counted_the_same_calls() -> None:
    books = PoolState()
    books.calls.accepted = books.calls.cancelled = 3
    assert misled(books, 3, ended_early=False) == []
    assert misled(books, 4, ended_early=False) == ["the pool's log reported 4 calls, and callers made 3"]


def test_wrong_answers_strange_ends_and_unhealed_sessions_are_faults() -> None:
    books = PoolState()
    books.wrong.add("python: printed b'1', not b'2'")
    books.strange.add("KeyError: 1")
    books.wound("session-3", Wound(1.0, "i-7", "docker kill"))
    faults = misled(books, 0, ended_early=False)
    assert len(faults) == 3
    for fault, said in zip(faults, ("printed b'1'", "KeyError: 1", "session-3 has not recovered"), strict=True):
        assert said in fault
    assert len(misled(books, 0, ended_early=True)) == 2


# The plan


def test_a_seed_gives_each_client_the_same_turns_again_and_no_two_clients_the_same() -> None:
    assert list(islice(turns("7/load", 0, 6), 30)) == list(islice(turns("7/load", 0, 6), 30))
    places = [[turn.session for turn in islice(turns(*who, 6), 30)] for who in (("7", 0), ("7", 1), ("8", 0))]
    assert len({tuple(place) for place in places}) == 3


def test_turns_do_everything_and_use_every_session() -> None:
    many = list(islice(turns("1/load", 0, 6), 600))
    assert {step.kind for turn in many for step in turn.steps} == set(KINDS)
    assert {turn.session for turn in many} == {f"session-{n}" for n in range(6)}
    assert {turn.close for turn in many} == {True, False}
    assert any(turn.give_up is not None for turn in many)
    assert any(turn.gap > 3 for turn in many)
    tokens = [step.token for turn in many for step in turn.steps if step.token]
    assert len(set(tokens)) == len(tokens)


def test_kills_and_sizes_come_again_with_their_seed_and_sizes_never_exceed_the_first() -> None:
    assert list(islice(kills("1", 3.0), 9)) == list(islice(kills("1", 3.0), 9))
    changes = list(islice(sizes("1", 5.0, 2, 6), 200))
    assert changes == list(islice(sizes("1", 5.0, 2, 6), 200))
    assert {change.max_sandboxes for change in changes} == {4, 5, 6}
    assert {change.min_standby for change in changes} == {1, 2}
    small = list(islice(sizes("1", 5.0, 2, 2), 50))
    assert {change.max_sandboxes for change in small} == {1, 2}
    assert all(change.min_standby <= change.max_sandboxes for change in small)


@pytest.mark.parametrize("kind", ["python", "argv", "stream", "flood"])
@pytest.mark.parametrize("draw", range(6))
def test_the_code_of_a_step_does_what_the_step_expects_of_it(kind: str, draw: int) -> None:
    step = step_of(kind, Random(draw), "3-14")
    done = subprocess.run(step.argv or [sys.executable, "-c", step.code], capture_output=True, timeout=20, check=False)
    kept = 60_000 if kind == "flood" else len(done.stdout)
    it = result(
        done.returncode, done.stdout[:kept], stdout_total=len(done.stdout), stderr_total=len(done.stderr), stderr=b""
    )
    assert wrong(step, it, wounded=False) == ""


STEP = Step(kind="python", code="...", stdout=b"7\n")


@pytest.mark.parametrize(
    ("step", "it", "said"),
    [
        (STEP, result(0, b"8\n"), "printed b'8"),
        (STEP, result(1, b"7\n", stderr=b"oh no"), "ended with exit 1, not exit 0 ('oh no')"),
        (STEP, result(None, signal=11), "signal 11"),
        (STEP, result(None, signal=9), "signal 9"),
        (step_of("oom", Random(1), "t"), result(None, signal=9), "not out of memory"),
        (step_of("timeout", Random(1), "t"), result(0), "not timed out"),
        (step_of("kill_runner", Random(1), "t"), result(0), "not no answer"),
        (
            step_of("flood", Random(1), "t"),
            result(0, b"x", stdout_total=FLOOD, stderr_total=FLOOD - 1),
            "bytes counted",
        ),
    ],
)
def test_a_result_that_the_code_cannot_have_had_is_wrong(step: Step, it: CallResult, said: str) -> None:
    assert said in wrong(step, it, wounded=False)


def test_any_call_may_time_out_and_a_call_may_see_the_end_of_its_sandbox() -> None:
    assert wrong(probe("x"), result(None, timed_out=True), wounded=False) == ""
    assert wrong(probe("x"), result(None, signal=9), wounded=True) == ""
    assert wrong(probe("x"), result(None, signal=11), wounded=True) != ""


# The log


def test_the_log_is_counted_and_only_errors_are_let_through(capsys: pytest.CaptureFixture[str]) -> None:
    tap = LogTap()
    tap.install()
    log = structlog.get_logger("emberpool.pool")
    log.info("call.ended", outcome="ok")
    log.info("sandbox.started", sandbox="p-i-1")
    log.info("sandbox.stopped", sandbox="p-i-9", why="idle")
    log.warning("runner.lost", sandbox="p-i-1")
    log.debug("call.ended")
    log.error("pool.left_behind", hint="look there")
    assert (tap.calls, tap.starts) == (1, 1)
    assert (tap.stops, tap.warnings) == (Counter(idle=1), Counter({"runner.lost": 1}))
    assert tap.errors.first == ["pool.left_behind: look there"]
    said = capsys.readouterr()
    assert said.out == ""
    assert [json.loads(line)["event"] for line in said.err.splitlines()] == ["pool.left_behind"]


def test_a_sandbox_was_a_standby_for_whoever_asked_after_its_start() -> None:
    tap = LogTap()
    tap.install()
    log = structlog.get_logger("emberpool.pool")
    log.info("sandbox.started", sandbox="p-i-1")
    mark = tap.starts
    log.info("sandbox.started", sandbox="p-i-2")
    assert tap.started_before("p-i-1", mark)
    assert not tap.started_before("p-i-2", mark)
    assert not tap.started_before("p-i-3", mark)
    log.info("sandbox.stopped", sandbox="p-i-1", why="closed")
    assert not tap.started_before("p-i-1", mark)


# The report


def some_soak(**more: Any) -> Soak:
    scale = Scale(seed=7, clients=8, min_standby=2, max_sandboxes=6)
    soak = Soak(scale=scale, minutes=2.0, machine=MACHINE, before=REST, after=REST, **more)
    books = soak.books
    books.calls.accepted = 4
    books.result(result())
    books.result(result(3))
    books.calls.error(SandboxDied("gone", cause="killed"))
    books.calls.cancelled = 1
    books.acquires.accepted = 3
    books.acquires.results.update({"own": 1, "standby": 1, "started": 1})
    books.warm.add(True)
    return soak


def shown(soak: Soak) -> str:
    console = Console(width=100, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    with console.file:
        show(soak, console)
    return console.export_text()


def test_json_tells_the_load_the_ends_the_growth_and_the_verdict() -> None:
    told = json.loads(json.dumps(as_json(some_soak())))
    assert (told["ok"], told["faults"], told["seed"], told["machine"]) == (True, [], 7, MACHINE)
    assert told["calls"]["results"] == {"failed": 1, "ok": 1}
    assert told["calls"]["accepted"] == 4
    assert told["warm"]["calls"] == {"n": 1, "of": 1, "rate": 1.0}
    assert told["warm"]["acquires"] == {"n": 2, "of": 3, "rate": 0.6667}
    assert told["warm"]["standbys"] == {"n": 1, "of": 2, "rate": 0.5}
    assert told["growth"]["descriptors"] == {"before": 23, "after": 23, "more": 0, "may_grow": 0}
    assert told["growth"]["daemon_memory"] == {"before": 140_000_000, "after": 140_000_000, "more": 0}


def test_tables_show_every_end_and_that_the_soak_passed() -> None:
    text = shown(some_soak())
    rows = [line.split() for line in text.splitlines()]
    assert ["error:", "sandbox_died", "(killed)", "yes", "1"] in rows
    assert ["all", "of", "4", "accepted", "4"] in rows
    assert ["our", "descriptors", "23", "23", "0", "0"] in rows
    assert "seed 7" in text
    assert text.rstrip().endswith("passed")


def test_a_failed_soak_says_of_what_as_its_last_words() -> None:
    text = shown(some_soak(faults=["threads grew", "calls do not balance"]))
    assert text.rstrip().splitlines()[-2:] == ["FAILED: threads grew", "FAILED: calls do not balance"]
    assert "passed" not in text
    assert as_json(some_soak(faults=["threads grew"]))["ok"] is False


def test_a_soak_that_ended_before_it_was_warm_says_that_growth_was_not_judged() -> None:
    soak = some_soak(interrupted=True)
    soak.before = None
    assert "though it was ended early; growth was not judged" in shown(soak)
    assert as_json(soak)["growth"]["threads"] == {"before": None, "after": 5, "more": None}


# The command


def refusal(*args: str) -> str:
    """What the command prints when it refuses: one line, on stderr."""
    done = CliRunner().invoke(app, list(args))
    assert (done.exit_code, done.stdout) == (1, "")
    return done.stderr


def test_without_an_engine_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "emberpool engine up" in refusal("--seed", "1")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--json", "/no/where/x.json"), "there is no directory /no/where"),
        (("--config", "/no/where.toml"), "/no/where.toml: there is no such file"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line_before_anything_starts(
    args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = refusal(*args)
    assert said in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(("sandboxes", "clients"), [(2, 1), (3, 100), (1_000, 10_000)])
def test_the_settings_of_every_scale_are_valid(sandboxes: int, clients: int, tmp_path: Path) -> None:
    scale = Scale(seed=1, clients=clients, min_standby=max(1, sandboxes // 4), max_sandboxes=sandboxes)
    own = soaked(Settings(), scale, tmp_path / "state")
    assert (own.pool.min_standby, own.pool.max_sandboxes) == (scale.min_standby, sandboxes)
    assert own.sandbox.memory_mb <= 96


# On a real engine


def started(tmp_path: Path, *args: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "benchmarks.soak", "--seed", "1", "--json", "-", *args]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.Popen(argv, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_until(run: subprocess.Popen[str], said: str) -> None:
    assert run.stderr is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith(said):
        line = run.stderr.readline()
        assert line, f"it ended without saying {said!r}: {lines}"
        lines.append(line)


def pool_ids(tmp_path: Path) -> list[str]:
    return [json.loads(file.read_text())["pool_id"] for file in tmp_path.glob("*/state/pool.json")]


@pytest.mark.full  # the soak as a user runs it, for some seconds
@pytest.mark.engine
@pytest.mark.usefixtures("real_engine")
def test_a_short_run_uses_the_pool_in_every_way_passes_and_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "--minutes", "0.05", "--sandboxes", "3", "--clients", "4") as run:
        try:
            read_until(run, "soak: warming up")
            ids = pool_ids(tmp_path)
            out, err = run.communicate(timeout=110)
        finally:
            run.kill()
    assert run.returncode == 0, err
    told = json.loads(out)
    assert set(told["load"]["steps"]) == set(KINDS)
    calls = told["calls"]
    ended = sum(calls["results"].values()) + sum(error["n"] for error in calls["errors"]) + calls["cancelled"]
    assert calls["accepted"] == calls["told_by_the_pool"] == ended
    assert calls["results"].keys() >= {"ok", "failed", "timed_out"}
    assert calls["oom_killed"] >= 1
    assert told["kills"]["the tool itself"] >= 1
    assert told["kills"]["recovery"]["n"] >= 1
    assert told["growth"]["containers"] == {"before": 1, "after": 1, "more": 0, "may_grow": 0}
    assert told["sandboxes"]["created"] == told["sandboxes"]["destroyed"] >= told["sandboxes"]["started"]
    assert len(ids) == 1
    assert containers(ids) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full  # the soak as a user runs it, and Ctrl-C
@pytest.mark.engine
@pytest.mark.usefixtures("real_engine")
def test_an_interrupted_run_still_reports_balances_and_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "--minutes", "0.3", "--sandboxes", "3", "--clients", "4", "--backend", "trio") as run:
        try:
            read_until(run, "soak: loading")
            ids = pool_ids(tmp_path)
            assert containers(ids) != []
            run.send_signal(signal.SIGINT)
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=110)
        finally:
            run.kill()
    assert run.returncode == 0, err
    told = json.loads(out)
    assert told["load"]["interrupted"] is True
    assert told["load"]["seconds"] < 18
    assert told["growth"]["containers"]["after"] == 1
    assert containers(ids) == []
    assert list(tmp_path.iterdir()) == []
