"""Staged tool directories on a real engine: what a sandbox's calls see of them, and what they can do to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.sandbox.request import Call
from executor.sandbox.sandbox import Sandbox
from executor.sandbox.start import start_sandbox
from executor.staging.versions import Staging
from tests.engine.conftest import Room

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

TOOL = "import helper, os\ndef tool():\n    return helper.word, os.listdir(os.path.dirname(__file__))\n"


async def ask(box: Sandbox, code: str) -> str:
    result = await box.call(Call(code=code))
    assert result.ok, result.stderr.decode()
    return result.stdout.decode().strip()


async def test_a_running_sandbox_sees_a_tool_and_its_next_version_and_can_change_neither(
    real_engine: Room, tmp_path: Path
) -> None:
    tool = tmp_path / "tools" / "tool"
    (tool / "lib").mkdir(parents=True)
    (tool / "tool.py").write_text(TOOL)
    (tool / "lib" / "helper.py").write_text("word = 'one'")
    (tool / "helper.py").symlink_to("lib/helper.py")
    (tool / "run").write_text("#!/bin/sh\necho ran\n")
    (tool / "run").chmod(0o700)
    spec = real_engine.spec()
    staging = Staging(Path(spec.staging))
    try:
        box = await start_sandbox(real_engine.engine, real_engine.hub, spec, python=True)
        first = staging.stage(tool, [tmp_path], hold=True)
        use = "import sys; sys.path.insert(0, '/tool/{}')\nimport tool; word, names = tool.tool()\nprint(word, *sorted(names))"
        assert await ask(box, use.format(first)) == "one helper.py lib run tool.py"
        assert (await box.call(Call(argv=(f"/tool/{first}/run",)))).stdout == b"ran\n"
        (tool / "lib" / "helper.py").write_text("word = 'two'")
        second = staging.stage(tool, [tmp_path])
        assert (await ask(box, use.format(second))).startswith("two ")
        assert (await ask(box, use.format(first))).startswith("one ")
        listing = "import os; print(*sorted(os.listdir('/tool')))"
        assert await ask(box, listing) == " ".join(sorted([first, second, "nonce", "witness"]))
        # The inside may lock what it sees; nobody out here waits for that.
        lock = f"import fcntl; fcntl.flock(open('/tool/{first}/tool.py'), fcntl.LOCK_EX); print('locked')"
        assert await ask(box, lock) == "locked"
        staging.release(first)
        assert await ask(box, listing) == " ".join(sorted([second, "nonce", "witness"]))
        attempt = (
            "import os\nfor act in (lambda: open(p + '/tool.py', 'a'), lambda: os.chmod(p + '/tool.py', 0o777),\n"
            "            lambda: os.unlink(p + '/tool.py'), lambda: os.mkdir('/tool/x'), lambda: os.rename(p, p + 'x')):\n"
            "    try: act()\n    except OSError as error: print(error.errno)\n    else: print('done')"
        )
        denied = (await ask(box, f"p = '/tool/{second}'\n{attempt}")).split()
        assert len(denied) == 5
        assert set(denied) <= {"1", "13", "30"}
    finally:
        await real_engine.engine.remove(spec.identity.name)
