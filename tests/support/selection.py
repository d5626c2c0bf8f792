"""Which tests run when: the quick set, everything there is (``--full``), and random schedules by fresh seeds.

A plain run leaves out what is marked ``full``, and of a test on the real engine, or one marked ``drawn``, all cases but
one that it draws. Of each file of tests on the real engine it draws ``ENGINE_TESTS``, unless paths are given. A test that is
named by its node ID always runs. A test marked ``seeds`` takes a random ``seed``: each run draws new ones, and a
failure prints how to run that seed again (``--seed N``).
"""

from __future__ import annotations

import os
import random
import re
import secrets
from collections.abc import Container, Generator, Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ENGINE_TESTS = 6
"""How many tests of each file on the real engine are in the quick set of a run without paths, which has to end in minutes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emberpool")
    group.addoption("--full", action="store_true", help="run everything: also tests marked `full`, and more seeds")
    group.addoption("--seed", type=int, help="run random schedules with this seed alone (or EMBERPOOL_SEED)")
    group.addoption(
        "--first-seed", type=int, help="draw the seeds of random schedules from this one (default: new ones)"
    )


def configure(config: pytest.Config) -> None:
    """Draw the number that this run's seeds are drawn from (a worker process takes that of the run), and say how many
    examples a property is tried on."""
    option = config.option
    if option.seed is None and os.environ.get("EMBERPOOL_SEED"):
        option.seed = int(os.environ["EMBERPOOL_SEED"])
    if option.first_seed is None:
        option.first_seed = getattr(config, "workerinput", {}).get("first_seed", secrets.randbits(32))
    if not config.getoption("--hypothesis-profile"):
        # On a busy machine an example may take long for no fault of its own.
        settings.register_profile(
            "emberpool",
            max_examples=400 if option.full else 60,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
        settings.load_profile("emberpool")


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
    cache = getattr(config, "cache", None)  # there is none with -p no:cacheprovider
    return cache.get("cache/lastfailed", {}) if cache is not None else ()


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


def mark_undrawn(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark ``full`` what this run does not draw: all cases but one (a backend, a fault, a limit) of a test on the real engine,
    all but ``cases`` of one that is marked ``drawn``, and of each file on the real engine all but ``ENGINE_TESTS``.

    What failed last time stays. Over some runs each test and each case has its turn.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn") or item.get_closest_marker("engine"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    failed = set(_last_failed(config))
    for name, of_one in cases.items():
        marker = of_one[0].get_closest_marker("drawn")
        _draw(config, name, of_one, marker.kwargs.get("cases", 1) if marker else 1, failed)
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        _draw_of_each_file([item for items in cases.values() for item in items], config, failed)


def _draw_of_each_file(items: Sequence[pytest.Item], config: pytest.Config, failed: Container[str]) -> None:
    """Mark ``full`` all tests on the real engine but ``ENGINE_TESTS`` of each file."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("full"):
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for name, of_one in files.items():
        _draw(config, name, of_one, ENGINE_TESTS, failed)


def _draw(config: pytest.Config, name: str, items: list[pytest.Item], count: int, failed: Container[str]) -> None:
    """Mark ``full`` all of these but so many that this run draws, and those that failed last time."""
    drawn = random.Random(f"{config.option.first_seed} {name}").sample(items, min(count, len(items)))
    for item in items:
        if item not in drawn and item.nodeid not in failed:
            item.add_marker(pytest.mark.full)


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
