"""Whose a container is, on a real engine: what a start takes over or removes, what a pool and `cleanup` never touch."""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import urllib.parse
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import structlog

from executor.engine.docker import CommandLineEngine
from executor.engine.locate import find_engine
from executor.engine.protocol import ContainerGone
from executor.errors import EmberpoolError
from executor.sandbox.profile import LABEL_KIND, LABEL_POOL
from pool.config.load import Settings
from pool.ledger.cleanup import clean, examine, survey
from pool.ledger.ledger import StateDirectory
from pool.pool import SandboxPool
from tests.support.pools import ledger_entries

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

LIMIT = 60.0
"""Seconds after which something that should have ended has hung."""

GATEWAY = """
import json
import sys

import anyio
from pool import logs
from pool.config.load import Settings
from pool.pool import SandboxPool

async def main():
    async with SandboxPool(Settings(**json.loads(sys.argv[1]))) as pool:
        await pool.acquire("agent", "session")
        while pool.snapshot().sandboxes.standby < 2:
            await anyio.sleep(0.02)
        print("ready", flush=True)
        await anyio.sleep_forever()

logs.configure("error")
anyio.run(main)
"""
CLEANUP = "import typer; from pool.cli.cleanup import cleanup; typer.run(cleanup)"


@pytest.fixture
def anyio_backend() -> str:
    """One backend is enough here: what happens is the engine's doing, and each of these takes seconds."""
    return "asyncio"


@pytest.fixture
async def engine(engine_settings: Settings) -> CommandLineEngine:
    return (await find_engine())[0]


@pytest.fixture
async def settings(engine: CommandLineEngine, engine_settings: Settings) -> AsyncIterator[Settings]:
    """Settings with two standbys; a test that fails half-way leaves no gateway's containers behind either."""
    yield with_pool(engine_settings, min_standby=2)
    for place in engine_settings.pool.state_dir.parent.iterdir():
        with survey(place) as found:
            await examine(engine, found)
            await clean(engine, found)


@pytest.fixture(autouse=True)
def _works_from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes import the packages that are tested."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
async def foreign(engine: CommandLineEngine, engine_settings: Settings) -> AsyncIterator[Callable[..., Any]]:
    """Starts containers that are somebody else's, of a name and labels; afterwards they must still run."""
    made: list[str] = []

    async def start(name: str, **labels: str) -> str:
        words = [word for key, value in labels.items() for word in ("--label", f"{key}={value}")]
        run = ["run", "-d", "--rm", "--network", "none", "--name", name, *words, engine_settings.sandbox.image]
        made.append(await engine.start([*run, "sleep", "300"]))
        return made[-1]

    try:
        yield start
        for container in made:
            assert (await engine.inspect(container))["State"]["Running"]
    finally:
        for container in made:
            await engine.remove(container)


def with_pool(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"pool": settings.pool.model_copy(update=changes)})


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(LIMIT):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.02)


async def full(pool: SandboxPool) -> None:
    await until(lambda: pool.snapshot().sandboxes.standby == pool.settings.pool.min_standby)


async def swept(pool: SandboxPool) -> None:
    """What an earlier gateway left is removed beside the pool's other work; its entries go last."""
    await until(lambda: set(ledger_entries(pool.settings.pool.state_dir)) == pool._shell.containers.names)


async def kill_a_gateway(settings: Settings) -> None:
    """Run a pool with a session and two standbys in a process of its own, and SIGKILL that."""
    given = settings.model_dump(mode="json")
    words = {section: given[section] for section in ("sandbox", "pool", "call")}
    argv = [sys.executable, "-c", GATEWAY, json.dumps(words)]
    gateway = await anyio.open_process(argv, stderr=None)
    try:
        assert gateway.stdout is not None
        with anyio.fail_after(LIMIT):
            assert (await gateway.stdout.receive()).startswith(b"ready")
    finally:
        gateway.kill()
        await gateway.wait()
        await gateway.aclose()


async def at_rest(engine: CommandLineEngine, name: str) -> None:
    """Wait until nothing runs in a sandbox but its PID 1 and that one's child."""
    with anyio.fail_after(LIMIT):
        while len((await engine._ask("top", name, "-eo", "pid", doing="a test")).stdout.splitlines()) > 3:  # noqa: ASYNC110
            await anyio.sleep(0.05)


# --- what a start takes over ------------------------------------------------------------------------------------------


async def test_standbys_of_a_killed_gateway_are_taken_over_and_serve(
    engine: CommandLineEngine, settings: Settings
) -> None:
    state_dir = settings.pool.state_dir
    await kill_a_gateway(settings)
    standbys, bound = ledger_entries(state_dir, "standby"), ledger_entries(state_dir, "bound")
    assert (len(standbys), len(bound)) == (2, 1)
    for name in standbys:
        await at_rest(engine, name)
    async with SandboxPool(settings) as pool:
        await full(pool)
        await swept(pool)
        assert ledger_entries(state_dir) == standbys
        rows = {row.name: row.id for row in await engine.list(LABEL_POOL, pool.snapshot().pool) if row.running}
        assert rows == standbys
        session = await pool.acquire("agent", "session")
        assert (await session.call(code="import os; print(os.listdir('/tmp'))")).stdout == b"[]\n"
        (name,) = ledger_entries(state_dir, "bound")
        assert name in standbys
        uid = (await session.call(["id", "-u"])).stdout.decode().strip()
        users = [json.loads(file.read_text())["user"] for file in (state_dir / "ledger").iterdir()]
        assert users.count(f"{uid}:{uid}") == 1 or os.geteuid() != 0


@pytest.mark.full  # the quick set waits for the killed gateway's clients to end
async def test_a_start_right_after_the_kill_has_its_standbys_whatever_it_finds(
    engine: CommandLineEngine, settings: Settings
) -> None:
    await kill_a_gateway(settings)
    async with SandboxPool(settings) as pool:
        await full(pool)
        await swept(pool)
        rows = {row.name for row in await engine.list(LABEL_POOL, pool.snapshot().pool)}
        assert rows == set(ledger_entries(settings.pool.state_dir)) == pool._shell.containers.names
        session = await pool.acquire("agent", "session")
        assert (await session.call(code="print(1)")).ok


async def test_a_standby_with_a_process_inside_is_replaced(engine: CommandLineEngine, settings: Settings) -> None:
    await kill_a_gateway(settings)
    standbys = ledger_entries(settings.pool.state_dir, "standby")
    for name in standbys:
        await at_rest(engine, name)
    touched = sorted(standbys)[0]
    user = json.loads((settings.pool.state_dir / "ledger" / f"{touched}.standby").read_text())["user"]
    await engine._ask("exec", "-d", "-u", user, touched, "sleep", "300", doing="a test")
    async with SandboxPool(settings) as pool:
        await full(pool)
        await swept(pool)
        assert touched not in {row.name for row in await engine.list(LABEL_POOL, pool.snapshot().pool)}
        assert set(standbys) - {touched} < pool._shell.containers.names


@pytest.mark.full  # the quick set has it on a scripted engine
async def test_standbys_of_other_settings_are_replaced(engine: CommandLineEngine, settings: Settings) -> None:
    await kill_a_gateway(settings)
    standbys = ledger_entries(settings.pool.state_dir, "standby")
    less = settings.model_copy(update={"sandbox": settings.sandbox.model_copy(update={"pids": 96})})
    async with SandboxPool(less) as pool:
        await full(pool)
        await swept(pool)
        assert not pool._shell.containers.names & set(standbys)
        rows = {row.name for row in await engine.list(LABEL_POOL, pool.snapshot().pool)}
        assert rows == pool._shell.containers.names


# --- what nobody touches ----------------------------------------------------------------------------------------------


async def test_a_container_with_our_labels_that_the_ledger_does_not_name_is_left_alone(
    settings: Settings, foreign: Callable[..., Any]
) -> None:
    state = StateDirectory.open(settings.pool.state_dir)
    pool_id = state.pool_id
    state.close()
    await foreign(f"emberpool-{pool_id}-0badcafe-1", **{LABEL_POOL: pool_id, LABEL_KIND: "sandbox"})
    async with SandboxPool(with_pool(settings, resync_interval=0.2)) as pool:
        session = await pool.acquire("agent", "session")
        assert (await session.call(code="print(1)")).ok
        await full(pool)
        await pool._shell.containers.sweep()
        assert len(pool._shell.containers.names) == 3


async def test_a_start_whose_name_is_taken_touches_nothing_and_the_next_has_another(
    engine_settings: Settings, foreign: Callable[..., Any]
) -> None:
    async with SandboxPool(engine_settings) as pool:
        await until(lambda: pool.snapshot().engine == "up")
        name = pool._shell.containers.name(1)
        await foreign(name)
        with structlog.testing.capture_logs() as logs:
            session = await pool.acquire("agent", "session")
        assert [entry["sandbox"] for entry in logs if entry["event"] == "sandbox.name_taken"] == [name]
        assert session.generation == f"{pool.snapshot().instance}-2"
        assert name not in ledger_entries(engine_settings.pool.state_dir)


async def test_two_pools_of_one_name_with_two_directories_live_side_by_side(
    engine: CommandLineEngine, settings: Settings
) -> None:
    one = with_pool(settings, min_standby=1)
    two = with_pool(one, state_dir=settings.pool.state_dir.with_name("other"))
    async with SandboxPool(one) as first, SandboxPool(two) as second:
        for pool in (first, second):
            session = await pool.acquire("agent", "session")
            assert (await session.call(code="print(1)")).ok
            await full(pool)
        for pool in (first, second):
            await pool._shell.containers.sweep()
            rows = {row.name for row in await engine.list(LABEL_POOL, pool.snapshot().pool)}
            assert rows == pool._shell.containers.names == set(ledger_entries(pool.settings.pool.state_dir))
        assert not first._shell.containers.names & second._shell.containers.names
    assert await engine.list(LABEL_POOL, second._shell.directory.pool_id) == []


# --- what a session is called -----------------------------------------------------------------------------------------

AGENT = 'Agent ☃ "quoted" --privileged\n[31m'
SESSION = "s3cret'; $(id) ../../../etc/passwd \0%s{0}"


def forms(text: str) -> set[bytes]:
    """A text as it would look where somebody wrote it down, in one way or another."""
    raw = text.encode()
    shown = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1], ascii(text)[1:-1]}
    return {
        raw, raw.hex().encode(), base64.b64encode(raw).rstrip(b"="), urllib.parse.quote(text).encode(),
        *(form.encode() for form in shown),
    }  # fmt: skip


async def test_a_sessions_key_is_in_no_label_name_ledger_or_log(engine: CommandLineEngine, settings: Settings) -> None:
    told: list[str] = []
    quick = with_pool(settings, min_standby=1, max_sandboxes=2, max_sessions_per_agent=1)
    since = (await engine.info()).time
    with structlog.testing.capture_logs() as logs:
        async with SandboxPool(quick) as pool:
            pool_id = pool.snapshot().pool
            session = await pool.acquire(AGENT, SESSION)
            told.append(repr(session))
            assert (await session.call(code="print(1)")).ok
            assert not (await session.call(["false"])).ok
            await session.ready()
            for row in await engine.list(LABEL_POOL, pool_id):
                told.append(json.dumps(await engine.inspect(row.name), ensure_ascii=False))
            assert (await session.call(["sleep", "9"], timeout=1.0)).timed_out
            refusals = (
                lambda: pool.acquire(AGENT, SESSION + "2"),
                lambda: session.call(["sh", "-c", "kill -9 -1"]),
                lambda: session.call(["true"], generation="0badcafe-1"),
            )
            for refusal in refusals:
                try:
                    told.append(repr(await refusal()))
                except EmberpoolError as error:
                    told.append(f"{error!r} {error} {error.__cause__!r}")
            # What the refusals cost the session is removed meanwhile: it may go while it is looked at.
            for row in await engine.list(LABEL_POOL, pool_id):
                with suppress(ContainerGone):
                    told.append(json.dumps(await engine.inspect(row.name), ensure_ascii=False))
            for file in settings.pool.state_dir.rglob("*"):
                told.append(str(file))
                with suppress(FileNotFoundError):
                    told.append(file.read_text() if file.is_file() else "")
            told.append(json.dumps(pool.snapshot().as_dict()))
            await session.close()
    told.append(json.dumps(logs, default=repr, ensure_ascii=False))
    words = (
        "events",
        "--since",
        since,
        "--until",
        (await engine.info()).time,
        "--filter",
        f"label={LABEL_POOL}={pool_id}",
    )
    told.append((await engine._ask(*words, "--format", "{{json .}}", doing="a test")).stdout.decode())
    everything = "\n".join(told).encode()
    assert session.id.encode() in everything  # what stands for it is told
    assert {entry["event"] for entry in logs} >= {"session.bound", "call.ended", "session.forgotten", "sandbox.stopped"}
    assert everything.count(b"exec_create") >= 4
    for text in (AGENT, SESSION, "s3cret", "☃"):
        assert not [form for form in forms(text) if form in everything]


# --- cleanup ----------------------------------------------------------------------------------------------------------


def cleanup(settings: Settings, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", CLEANUP, "--state-dir", str(settings.pool.state_dir), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, check=False)


async def test_cleanup_removes_what_a_killed_gateway_left_and_nothing_else(
    engine: CommandLineEngine, settings: Settings, foreign: Callable[..., Any]
) -> None:
    await kill_a_gateway(settings)
    one_shot = with_pool(settings, state_dir=settings.pool.state_dir.with_name(f"one-shot-{secrets.token_hex(6)}"))
    await kill_a_gateway(one_shot)
    state = StateDirectory.open(settings.pool.state_dir)
    pool_id = state.pool_id
    state.close()
    await foreign(f"emberpool-{pool_id}-0badcafe-1", **{LABEL_POOL: pool_id})
    ours = {**ledger_entries(settings.pool.state_dir), **ledger_entries(one_shot.pool.state_dir)}
    assert len(ours) == 6

    async with SandboxPool(with_pool(settings, state_dir=settings.pool.state_dir.with_name("live"))) as live:
        await full(live)
        dry = await anyio.to_thread.run_sync(cleanup, settings, "--dry-run")
        assert dry.returncode == 0, dry.stderr
        for name, container in ours.items():
            assert f"container {name} (" in dry.stdout
            assert (await engine.inspect(name))["Id"] == container
        done = await anyio.to_thread.run_sync(cleanup, settings)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("removed: 6 containers, 6 ledger entries,")
        assert len(await engine.list(LABEL_POOL, live.snapshot().pool)) == 2
        assert (await (await live.acquire("agent", "session")).call(code="print(1)")).ok
    left = [row.name for row in await engine.list(LABEL_POOL, pool_id)]
    assert left == [f"emberpool-{pool_id}-0badcafe-1"]
    assert not one_shot.pool.state_dir.exists()
    again = await anyio.to_thread.run_sync(cleanup, settings)
    assert (again.returncode, again.stdout) == (0, "nothing to remove\n")


async def test_cleanup_leaves_a_live_pool_alone_and_says_whose_it_is(
    engine: CommandLineEngine, settings: Settings
) -> None:
    async with SandboxPool(settings) as pool:
        await full(pool)
        done = await anyio.to_thread.run_sync(cleanup, settings)
        assert done.returncode == 1
        assert f"in use by a live pool (pid {os.getpid()}, since " in done.stdout
        assert {row.name for row in await engine.list(LABEL_POOL, pool.snapshot().pool)} == pool._shell.containers.names


async def test_cleanup_without_an_engine_removes_nothing(
    engine: CommandLineEngine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kill_a_gateway(settings)
    before = ledger_entries(settings.pool.state_dir)
    with monkeypatch.context() as patched:
        patched.setenv("DOCKER_HOST", f"unix://{settings.pool.state_dir}/nowhere.sock")
        done = await anyio.to_thread.run_sync(cleanup, settings)
    assert done.returncode == 1
    assert "nothing was removed" in done.stderr
    assert ledger_entries(settings.pool.state_dir) == before
    for name, container in before.items():
        assert (await engine.inspect(name))["Id"] == container
    assert (await anyio.to_thread.run_sync(cleanup, settings)).returncode == 0


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 40])
async def test_a_start_after_every_file_was_damaged_removes_what_a_killed_gateway_left_and_nothing_else(
    engine: CommandLineEngine, settings: Settings, foreign: Callable[..., Any], cut: int
) -> None:
    await kill_a_gateway(settings)
    place = settings.pool.state_dir
    pool_id = json.loads((place / "pool.json").read_text())["pool_id"]
    ours = ledger_entries(place)
    assert len(ours) == 3
    await foreign(f"emberpool-{pool_id}-0badcafe-1", **{LABEL_POOL: pool_id})
    for file in (place / "pool.json", *(place / "ledger").iterdir()):
        file.write_bytes(file.read_bytes()[:cut])
    async with SandboxPool(settings) as pool:
        assert pool.snapshot().pool == pool_id
        assert (await (await pool.acquire("agent", "session")).call(code="print(1)")).ok
        listed = {row.id for row in await engine.list(LABEL_POOL, pool_id)}
        assert not listed & set(ours.values())
    assert ledger_entries(place) == {}
