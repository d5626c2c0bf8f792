"""Privileged commands: what reaches the container's argv, and what is refused before there is one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from executor.errors import EmberpoolError, InvalidCall, ProfileMismatch
from pool.config.load import Settings
from pool.privileged import Privileged
from tests.support.pools import outcome, running, settings_of
from tests.support.scripted import ScriptedEngine
from tests.support.scripted_box import RunWords
from tests.support.tools import changed

pytestmark = pytest.mark.anyio

OWNER = 1000
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
Act = Callable[[Privileged], Awaitable[object]]


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    (place / "data" / "sandbox").mkdir(parents=True)
    if os.name == "posix" and os.geteuid() == 0:
        os.chown(place / "data" / "sandbox", OWNER, OWNER + 1)
    return place


def settings_with(state_dir: Path, workspace: Path | str, **sections: Any) -> Settings:
    sandbox = {"workspace": str(workspace), **sections.pop("sandbox", {})}
    return changed(settings_of(state_dir), sandbox=sandbox, **sections)


async def run_words(engine: ScriptedEngine, settings: Settings, act: Act) -> tuple[RunWords, Any]:
    """How the container of a command is started, and the call that it carries."""
    calls: list[Any] = []
    async with running(engine, settings) as pool:

        async def kept(call: Any, setting: Any = None) -> Any:
            calls.append(call)
            # A scripted engine runs steps, not programs: here they do not matter.
            return await real(type(call)(code="echo ran", cwd=call.cwd, timeout=call.timeout), setting)

        real, pool._shell.containers.cold = pool._shell.containers.cold, kept  # type: ignore[method-assign]
        await act(pool.privileged)
    (words,) = engine.started
    (call,) = calls
    return words, call


@needs_root
async def test_a_command_has_the_sandbox_of_the_workspace_alone_and_runs_as_its_owner(
    engine: ScriptedEngine, state_dir: Path, workspace: Path
) -> None:
    settings = settings_with(state_dir, workspace)
    words, call = await run_words(engine, settings, lambda commands: commands.shell_exec("make all", stdin=b"in"))
    assert words.flags["-v"] == [f"{workspace}/data/sandbox:/workspace"]
    assert "--mount" not in words.flags
    assert words.one("--workdir") == "/workspace"
    assert words.one("--user") == "1000:1001"
    assert words.one("--network") == "none"
    for flag in ("--rm", "--read-only", "--no-healthcheck"):
        assert flag in words.flags
    assert (words.one("--cap-drop"), words.one("--security-opt")) == ("ALL", "no-new-privileges")
    assert words.labels["emberpool.kind"] == "cold"
    assert (call.argv, call.stdin, call.cwd, dict(call.env)) == (("sh", "-c", "make all"), b"in", "/workspace", {})
    assert call.max_output == 1_048_576
    assert 59 < call.timeout <= 60
    # Nothing of what it is told to do shows in the argv of the engine's client.
    assert "make" not in " ".join(words.argv)


SENT: dict[str, tuple[Act, tuple[str, ...], dict[str, str]]] = {
    "python script": (
        lambda commands: commands.run_script("steps/go.py", ["-c", "a b"]),
        ("python3", "-B", "/workspace/steps/go.py", "-c", "a b"),
        {"PYTHONPATH": "/workspace/lib"},
    ),
    "shell script": (
        lambda commands: commands.run_script("./-rf.sh"),
        ("sh", "/workspace/-rf.sh"),
        {"PYTHONPATH": "/workspace/lib"},
    ),
}


@needs_root
@pytest.mark.parametrize("case", SENT)
async def test_a_script_runs_from_its_place_in_the_workspace(
    engine: ScriptedEngine, state_dir: Path, workspace: Path, case: str
) -> None:
    act, argv, env = SENT[case]
    _, call = await run_words(engine, settings_with(state_dir, workspace), act)
    assert (call.argv, dict(call.env)) == (argv, env)


@needs_root
async def test_evaluated_code_is_sent_as_it_is(engine: ScriptedEngine, state_dir: Path, workspace: Path) -> None:
    settings = settings_with(state_dir, workspace, privileged={"python_eval": {"timeout": 7, "max_output": 10}})
    _, call = await run_words(engine, settings, lambda commands: commands.python_eval("print(1)"))
    assert (call.code, call.max_output) == ("print(1)", 10)
    assert 6 < call.timeout <= 7


@needs_root
async def test_only_the_command_that_has_a_network_gets_it(
    engine: ScriptedEngine, state_dir: Path, workspace: Path
) -> None:
    settings = settings_with(state_dir, workspace, privileged={"install_library": {"network": "packages"}})
    words, call = await run_words(
        engine, settings, lambda commands: commands.install_library("tabulate", "rich[jupyter]>=13, <15", timeout=20)
    )
    assert words.one("--network") == "packages"
    assert call.argv[:4] == ("python3", "-I", "-m", "pip")
    assert call.argv[-6:] == ("--upgrade", "--target", "/workspace/lib", "--", "tabulate", "rich[jupyter]>=13, <15")
    assert 19 < call.timeout <= 20
    engine.started.clear()
    words, _ = await run_words(engine, settings, lambda commands: commands.shell_exec("true"))
    assert words.one("--network") == "none"


@needs_root
async def test_shared_mounts_stay_and_do_not_choose_the_user(
    engine: ScriptedEngine, state_dir: Path, workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    os.chown(tmp_path / "shared", 4000, 4000)
    mount = f"{tmp_path}/shared:/shared"
    words, _ = await run_words(
        engine, settings_with(state_dir, workspace, sandbox={"mounts": [mount]}), lambda c: c.shell_exec("true")
    )
    assert words.flags["-v"] == [mount, f"{workspace}/data/sandbox:/workspace"]
    assert words.one("--user") == "1000:1001"


@needs_root
async def test_commands_share_the_places_of_cold_calls(
    engine: ScriptedEngine, state_dir: Path, workspace: Path
) -> None:
    settings = changed(settings_with(state_dir, workspace), pool={"max_cold": 0, "max_cold_waiters": 0})
    async with running(engine, settings) as pool:
        error = await outcome(lambda: pool.privileged.shell_exec("true"))
        assert getattr(error, "reason", error) == "pool_exhausted"
        assert engine.started == []


# --- refusals ---------------------------------------------------------------------------------------------------------


async def refusal(
    engine: ScriptedEngine, settings: Settings, act: Act, kind: type[EmberpoolError] = InvalidCall
) -> str:
    async with running(engine, settings) as pool:
        error = await outcome(lambda: act(pool.privileged))
    assert isinstance(error, kind), error
    assert not error.started
    assert engine.started == []
    return str(error)


def _no_data(workspace: Path) -> None:
    (workspace / "data" / "sandbox").rmdir()
    (workspace / "data").rmdir()


def _no_sandbox(workspace: Path) -> None:
    (workspace / "data" / "sandbox").rmdir()


def _file(workspace: Path) -> None:
    (workspace / "data" / "sandbox").rmdir()
    (workspace / "data" / "sandbox").touch()


def _link(workspace: Path) -> None:
    (workspace / "elsewhere").mkdir()
    (workspace / "data" / "sandbox").rmdir()
    (workspace / "data" / "sandbox").symlink_to("../elsewhere")


def _linked_data(workspace: Path) -> None:
    (workspace / "data").rename(workspace / "elsewhere")
    (workspace / "data").symlink_to("elsewhere")


def _dangling(workspace: Path) -> None:
    (workspace / "data" / "sandbox").rmdir()
    (workspace / "data" / "sandbox").symlink_to("gone")


def _circle(workspace: Path) -> None:
    workspace.rename(workspace.with_name("away"))
    workspace.symlink_to(workspace.with_name("other"))
    workspace.with_name("other").symlink_to(workspace)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_no_data, "/data is not there, or is no directory; run: mkdir -p "),
        (_no_sandbox, "/data/sandbox is not there, or is no directory; run: mkdir -p "),
        (_file, "/data/sandbox is not there, or is no directory; run: mkdir -p "),
        (_link, "/data/sandbox must be a directory of the workspace itself, not a link; put one there"),
        (_linked_data, "/data must be a directory of the workspace itself, not a link; put one there"),
        (_dangling, "/data/sandbox must be a directory of the workspace itself, not a link; put one there"),
        (_circle, "; correct it, or its rights"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_workspace_whose_sandbox_is_no_directory_of_its_own_is_refused(
    engine: ScriptedEngine, state_dir: Path, workspace: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(workspace)
    for act in (lambda c: c.shell_exec("true"), lambda c: c.python_eval("1"), lambda c: c.run_script("x.py")):
        assert words in await refusal(engine, settings_with(state_dir, workspace), act)


async def test_a_workspace_may_be_reached_by_a_link_and_not_lead_to_a_name_that_cannot_be_mounted(
    engine: ScriptedEngine, state_dir: Path, workspace: Path
) -> None:
    way = workspace.with_name("way")
    way.symlink_to(workspace)
    if os.name == "posix" and os.geteuid() == 0:
        words, _ = await run_words(engine, settings_with(state_dir, way), lambda c: c.shell_exec("true"))
        assert words.flags["-v"] == [f"{workspace}/data/sandbox:/workspace"]
        engine.started.clear()
    for name in ("co:lon", "li\nne"):
        odd = workspace.with_name(name)
        (odd / "data" / "sandbox").mkdir(parents=True)
        way.unlink()
        way.symlink_to(odd)
        said = await refusal(engine, settings_with(state_dir, way), lambda c: c.shell_exec("true"))
        assert "holds a colon or a control character, which no mount can; choose another sandbox.workspace" in said


async def test_without_a_workspace_every_command_says_which_setting_is_missing(
    engine: ScriptedEngine, state_dir: Path
) -> None:
    settings = settings_of(state_dir)
    assert await refusal(engine, settings, lambda c: c.python_eval("1")) == (
        "python_eval needs a workspace; set sandbox.workspace in the configuration"
    )


@needs_root
async def test_a_sandbox_that_belongs_to_root_is_refused_naming_the_chown(
    engine: ScriptedEngine, state_dir: Path, workspace: Path
) -> None:
    place = workspace / "data" / "sandbox"
    os.chown(place, 0, 0)
    said = await refusal(
        engine, settings_with(state_dir, workspace), lambda c: c.shell_exec("true"), kind=ProfileMismatch
    )
    assert said.endswith(f"for example: chown 1000:1000 {place}")


async def test_an_install_without_a_network_is_refused(
    engine: ScriptedEngine, state_dir: Path, workspace: Path
) -> None:
    said = await refusal(engine, settings_with(state_dir, workspace), lambda c: c.install_library("tabulate"))
    assert "choose it with privileged.install_library.network in the configuration" in said


REQUIREMENTS = (
    (), "", " ", "-r x", "-rx", "--index-url=http://h/", "--target", "http://h/x", "git+ssh://h/x", "../x", "./x", "a/b",
    "a@b", "a @ http://h/x", "a;b", "a==1 --pre", "a\n--pre", "/x", "~x", ".x", "x.whl", "x-1-py3-none-any.whl", "x.ZIP",
    "x.tar.gz", "x.tar", "x.zip[extra]", "a[b", "a>=", "a b", "é", None, 7,
)  # fmt: skip


async def test_what_is_no_package_name_is_refused(engine: ScriptedEngine, state_dir: Path, workspace: Path) -> None:
    settings = settings_with(state_dir, workspace, privileged={"install_library": {"network": "packages"}})
    async with running(engine, settings) as pool:
        for one in REQUIREMENTS:
            for names in ([one], ["tabulate", one]) if one != () else ([],):
                error = await outcome(lambda names=names: pool.privileged.install_library(*names))  # type: ignore[misc]
                assert isinstance(error, InvalidCall), (names, error)
                assert "is not a package name with an optional version" in str(error)
        assert engine.started == []


SCRIPTS: tuple[tuple[Any, str], ...] = (
    ("../x.py", "without .."),
    ("a/../../x.py", "without .."),
    ("/etc/x.py", "must be relative"),
    ("x", "end in .py or .sh"),
    ("x.txt", "end in .py or .sh"),
    ("x.PY", "end in .py or .sh"),
    (".py", "end in .py or .sh"),
    ("", "path must be a non-empty string"),
    (None, "path must be a non-empty string"),
    ("a\0.py", "NUL byte"),
)


async def test_a_script_outside_of_the_workspace_or_of_another_kind_is_refused(
    engine: ScriptedEngine, state_dir: Path, workspace: Path
) -> None:
    async with running(engine, settings_with(state_dir, workspace)) as pool:
        for path, words in SCRIPTS:
            error = await outcome(lambda path=path: pool.privileged.run_script(path))  # type: ignore[misc]
            assert isinstance(error, InvalidCall), (path, error)
            assert words in str(error), path
        assert engine.started == []


WRONG: dict[str, tuple[Callable[[Any], Awaitable[object]], str]] = {
    "no command": (lambda c: c.shell_exec(""), "command must be a non-empty string"),
    "argv for a command": (lambda c: c.shell_exec(["ls"]), "command must be a non-empty string"),
    "no code": (lambda c: c.python_eval(None), "code must be a non-empty string"),
    "one string for args": (lambda c: c.run_script("x.py", "--all"), "args must be a list of strings"),
    "number in args": (lambda c: c.run_script("x.py", [1]), "must be a string"),
    "text for stdin": (lambda c: c.shell_exec("cat", stdin="x"), "stdin must be bytes"),
    "text for timeout": (lambda c: c.shell_exec("cat", timeout="x"), "timeout must be above 0 seconds"),
    "no timeout": (lambda c: c.shell_exec("cat", timeout=0), "timeout must be above 0 seconds"),
    "NaN for timeout": (lambda c: c.shell_exec("cat", timeout=float("nan")), "timeout must be above 0 seconds"),
    "long timeout": (
        lambda c: c.python_eval("1", timeout=31),
        "at most 30 s are allowed (privileged.python_eval.timeout)",
    ),
}


async def test_a_wrong_argument_is_refused_by_its_name(
    engine: ScriptedEngine, state_dir: Path, workspace: Path
) -> None:
    async with running(engine, settings_with(state_dir, workspace)) as pool:
        for name, (act, words) in WRONG.items():
            error = await outcome(lambda act=act: act(pool.privileged))  # type: ignore[misc]
            assert isinstance(error, InvalidCall), (name, error)
            assert words in str(error), name
        assert engine.started == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("place", ["", "data"])
@pytest.mark.parametrize(("owner", "mode"), [(1000, 0o755), (0, 0o777), (0, 0o775)])
async def test_a_workspace_in_which_another_could_swap_the_sandbox_is_refused(
    engine: ScriptedEngine, state_dir: Path, workspace: Path, place: str, owner: int, mode: int
) -> None:
    os.chown(workspace / place, owner, owner)
    (workspace / place).chmod(mode)
    async with running(engine, settings_with(state_dir, workspace)) as pool:
        with pytest.raises(InvalidCall, match="chmod go-w"):
            await pool.privileged.shell_exec("true")
