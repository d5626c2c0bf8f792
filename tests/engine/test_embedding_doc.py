"""Every program of docs/embedding.md runs, as it stands there, with the real libraries."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from mcp import Client, StdioServerParameters

from pool.config.load import Settings
from tests.engine.documents import ROOT, blocks, run_fragments, variables

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

PROGRAMS = {block.partition("\n")[0].removeprefix("# "): block for block in blocks("embedding.md", "python")}


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The programs choose their loop themselves; their callers need one only."""
    return str(request.param)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with every program of the page."""
    for name, source in PROGRAMS.items():
        if name.endswith(".py"):
            (tmp_path / name).write_text(source)
    return tmp_path


@asynccontextmanager
async def serving(argv: list[str], settings: Settings, place: Path, **env: str) -> AsyncIterator[Any]:
    """A server's process. It has to end by itself when the block is left."""
    words = {**variables(settings), **env}
    async with await anyio.open_process(argv, cwd=place, env=words, stdout=None, stderr=subprocess.PIPE) as process:
        try:
            yield process
            with anyio.fail_after(40):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.stderr is not None
        errors = b"".join([chunk async for chunk in process.stderr]).decode()
        assert "Traceback" not in errors, errors
        assert "Warning" not in errors, errors


async def answered(client: httpx.AsyncClient, path: str, *, method: str = "GET", **request: Any) -> httpx.Response:
    """What a server answers, once it listens."""
    with anyio.fail_after(40):
        while True:
            try:
                return await client.request(method, path, timeout=40, **request)
            except httpx.ConnectError:
                await anyio.sleep(0.05)


async def test_fastapi_serves_and_ends_in_order_while_a_call_runs(
    engine_settings: Settings, place: Path, state_dir: Path
) -> None:
    path = str(state_dir.parent / "gateway.sock")
    argv = [sys.executable, "-m", "uvicorn", "gateway:app", "--uds", path, "--log-level", "warning"]
    async with (
        serving(argv, engine_settings, place) as server,
        httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), base_url="http://gateway") as client,
    ):
        assert (await answered(client, "/ready")).json()["engine"] == "up"
        first = await client.post("/run/a", content="open('/tmp/x', 'w').write('1'); print(6 * 7)", timeout=40)
        assert first.json() == {"exit_code": 0, "stdout": "42\n"}
        assert (await client.delete("/run/a")).json() == {"ended": True}
        assert (await client.delete("/run/a")).json() == {"ended": False}
        last: list[httpx.Response] = []

        async def run() -> None:
            code = "import time; time.sleep(2); print('done')"
            last.append(await client.post("/run/b", content=code, timeout=40))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            with anyio.fail_after(20):
                while not (await client.get("/ready", timeout=40)).json().get("running"):  # noqa: ASYNC110 - asked by HTTP
                    await anyio.sleep(0.05)
            server.send_signal(signal.SIGTERM)
        assert last[0].json() == {"exit_code": 0, "stdout": "done\n"}


async def test_a_pytest_fixture_of_module_scope_holds_a_pool(engine_settings: Settings, place: Path) -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:trio", "test_tools.py"]
    done = await anyio.run_process(argv, cwd=place, env=variables(engine_settings), check=False)
    assert done.returncode == 0, done.stdout.decode()
    assert b"2 passed" in done.stdout


@pytest.mark.full  # the quick set has FastAPI and pytest of this page
async def test_flask_serves_from_threads_through_a_portal(engine_settings: Settings, place: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with (
        serving([sys.executable, "web.py"], engine_settings, place, PORT=str(port)) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        answers: dict[str, str] = {}

        async def run(chat: str) -> None:
            answer = await answered(client, f"/run/{chat}", method="POST", content=f"print('{chat}')")
            answers[chat] = answer.json()["stdout"]

        async with anyio.create_task_group() as tasks:
            for chat in ("a", "b"):
                tasks.start_soon(run, chat)
        assert answers == {"a": "a\n", "b": "b\n"}
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


# In a process of its own: what the client leaves behind (event loops, sockets) warns when it is collected.
NOTEBOOK = """
import json, sys
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3")
for cell in json.load(sys.stdin):
    shown = []
    reply = client.execute_interactive(cell, timeout=60, output_hook=lambda m: shown.append(m["content"].get("text", "")))
    print(json.dumps([reply["content"]["status"], "".join(filter(None, shown))]))
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


@pytest.mark.full  # starts a Jupyter kernel
async def test_a_notebooks_cells_share_a_pool(engine_settings: Settings) -> None:
    cells = [source for name, source in PROGRAMS.items() if name.startswith("cell ")]
    done = await anyio.run_process(
        [sys.executable, "-c", NOTEBOOK], input=json.dumps(cells).encode(), env=variables(engine_settings), cwd=ROOT
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [status for status, _ in answers] == ["ok"] * 4, answers
    assert "42" in answers[1][1]
    assert "Output(stream='stdout'" in answers[2][1]


@pytest.mark.full  # the quick set has FastAPI and pytest of this page
async def test_an_mcp_server_speaks_over_stdio(engine_settings: Settings, place: Path) -> None:
    server = StdioServerParameters(
        command=sys.executable, args=["server.py"], env=variables(engine_settings), cwd=str(place)
    )
    with anyio.fail_after(60):
        async with Client(server) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["run_python"]
            answer = await client.call_tool("run_python", {"code": "print(6 * 7)"})
            assert "42" in json.dumps([content.model_dump(mode="json") for content in answer.content])
            assert not answer.is_error


async def test_workers_take_state_directories_of_their_own(engine_settings: Settings) -> None:
    names: dict[str, Any] = {}
    await run_fragments([PROGRAMS["workers.py"]], names)
    start = names["start_in_a_free_place"]
    pools = [await start(engine_settings), await start(engine_settings)]
    places = [pool.settings.pool.state_dir.name for pool in pools]
    assert places == ["state-0", "state-1"]
    await pools[0].aclose()
    pools.append(await start(engine_settings))
    assert pools[2].settings.pool.state_dir.name == "state-0"
    for pool in pools:
        await pool.aclose()


def test_the_sizing_example_is_a_valid_configuration() -> None:
    (example,) = blocks("embedding.md", "toml")
    settings = Settings(**tomllib.loads(example))
    assert (settings.pool.max_sandboxes, settings.pool.reclaim_idle_after) == (40, 60.0)
