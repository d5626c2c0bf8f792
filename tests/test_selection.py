"""What a run of the tests selects, asked of pytest in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT, selection
from tests.support.selection import mark_undrawn

CHAOS = "tests/pool/test_chaos.py::test_whatever_fails_every_call_ends_once_and_the_pool_heals"
TRACED = "tests/engine/test_traced.py"


def collected(*words: str, **env: str) -> list[str]:
    """The node IDs that a run with these arguments has."""
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words]
    environment = {name: value for name, value in os.environ.items() if name != "EMBERPOOL_SEED"} | env
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def names(nodes: list[str]) -> Counter[str]:
    return Counter(node.partition("[")[0] for node in nodes)


@pytest.mark.full  # each process imports everything
def test_a_quick_run_has_fresh_seeds_and_one_case_of_each_test_on_the_engine() -> None:
    files = [CHAOS.partition("::")[0], TRACED]
    one, other = collected(*files), collected(*files, "--first-seed", "1")
    full = collected(*files, "--first-seed", "1", "--full")
    seeds = [{node for node in nodes if node.startswith(CHAOS)} for nodes in (one, other, full)]
    assert [len(nodes) for nodes in seeds] == [15, 15, 100]
    assert not seeds[0] & seeds[1]
    assert seeds[1] < seeds[2]
    traced = [names([node for node in nodes if node.startswith(TRACED)]) for nodes in (one, other, full)]
    assert traced[0] == traced[1] == Counter(dict.fromkeys(traced[2], 1))
    assert max(traced[2].values()) > 1


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("words", "env", "seed"),
    [([CHAOS, "--seed", "7"], {}, 7), ([CHAOS], {"EMBERPOOL_SEED": "8"}, 8), ([f"{CHAOS}[9]"], {}, 9)],
    ids=["option", "environment", "named"],
)
def test_one_seed_is_run_alone(words: list[str], env: dict[str, str], seed: int) -> None:
    assert collected(*words, **env) == [f"{CHAOS}[{seed}]"]


def test_over_some_runs_each_case_has_its_turn() -> None:
    class Case:
        def __init__(self, nodeid: str) -> None:
            self.nodeid, self.full = nodeid, False

        def get_closest_marker(self, name: str) -> pytest.Mark | None:
            return pytest.mark.drawn(cases=2).mark if name == "drawn" else None

        def add_marker(self, marker: object) -> None:
            self.full = True

    drawn: set[str] = set()
    for first_seed in range(50):
        cases: list[Any] = [Case(f"a.py::test[{name}]") for name in "wxyz"]
        config: Any = SimpleNamespace(
            option=SimpleNamespace(first_seed=first_seed), args_source=pytest.Config.ArgsSource.ARGS
        )
        mark_undrawn(config, cases)
        left = [case.nodeid for case in cases if not case.full]
        assert len(left) == 2
        drawn.update(left)
    assert len(drawn) == 4


def test_a_quick_run_without_paths_draws_some_tests_of_each_file_on_the_engine() -> None:
    class Test:
        def __init__(self, nodeid: str) -> None:
            self.nodeid, self.full = nodeid, False

        def get_closest_marker(self, name: str) -> object:
            return pytest.mark.engine.mark if name == "engine" or (name == "full" and self.full) else None

        def add_marker(self, marker: object) -> None:
            self.full = True

    drawn: set[str] = set()
    for first_seed in range(100):
        tests: list[Any] = [
            Test(f"{file}.py::test_{number}[{case}]") for file in "ab" for number in range(20) for case in "xy"
        ]
        config: Any = SimpleNamespace(
            option=SimpleNamespace(first_seed=first_seed), args_source=pytest.Config.ArgsSource.TESTPATHS
        )
        mark_undrawn(config, tests)
        left = [test.nodeid for test in tests if not test.full]
        assert Counter(node[0] for node in left) == {"a": selection.ENGINE_TESTS, "b": selection.ENGINE_TESTS}
        drawn.update(left)
    assert len(drawn) == 80
