"""``emberpool call`` on a real engine with standard streams that are closed, full, or piped into nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pool.config.load import Settings

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the command has a loop of its own


@pytest.mark.full  # a command for each kind of stream; the quick set has them in pool/cli
async def test_a_call_ends_in_no_traceback_whatever_its_streams_are(engine_settings: Settings) -> None:
    state_dir = engine_settings.pool.state_dir
    state_dir.parent.mkdir(exist_ok=True)
    config = state_dir.with_name("config.toml")
    config.write_text(f'[sandbox]\nimage = "{engine_settings.sandbox.image}"\n[pool]\nstate_dir = "{state_dir}"\n')
    lost = "error: stdout cannot be written: {}; what was to be said there is lost\n"
    for words, redirections, wanted in (
        ("cat", "<&-", (0, "", "")),
        ("true", "<&- >&-", (0, "", "")),  # it had nothing to say
        ("echo said", ">/dev/full", (1, "", lost.format("No space left on device"))),
        ("sh -c 'echo said >&2; exit 3'", "2>/dev/full", (3, "", "")),
        ("echo said", "| true", (1, "", "")),
    ):
        command = f"set -o pipefail; {sys.executable} -m pool.cli call --config {config} -- {words} {redirections}"
        done = subprocess.run(  # noqa: ASYNC221
            ["bash", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False
        )
        noted = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("emberpool: ")) + "\n"
        assert (done.returncode, done.stdout, noted.lstrip("\n")) == wanted, (words, redirections)
    assert list(state_dir.parent.glob("one-shot-*")) == []
