"""Cold calls on a real engine: one container each, gone afterwards, however the call ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from executor.engine.protocol import ImageInfo
from executor.errors import EmberpoolError, ImageMissing, InvalidCall, ProfileMismatch, SandboxDied
from executor.sandbox.mount import Mount
from executor.sandbox.profile import LABEL_POOL, Limits
from executor.sandbox.request import Call
from pool.config.load import Settings
from pool.pool import SandboxPool
from tests.engine.conftest import Room
from tests.engine.tiny import tiny_image, volume_image
from tests.support.pools import until

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

BLOCK = "import time\nprint('begun', flush=True)\ntime.sleep(600)"


@asynccontextmanager
async def leaves_nothing(room: Room) -> AsyncIterator[None]:
    """The container is confirmed gone by the time that a cold call returns or raises."""
    yield
    assert await room.engine.list(LABEL_POOL, room.pool) == []


async def started(room: Room) -> str:
    """The name of the cold container once it runs."""
    with anyio.fail_after(30):
        while True:
            for row in await room.engine.list(LABEL_POOL, room.pool):
                if row.running:
                    return row.name
            await anyio.sleep(0.05)


async def test_cold_call_answers_with_its_own_exit_code_streams_and_stdin(real_engine: Room) -> None:
    code = "import sys\nprint(sys.stdin.read())\nprint('err', file=sys.stderr)\nsys.exit(3)"
    async with leaves_nothing(real_engine):
        result = await real_engine.cold(Call(code=code, stdin=b"in"))
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"in\n", b"err\n")
    async with leaves_nothing(real_engine):
        assert (await real_engine.cold(Call(argv=("sh", "-c", "exit 42")))).exit_code == 42


async def test_cold_timeout_is_a_result_and_the_container_is_gone(real_engine: Room) -> None:
    async with leaves_nothing(real_engine):
        result = await real_engine.cold(Call(code=BLOCK, timeout=3.0))
    assert (result.timed_out, result.exit_code, result.stdout) == (True, None, b"begun\n")


async def test_cancelled_cold_call_leaves_no_container(real_engine: Room) -> None:
    async with leaves_nothing(real_engine), anyio.create_task_group() as tasks:
        tasks.start_soon(real_engine.cold, Call(code=BLOCK))
        await started(real_engine)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("patience", [0.0, 0.05, 0.15, 0.25])
async def test_cold_call_cancelled_while_its_container_starts_leaves_no_container(
    real_engine: Room, patience: float
) -> None:
    async with leaves_nothing(real_engine):
        with anyio.move_on_after(patience):
            await real_engine.cold(Call(code=BLOCK))


@pytest.mark.parametrize("how", [("kill",), ("rm", "-f")])
async def test_cold_container_ended_by_hand_is_a_death_and_not_exit_137(
    real_engine: Room, how: tuple[str, ...]
) -> None:
    async with leaves_nothing(real_engine), anyio.create_task_group() as tasks:

        async def end() -> None:
            name = await started(real_engine)
            await real_engine.engine._ask(*how, name, doing="ending a cold call by hand")

        tasks.start_soon(end)
        with pytest.raises(SandboxDied) as caught:
            await real_engine.cold(Call(code=BLOCK))
        assert caught.value.cause == "killed"


async def test_cold_out_of_memory_and_cpu_limit_are_told(real_engine: Room) -> None:
    async with leaves_nothing(real_engine):
        memory = await real_engine.cold(Call(code="data = bytearray(300 << 20)"), limits=Limits(memory_mb=64))
        cpu = await real_engine.cold(Call(code="while True: pass"), limits=Limits(cpu_seconds=1))
        own = await real_engine.cold(Call(code="import sys\nsys.exit(137)"))
    assert (memory.oom_killed, memory.signal, memory.exit_code) == (True, 9, None)
    assert (cpu.cpu_limit, cpu.exit_code, cpu.timed_out) == (True, None, False)
    assert (own.exit_code, own.oom_killed, own.signal) == (137, False, None)


async def test_cold_call_has_the_profile_inside(real_engine: Room) -> None:
    code = """
import os
status = dict(l.split(':\\t', 1) for l in open('/proc/self/status').read().splitlines() if ':\\t' in l)
print({key: status[key] for key in ('CapEff', 'CapBnd', 'NoNewPrivs', 'Seccomp')})
print(os.getuid() != 0, os.listdir('/sys/class/net'))
try:
    open('/x', 'w')
except OSError as error:
    print(error.strerror)
"""
    result = await real_engine.cold(Call(code=code))
    zero = "0" * 16
    facts = {"CapEff": zero, "CapBnd": zero, "NoNewPrivs": "1", "Seccomp": "2"}
    assert result.stdout.decode() == f"{facts}\nTrue ['lo']\nRead-only file system\n", result.stderr


async def test_cold_image_without_python_runs_programs_and_refuses_code(real_engine: Room, tmp_path: Path) -> None:
    image = await tiny_image(real_engine, tmp_path)
    async with leaves_nothing(real_engine):
        shown = await real_engine.cold(Call(argv=("env",), env={"MINE": "a=b c"}), python=False, image=image)
        missing = await real_engine.cold(Call(argv=("no-such-program",)), python=False, image=image)
        with pytest.raises(InvalidCall, match="python3"):
            await real_engine.cold(Call(code="print(1)"), python=False, image=image)
    assert b"MINE=a=b c\n" in shown.stdout
    assert (missing.exit_code, missing.stdout) == (127, b"")


async def test_cold_refusals_are_typed_and_start_nothing(real_engine: Room, tmp_path: Path) -> None:
    absent = ImageInfo(id=f"sha256:{'0' * 64}")
    volume = await volume_image(real_engine, tmp_path)
    async with leaves_nothing(real_engine):
        with pytest.raises(ImageMissing):
            await real_engine.cold(Call(code="1"), image=absent)
        with pytest.raises(ProfileMismatch, match="/data"):
            await real_engine.cold(Call(argv=("env",)), image=volume)
        with pytest.raises(EmberpoolError) as caught:
            await real_engine.cold(Call(code="1"), mounts=(Mount(f"{tmp_path}/absent-{'x' * 300}", "/data", ("ro",)),))
    assert not isinstance(caught.value, SandboxDied)


@pytest.mark.parametrize("kind", ["session", "cold"])
async def test_a_pool_whose_image_declares_a_volume_keeps_nothing_of_what_it_refuses(
    real_engine: Room, tmp_path: Path, state_dir: Path, kind: str
) -> None:
    image = await volume_image(real_engine, tmp_path)
    settings = Settings(
        sandbox={"image": image.id},
        pool={"state_dir": state_dir, "min_standby": 0, "max_sandboxes": 2, "max_starting": 1, "overcommit": True},
    )
    async with SandboxPool(settings) as pool:
        await until(lambda: pool.snapshot().engine == "up", limit=30)
        with pytest.raises(ProfileMismatch, match="/data"):
            await (pool.acquire("agent", "session") if kind == "session" else pool.call_cold(["true"]))
        assert list((state_dir / "ledger").iterdir()) == []
        assert await real_engine.engine.list(LABEL_POOL, pool.snapshot().pool) == []


PID_1 = """
import ctypes, errno, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
print('uid', os.stat('/proc/1').st_uid == os.getuid())
print('trace', libc.ptrace(16902, 1, None, None), errno.errorcode[ctypes.get_errno()])
for number in (signal.SIGKILL, signal.SIGSTOP):
    os.kill(1, number)
resource.prlimit(1, resource.RLIMIT_NOFILE, (64, 64))
print('on', flush=True)
os._exit(7)
"""


async def test_code_of_a_cold_call_shares_the_uid_of_its_pid_1_and_cannot_change_its_answer_by_it(
    real_engine: Room,
) -> None:
    async with leaves_nothing(real_engine):
        result = await real_engine.cold(Call(code=PID_1, timeout=30.0))
    assert (result.exit_code, result.signal, result.timed_out) == (7, None, False)
    assert result.stdout == b"uid True\ntrace -1 EPERM\non\n"
    async with leaves_nothing(real_engine):  # it hands SIGTERM on to the call, whose own end that is
        result = await real_engine.cold(Call(code="import os, time\nos.kill(1, 15)\ntime.sleep(600)", timeout=30.0))
    assert (result.exit_code, result.timed_out) == (143, False)
