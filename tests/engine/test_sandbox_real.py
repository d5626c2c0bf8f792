"""One real sandbox: what a call answers, what ends it, what shows of it, and what it cannot reach."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import anyio
import pytest

from executor.errors import EngineFailed, InvalidCall, ProfileMismatch, SandboxDied
from executor.sandbox.profile import PROXY_VARIABLES, ContainerProfile, Limits
from executor.sandbox.request import Call
from executor.sandbox.seccomp import strict_profile
from executor.sandbox.start import start_sandbox
from executor.sandbox.verify import check_inspect
from tests.engine.conftest import KEEPER, Room
from tests.engine.tiny import tiny_image, volume_image

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

BLOCK = "import time\nprint('begun', flush=True)\ntime.sleep(600)"


async def test_call_answers_with_its_own_exit_code_and_both_streams(real_engine: Room) -> None:
    async with real_engine.sandbox() as box:
        result = await box.call(Call(code="import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)"))
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
        assert (await box.call(Call(argv=("sh", "-c", "exit 42")))).exit_code == 42
        missing = await box.call(Call(argv=("no-such-program",)))
        assert (missing.exit_code, missing.stderr) == (127, b"no-such-program: No such file or directory\n")
        assert (await box.call(Call(argv=("/etc/hostname",)))).exit_code == 126
        # Its own exit, or its own kill: the sandbox lives, so the code is the call's.
        assert (await box.call(Call(code="import sys\nsys.exit(137)"))).exit_code == 137
        assert (await box.call(Call(argv=("sh", "-c", "kill -9 $$")))).exit_code == 137
        assert box.poisoned == ""


async def test_call_starts_from_the_image_and_call_environment_and_nothing_else(real_engine: Room) -> None:
    async with real_engine.sandbox() as box:
        code = "import os\nprint(sorted(os.environ.items()), os.getcwd())"
        result = await box.call(Call(code=code, env={"MINE": "a\nb"}))
    expected = {
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "LOGNAME": "sandbox",
        "MINE": "a\nb",
        "PYTHONDONTWRITEBYTECODE": "1",
        "USER": "sandbox",
        **dict(item.split("=", 1) for item in real_engine.image.env),
    }
    assert result.stdout.decode() == f"{sorted(expected.items())} /tmp\n"


async def test_sixteen_megabytes_of_stdin_arrive_unchanged(real_engine: Room) -> None:
    data = os.urandom(16_000_000)
    code = "import hashlib, sys\nprint(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    async with real_engine.sandbox() as box:
        result = await box.call(Call(code=code, stdin=data))
        unread = await box.call(Call(code="print('done')", stdin=data))
    assert result.stdout.decode().strip() == hashlib.sha256(data).hexdigest()
    assert unread.stdout == b"done\n"


async def test_flood_of_output_is_counted_and_kept_out_of_memory(real_engine: Room) -> None:
    size = 200 * 1024 * 1024
    code = "import os\nfor _ in range(3200):\n    n = 0\n    while n < 65536:\n        n += os.write(1, b'y' * (65536 - n))"
    async with real_engine.sandbox() as box:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = await box.call(Call(code=code, max_output=1000))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (len(result.stdout), result.stdout_total, result.truncated) == (1000, size, True)
    assert grown < 64 * 1024  # KiB


async def test_timeout_is_a_result_and_nothing_runs_afterwards(real_engine: Room) -> None:
    async with real_engine.sandbox() as box:
        result = await box.call(Call(code=BLOCK, timeout=3.0))
        assert (result.timed_out, result.exit_code, result.stdout) == (True, None, b"begun\n")
        assert box.poisoned == "timeout"
        await box.watch.died.wait()
        with anyio.fail_after(30):  # as below
            while await running(real_engine, box.name):  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.02)


async def test_cancelled_call_takes_the_container_with_it(real_engine: Room) -> None:
    async with real_engine.sandbox() as box:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(box.call, Call(code=BLOCK))
            await seen_inside(real_engine, box.name)
            tasks.cancel_scope.cancel()
        assert box.poisoned == "cancelled"
        await box.watch.died.wait()
        with anyio.fail_after(30):  # it is killed; its engine may tell so a moment later
            while await running(real_engine, box.name):  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.02)
        with pytest.raises(SandboxDied) as caught:
            await box.call(Call(code="print(1)"))
        assert not caught.value.started


async def test_lost_client_takes_the_container_with_it_and_is_no_result(real_engine: Room) -> None:
    async with real_engine.sandbox() as box:
        async with anyio.create_task_group() as tasks:

            async def lose() -> None:
                await seen_inside(real_engine, box.name)
                for place in clients(box.name):
                    if b"\0exec\0" in place.read_bytes():
                        os.kill(int(place.parent.name), signal.SIGKILL)

            tasks.start_soon(lose)
            with pytest.raises((SandboxDied, EngineFailed)) as caught:
                await box.call(Call(code=BLOCK))
        # Lost before the proof that precedes the code, the call never began.
        assert caught.value.started == isinstance(caught.value, SandboxDied)
        assert box.poisoned
        await box.watch.died.wait()


async def test_calls_at_the_same_time_each_get_their_own_answer(real_engine: Room) -> None:
    async with real_engine.sandbox() as box:
        answers: dict[int, bytes] = {}

        async def ask(number: int) -> None:
            code = "import sys\nprint(sys.stdin.read())"
            answers[number] = (await box.call(Call(code=code, stdin=b"%d" % number))).stdout

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(ask, number)
    assert answers == {number: b"%d\n" % number for number in range(5)}


async def test_out_of_memory_is_told_from_other_kills_and_the_sandbox_lives(real_engine: Room) -> None:
    async with real_engine.sandbox(profile={"limits": Limits(memory_mb=64)}) as box:
        result = await box.call(Call(code="data = bytearray(300 << 20)"))
        assert (result.oom_killed, result.signal, result.exit_code) == (True, 9, None)
        after = await box.call(Call(code="print('alive')"))
        assert (after.stdout, after.oom_killed) == (b"alive\n", False)


async def test_used_up_cpu_limit_is_reported(real_engine: Room) -> None:
    async with real_engine.sandbox(profile={"limits": Limits(cpu_seconds=1)}) as box:
        result = await box.call(Call(code="while True: pass"))
        assert (result.cpu_limit, result.exit_code, result.timed_out) == (True, None, False)
        # The same exit code without the CPU time is the code's own.
        own = await box.call(Call(code="import sys\nsys.exit(152)"))
        assert (own.cpu_limit, own.exit_code) == (False, 152)


@pytest.mark.parametrize("how", [("kill",), ("rm", "-f")])
async def test_container_ended_by_hand_under_a_call_is_a_death_and_not_exit_137(
    real_engine: Room, how: tuple[str, ...]
) -> None:
    async with real_engine.sandbox() as box:
        async with anyio.create_task_group() as tasks:

            async def end() -> None:
                await seen_inside(real_engine, box.name)
                await real_engine.engine._ask(*how, box.name, doing="ending a sandbox by hand")

            tasks.start_soon(end)
            with pytest.raises(SandboxDied) as caught:
                await box.call(Call(code=BLOCK))
        assert (caught.value.cause, caught.value.started) == ("killed", True)


@pytest.mark.parametrize("how", [("kill",), ("rm", "-f")])
async def test_container_ended_by_hand_while_idle_refuses_the_next_call(
    real_engine: Room, how: tuple[str, ...]
) -> None:
    async with real_engine.sandbox() as box:
        await real_engine.engine._ask(*how, box.name, doing="ending a sandbox by hand")
        with pytest.raises(SandboxDied) as caught:
            await box.call(Call(code="print(1)"))
        assert not caught.value.started


async def test_nothing_of_a_call_shows_outside(real_engine: Room) -> None:
    secret = {part: f"secret-{part}-{os.urandom(6).hex()}" for part in ("code", "env", "stdin", "argv")}
    secret["host"] = os.environ["EMBERPOOL_TEST_FOREIGN"]  # set before the engine was found
    looked: list[bytes] = []
    calls = [
        Call(code=f"# {secret['code']}\n{BLOCK}", env={"KEY": secret["env"]}, stdin=secret["stdin"].encode()),
        Call(argv=("sh", "-c", f": {secret['argv']}; sleep 600"), env={"LD_PRELOAD": secret["env"]}),
    ]
    for call in calls:
        async with real_engine.sandbox() as box, anyio.create_task_group() as tasks:
            tasks.start_soon(box.call, call)
            await seen_inside(real_engine, box.name)
            await anyio.to_thread.run_sync(look_at_clients, box.name, looked)
            tasks.cancel_scope.cancel()
    events = await real_engine.engine._ask(
        "events", "--since", real_engine.info.time, "--until", str(int(time.time()) + 1), "--filter", f"label=emberpool.pool={real_engine.pool}",
        "--format", "{{json .}}", doing="reading events",
    )  # fmt: skip
    assert b"exec_create" in events.stdout
    assert len(looked) >= 2
    for place in [*looked, events.stdout]:
        found = [part for part, text in secret.items() if text.encode() in place]
        assert found == []


async def test_calls_run_as_another_user_than_pid_1_and_cannot_end_it(real_engine: Room) -> None:
    code = """
import os, signal
def uid(pid):
    return [l.split()[1] for l in open(f'/proc/{pid}/status') if l.startswith('Uid')][0]
others = [p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]
print(os.getuid(), sorted({uid(p) for p in others}))
for pid in map(int, others):
    for sign in (signal.SIGKILL, signal.SIGSTOP):
        try:
            os.kill(pid, sign)
            print('reached', pid)
        except PermissionError:
            pass
"""
    async with real_engine.sandbox() as box:
        result = await box.call(Call(code=code))
        assert result.stdout.decode() == f"{box.user.partition(':')[0]} ['{KEEPER}']\n"
        everyone = await box.call(Call(argv=("sh", "-c", "kill -9 -1; echo still here")))
        assert everyone.stdout == b"still here\n"
        assert (await box.call(Call(code="print('stands')"))).stdout == b"stands\n"


async def test_writable_places_are_the_three_that_are_listed(real_engine: Room) -> None:
    code = """
import os
found = []
for place, dirs, files in os.walk('/'):
    if place in ('/proc', '/sys'):
        dirs.clear()
        continue
    try:
        with open(place + '/.probe', 'w'):
            pass
        os.unlink(place + '/.probe')
        found.append(place)
    except OSError:
        pass
print(sorted(found))
open('/tmp/x.sh', 'w').write('#!/bin/sh\\n')
os.chmod('/tmp/x.sh', 0o755)
try:
    os.execv('/tmp/x.sh', ['x'])
except PermissionError:
    print('noexec')
"""
    async with real_engine.sandbox() as box:
        result = await box.call(Call(code=code))
    assert result.stdout.decode() == "['/dev/mqueue', '/dev/shm', '/tmp']\nnoexec\n", result.stderr


async def test_inspect_of_a_started_sandbox_matches_the_profile(real_engine: Room) -> None:
    spec = real_engine.spec()
    box = await start_sandbox(real_engine.engine, real_engine.hub, spec, python=True)
    try:
        facts = await real_engine.engine.inspect(box.name)
    finally:
        await box.destroy()
    host, config = facts["HostConfig"], facts["Config"]
    table = {
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "Privileged": False,
        "CapDrop": ["ALL"],
        "CapAdd": None,
        "SecurityOpt": [
            "no-new-privileges",
            f"seccomp={json.dumps(strict_profile(), separators=(',', ':'))}",
        ],
        "PidsLimit": 128,
        "Tmpfs": {"/tmp": "rw,noexec,nosuid,size=64m,mode=1777,uid={},gid={}".format(*spec.user.split(":"))},
        "Memory": 512 << 20,
        "MemorySwap": 512 << 20,
        "NanoCpus": 1_000_000_000,
        "AutoRemove": True,
        "Init": True,
    }
    assert {key: host[key] for key in table} == table
    assert host["LogConfig"]["Type"] == "none"
    assert {row["Name"]: (row["Soft"], row["Hard"]) for row in host["Ulimits"]} == {
        "nofile": (256, 256),
        "fsize": (64 << 20, 64 << 20),
        "cpu": (30, 31),
        "core": (0, 0),
    }
    assert config["User"] == f"{KEEPER}:{KEEPER}"
    assert config["WorkingDir"] == "/tmp"
    assert (config["Cmd"], config["Entrypoint"]) == (["sleep", "600"], None)
    own = {"HOME=/tmp", "PYTHONDONTWRITEBYTECODE=1", "LANG=C.UTF-8"}
    assert set(config["Env"]) == {*real_engine.image.env, *own, *PROXY_VARIABLES}  # a bare name is one that it has not
    assert [(row["Source"], row["Destination"], row["RW"]) for row in facts["Mounts"]] == [
        (spec.staging, "/tool", False)
    ]
    assert facts["Image"] == real_engine.image.id
    found = check_inspect(facts, spec.profile, spec.image, staging=spec.staging, labels=spec.identity.labels)
    assert {finding.verdict for finding in found} == {"equal"}


async def test_container_that_is_weaker_than_its_profile_is_refused(real_engine: Room) -> None:
    class Weaker(ContainerProfile):
        def run_args(self, *_: object, **__: object) -> list[str]:
            raise AssertionError("a sandbox is not started by run_args")

        def sandbox_args(self, *args: object, **kwargs: object) -> list[str]:
            made = ContainerProfile.sandbox_args(self, *args, **kwargs)  # type: ignore[arg-type]
            return [word for word in made if word != "--read-only"]

    spec = real_engine.spec()
    object.__setattr__(spec, "profile", Weaker(user=spec.profile.user))
    try:
        with pytest.raises(ProfileMismatch, match="read-only root"):
            await start_sandbox(real_engine.engine, real_engine.hub, spec)
    finally:
        await real_engine.engine.remove(spec.identity.name)


async def test_image_that_declares_a_volume_is_refused_before_anything_starts(
    real_engine: Room, tmp_path: Path
) -> None:
    image = await volume_image(real_engine, tmp_path)
    assert image.volumes == ("/data",)
    spec = real_engine.spec(image=image)
    with pytest.raises(ProfileMismatch, match="/data"):
        await start_sandbox(real_engine.engine, real_engine.hub, spec)
    assert await real_engine.gone(spec.identity.name)


async def test_image_without_python_runs_programs_and_refuses_code(real_engine: Room, tmp_path: Path) -> None:
    image = await tiny_image(real_engine, tmp_path)
    async with real_engine.sandbox(image=image, python=None) as box:
        assert not box.python
        env = {"MINE": "one two=3 #4", "LD_LIBRARY_PATH": "/nowhere"}
        shown = await box.call(Call(argv=("env",), env=env))
        lines = dict(line.split("=", 1) for line in shown.stdout.decode().splitlines())
        assert lines["MINE"] == "one two=3 #4"
        assert (lines["LD_LIBRARY_PATH"], lines["USER"], lines["HOME"]) == ("/nowhere", "sandbox", "/tmp")
        echoed = await box.call(Call(argv=("cat",), stdin=b"\x00\xff" * 50_000))
        assert echoed.stdout == b"\x00\xff" * 50_000
        assert (await box.call(Call(argv=("sh", "-c", "exit 7")))).exit_code == 7
        missing = await box.call(Call(argv=("no-such-program",)))
        assert (missing.exit_code, missing.stdout) == (127, b"")
        assert b"no-such-program" in missing.stderr
        for wrong in (
            Call(code="print(1)"),
            Call(argv=("env",), env={"A": "one\ntwo"}),
            Call(argv=("env",), env={"A": "x" * 65_600}),
        ):
            with pytest.raises(InvalidCall):
                await box.call(wrong)
        long = await box.call(Call(argv=("env",), env={"A": "x" * 65_000}))
        assert b"A=" + b"x" * 65_000 in long.stdout
        assert box.poisoned == ""


async def seen_inside(room: Room, name: str) -> None:
    """Return once a client of ``name`` carries a call (that is, an exec's process runs in the container)."""
    with anyio.fail_after(30):
        while not (clients(name) and inside(room, name)):  # noqa: ASYNC110 - the engine tells of its processes when asked
            await anyio.sleep(0.02)


def clients(name: str) -> list[Path]:
    """The ``cmdline`` files of processes that name a container."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if name.encode() in words:
            found.append(place)
    return found


def inside(room: Room, name: str) -> bool:
    """Whether more than the keeper's own two processes run in the container."""
    done = subprocess.run([*room.engine.endpoint.argv, "top", name, "-o", "pid"], capture_output=True, check=False)
    return len(done.stdout.split(b"\n")) > 4


def look_at_clients(name: str, looked: list[bytes]) -> None:
    for place in clients(name):
        try:
            looked.append(place.read_bytes() + (place.parent / "environ").read_bytes())
        except OSError:
            continue


async def running(room: Room, name: str) -> bool:
    return name in [row.name for row in await room.engine.list("emberpool.pool", room.pool) if row.running]
