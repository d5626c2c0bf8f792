"""Make, check and compare the strict seccomp profile; see ``executor/sandbox/seccomp.py``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from executor.sandbox.seccomp import STRICT_LIST, STRICT_PROFILE, allowed, as_json, beyond, build

ROOT = Path(__file__).resolve().parents[1]
KNOWN_DEFAULT = ROOT / "tests" / "data" / "engine_seccomp.json"


def main() -> int:
    """Do what the arguments ask; the exit status is 0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--write", action="store_true", help="make the profile out of its list")
    asked.add_argument("--check", action="store_true", help="exit with 1 where the profile is not what its list makes")
    asked.add_argument(
        "--compare",
        nargs="?",
        type=Path,
        const=KNOWN_DEFAULT,
        metavar="FILE",
        help="exit with 1 where it allows what an engine's default refuses: the linux.seccomp of a container's config.json "
        "(default: the one of docker 20.10.24 on amd64, kept for the tests)",
    )
    args = parser.parse_args()
    made = build(STRICT_LIST.read_text("utf-8"))
    if args.write:
        STRICT_PROFILE.write_text(as_json(made), "utf-8")
        print(f"{STRICT_PROFILE.relative_to(ROOT)}: {len(allowed(made))} system calls allowed")
        return 0
    if args.check:
        current = STRICT_PROFILE.read_text("utf-8") == as_json(made)
        print("current" if current else "not current: run scripts/seccomp --write")
        return 0 if current else 1
    default = json.loads(args.compare.read_text("utf-8"))
    default = default.get("linux", {}).get("seccomp", default)
    more = beyond(made, default)
    fewer = sorted(set(allowed(default)) - set(allowed(made)))
    print(f"the default allows {len(allowed(default))} calls, the strict profile {len(allowed(made))} of them")
    print("allowed beyond the default:", " ".join(more) or "nothing")
    print("allowed by the default alone:", " ".join(fewer))
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
