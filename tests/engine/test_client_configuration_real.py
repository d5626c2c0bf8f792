"""What a docker client's own configuration does, and does not do, to sandboxes; and what an armed runner holds of its host."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.engine.docker import CommandLineEngine
from executor.engine.locate import find_engine
from executor.engine.paths import ENGINE_HOME, engine_paths
from executor.errors import EngineUnavailable
from executor.sandbox.request import Call
from pool.config.descriptors import ARMED
from pool.config.load import Settings
from pool.pool import SandboxPool
from tests.engine.conftest import Room
from tests.engine.tiny import tiny_image

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

PROXIES = {
    "httpProxy": "http://user:password@proxy:1", "httpsProxy": "http://proxy:2", "noProxy": "inner", "ftpProxy": "http://proxy:3",
    "allProxy": "socks5://proxy:4",
}  # fmt: skip


@pytest.fixture
def configured(real_engine: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    """The engine by a client whose configuration puts proxies into every container."""
    (tmp_path / "config.json").write_text(json.dumps({"proxies": {"default": PROXIES}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return replace(real_engine, engine=CommandLineEngine(real_engine.engine.endpoint))


async def test_proxies_of_the_clients_configuration_reach_no_container(configured: Room, tmp_path: Path) -> None:
    tiny = await tiny_image(configured, tmp_path)
    seen = b""
    async with configured.armed() as box:
        code = "print(open('/proc/self/environ').read(), __import__('os').environ)"
        seen += (await box.call(Call(code=code))).stdout + (await box.call(Call(argv=("env",)))).stdout
        assert (await box.call(Call(argv=("env",), env={"HTTP_PROXY": "mine"}))).stdout.count(b"HTTP_PROXY=mine") == 1
    async with configured.sandbox(python=False, image=tiny) as box:
        seen += (await box.call(Call(argv=("env",)))).stdout
    seen += (await configured.cold(Call(argv=("env",)))).stdout
    seen += (await configured.cold(Call(argv=("env",)), python=False, image=tiny)).stdout
    assert seen.count(b"HOME=/tmp") >= 4
    assert b"proxy" not in seen.lower()


async def test_command_that_is_installed_while_the_pool_runs_is_used(
    engine_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, info = await find_engine()
    if info.kind != "docker" or os.environ.get(ENGINE_HOME):
        pytest.skip("a command of another name is taken for docker")
    docker = shutil.which(engine.endpoint.binary)
    assert docker
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for variable, value in engine.endpoint.env:
        monkeypatch.setenv(variable, value)
    if engine.endpoint.private:
        monkeypatch.setenv("DOCKER_HOST", engine_paths().url)
    sandbox = engine_settings.sandbox.model_copy(update={"binary": "late-engine"})
    async with SandboxPool(engine_settings.model_copy(update={"sandbox": sandbox})) as pool:
        with pytest.raises(EngineUnavailable, match=r"sandbox\.binary: there is no command late-engine") as caught:
            await pool.acquire("agent", "session")
        assert (caught.value.retryable, caught.value.retry_after) == (False, None)
        (tmp_path / "late-engine").symlink_to(docker)
        with anyio.fail_after(15):
            while pool.snapshot().fault:  # noqa: ASYNC110 - the pool has no event for it
                await anyio.sleep(0.1)
        session = await pool.acquire("agent", "session")
        assert (await session.call(["echo", "here"])).stdout == b"here\n"


async def test_an_armed_runner_holds_so_many_files_and_no_thread(engine_settings: Settings) -> None:
    def held() -> tuple[int, int]:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count()

    async with SandboxPool(engine_settings) as pool:
        sessions: list[Any] = []
        counts = []
        for number in range(3):
            sessions.append(await pool.acquire("agent", f"session-{number}"))
            counts.append(held())
        assert [files - counts[0][0] for files, _ in counts] == [0, ARMED, 2 * ARMED]
        assert {threads for _, threads in counts} == {counts[0][1]}
