"""Many clients on a pool of real containers: hands that kill, callers that give up, a pool that is resized meanwhile.

``EMBERPOOL_STORM_SECONDS`` says for how long (8 s, and 60 s with ``--full``), ``EMBERPOOL_STORM_CLIENTS`` and ``EMBERPOOL_STORM_SANDBOXES`` how many.
The accounts are printed at the end (``pytest -s`` shows them).
"""

from __future__ import annotations

import os
import random
import secrets
import subprocess
from pathlib import Path

import anyio
import pytest
import structlog

from executor.errors import PoolExhausted
from pool.core.handlers import Phase
from pool.pool import SandboxPool
from pool.session import Session
from pool.supervisor.snapshot import SandboxCounts
from tests.engine.faulty import Daemon, until
from tests.engine.scene import pool_settings
from tests.support.pools import assert_balanced
from tests.support.storm import Accounts, Judge

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

SECONDS = os.environ.get("EMBERPOOL_STORM_SECONDS", "")
CLIENTS = int(os.environ.get("EMBERPOOL_STORM_CLIENTS", "100"))
SANDBOXES = int(os.environ.get("EMBERPOOL_STORM_SANDBOXES", "20"))
STANDBYS = 2
CALLS = (
    "print('x')",
    "import sys; sys.exit(3)",
    "import time; time.sleep(0.3)",
    "import time; time.sleep(60)",
    "print('x' * 100_000)",
)
NEVER = 1e6


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # on trio it is the virtual storm


async def client(pool: SandboxPool, accounts: Accounts, dice: random.Random, until_when: float) -> None:
    def patience() -> float:
        return dice.choice((dice.expovariate(2.0), NEVER, NEVER, NEVER))

    while anyio.current_time() < until_when:
        name, wait = str(dice.randrange(CLIENTS)), dice.choice((0.5, 2.0, 6.0))
        session = await accounts.ask("acquire", lambda: pool.acquire("agent", name, timeout=wait), patience())  # noqa: B023
        if not isinstance(session, Session):
            await anyio.sleep(dice.expovariate(5.0))
            continue
        for _ in range(dice.randint(1, 3)):
            code, cold = dice.choice(CALLS), dice.random() < 0.03
            act = pool.call_cold if cold else session.call
            timeout = 15.0 if cold else dice.choice((0.5, 5.0))
            await accounts.ask("cold" if cold else "call", lambda: act(code=code, timeout=timeout), patience())  # noqa: B023
        await dice.choice((session.release, session.close))()
        await anyio.sleep(dice.expovariate(5.0))


async def hand(pool: SandboxPool, daemon: Daemon, dice: random.Random) -> None:
    """Kill a sandbox every second or so."""
    while True:
        await anyio.sleep(dice.expovariate(1.0))
        boxes = pool._shell.state.in_phase(Phase.BOUND) + pool._shell.state.in_phase(Phase.STANDBY)
        if boxes:
            try:
                await daemon.ask("kill", pool._shell.containers.name(dice.choice(boxes).n))
            except subprocess.CalledProcessError:
                continue  # it has just ended by itself


async def resizes(pool: SandboxPool, dice: random.Random) -> None:
    while True:
        await anyio.sleep(dice.expovariate(0.5))
        most = dice.randint(SANDBOXES // 2, SANDBOXES)
        pool.resize(max_sandboxes=most, min_standby=dice.randint(0, STANDBYS))


@pytest.mark.timeout(120 + 3 * float(SECONDS or 60))
async def test_storm_leaves_balanced_accounts_fair_grants_and_a_pool_at_rest(
    daemon: Daemon, state_dir: Path, pytestconfig: pytest.Config
) -> None:
    seconds = float(SECONDS or (60 if pytestconfig.option.full else 8))
    seed = secrets.randbelow(1_000_000) if pytestconfig.option.seed is None else pytestconfig.option.seed
    print(f"seed {seed}: {CLIENTS} clients on {SANDBOXES} sandboxes for {seconds:g} s")  # noqa: T201 - it is what the run did
    dice, accounts = random.Random(seed), Accounts()
    settings = pool_settings(
        state_dir,
        sandbox={"memory_mb": 64},
        min_standby=STANDBYS,
        max_sandboxes=SANDBOXES,
        max_starting=4,
        max_waiters=CLIENTS,
        idle_timeout=2.0,
        reclaim_idle_after=1.0,
        resync_interval=5.0,
        drain_timeout=10.0,
    )
    with structlog.testing.capture_logs() as lines:
        async with SandboxPool(settings, find=daemon.found) as pool:
            judge = Judge(pool)
            await until(lambda: pool.snapshot().sandboxes.standby == STANDBYS)
            async with anyio.create_task_group() as troubles:
                troubles.start_soon(hand, pool, daemon, dice)
                troubles.start_soon(resizes, pool, dice)
                with anyio.fail_after(seconds + 60.0):
                    async with anyio.create_task_group() as clients:
                        for _ in range(CLIENTS):
                            clients.start_soon(client, pool, accounts, dice, anyio.current_time() + seconds)
                troubles.cancel_scope.cancel()
            assert_balanced(pool)
            pool.resize(max_sandboxes=SANDBOXES, min_standby=STANDBYS)
            wanted = SandboxCounts(standby=STANDBYS)
            await until(lambda: pool.snapshot().sandboxes == wanted)
            ledger = state_dir / "ledger"
            await until(lambda: {file.stem for file in ledger.iterdir()} == pool._shell.containers.names)
            assert set(daemon.containers()) == pool._shell.containers.names
    accounts.check(lines)
    print(accounts.table(), f"sandboxes given to who waited: {judge.grants}", sep="\n")  # noqa: T201
    # How many there are of each is the machine's affair.
    assert accounts.ended["acquire", "granted"]
    assert accounts.ended["acquire", PoolExhausted.reason] + accounts.ended["acquire", "cancelled"]
    assert accounts.ended["call", "ok"]
    assert judge.grants
