"""The host's end of a runner, whatever that does: every fault ends in a truthful outcome and a usable or dead sandbox."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from executor.engine.protocol import Channel
from executor.errors import (
    EmberpoolError,
    EngineFailed,
    EngineUnavailable,
    ImageUnfit,
    ProfileMismatch,
    SandboxDied,
    SessionBusy,
)
from executor.result import CallResult
from executor.sandbox import wire
from executor.sandbox.request import Call
from executor.sandbox.runner_call import ANSWER_PATIENCE
from executor.sandbox.runner_client import SEND_TIMEOUT, ArmedRunner, RunnerConfig, RunnerState
from executor.sandbox.runner_supervision import ARM_TIMEOUT, CLEAN_PATIENCE, CLEAN_TIMEOUT, START_TIMEOUT
from executor.sandbox.runners import EVENT_PATIENCE
from executor.sandbox.running_call import WINDOW
from executor.sandbox.sandbox import Sandbox
from executor.sandbox.wire import encode
from tests.support.pools import LATENCY, outcome, until, virtual_backend
from tests.support.runners import NAME, Site, site
from tests.support.scripted import Fault, ScriptedEngine
from tests.support.scripted_runner import (
    Misdeed,
    ScriptedRunner,
    cleans_for,
    dies,
    falls_silent,
    loses_its_client,
    poisoned,
    says,
    takes,
)
from tests.support.stepwise import Cancelled, after_turns, at_pause, every_place
from tests.support.wire import report

pytestmark = pytest.mark.anyio
VIRTUAL = pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True)
Says = Callable[[ScriptedRunner], bytes]


@pytest.fixture(params=["asyncio", "trio", "virtual"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return virtual_backend() if request.param == "virtual" else request.param


@pytest.fixture
async def place(tmp_path: Path, anyio_backend: object) -> AsyncIterator[Site]:
    engine = ScriptedEngine(latency=LATENCY if isinstance(anyio_backend, tuple) else None)
    async with site(tmp_path, engine) as place:
        yield place


async def _call(box: Sandbox, steps: str, **more: Any) -> object:
    return await outcome(lambda: box.call(Call(code=steps, **more)))


def _died(answer: object, cause: str, *, started: bool) -> None:
    assert isinstance(answer, SandboxDied)
    assert (answer.cause, answer.started) == (cause, started)


async def _gone(place: Site) -> None:
    """The container is ended without anyone calling."""
    await until(lambda: not place.engine.boxes, limit=60)


# --- sound runners ----------------------------------------------------------------------------------------------------


async def test_each_exec_serves_one_call_and_the_next_is_armed_ahead(place: Site) -> None:
    box = await place.start()
    for _ in range(3):
        answer = await _call(box, "echo x; err y; exit 3")
        assert isinstance(answer, CallResult)
        assert (answer.stdout, answer.stderr, answer.exit_code, answer.max_rss) == (b"x\n", b"y\n", 3, 9_000_000)
    await until(lambda: len(place.engine.runners) == 4, limit=5)


@pytest.mark.parametrize(("calls", "runners"), [(3, 3), (0, 1)])
async def test_an_exec_serves_as_many_calls_as_configured(place: Site, calls: int, runners: int) -> None:
    box = await place.start(calls=calls)
    assert [(await box.call(Call(code="echo x"))).ok for _ in range(8)] == [True] * 8
    assert len(place.engine.runners) == runners


@pytest.mark.parametrize(
    ("steps", "facts"),
    [
        ("exit 137", {"exit_code": 137, "signal": None, "oom_killed": False}),
        ("kill 9", {"exit_code": None, "signal": 9, "oom_killed": False, "cpu_limit": False}),
        ("kill 11", {"exit_code": None, "signal": 11}),
        ("oom", {"exit_code": None, "signal": 9, "oom_killed": True}),
        ("burn", {"exit_code": None, "signal": 24, "cpu_limit": True}),
        ("linger 4", {"exit_code": 4, "timed_out": False}),
    ],
)
async def test_a_result_distinguishes_kinds_of_death(place: Site, steps: str, facts: dict[str, object]) -> None:
    box = await place.start()
    answer = await _call(box, steps)
    assert {name: getattr(answer, name) for name in facts} == facts
    assert isinstance(await _call(box, "echo on"), CallResult)


async def test_an_unreadable_counter_leaves_out_of_memory_to_the_engines_events(place: Site) -> None:
    box = await place.start()

    def killed(runner: ScriptedRunner) -> bytes:
        runner.send_oom()
        return b""

    ended = report(exit_code=None, signal=9, oom=None)
    place.engine.misdeeds["done"] = [says(killed, instead=False), says(b"")]
    place.engine.misdeeds["call"] = [
        says(lambda runner: killed(runner) + encode(wire.DONE, 1, ended) + encode(wire.CLEAN, 1))
    ]
    answer = await _call(box, "hang")
    assert isinstance(answer, CallResult)
    assert (answer.oom_killed, answer.signal) == (True, 9)


async def test_16_mb_of_stdin_arrive_whole_and_never_more_than_a_window_waits_inside(place: Site) -> None:
    box, data = await place.start(), bytes(range(256)) * 65_536
    answer = await _call(box, "cat", stdin=data, max_output=len(data))
    assert isinstance(answer, CallResult)
    assert answer.stdout == data
    assert 0 < place.engine.runners[0].most_input <= WINDOW


@pytest.mark.parametrize("size", [0, 1, 65_536, WINDOW - 1, WINDOW, WINDOW + 1])
async def test_stdin_of_every_size_ends_for_its_reader(place: Site, size: int) -> None:
    answer = await _call(await place.start(), "cat", stdin=b"x" * size)
    assert isinstance(answer, CallResult)
    assert (len(answer.stdout), answer.stdout_total) == (size, size)


async def test_code_that_does_not_read_its_stdin_holds_nobody_up(place: Site) -> None:
    answer = await _call(await place.start(), "echo x", stdin=b"x" * 16_000_000)
    assert isinstance(answer, CallResult)
    assert answer.stdout == b"x\n"


@pytest.mark.parametrize("cap", [0, 1, 1000, 65_536, 100_000])
async def test_output_beyond_the_cap_is_dropped_and_counted(place: Site, cap: int) -> None:
    answer = await _call(await place.start(), "flood 300000; err note", max_output=cap)
    assert isinstance(answer, CallResult)
    assert (answer.stdout, answer.stdout_total) == (b"x" * cap, 300_000)
    assert (answer.stderr, answer.stderr_total, answer.truncated) == (b"note\n"[:cap], 5, True)


async def test_letting_go_ends_the_runner_and_leaves_the_container_to_its_owner(place: Site) -> None:
    box = await place.start()
    box.close_runners()
    await until(lambda: not place.engine.the_box().execs, limit=5)
    assert place.engine.asked["kill"] == 0
    _died(await _call(box, "echo x"), "unknown", started=False)
    assert len(place.engine.runners) == 1


# --- protocol violations ----------------------------------------------------------------------------------------------

WHILE_BUSY: dict[str, bytes | Says] = {
    "garbage": b"Traceback (most recent call last):\n",
    "an unknown type": encode(99, 1),
    "a frame of the host's": encode(wire.CALL, 1),
    "an oversized frame": bytes((wire.OUT,)) + (1).to_bytes(4, "big") + b"\xff" * 4,
    "another call's sequence number": encode(wire.DONE, 2, report()),
    "the hello's sequence number": encode(wire.OUT, 0, b"x"),
    "clean before done": encode(wire.CLEAN, 1),
    "dirty before done": encode(wire.DIRTY, 1),
    "armed before done": encode(wire.ARMED, 2),
    "a second hello": encode(wire.HELLO, 1, b"{}"),
    "armed again": encode(wire.ARMED, 1),
    "more output than asked for": encode(wire.OUT, 1, b"x" * 11),
    "more input taken than sent": encode(wire.TAKEN, 1, (6).to_bytes(8, "big")),
    "a number of a wrong size": encode(wire.TAKEN, 1, b"\0"),
    "a report that is cut": encode(wire.DONE, 1, report()[:-1]),
    "a report without an ending": encode(wire.DONE, 1, report(exit_code=None)),
    "a report of output that never came": encode(wire.DONE, 1, report(stdout_total=5)),
    "a report of less output than came": encode(wire.ERR, 1, b"err") + encode(wire.DONE, 1, report(stderr_total=2)),
    "output after the end": encode(wire.DONE, 1, report()) + encode(wire.OUT, 1, b"x"),
}  # fmt: skip


@pytest.mark.parametrize("what", [name for name in WHILE_BUSY if name != "output after the end"])
async def test_a_violation_during_a_call_is_named_and_ends_the_sandbox(place: Site, what: str) -> None:
    box = await place.start()
    # Nothing else follows that could be taken for the violation.
    place.engine.misdeeds = defaultdict(list, call=[says(WHILE_BUSY[what])], armed=[falls_silent])
    _died(await _call(box, "echo x", stdin=b"input", max_output=10, timeout=5), "protocol", started=True)
    assert box.poisoned
    assert place.engine.boxes == {}


AFTER_THE_ANSWER: dict[str, Says] = {
    "a replayed report": lambda runner: encode(wire.DONE, runner.seq, report()),
    "output": lambda runner: encode(wire.OUT, runner.seq, b"x"),
    "garbage": lambda runner: b"\0" * 9,
    "clean of another call": lambda runner: encode(wire.CLEAN, runner.seq + 1),
    "armed without clean": lambda runner: encode(wire.ARMED, runner.seq + 1),
}


@pytest.mark.parametrize("what", AFTER_THE_ANSWER)
async def test_a_violation_after_the_answer_leaves_that_and_ends_the_sandbox(place: Site, what: str) -> None:
    box = await place.start()
    place.engine.misdeeds["clean"] = [says(AFTER_THE_ANSWER[what])]
    assert isinstance(await _call(box, "echo x"), CallResult)
    await _gone(place)
    _died(await _call(box, "echo x"), "protocol", started=False)


@pytest.mark.parametrize("kind", [wire.OUT, wire.TAKEN, wire.DONE, wire.CLEAN, wire.HELLO, wire.ARMED])
async def test_a_violation_of_an_idle_runner_ends_the_sandbox_unasked(place: Site, kind: int) -> None:
    box = await place.start()
    (runner,) = place.engine.runners
    runner.say(kind, b"{}" if kind == wire.HELLO else b"")
    await _gone(place)
    _died(await _call(box, "echo x"), "protocol", started=False)


@pytest.mark.parametrize(
    "data",
    [b"\0" * 9, encode(wire.ARMED, 1), encode(wire.HELLO, 0, b"[]"), encode(wire.HELLO, 1, b"{}"), b"bash: python3"],
)  # fmt: skip
async def test_a_violation_in_place_of_the_hello_is_no_sandbox(place: Site, data: bytes) -> None:
    place.engine.misdeeds["hello"] = [says(data)]
    _died(await outcome(place.start), "protocol", started=False)


async def test_what_an_engine_says_of_a_container_that_has_just_ended_is_no_violation(place: Site) -> None:
    box = await place.start()

    async def ends(runner: ScriptedRunner) -> bool:
        runner.channel.stdout.write(b"cannot exec in a stopped state: unknown\r\n")
        await anyio.sleep(0.05)  # the event of the end comes a moment later
        place.engine.die(place.engine.the_box(), 137)
        return True

    place.engine.misdeeds["hello"] = [ends]
    assert isinstance(await _call(box, "echo x"), CallResult)  # the runner that was armed
    await _gone(place)
    _died(await _call(box, "echo x"), "killed", started=False)


async def test_a_frame_that_is_cut_off_by_the_runners_end_is_no_result(place: Site) -> None:
    box = await place.start()
    place.engine.misdeeds["call"] = [says(encode(wire.DONE, 1, report())[:-1], instead=False), dies]
    place.engine.misdeeds["done"] = [dies]
    _died(await _call(box, "sleep 0"), "runner", started=True)
    assert place.engine.boxes == {}


# --- runners that end, lie or say nothing -----------------------------------------------------------------------------


async def test_an_idle_runner_that_is_killed_takes_its_sandbox_with_it(place: Site) -> None:
    box = await place.start()
    inside = place.engine.the_box()
    place.engine._end_exec(inside, next(iter(inside.execs)))
    await _gone(place)
    _died(await _call(box, "echo x"), "runner", started=False)


@pytest.mark.parametrize("how", [dies, loses_its_client])
async def test_a_runner_that_ends_under_a_call_is_no_exit_status(place: Site, how: Misdeed) -> None:
    box = await place.start()
    place.engine.misdeeds["call"] = [how]
    _died(await _call(box, "hang"), "runner", started=True)
    assert place.engine.boxes == {}


@pytest.mark.parametrize("at", ["clean", "armed"])
async def test_a_runner_that_dies_between_calls_takes_its_sandbox_with_it(place: Site, at: str) -> None:
    box = await place.start()
    place.engine.misdeeds[at] = [dies]
    assert isinstance(await _call(box, "echo x"), CallResult)
    await _gone(place)
    _died(await _call(box, "echo x"), "runner", started=False)


@pytest.fixture(params=["away", "late"])
def no_events(request: pytest.FixtureRequest, place: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Keep the engine's events from the host: the stream is ``away``, or nothing comes although it stands (``late``)."""

    @asynccontextmanager
    async def never(*_: object) -> AsyncIterator[None]:
        await anyio.sleep_forever()
        yield

    def keep_away() -> None:
        if request.param == "late":
            monkeypatch.setattr(place.hub, "publish", lambda event: None)
        else:
            monkeypatch.setattr(place.engine, "events", never)
            place.engine.cut_events()

    return keep_away


@pytest.mark.parametrize(("at", "made"), [("clean", 1), ("armed", 2)])
@VIRTUAL
async def test_a_runner_that_ends_without_a_word_of_the_engine_is_never_armed_again(
    place: Site, at: str, made: int, no_events: Callable[[], None]
) -> None:
    """What the call left could stop the next runner before that one protects itself, and speak for it."""
    box = await place.start()
    no_events()
    await anyio.sleep(1)
    place.engine.misdeeds[at] = [dies]
    assert isinstance(await _call(box, "echo x"), CallResult)
    answer = await _call(box, "echo x")
    if at == "armed" and not place.hub.connected:
        # There is no next one while the engine's events are away.
        assert isinstance(answer, EngineUnavailable)
        assert (len(place.engine.runners), box.poisoned) == (1, "")
        return
    assert isinstance(answer, SandboxDied)
    assert not answer.started
    await anyio.sleep(60)
    assert len(place.engine.runners) == made
    assert (place.engine.boxes, bool(box.poisoned)) == ({}, True)


async def test_a_poisoned_runner_says_that_the_call_never_started(place: Site) -> None:
    box = await place.start()
    place.engine.misdeeds["call"] = [poisoned(b"the runner's limits changed")]
    answer = await _call(box, "echo x")
    _died(answer, "runner", started=False)
    assert "limits changed" in str(answer)
    assert place.engine.boxes == {}


@pytest.mark.parametrize("at", ["idle", "call"])
async def test_a_poisoned_runner_that_does_not_end_is_not_waited_for(place: Site, at: str) -> None:
    box = await place.start()
    if at == "idle":
        place.engine.runners[0].say(wire.POISONED, b"unfit")
        await _gone(place)
    else:
        place.engine.misdeeds[at] = [says(encode(wire.POISONED, 1, b"unfit"), instead=False)]
    # The runner itself goes on: waits for its call, or carries it out.
    with anyio.fail_after(10):
        _died(await _call(box, "hang"), "runner", started=False)
        await _gone(place)


@pytest.mark.parametrize(
    "said", [b"\x1b]0;owned\x07\r\nerror: all is well \xe2\x80\xae\x9b1m", b"\xff" * 256, b"protocol: it says"]
)
async def test_what_an_unfit_runner_says_is_quoted_in_printable_words_and_decides_nothing(
    place: Site, said: bytes
) -> None:
    box = await place.start()
    with capture_logs() as logs:
        place.engine.runners[0].say(wire.POISONED, said)
        await _gone(place)
        answer = await _call(box, "echo x")
    _died(answer, "runner", started=False)
    reasons = [str(entry["reason"]) for entry in logs if entry["event"] == "runner.lost"]
    assert len(reasons) == 1
    assert all(text.isprintable() for text in (str(answer), *reasons))


async def test_what_could_not_be_proven_dead_ends_the_sandbox(place: Site) -> None:
    box = await place.start(calls=0)
    assert isinstance(await _call(box, "dirty; echo x"), CallResult)
    await _gone(place)
    _died(await _call(box, "echo x"), "runner", started=False)


@VIRTUAL
async def test_silence_during_a_call_is_a_timeout_and_costs_the_sandbox(place: Site) -> None:
    box = await place.start()
    place.engine.misdeeds["call"] = [says(encode(wire.OUT, 1, b"begun"), instead=False)]
    place.engine.misdeeds["done"] = [falls_silent]
    began = anyio.current_time()
    answer = await _call(box, "sleep 1", timeout=10)
    assert isinstance(answer, CallResult)
    assert (answer.timed_out, answer.exit_code, answer.signal, answer.stdout) == (True, None, None, b"begun")
    assert 12 + ANSWER_PATIENCE <= anyio.current_time() - began < 12.1 + ANSWER_PATIENCE
    assert box.poisoned == "timeout"
    assert place.engine.boxes == {}


@VIRTUAL
async def test_an_exec_that_takes_no_more_bytes_is_a_timeout_and_costs_the_sandbox(place: Site) -> None:
    box = await place.start()
    for channel in place.engine._clients:
        channel.stuck = True
    answer = await _call(box, "echo x", timeout=SEND_TIMEOUT + 5)
    assert isinstance(answer, CallResult)
    assert answer.timed_out
    assert place.engine.boxes == {}


@VIRTUAL
@pytest.mark.parametrize(
    ("at", "patience"), [("hello", START_TIMEOUT), ("armed", START_TIMEOUT), ("clean", CLEAN_PATIENCE)]
)
async def test_silence_between_calls_ends_the_sandbox_unasked(place: Site, at: str, patience: float) -> None:
    box = await place.start()
    place.engine.misdeeds[at] = [falls_silent]
    assert isinstance(await _call(box, "echo x"), CallResult)
    await anyio.sleep(patience - 0.1)
    assert place.engine.boxes != {}
    await anyio.sleep(1)
    assert place.engine.boxes == {}
    _died(await _call(box, "echo x"), "runner", started=False)


@VIRTUAL
async def test_a_runner_that_is_alive_may_clean_up_for_as_long_as_it_says_so_and_then_no_longer(place: Site) -> None:
    box = await place.start()
    place.engine.misdeeds["clean"] = [cleans_for(CLEAN_TIMEOUT - 1), cleans_for(60)]
    for _ in range(2):
        assert isinstance(await _call(box, "echo x"), CallResult)
    await anyio.sleep(CLEAN_TIMEOUT - 0.5)
    assert place.engine.boxes != {}
    await anyio.sleep(1)
    assert place.engine.boxes == {}


@pytest.mark.parametrize("at", ["hello", "armed", "idle", "call", "done"])
async def test_a_sign_of_cleaning_up_at_any_other_time_is_a_violation(place: Site, at: str) -> None:
    place.engine.misdeeds[at] = [says(lambda runner: encode(wire.CLEANING, runner.seq), instead=False)]
    box = await outcome(place.start)
    if at in ("hello", "armed") or not isinstance(box, Sandbox):
        # What rests armed says it at once, and may be heard before the start is over.
        assert isinstance(box, SandboxDied)
        assert at in ("hello", "armed", "idle")
        return
    await _call(box, "echo x")
    await _gone(place)


@VIRTUAL
@pytest.mark.parametrize("at", ["hello", "armed"])
async def test_silence_in_place_of_the_first_hello_is_no_sandbox(place: Site, at: str) -> None:
    place.engine.misdeeds[at] = [falls_silent]
    assert isinstance(await outcome(place.start), SandboxDied | EngineUnavailable)


@VIRTUAL
@pytest.mark.parametrize("at", ["hello", "armed", "idle", "call", "done"])
async def test_a_runner_that_is_only_slow_is_waited_for(place: Site, at: str) -> None:
    box = await place.start()
    place.engine.misdeeds[at] = [takes(ARM_TIMEOUT - 1)]
    for _ in range(2):
        answer = await _call(box, "echo x")
        assert isinstance(answer, CallResult)
        assert answer.stdout == b"x\n"


@VIRTUAL
async def test_a_call_that_finds_no_runner_in_its_time_never_started(place: Site) -> None:
    box = await place.start()
    place.engine.misdeeds["hello"] = [takes(10)]
    await _call(box, "echo x")
    answer = await _call(box, "echo x", timeout=5)
    assert isinstance(answer, SessionBusy)
    assert not answer.started
    assert isinstance(await _call(box, "echo x", timeout=10), CallResult)


@VIRTUAL
async def test_a_call_that_finds_no_runner_since_the_engine_is_gone_names_the_engine(place: Site) -> None:
    box = await place.start()
    place.engine.faults["attach"] = [Fault(error=EngineUnavailable("connection refused"))] * 20
    assert isinstance(await _call(box, "echo x"), CallResult)
    answer = await _call(box, "echo x", timeout=5)
    assert isinstance(answer, EngineUnavailable)
    assert not answer.started


# --- weaker than asked ------------------------------------------------------------------------------------------------


def _drops_files(facts: dict[str, Any]) -> None:
    del facts["files"]


def _nested(depth: int) -> list[Any]:
    lists: list[Any] = []
    for _ in range(depth):
        lists = [lists]
    return lists


WEAKER: dict[str, Callable[[dict[str, Any]], object]] = {
    "dumpable": lambda facts: facts.update(undumpable=False),
    "no subreaper": lambda facts: facts.update(subreaper=False),
    "alone unknown": lambda facts: facts.update(alone="perhaps"),
    "another nonce": lambda facts: facts.update(nonce="another"),
    "a text for true": lambda facts: facts.update(undumpable="yes"),
    "1 for true": lambda facts: facts.update(undumpable=1),
    "lists in lists": lambda facts: facts.update(undumpable=_nested(900), nonce=_nested(900)),
    "words that steer a terminal": lambda facts: facts.update(nonce="\x1b]0;owned\x07\nerror: all is well\r\u202e"),
    "a number of thousands of digits": lambda facts: facts["files"].update(
        {"/proc/self/status": facts["files"]["/proc/self/status"].replace("CapEff:\t0", "CapEff:\t" + "f" * 10_000)}
    ),
    "no files": _drops_files,
    "files of a wrong form": lambda facts: facts.update(files=dict.fromkeys(facts["files"], 7)),
    "nothing": lambda facts: facts.clear(),
    "capabilities": lambda facts: facts["files"].update(
        {"/proc/self/status": facts["files"]["/proc/self/status"].replace("CapEff:\t0", "CapEff:\t1")}
    ),
    "a network": lambda facts: facts["files"].update({"/proc/net/dev": "eth0: 0\n    lo: 0\n"}),
}  # fmt: skip


@pytest.mark.parametrize("what", WEAKER)
async def test_a_weaker_hello_is_no_sandbox(place: Site, what: str) -> None:
    place.engine.hello = WEAKER[what]  # type: ignore[assignment]
    error = await outcome(place.start)
    assert isinstance(error, ProfileMismatch)
    assert str(error).isprintable()
    # Its owner removes the container; nothing of the runner is left behind.
    await until(lambda: not place.engine._clients, limit=5)


@pytest.mark.parametrize("what", WEAKER)
async def test_a_weaker_hello_of_a_later_exec_gets_no_call(place: Site, what: str) -> None:
    box = await place.start()
    place.engine.hello = WEAKER[what]  # type: ignore[assignment]
    assert isinstance(await _call(box, "echo x"), CallResult)
    assert isinstance(await _call(box, "echo never"), ProfileMismatch)
    assert wire.CALL not in place.engine.runners[1].heard
    await _gone(place)


LACKS = pytest.mark.parametrize(
    ("fact", "said"),
    [({"problem": "preload: no module x"}, "no module x"), ({"parent": "/bin/sh wrap"}, "/bin/sh wrap")],
)


@LACKS
async def test_what_the_image_lacks_is_named(place: Site, fact: dict[str, str], said: str) -> None:
    place.engine.hello = lambda facts: facts.update(fact)
    error = await outcome(place.start)
    assert isinstance(error, ImageUnfit)
    assert said in str(error)


@LACKS
async def test_what_a_later_runner_lacks_is_its_sandboxs_end(place: Site, fact: dict[str, str], said: str) -> None:
    box = await place.start()
    place.engine.hello = lambda facts: facts.update(fact)
    assert isinstance(await _call(box, "echo x"), CallResult)
    _died(await _call(box, "echo never"), "runner", started=False)


async def test_a_process_of_unknown_origin_is_no_weaker_profile_but_an_unfit_sandbox(place: Site) -> None:
    place.engine.hello = lambda facts: facts.update(alone=False)
    error = await outcome(place.start)
    assert isinstance(error, SandboxDied)
    assert (error.cause, error.started) == ("runner", False)


# --- the engine -------------------------------------------------------------------------------------------------------


@VIRTUAL
async def test_an_engine_that_is_lost_while_a_runner_is_armed_costs_the_sandbox(place: Site) -> None:
    """The exec's end is all that is known, and what else runs in there is not."""
    box = await place.start()
    place.engine.down()
    await anyio.sleep(30)
    place.engine.up_now = True
    _died(await _call(box, "echo back"), "engine", started=False)
    assert len(place.engine.runners) == 1


@VIRTUAL
async def test_an_engine_that_is_lost_before_the_next_hello_arms_again(place: Site) -> None:
    """The call before it ended clean, so that nothing is in there."""
    box = await place.start()
    place.engine.misdeeds["hello"] = [loses_its_engine]
    assert isinstance(await _call(box, "echo x"), CallResult)
    await anyio.sleep(30)
    place.engine.up_now = True
    answer = await _call(box, "echo back")
    assert isinstance(answer, CallResult)
    assert (answer.stdout, box.poisoned) == (b"back\n", "")


async def loses_its_engine(runner: ScriptedRunner) -> bool:
    runner._engine.down()  # type: ignore[attr-defined]
    return False


@VIRTUAL
async def test_an_engine_that_is_lost_under_a_call_is_named(place: Site) -> None:
    box = await place.start()
    async with anyio.create_task_group() as tasks:

        async def call() -> None:
            _died(await _call(box, "hang"), "engine", started=True)
            assert box.poisoned

        tasks.start_soon(call)
        await anyio.sleep(1)
        place.engine.down()


@VIRTUAL
@pytest.mark.parametrize("error", [EngineFailed("it failed"), EngineUnavailable("connection refused")])
async def test_an_exec_that_the_engine_does_not_make_is_asked_for_again(place: Site, error: EmberpoolError) -> None:
    box = await place.start()
    place.engine.faults["attach"] = [Fault(error=error)] * 3
    assert isinstance(await _call(box, "echo x"), CallResult)
    assert isinstance(await _call(box, "echo slower"), CallResult)
    assert place.engine.faults["attach"] == []
    assert box.poisoned == ""


@VIRTUAL
@pytest.mark.parametrize("error", [EngineUnavailable("it cannot be started"), OSError("Too many open files")])
async def test_a_client_that_cannot_be_started_is_tried_again(
    place: Site, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    box = await place.start()
    attach, refused = place.engine.attach, list[object]()

    def refuse(args: list[str]) -> AbstractAsyncContextManager[Channel]:
        if len(refused) < 3:
            refused.append(args)
            raise error
        return attach(args)

    monkeypatch.setattr(place.engine, "attach", refuse)
    assert isinstance(await _call(box, "echo x"), CallResult)
    never = await _call(box, "echo never", timeout=EVENT_PATIENCE + 0.2)
    assert isinstance(never, EngineUnavailable)
    assert not never.started
    assert isinstance(await _call(box, "echo slower"), CallResult)
    assert len(refused) == 3


async def test_an_idle_runner_whose_client_is_killed_takes_its_sandbox_with_it(place: Site) -> None:
    box = await place.start()
    place.engine.kill_clients()
    await _gone(place)
    _died(await _call(box, "echo x"), "runner", started=False)


@pytest.mark.parametrize(("code", "cause"), [(137, "killed"), (143, "killed"), (0, "unknown")])
async def test_the_containers_own_end_is_not_blamed_on_its_runner(place: Site, code: int, cause: str) -> None:
    box = await place.start()
    _died(await _call(box, f"die {code}"), cause, started=True)
    _died(await _call(box, "echo x"), cause, started=False)


@VIRTUAL
async def test_the_containers_end_is_not_blamed_on_its_runner_whose_end_comes_first(place: Site) -> None:
    box, inside = await place.start(), place.engine.the_box()
    async with anyio.create_task_group() as tasks:

        async def call() -> None:
            _died(await _call(box, "hang"), "killed", started=True)

        tasks.start_soon(call)
        await anyio.sleep(1)
        place.engine._end_exec(inside, next(iter(inside.execs)))
        await anyio.sleep(0.1)
        place.engine.die(inside, 137)
    assert place.engine.asked["kill"] == 0  # the event of its end is the proof


# --- cancelled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancelled", [at_pause, after_turns])
@pytest.mark.parametrize("calls", [1, 0])
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"], indirect=True)
async def test_a_call_cancelled_at_any_await_leaves_nothing_running(
    tmp_path: Path, cancelled: Cancelled, calls: int
) -> None:
    async def one(turn: int) -> bool:
        engine = ScriptedEngine()
        async with site(tmp_path, engine) as place:
            box = await place.start(calls=calls, grace=0.05)

            async def scenario() -> None:
                await box.call(Call(code="sleep 0; echo x; cat", stdin=b"i" * 600_000))

            reached = await cancelled(turn, scenario)
            if box.poisoned:
                assert engine.boxes == {}
            else:
                assert engine.boxes[NAME].busy == 0
                assert (await box.call(Call(code="echo on"))).stdout == b"on\n"
        return reached

    assert await every_place(one) > 0


async def test_a_cancelled_call_ends_its_program_and_keeps_its_sandbox(place: Site) -> None:
    box = await place.start(calls=0)
    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_call, box, "echo x; hang")
            await until(lambda: place.engine.the_box().busy, limit=5)
            tasks.cancel_scope.cancel()
        assert place.engine.the_box().busy == 0
    assert isinstance(await _call(box, "echo on"), CallResult)
    assert box.poisoned == ""


@VIRTUAL
async def test_a_cancelled_call_that_resists_is_killed_after_its_grace(place: Site) -> None:
    box = await place.start()
    with anyio.move_on_after(5):
        await box.call(Call(code="stubborn; hang"))
    assert anyio.current_time() >= 5 + 2
    assert place.engine.the_box().busy == 0
    assert isinstance(await _call(box, "echo on"), CallResult)


@VIRTUAL
@pytest.mark.parametrize("at", ["done", "clean"])
async def test_a_cancelled_call_of_a_silent_runner_costs_the_sandbox(place: Site, at: str) -> None:
    box = await place.start()
    place.engine.misdeeds[at] = [falls_silent]
    with anyio.move_on_after(5):
        await box.call(Call(code="hang"))
    assert box.poisoned == "cancelled"
    assert place.engine.boxes == {}


async def test_a_cancelled_call_that_still_waits_for_a_runner_costs_nothing(place: Site) -> None:
    box = await place.start()
    place.engine.misdeeds["clean"] = [takes(0.2)]
    await _call(box, "echo x")
    with anyio.move_on_after(0.01) as scope:
        await box.call(Call(code="echo never"))
    assert scope.cancelled_caught
    answer = await _call(box, "echo on")
    assert isinstance(answer, CallResult)
    assert answer.stdout == b"on\n"


# --- what is written to it --------------------------------------------------------------------------------------------


class SlowChannel:
    """Takes what is sent once it is let."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.let = anyio.Event()

    def send_at_once(self, data: bytes) -> bool:
        self.taken.append(data)
        return True

    async def send(self, data: bytes) -> None:
        await self.let.wait()
        self.taken.append(data)


async def test_what_is_written_while_something_else_is_waits_for_it() -> None:
    runner, channel = ArmedRunner(ScriptedEngine(), [], RunnerConfig(keeper="1", files=()), lambda: None), SlowChannel()
    runner.state, runner._channel = RunnerState.ARMED, channel  # type: ignore[assignment]
    call = runner.begin(b"r" * 10_000, b"", timeout=1, grace=1, max_output=1)
    runner.feed_at_once(call)
    assert channel.taken == []
    sent: list[bool] = []

    async def cancel() -> None:
        sent.append(await runner.cancel(call))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.feed, call)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(cancel)
        await anyio.wait_all_tasks_blocked()
        runner.feed_at_once(call)
        assert channel.taken == []
        channel.let.set()
    assert sent == [True]
    assert [data[0] for data in channel.taken] == [wire.CALL, wire.CANCEL]
