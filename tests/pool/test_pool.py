"""The pool as its callers see it: handles, generations, keys, and what never reaches a log."""

from __future__ import annotations

import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.common.locks import HeldLock
from executor.engine.attached import PROVED, REFUSED
from executor.errors import (
    ImageUnfit,
    InvalidCall,
    PoolClosed,
    PoolExhausted,
    PoolUnusable,
    ProfileMismatch,
    SandboxDied,
    SessionClosed,
    StateLost,
)
from pool.ledger.ledger import StateDirectory
from pool.pool import SandboxPool
from pool.session import Session
from pool.supervisor.snapshot import SandboxCounts
from tests.support.pools import assert_closed, count, outcome, running, settings_of, until
from tests.support.scripted import ScriptedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
async def pool(engine: ScriptedEngine, state_dir: Path) -> AsyncIterator[SandboxPool]:
    async with running(engine, settings_of(state_dir)) as pool:
        yield pool


# --- handles ----------------------------------------------------------------------------------------------------------


async def test_two_acquires_of_one_session_at_once_share_one_sandbox(pool: SandboxPool, engine: ScriptedEngine) -> None:
    got: list[Session] = []

    async def acquire() -> None:
        got.append(await pool.acquire("agent", "session"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(acquire)
        tasks.start_soon(acquire)
    assert got[0].id == got[1].id
    assert got[0].generation == got[1].generation
    assert engine.asked["start"] == 1


async def test_a_released_handle_refuses_and_the_others_go_on(pool: SandboxPool) -> None:
    first, second = await pool.acquire("agent", "session"), await pool.acquire("agent", "session")
    await first.release()
    await first.release()
    assert isinstance(await outcome(lambda: first.call(code="echo x")), SessionClosed)
    assert (await second.call(code="echo x")).ok
    assert pool._shell.state.sessions["agent", "session"].handles == 1


async def test_closing_ends_the_session_for_every_handle(pool: SandboxPool) -> None:
    first, second = await pool.acquire("agent", "session"), await pool.acquire("agent", "session")
    await first.close()
    await first.close()
    assert isinstance(await outcome(lambda: second.call(code="echo x")), SessionClosed)
    assert second.generation is None
    await second.release()


async def test_closing_ends_a_running_call_and_whoever_waits(pool: SandboxPool, engine: ScriptedEngine) -> None:
    session = await pool.acquire("agent", "session")
    answers: list[object] = []

    async def call() -> None:
        answers.append(await outcome(lambda: session.call(code="hang")))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await until(lambda: engine.the_box().busy, limit=5)
        tasks.start_soon(call)
        await until(lambda: pool.snapshot().waiting == 1, limit=5)
        await session.close()
    assert [type(answer) for answer in answers] == [SessionClosed, SessionClosed]
    assert sorted(answer.started for answer in answers if isinstance(answer, SessionClosed)) == [False, True]


async def test_a_cold_call_without_the_proof_of_its_boundary_never_began(
    pool: SandboxPool, engine: ScriptedEngine
) -> None:
    for proof, kind, why in (
        (REFUSED, ProfileMismatch, "strict seccomp profile is not in force"),
        (b"", ImageUnfit, "did not take the call"),
    ):
        engine.proof = proof
        error = await outcome(lambda: pool.call_cold(code="exit 1"))
        assert isinstance(error, kind)
        assert why in str(error)
        assert not error.started
    engine.proof = PROVED
    done = await pool.call_cold(code="echo x")
    assert (done.stdout, done.stdout_total) == (b"x\n", 2)


@pytest.mark.parametrize("proof", [PROVED, b""])
async def test_a_cold_call_whose_client_is_lost_has_no_result_and_may_have_run(
    pool: SandboxPool, engine: ScriptedEngine, proof: bytes
) -> None:
    """What it printed afterwards is lost, and without a client nothing proves that it never began."""
    engine.proof = proof
    answers: list[object] = []

    async def call() -> None:
        answers.append(await outcome(lambda: pool.call_cold(code="sleep 0.3; echo x; exit 0")))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await until(lambda: any(box.busy for box in engine.boxes.values()), limit=5)
        engine.kill_clients()
    (error,) = answers
    assert isinstance(error, SandboxDied)
    assert (error.cause, error.started) == ("unknown", True)


async def test_a_cold_call_of_which_no_event_tells_may_have_run_and_is_not_refused(
    pool: SandboxPool, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever retries what never started would run it twice."""
    monkeypatch.setattr(pool._shell.hub, "publish", lambda event: None)
    errors: list[object] = []

    async def call(code: int) -> None:
        errors.append(await outcome(lambda: pool.call_cold(code=f"err docker: Cannot connect; exit {code}")))

    async with anyio.create_task_group() as tasks:
        for code in (1, 125, 126, 127):
            tasks.start_soon(call, code)
    assert len(errors) == 4
    for error in errors:
        assert isinstance(error, SandboxDied)
        assert (error.cause, error.started) == ("engine", True)


async def test_a_handle_of_an_ended_session_does_not_reach_its_successor(pool: SandboxPool) -> None:
    old = await pool.acquire("agent", "session")
    await old.close()
    new = await pool.acquire("agent", "session")
    assert isinstance(await outcome(lambda: old.call(code="echo x")), SessionClosed)
    await old.release()
    await old.close()
    assert (await new.call(code="echo x")).ok


async def test_leaving_the_handles_block_releases_it_and_keeps_the_session(pool: SandboxPool) -> None:
    async with await pool.acquire("agent", "session") as session:
        first = session.generation
    assert isinstance(await outcome(lambda: session.call(code="echo x")), SessionClosed)
    assert (await pool.acquire("agent", "session")).generation == first


async def test_calls_of_one_session_run_one_after_another(pool: SandboxPool, engine: ScriptedEngine) -> None:
    session = await pool.acquire("agent", "session")
    most, ended = 0, []

    async def call(name: str) -> None:
        ended.append((await session.call(code=f"sleep 0.01; echo {name}")).stdout)

    async with anyio.create_task_group() as tasks:
        for name in "abc":
            tasks.start_soon(call, name)
            await until(lambda: pool.snapshot().waiting + pool.snapshot().running + len(ended) > 0, limit=5)
        while len(ended) < 3:
            most = max(most, engine.the_box().busy)
            await anyio.lowlevel.checkpoint()
    assert sorted(ended) == [b"a\n", b"b\n", b"c\n"]
    assert most == 1


async def test_parallel_sessions_never_share_a_sandbox(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, max_sandboxes=5, min_standby=2)) as pool:
        used: dict[str, set[str]] = {}

        async def live(name: str) -> None:
            for turn in range(4):
                session = await pool.acquire("agent", name)
                for _ in range(2):
                    used.setdefault(name, set()).add((await session.call(code="echo x")).generation)
                await (session.close if turn % 2 else session.release)()

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(live, f"s{number}")
        everyone = [generation for generations in used.values() for generation in generations]
        assert len(everyone) == len(set(everyone))
        assert engine.most <= 5


# --- generations ------------------------------------------------------------------------------------------------------


async def test_a_call_that_asks_for_its_generation_runs_in_it_or_nowhere(
    pool: SandboxPool, engine: ScriptedEngine
) -> None:
    session = await pool.acquire("agent", "session")
    generation = session.generation
    assert (await session.call(code="echo x", generation=generation)).generation == generation
    engine.die(engine.the_box(), 137)
    await until(lambda: session.generation not in (None, generation), limit=5)
    assert isinstance(await outcome(lambda: session.call(code="echo x", generation=generation)), StateLost)
    assert isinstance(await outcome(lambda: session.call(code="echo x", generation="0badcafe-1")), StateLost)


@pytest.mark.parametrize("generation", ["", "1", "-1", "x-", "x-y", "x-1.5", "x-²", "x-" + "9" * 30, "\0-x"])
async def test_a_generation_of_no_known_form_is_an_invalid_call(pool: SandboxPool, generation: str) -> None:
    session = await pool.acquire("agent", "session")
    assert isinstance(await outcome(lambda: session.call(code="echo x", generation=generation)), InvalidCall)


# --- keys and requests ------------------------------------------------------------------------------------------------

KEYS = [
    "with spaces", "a/b/../c", "héllo wörld ☃", "-leading-dash", "--privileged", "x" * 10_000, "nul\0inside", "new\nline",
    "\ud800lone", "$(id)", "'; rm -rf /", "%s{0}",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
async def test_any_key_works_and_shows_nowhere(pool: SandboxPool, engine: ScriptedEngine, key: str) -> None:
    with structlog.testing.capture_logs() as logs:
        session = await pool.acquire(key, "session")
        other = await pool.acquire("agent", key)
        assert (await session.call(code="echo x")).ok
        await session.close()
    assert session.id != other.id
    for shown in (session.id, other.id):
        assert len(shown) == 16
        assert int(shown, 16) >= 0
    assert key not in repr(session)
    for words in engine.started:
        assert not [value for values in words.flags.values() for value in values if key in value]
    assert key not in repr(logs)
    assert json.dumps(key)[1:-1] not in json.dumps(logs, default=str)


@pytest.mark.parametrize("key", ["", None, 7, b"bytes", "x" * 65_537])
async def test_a_key_that_is_no_name_is_an_invalid_call(pool: SandboxPool, key: Any) -> None:
    assert isinstance(await outcome(lambda: pool.acquire(key, "session")), InvalidCall)
    assert isinstance(await outcome(lambda: pool.acquire("agent", key)), InvalidCall)


async def test_two_keys_that_read_the_same_when_joined_are_two_sessions(pool: SandboxPool) -> None:
    ids = {(await pool.acquire(agent, name)).id for agent, name in (("ab", "c"), ("a", "bc"), ("a\0b", "c"))}
    assert len(ids) == 3


@given(first=st.tuples(st.text(min_size=1), st.text(min_size=1)), second=st.tuples(st.text(min_size=1), st.text()))
@settings(max_examples=200, deadline=None)
def test_a_session_id_depends_on_the_whole_key_and_the_pools_secret(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    mine = StateDirectory(Path("/nowhere"), HeldLock(-1), "p" * 12, b"1" * 32)
    other = StateDirectory(Path("/nowhere"), HeldLock(-1), "p" * 12, b"2" * 32)
    assert mine.session_id(*first) == mine.session_id(*first) != other.session_id(*first)
    assert (mine.session_id(*first) == mine.session_id(*second)) == (first == second)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "5", None, 61])
async def test_a_timeout_out_of_range_is_an_invalid_call(pool: SandboxPool, timeout: Any) -> None:
    session = await pool.acquire("agent", "session")
    if timeout is None:
        assert (await session.call(code="echo x", timeout=None)).ok
        return
    assert isinstance(await outcome(lambda: session.call(code="echo x", timeout=timeout)), InvalidCall)
    if timeout != 61:
        assert isinstance(await outcome(lambda: pool.acquire("agent", "session", timeout=timeout)), InvalidCall)


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"argv": []},
        {"argv": "ls -l"},
        {"argv": b"ls"},
        {"argv": 7},
        {"argv": ["ls"], "code": "x"},
        {"argv": ["a\0b"]},
        {"argv": [7]},
        {"code": 7},
        {"code": "\ud800"},
        {"code": "x", "stdin": "text"},
        {"code": "x", "env": ["A=B"]},
        {"code": "x", "env": "A"},
        {"code": "x", "env": {"A": 7}},
        {"code": "x", "env": {"A=B": "c"}},
        {"code": "x", "max_output": -1},
        {"code": "x", "max_output": 1.5},
        {"code": "x", "max_output": "1"},
        {"code": "x", "max_output": True},
        {"code": "x", "max_output": 10**9},
        {"code": "x", "generation": 7},
    ],
    ids=repr,
)
async def test_a_bad_request_is_an_invalid_call_and_starts_nothing(
    pool: SandboxPool, engine: ScriptedEngine, request_: dict[str, Any]
) -> None:
    session = await pool.acquire("agent", "session")
    asked = engine.asked["attach"]
    assert isinstance(await outcome(lambda: session.call(**request_)), InvalidCall)
    if "generation" not in request_:
        assert isinstance(await outcome(lambda: pool.call_cold(**request_)), InvalidCall)
    assert engine.asked["attach"] == asked
    assert pool._shell.waiting == {}


async def test_output_beyond_the_callers_cap_is_dropped_and_counted(pool: SandboxPool) -> None:
    session = await pool.acquire("agent", "session")
    result = await session.call(code="flood 300000", max_output=1000)
    assert (len(result.stdout), result.stdout_total, result.truncated) == (1000, 300_000, True)


# --- before, after and beside -----------------------------------------------------------------------------------------


async def test_a_pool_that_was_not_entered_refuses(engine: ScriptedEngine, state_dir: Path) -> None:
    pool = SandboxPool(settings_of(state_dir), find=engine.find)
    assert isinstance(await outcome(lambda: pool.acquire("agent", "session")), PoolClosed)
    assert isinstance(await outcome(lambda: pool.call_cold(code="echo x")), PoolClosed)


async def test_a_pool_that_could_not_be_entered_refuses_instead_of_waiting(
    pool: SandboxPool, engine: ScriptedEngine
) -> None:
    second = SandboxPool(pool.settings, find=engine.find)
    with pytest.raises(PoolUnusable):
        await second.__aenter__()
    with anyio.fail_after(5):
        assert isinstance(await outcome(lambda: second.acquire("agent", "session")), PoolClosed)


async def test_a_closed_pool_refuses_and_its_handles_still_release(engine: ScriptedEngine, state_dir: Path) -> None:
    async with SandboxPool(settings_of(state_dir), find=engine.find) as pool:
        session = await pool.acquire("agent", "session")
    assert isinstance(await outcome(lambda: pool.acquire("agent", "session")), PoolClosed)
    assert isinstance(await outcome(lambda: pool.call_cold(code="echo x")), PoolClosed)
    assert isinstance(await outcome(lambda: session.call(code="echo x")), PoolClosed)
    assert session.generation is None
    await session.release()
    await session.close()
    with pytest.raises(PoolClosed):
        await pool.__aenter__()
    assert_closed(pool, engine)


async def test_the_state_directory_is_free_again_after_the_pool(engine: ScriptedEngine, state_dir: Path) -> None:
    instances = set()
    for _ in range(2):
        async with running(engine, settings_of(state_dir)) as pool:
            instances.add(pool.snapshot().instance)
            identity = pool.snapshot().pool
    assert len(instances) == 2
    assert identity == json.loads((state_dir / "pool.json").read_text("utf-8"))["pool_id"]


async def test_a_deadline_that_passes_between_two_looks_at_the_clock_is_not_missed(
    engine: ScriptedEngine, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every look at the clock finds it further on, as on a real one; only far more so. A deadline then falls between the
    # step that is told of it and the question when to wake.
    real, looks = anyio.current_time, 0

    def running_on() -> float:
        nonlocal looks
        looks += 1
        return real() + looks * 0.004

    async with running(engine, settings_of(state_dir, max_sandboxes=1, max_starting=1)) as pool:
        await pool.acquire("agent", "holder")
        monkeypatch.setattr(anyio, "current_time", running_on)
        with anyio.fail_after(10):
            for _ in range(20):
                error = await outcome(lambda: pool.acquire("agent", "late", timeout=0.006))
                assert isinstance(error, PoolExhausted)
        monkeypatch.undo()


async def test_a_background_failure_ends_the_pool_instead_of_going_unseen(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async def find() -> Any:
        raise ZeroDivisionError("a bug")

    with pytest.raises(PoolUnusable, match="ZeroDivisionError: a bug") as caught:  # noqa: PT012 - the block is tested
        async with SandboxPool(settings_of(state_dir), find=find) as pool:
            # Whoever waits at that moment is told too.
            assert isinstance(await outcome(lambda: pool.acquire("agent", "session")), PoolUnusable)
            assert isinstance(await outcome(lambda: pool.call_cold(["true"])), PoolUnusable)
    assert pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True).matches(caught.value.__cause__)
    async with running(engine, settings_of(state_dir)):
        pass


# --- what is never told -----------------------------------------------------------------------------------------------


async def test_logs_hold_nothing_of_keys_code_environment_and_stdin(engine: ScriptedEngine, state_dir: Path) -> None:
    secrets = ["KEY-AGENT", "KEY-SESSION", "SECRET-CODE", "SECRET-VALUE", "SECRET-STDIN", "SECRET-OUT", "SECRET-ARG"]
    with structlog.testing.capture_logs() as logs:
        async with running(engine, settings_of(state_dir, min_standby=1)) as pool:
            session = await pool.acquire("KEY-AGENT", "KEY-SESSION")
            hidden: dict[str, Any] = {"env": {"A": "SECRET-VALUE"}, "stdin": b"SECRET-STDIN"}
            for steps in ("echo SECRET-OUT", "err SECRET-CODE; exit 3", "die 137", "lose; err SECRET-CODE", "oom"):
                await outcome(lambda steps=steps: session.call(code=steps, **hidden))  # type: ignore[misc]
                await outcome(lambda steps=steps: pool.call_cold(code=steps, **hidden))  # type: ignore[misc]
                await outcome(lambda steps=steps: session.call(["echo", "SECRET-ARG"], **hidden))  # type: ignore[misc]
            await outcome(lambda: session.call(code="echo SECRET-CODE; hang", timeout=0.05, **hidden))
            await outcome(lambda: pool.call_cold(code="echo SECRET-CODE; hang", timeout=0.05, **hidden))
            await session.close()
    assert {"pool.started", "pool.engine_up", "sandbox.started", "session.bound", "pool.closed"} <= {
        str(entry["event"]) for entry in logs
    }
    shown = json.dumps(logs, default=str)
    assert [secret for secret in secrets if secret in shown] == []


async def test_an_engines_event_holds_nothing_of_a_call(pool: SandboxPool, engine: ScriptedEngine) -> None:
    session = await pool.acquire("agent", "session")
    await session.call(code="echo SECRET-CODE", env={"A": "SECRET-VALUE"}, stdin=b"SECRET-STDIN")
    await pool.call_cold(["echo", "SECRET-ARG"], env={"A": "SECRET-VALUE"}, stdin=b"SECRET-STDIN")
    assert engine.sent
    assert "SECRET" not in repr(engine.sent)
    assert "SECRET" not in repr(engine.started)


async def test_the_snapshot_counts_what_there_is(engine: ScriptedEngine, state_dir: Path) -> None:
    async with running(engine, settings_of(state_dir, min_standby=1)) as pool:
        await pool.acquire("agent", "session")
        await until(lambda: count(pool, "standby") == 1, limit=5)
        shown = pool.snapshot()
        assert shown.sandboxes == SandboxCounts(standby=1, bound=1)
        assert (shown.sessions, shown.waiting, shown.running, shown.cold) == (1, 0, 0, 0)
        assert (shown.state, shown.engine, shown.fault, shown.error) == ("running", "up", None, None)
        assert shown.healthy
        as_dict = shown.as_dict()
        assert as_dict["sandboxes"] == {"starting": 0, "standby": 1, "bound": 1, "stopping": 0}
        assert json.loads(json.dumps(as_dict)) == as_dict
        pool.drain(1.0)
        assert pool.snapshot().state == "closing"
    closed = pool.snapshot()
    assert (closed.state, closed.sandboxes, closed.pool, closed.healthy) == (
        "closed",
        SandboxCounts(),
        shown.pool,
        False,
    )


def test_the_snapshot_of_a_pool_that_was_never_started_says_so(state_dir: Path) -> None:
    shown = SandboxPool(settings_of(state_dir)).snapshot()
    assert (shown.state, shown.pool, shown.instance, shown.engine, shown.healthy) == ("new", "", "", "down", False)


def test_the_snapshot_of_a_pool_whose_loop_ended_says_so(state_dir: Path) -> None:
    async def leave() -> SandboxPool:
        async with ScriptedEngine() as engine:
            pool = await SandboxPool(settings_of(state_dir), find=engine.find).start()
            await pool.ready()
            return pool

    # Only asyncio leaves a pool so: the end of a trio run closes it in order.
    assert anyio.run(leave, backend="trio").snapshot().state == "closed"
    pools = [anyio.run(leave, backend="asyncio")]
    shown = pools[0].snapshot()
    assert (shown.state, shown.engine, shown.healthy) == ("failed", "down", False)
    assert "ended before the pool was closed" in str(shown.error)
    with pytest.warns(ResourceWarning):
        _collect(pools)


async def test_a_pool_whose_object_is_forgotten_runs_for_as_long_as_its_sessions_are_used(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async def start() -> Session:
        pool = await SandboxPool(settings_of(state_dir), find=engine.find).start()
        return await pool.acquire("agent", "session")

    session = await start()
    gc.collect()
    assert (await session.call(code="echo on")).ok
    await SandboxPool.aclose(_face_of(session))


def _collect(pools: list[SandboxPool]) -> None:
    pools.clear()
    gc.collect()


def _face_of(session: Session) -> SandboxPool:
    """A pool object like the one that was forgotten."""
    pool = object.__new__(SandboxPool)
    pool.settings, pool._shell = session._calls.settings, session._calls._shell
    return pool


async def test_a_container_is_removed_by_what_it_is_and_not_by_its_name(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    async with running(engine, settings_of(state_dir)) as pool:
        session = await pool.acquire("agent", "session")
        ours = engine.the_box()
        name = ours.name
        # Somebody who may use the engine renames it, and makes another container of that name.
        ours.words.flags["--name"] = ["renamed"]
        engine.boxes = {"renamed": ours}
        stranger = engine.foreign(name)
        await session.close()
        await until(lambda: not ours.running)
        assert engine.boxes == {name: stranger}
        assert stranger.running
        engine.boxes.clear()


async def test_a_cold_calls_container_is_removed_by_what_it_is_too(engine: ScriptedEngine, state_dir: Path) -> None:
    answers: list[object] = []
    async with running(engine, settings_of(state_dir)) as pool, anyio.create_task_group() as tasks:

        async def call() -> None:
            answers.append(await outcome(lambda: pool.call_cold(code="hang", timeout=0.3)))

        tasks.start_soon(call)
        await until(lambda: engine.boxes)
        ours = engine.the_box()
        name = ours.name
        # As above, in the middle of the call.
        ours.words.flags["--name"] = ["renamed"]
        engine.boxes = {"renamed": ours}
        stranger = engine.foreign(name)
        await until(lambda: answers)
        assert not ours.running
        assert stranger.running
        engine.boxes.clear()
