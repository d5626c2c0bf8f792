"""Run a part of CPython's own test suite in a session, as a cold call, and under the engine's seccomp profile; compare.

The suite is Debian's libpython3.11-testsuite, of the very version that the image built from Debian's packages has; it is
downloaded into a directory of the machine's cache and mounted read-only. A test counts as different where one run says
another word of it (ok, FAIL, ERROR, skipped) than the run in a session under the strict profile.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio

from emberpool import SandboxPool, Settings, configure_logs

MODULES = [
    "test_json",
    "test_os",
    "test_subprocess",
    "test_threading",
    "test_socket",
    "test_asyncio.test_tasks",
    "test_concurrent_futures",
]
PACKAGES = ("libpython3.11-testsuite", "libpython3.11-stdlib")  # the second has the suite's own runner
INSIDE = "/usr/lib/python3.11/test"
CODE = """
import runpy, sys
sys.argv[1:] = ["-v", %r]
runpy.run_module("test", run_name="__main__", alter_sys=True)
"""
TIMEOUT = 1200.0
_OUTCOME = re.compile(
    r"^(?P<test>\w+ \([\w.]+\))(?:\n[^\n]*?)? \.\.\. (?P<rest>(?:.|\n)*?)(?P<word>ok|FAIL|ERROR|skipped|expected failure)\b",
    re.MULTILINE,
)


def fetch() -> Path:
    """Download and unpack the suite, once; the directory that holds it."""
    place = Path(tempfile.gettempdir()) / "emberpool-cpython-suite"
    suite = place / "usr/lib/python3.11/test"
    if not suite.is_dir():
        place.mkdir(exist_ok=True)
        subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=place, check=True)
        for package in sorted(place.glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, place], check=True)
    return suite


def settings(suite: Path, state: Path, seccomp: str) -> Settings:
    """A pool whose limits leave the suite room; everything else is the default."""
    return Settings(
        sandbox={
            "mounts": (f"{suite}:{INSIDE}:ro",), "cpu_seconds": 3600, "memory_mb": 2048, "open_files": 1024, "pids": 512,
            "tmpfs_mb": 512, "file_size_mb": 4096, "seccomp": seccomp,
        },
        pool={"state_dir": state / seccomp, "min_standby": 0, "max_sandboxes": 1, "max_starting": 1, "max_cold": 1},
        call={"timeout": TIMEOUT, "max_output": 64 << 20},
    )  # fmt: skip


def outcomes(said: bytes) -> dict[str, str]:
    """What a run of the suite says of each of its tests."""
    text = said.decode("utf-8", "replace")
    return {match["test"]: match["word"] for match in _OUTCOME.finditer(text)}


async def compare(modules: list[str]) -> int:
    """Run each module three times and print what differs; the number of differing tests."""
    suite = await anyio.to_thread.run_sync(fetch)
    differing = 0
    with tempfile.TemporaryDirectory() as state:
        async with (
            SandboxPool(settings(suite, Path(state), "strict")) as strict,
            SandboxPool(settings(suite, Path(state), "engine")) as engine,
        ):
            for module in modules:
                code = CODE % module
                async with await strict.acquire("cpython", module, timeout=60) as session:
                    warm = await session.call(code=code)
                    await session.close()
                cold = await strict.call_cold(code=code)
                async with await engine.acquire("cpython", module, timeout=60) as session:
                    default = await session.call(code=code)
                    await session.close()
                found = [outcomes(run.stdout + run.stderr) for run in (warm, cold, default)]
                print(f"{module}: {len(found[0])} tests in a session, exit {warm.exit_code}; cold {cold.exit_code}, engine's"
                      f" profile {default.exit_code}", flush=True)  # fmt: skip
                if not found[0]:
                    print((warm.stdout + warm.stderr).decode("utf-8", "replace")[-2000:])
                    return 1
                for test in sorted(set().union(*found)):
                    words = [one.get(test, "not run") for one in found]
                    if len(set(words)) > 1:
                        differing += 1
                        print(f"  {test}: session {words[0]}, cold {words[1]}, engine's profile {words[2]}", flush=True)
    print(f"{differing} tests differ")
    return differing


def main() -> int:
    """Run the modules that the arguments name, or the usual ones; the exit status is 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES, metavar="MODULE")
    configure_logs("warning")
    anyio.run(compare, list(parser.parse_args().modules))
    return 0


if __name__ == "__main__":
    sys.exit(main())
