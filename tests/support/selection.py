"""Which tests run when: the quick set, everything there is (``--full``), and random schedules by fresh seeds.

A plain run leaves out what is marked ``full``; a test that is named by its node ID always runs. A test marked ``seeds``
takes a random ``seed``: each run draws new ones, and a failure prints how to run that seed again (``--seed N``).
"""

from __future__ import annotations

import os
import random
import re
import secrets
from collections.abc import Generator, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from zlib import crc32

import pytest

BACKENDS = ("asyncio", "trio")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emberpool")
    group.addoption("--full", action="store_true", help="run everything: also tests marked `full`, and more seeds")
    group.addoption("--seed", type=int, help="run random schedules with this seed alone (or EMBERPOOL_SEED)")
    group.addoption(
        "--first-seed", type=int, help="draw the seeds of random schedules from this one (default: new ones)"
    )


def configure(config: pytest.Config) -> None:
    """Draw the number that this run's seeds are drawn from; a worker process takes that of the run."""
    option = config.option
    if option.seed is None and os.environ.get("EMBERPOOL_SEED"):
        option.seed = int(os.environ["EMBERPOOL_SEED"])
    if option.first_seed is None:
        option.first_seed = getattr(config, "workerinput", {}).get("first_seed", secrets.randbits(32))


# --- seeds ------------------------------------------------------------------------------------------------------------


def generate_seeds(metafunc: pytest.Metafunc) -> None:
    """Parametrise a test marked ``seeds(quick, full)`` with so many fresh seeds, after those that failed last time."""
    marker = metafunc.definition.get_closest_marker("seeds")
    if marker is not None:
        metafunc.parametrize("seed", _seeds(metafunc, **marker.kwargs))


def _seeds(metafunc: pytest.Metafunc, *, quick: int, full: int) -> list[int]:
    config = metafunc.config
    if config.option.seed is not None:
        return [config.option.seed]
    node = metafunc.definition.nodeid.partition("[")[0]
    # A test that is named with its seed, and those that the last run has seen fail.
    named = [*map(str, config.args), *_last_failed(config)]
    again = [int(seed) for seed in re.findall(re.escape(node) + r"\[(\d+)\]", "\n".join(named))]
    fresh = random.Random(config.option.first_seed).sample(range(1 << 32), full if config.option.full else quick)
    return list(dict.fromkeys([*again, *fresh]))


def _last_failed(config: pytest.Config) -> Iterable[str]:
    return config.cache.get("cache/lastfailed", {}) if config.cache is not None else ()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say at a failure of a random schedule how to run the same one again."""
    report = yield
    if report.failed and item.get_closest_marker("seeds"):
        seed = item.callspec.params["seed"]  # type: ignore[attr-defined]
        again = f"scripts/test '{item.nodeid.partition('[')[0]}' --seed {seed}"
        report.sections.append(("to run this schedule again", again))
    return report


# --- the quick set ----------------------------------------------------------------------------------------------------


def mark_full(items: Sequence[pytest.Item], kept: Mapping[str, Sequence[str]]) -> None:
    """Mark ``full`` what the quick set leaves out. ``kept`` maps patterns of node IDs, without parameters, to patterns of
    the parameters' IDs that it keeps: none for no case at all."""
    for item in items:
        name, _, case = item.nodeid.partition("[")
        for pattern, cases in kept.items():
            if fnmatchcase(name, pattern) and not any(fnmatchcase(case.removesuffix("]"), one) for one in cases):
                item.add_marker(pytest.mark.full)


def mark_one_backend(items: Sequence[pytest.Item]) -> None:
    """Mark ``full`` one of the two cases of a test that runs on asyncio and on trio: half of the tests keep the one, half
    the other. A test of a single backend is left as it is."""
    cases: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        backend = params.get("anyio_backend")
        if backend in BACKENDS:
            rest = "-".join(part for part in item.nodeid.split("[", 1)[1].rstrip("]").split("-") if part != backend)
            cases.setdefault(f"{item.nodeid.partition('[')[0]}[{rest}]", {})[backend] = item
    for name, both in cases.items():
        if len(both) == len(BACKENDS):
            both[BACKENDS[crc32(name.encode()) % 2]].add_marker(pytest.mark.full)


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``full``, unless everything is wanted or the test is named by its node ID."""
    if config.option.full:
        return
    named = [Path(config.invocation_params.dir, arg).as_posix() for arg in map(str, config.args) if "::" in arg]
    left_out = [
        item
        for item in items
        if item.get_closest_marker("full")
        and not any((config.rootpath / item.nodeid).as_posix().startswith(name) for name in named)
    ]
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)
