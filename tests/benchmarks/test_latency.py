"""The latency benchmark: its arithmetic, its report, its refusals, and one short run on a real engine."""

from __future__ import annotations

import ast
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import cast

import anyio
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import bench as bench_module
from benchmarks import modes as modes_module
from benchmarks import profile, tricks
from benchmarks.bench import Bench, BenchmarkError, check_finished
from benchmarks.document import BEGIN, END, write_figures
from benchmarks.floor import COMMAND, Floor, FloorError
from benchmarks.latency import app
from benchmarks.machine import cpu_model
from benchmarks.modes import MODES, Measure, Mode, mode
from benchmarks.plot import check_plot, plot
from benchmarks.report import Report, milliseconds
from benchmarks.rounds import sample
from benchmarks.stats import Summary, percentile, ratios, summarise
from executor import inside
from executor.engine.locate import find_engine
from executor.engine.process import Finished, client_environment
from pool.pool import SandboxPool
from tests.conftest import ENGINE_IMAGE, engine_fault
from tests.support import ROOT

MACHINE: dict[str, str | int | float] = {
    "cpu": "Some CPU", "cores": 2, "memory_mb": 4096, "load_1m": 0.5, "kernel": "Linux 6", "python": "3.11.7",
    "engine": "docker 20.10", "runtime": "runc", "cgroup": "1", "image": "some:1", "image_id": "sha256:0",
    "backend": "asyncio", "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip
USUAL = ["cold", "warm_exec", "armed", "resident", "floor", "acquire_standby", "acquire_cold"]
PARTS = ["sandbox", "echo", "bare_exec"]
POOLS, OWN = 5, 2
"""Pools of a usual run (the shared one, one for each kind of session, one for each acquire), and sandboxes without one."""
REPOSITORY = ROOT


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """The command configures logging for the whole process; no other test may log into its closed stream."""
    yield
    structlog.reset_defaults()


def report(samples: dict[str, Sequence[float]]) -> Report:
    return Report(MACHINE, [MODES[name] for name in samples], samples)


# Percentiles

latencies = st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=1, max_size=300)


@given(latencies, st.integers(1, 100))
def test_percentile_is_the_smallest_latency_that_enough_do_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(values, percent)

    def covered(limit: float) -> int:
        return 100 * sum(value <= limit for value in values)

    assert found in values
    assert covered(found) >= percent * len(values)
    assert all(covered(value) < percent * len(values) for value in values if value < found)


@given(latencies)
def test_the_50th_percentile_is_the_low_median_and_the_100th_the_maximum(values: list[float]) -> None:
    assert percentile(values, 50) == statistics.median_low(values)
    assert percentile(values, 100) == max(values)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_percentile_of_nothing_or_of_no_percentage_is_refused(values: list[float], percent: int) -> None:
    with pytest.raises(ValueError, match="percent"):
        percentile(values, percent)


def test_summary_is_in_milliseconds_whatever_the_order() -> None:
    assert summarise([number / 1000 for number in range(100, 0, -1)]) == Summary(100, 50.0, 95.0, 99.0)


def test_ratios_say_how_often_each_median_goes_into_the_cold_one() -> None:
    modes = {"cold": Summary(1, 400.0, 0, 0), "warm_exec": Summary(1, 80.0, 0, 0), "other": Summary(1, 800.0, 0, 0)}
    assert ratios(modes) == {"cold/warm_exec": 5.0, "cold/other": 0.5}
    del modes["cold"]
    assert ratios(modes) == {}


def test_ratios_compare_the_armed_call_with_the_plain_one_and_the_resident_one_with_the_floor() -> None:
    medians = {"warm_exec": 60.0, "armed": 2.0, "resident": 1.5, "floor": 1.2}
    assert ratios({name: Summary(1, p50, 0, 0) for name, p50 in medians.items()}) == {
        "warm_exec/armed": 30.0, "resident/floor": 1.25,
    }  # fmt: skip


# Modes, in turn


class Quiet:
    """Progress that nobody watches."""

    def begins(self, rounds: int) -> None:
        """Say nothing."""

    def round(self, number: int, rounds: int) -> None:
        """Say nothing."""


def fake_mode(name: str, seen: list[str]) -> Mode:
    @mode("a fake")
    async def fake(_: Bench) -> AsyncIterator[Measure]:
        seen.append(f"open {name}")

        async def measure() -> float:
            seen.append(name)
            return float(len(seen))

        yield measure
        seen.append(f"shut {name}")

    return Mode(name, "a fake", fake, True)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Mode]:
    monkeypatch.setattr(modes_module, "MODES", {})
    return modes_module.MODES


@pytest.mark.anyio
async def test_modes_are_measured_in_turn_each_right_after_one_that_does_not_count(registry: dict[str, Mode]) -> None:
    seen: list[str] = []
    modes = [fake_mode("a", seen), fake_mode("b", seen)]
    samples = await sample(cast(Bench, None), modes, 2, Quiet())
    assert seen == ["open a", "open b", *"ab", *"aabb", *"aabb", "shut b", "shut a"]
    assert samples == {"a": [6.0, 10.0], "b": [8.0, 12.0]}


def test_a_mode_is_registered_by_writing_one_function(registry: dict[str, Mode]) -> None:
    @mode("what it times", usual=False)
    async def another(_: Bench) -> AsyncIterator[Measure]:
        yield instantly

    async def instantly() -> float:
        return 0.0

    assert registry == {"another": Mode("another", "what it times", another, False)}


def test_the_usual_modes_are_cold_every_warm_one_the_floor_and_both_acquires() -> None:
    assert [it.name for it in MODES.values() if it.usual] == USUAL


@pytest.mark.parametrize(("code", "stdout"), [(0, b""), (0, b"1"), (1, b"1\n"), (125, b"")])
def test_a_failed_call_is_never_a_measurement(code: int, stdout: bytes) -> None:
    check_finished(Finished(0, b"1\n", b""))
    with pytest.raises(BenchmarkError, match=f"exit status {code}.*some reason"):
        check_finished(Finished(code, stdout, b"some\nreason\n"))


# The report


def test_json_has_the_machine_the_modes_and_their_ratios() -> None:
    shown = report({"cold": [0.4, 0.5, 0.6], "warm_exec": [0.1, 0.1, 0.2]}).as_json()
    assert json.loads(json.dumps(shown)) == {
        "machine": MACHINE,
        "modes": {
            "cold": {"n": 3, "p50_ms": 500.0, "p95_ms": 600.0, "p99_ms": 600.0},
            "warm_exec": {"n": 3, "p50_ms": 100.0, "p95_ms": 200.0, "p99_ms": 200.0},
        },
        "ratios": {"cold/warm_exec": 5.0},
    }


def test_table_shows_every_mode_its_ratio_and_the_machine() -> None:
    console = Console(width=80, record=True, quiet=False, file=Path(os.devnull).open("w"))  # noqa: SIM115
    with console.file:
        report({"cold": [0.4], "warm_exec": [0.1]}).print(console)
    text = console.export_text()
    rows = [line.split() for line in text.splitlines()]
    assert ["cold", "1", "400.0", "400.0", "400.0"] in rows
    assert ["warm_exec", "1", "100.0", "100.0", "100.0", "4.0x"] in rows
    assert "docker 20.10, runc, some:1; Some CPU, 2 cores, Linux 6" in text


@given(st.floats(min_value=0.01, max_value=1e6))
def test_shown_milliseconds_are_close_to_the_measured_ones(value: float) -> None:
    assert math.isclose(float(milliseconds(value).replace(",", "")), value, rel_tol=0.06)


def test_cpu_is_named_by_the_kernel_or_else_by_its_architecture(tmp_path: Path) -> None:
    place = tmp_path / "cpuinfo"
    assert cpu_model(place)
    place.write_text("processor\t: 0\nmodel name\t: Fast CPU 9000\n")
    assert cpu_model(place) == "Fast CPU 9000"


def test_table_tells_a_ratio_beside_what_it_ought_to_be() -> None:
    console = Console(width=80, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    with console.file:
        report({"resident": [0.003], "floor": [0.001]}).print(console)
    assert "resident/floor is 3.0; it ought to be at most 1.5" in console.export_text()


# The page


def test_figures_replace_what_stands_between_the_marks_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nearlier\n{END}\nafter\n")
    run = report({"cold": [0.4], "sandbox": [0.0015], "floor": [0.001], "echo": [0.0004], "resident": [0.002]})
    for _ in range(2):
        write_figures(run, page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "earlier" not in text
    assert text.count("| `resident` | 2.00 | 2.00 | 2.00 | 200.0x |") == 1
    assert "| `cold/resident` | 200.0 | at least 180 |" in text
    assert "| `resident` less `sandbox` | 0.50 |" in text
    assert "| `echo` | 0.40 |" in text
    assert "`armed`" not in text


def test_a_page_without_a_place_for_figures_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    assert "it has no place for figures" in refusal("--docs", str(page))
    assert page.read_text() == "nothing"


# The floor


def test_the_floor_measures_calls_of_its_program_and_refuses_another_one() -> None:
    loop = Floor([sys.executable, "-I", "-B", "-c", COMMAND[-1]])
    try:
        assert all(loop.once() > 0 for _ in range(3))
    finally:
        loop.close()
    loop = Floor([sys.executable, "-c", "print('-', end='')"])
    try:
        with pytest.raises(FloorError, match="something else"):
            loop.once()
    finally:
        loop.close()


def test_a_floor_whose_client_ends_says_so() -> None:
    loop = Floor([sys.executable, "-c", "raise SystemExit(7)"])
    try:
        with pytest.raises(FloorError, match="exit status 7"):
            loop.once()
    finally:
        loop.close()


# The plot


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".SVG", b"<?xml")])
def test_plot_writes_a_picture_of_the_kind_that_its_name_says(tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = tmp_path / f"plot{suffix}"
    check_plot(path)
    plot(report({"cold": [0.4, 0.5], "acquire_standby": [0.0003, 0.0004]}), path)
    assert path.read_bytes().startswith(begins)


def test_plot_without_matplotlib_names_the_extra_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "emberpool[benchmarks]" in refusal("--plot", "x.png")


# The command


def refusal(*args: str) -> str:
    """What the command prints when it refuses: one line, on stderr."""
    result = CliRunner().invoke(app, list(args))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_without_an_engine_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "emberpool engine up" in refusal("--quick")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--mode", "cool"), "'cool' is unknown; there are cold, warm_exec"),
        (("--plot", "x.jpeg"), "must end in .png or .svg"),
        (("--plot", "/no/where/x.png"), "there is no directory /no/where"),
        (("--json", "/no/where/x.json"), "there is no directory /no/where"),
        (("--config", "/no/where.toml"), "/no/where.toml: there is no such file"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line_before_anything_starts(
    args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert said in refusal(*args)


# On a real engine


@pytest.fixture
def real_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with the image of the tests, for a command that is configured by its environment."""
    if fault := engine_fault():
        if os.environ.get("EMBERPOOL_CI"):
            pytest.fail(f"CI needs a container engine: {fault}")
        pytest.skip(fault)
    if ENGINE_IMAGE:
        monkeypatch.setenv("EMBERPOOL_SANDBOX__IMAGE", ENGINE_IMAGE)


class RecordedPool(SandboxPool):
    """A pool that notes its id, by which its containers can be looked for afterwards."""

    ids: list[str]

    async def __aenter__(self) -> SandboxPool:
        pool = await super().__aenter__()
        self.ids.append(str(self.snapshot().pool))
        return pool


def containers(pool_ids: Sequence[str]) -> list[str]:
    """The names of the containers, running or not, of these pools and of the cold calls made beside them."""
    engine, _ = anyio.run(find_engine)
    endpoint = engine.endpoint
    argv = [*endpoint.argv, "ps", "-a", "--format", "{{.Names}}"]
    listed = subprocess.run(
        argv, env=client_environment(dict(endpoint.env)), capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split() if any(name.startswith(f"emberpool-{it}-") for it in pool_ids)]


@pytest.mark.full  # every mode: many starts
@pytest.mark.engine
@pytest.mark.usefixtures("real_engine")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_quick_run_measures_every_mode_and_leaves_nothing(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []
    monkeypatch.setattr(RecordedPool, "ids", ids, raising=False)
    monkeypatch.setattr(bench_module, "SandboxPool", RecordedPool)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    args = ["--quick", "--rounds", "2", "--backend", backend, "--json", "-"]
    for name in (*USUAL, *PARTS):
        args += ["--mode", name]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    assert shown["machine"]["backend"] == backend
    assert set(shown["machine"]) == set(MACHINE)
    assert set(shown["modes"]) == {*USUAL, *PARTS}
    for figures in shown["modes"].values():
        assert figures["n"] == 2
        assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]
    pairs = {f"cold/{name}" for name in shown["modes"] if name != "cold"}
    assert set(shown["ratios"]) == {*pairs, "warm_exec/armed", "resident/floor"}
    assert "warm_exec" in result.stderr
    assert len(ids) == POOLS
    assert containers(ids) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full  # the benchmark as a user runs it, and Ctrl-C
@pytest.mark.engine
@pytest.mark.usefixtures("real_engine")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_interrupted_run_leaves_nothing_and_says_so(backend: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks.latency", "--rounds", "1000", "--backend", backend, "--json", "-"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        argv, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        try:
            assert run.stderr.readline() == "latency: warm; measuring 1000 rounds\n"
            ids = [json.loads(file.read_text())["pool_id"] for file in tmp_path.glob("*/state/pool.json")]
            assert containers(ids) != []
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=60)
        finally:
            # Where it did not end by itself the test has failed, and must not wait for a thousand rounds.
            run.kill()
    assert (run.returncode, out) == (130, "")
    assert err == "latency: interrupted; everything it started is removed\n"
    assert len(ids) == POOLS + OWN
    assert containers(ids) == []
    assert list(tmp_path.iterdir()) == []


def test_the_profile_finds_every_line_that_it_stamps() -> None:
    parts = inside.parts("runner")
    for name, text in profile.stamped(parts).items():
        compile(text, name, "exec")
    for _, line, _ in profile.INSIDE:
        with pytest.raises(BenchmarkError, match=r"mend benchmarks/profile\.py"):
            profile.stamped({name: text.replace(line, "") for name, text in parts.items()})


@pytest.mark.parametrize("name", tricks.TRICKS)
def test_every_trick_of_the_runner_can_be_switched_off(name: str) -> None:
    for statement in ast.parse(tricks.program(name)).body:
        text, part, _ = [ast.literal_eval(it) for it in statement.value.args[0].args]  # type: ignore[attr-defined]
        compile(text, part, "exec")
    assert (tricks.program(name) == inside.source("runner").encode()) == (name == tricks.ALL)


@pytest.mark.engine
@pytest.mark.usefixtures("real_engine")
def test_a_profile_tells_every_step_of_a_call() -> None:
    argv = [sys.executable, "-m", "benchmarks.profile", "--calls", "3"]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    rows = [line.rsplit(maxsplit=1) for line in lines if line[-1:].isdigit()]
    assert [what.strip() for what, _ in rows] == [*(what for _, what in profile.STEPS), "one call, the median of 3"]
    *steps, whole = [int(us) for _, us in rows]  # the runner may have been overtaken by the child that it woke
    assert sum(steps) > 0
    assert whole > 0
