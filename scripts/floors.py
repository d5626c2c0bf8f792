"""Run the fast tests with the lowest versions of its dependencies that pyproject.toml allows.

Each ``name>=version`` becomes ``name==version`` in a constraints file; pip installs from it into ``.venv-floors``, which is kept
and renewed when the floors change.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / ".venv-floors"
TOOLS = ("pyte", "pytest", "pytest-timeout", "pytest-trio", "pytest-xdist", "hypothesis")
"""What runs the tests; users of the library do not install it, so its versions are not held down."""
TESTS = (
    "tests/executor/common", "tests/executor/engine", "tests/executor/staging", "tests/pool/config", "tests/pool/ledger/test_ledger.py",
    "tests/pool/cli/test_output.py", "tests/pool/test_pool.py", "tests/pool/test_lifecycle.py", "tests/test_emberpool.py",
)  # fmt: skip


def floors() -> list[str]:
    """The lowest allowed version of each dependency, as a constraint."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needs = {*project["dependencies"], *project["optional-dependencies"]["trio"]}
    for need in sorted(needs):
        if ">=" not in need:
            raise SystemExit(f"{need!r} in pyproject.toml names no lowest version; write it as name>=version")
    return sorted(need.replace(">=", "==") for need in needs)


def main() -> int:
    """Install, and run the tests; returns pytest's exit status."""
    constraints = "\n".join(floors()) + "\n"
    python, kept = PLACE / "bin" / "python", PLACE / "constraints.txt"
    if not kept.is_file() or kept.read_text("utf-8") != constraints:
        print("lowest allowed versions:", ", ".join(floors()), flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", PLACE], check=True)
        draft = PLACE / "constraints.draft.txt"
        draft.write_text(constraints, "utf-8")
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", draft]
        subprocess.run([*pip, "-e", f"{ROOT}[trio]", *TOOLS], check=True)
        draft.rename(kept)
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-n", "3", "-W", "default::DeprecationWarning", *TESTS], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
