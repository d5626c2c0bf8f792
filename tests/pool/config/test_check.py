"""``emberpool config check``: the settings against the host, the command, and the documentation that describes both."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pool.cli.config import config_app
from pool.config.host import host_memory
from pool.config.load import Settings, check_host, load
from pool.config.models import SECTIONS, known_keys
from pool.config.tables import COMMANDS, PrivilegedSettings
from tests.support import ROOT

DOCS = ROOT / "docs" / "configuration.md"
EXAMPLE = DOCS.parent / "emberpool.example.toml"
GIB = 1024**3

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "emberpool.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("EMBERPOOL_"):
            monkeypatch.delenv(name)


# --- the host
def test_memory_that_the_host_does_not_have_is_refused_unless_overcommit() -> None:
    settings = Settings(pool={"max_sandboxes": 6, "max_cold": 2}, sandbox={"memory_mb": 1024})
    assert check_host(settings, 8 * GIB) == []
    (line,) = check_host(settings, 8 * GIB - 1)
    assert line.startswith("sandbox.memory_mb: (pool.max_sandboxes 6 + pool.max_cold 2) x 1024 MiB is 8,192 MiB")
    assert "pool.overcommit = true" in line
    relaxed = Settings(pool={"max_sandboxes": 6, "max_cold": 2, "overcommit": True}, sandbox={"memory_mb": 1024})
    assert check_host(relaxed, 1) == []


def test_mount_source_has_to_exist(tmp_path: Path) -> None:
    settings = Settings(sandbox={"mounts": [f"{tmp_path}:/ok:ro", f"{tmp_path}/none:/data:ro"]})
    (line,) = check_host(settings, 64 * GIB)
    assert line.startswith(f"sandbox.mounts[1]: its source {tmp_path}/none cannot be used: No such file")


def test_writable_mount_that_belongs_to_root_is_refused_naming_the_chown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def owned_by(uid: int) -> None:
        stat = os.stat_result((0o40755, 1, 1, 1, uid, uid, 0, 0, 0, 0))
        monkeypatch.setattr(Path, "stat", lambda _self, **_: stat)

    def found(user: str, spec: str) -> list[str]:
        return check_host(Settings(sandbox={"user": user, "mounts": [spec]}), 64 * GIB)

    owned_by(0)
    (line,) = found("auto", f"{tmp_path}:/data")
    assert f"chown 1000:1000 {tmp_path}" in line
    assert found("auto", f"{tmp_path}:/data:rw,z") == [line]
    assert found("auto", f"{tmp_path}:/data:z,ro") == []
    assert found("1000:1000", f"{tmp_path}:/data") == []
    owned_by(1000)
    assert found("auto", f"{tmp_path}:/data") == []


def test_seccomp_profile_and_binary_have_to_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "seccomp.json"
    settings = Settings(sandbox={"seccomp": str(profile), "binary": "no-such-engine"})
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert check_host(settings, 64 * GIB) == [
        f"sandbox.seccomp: there is no file {profile} on this host",
        "sandbox.binary: there is no command no-such-engine on this host (PATH is /usr/bin:/bin); install it, or change the "
        "setting (empty: docker or podman, whichever answers)",
    ]
    profile.write_text("{}")
    assert check_host(Settings(sandbox={"seccomp": str(profile), "binary": "sh"}), 64 * GIB) == []


def test_host_memory_is_bytes() -> None:
    assert host_memory() > 64 * 1024**2


# --- the command
@pytest.fixture
def _plenty_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pool.cli.config.host_memory", lambda: 64 * GIB)


@pytest.mark.usefixtures("_plenty_of_memory")
def test_check_prints_ok_and_the_effective_settings(write: Write) -> None:
    path = write('[pool]\nmax_sandboxes = 4\nreclaim_idle_after = "off"\n')
    result = CliRunner().invoke(config_app, ["check", str(path)], env={"EMBERPOOL_CALL__TIMEOUT": "90s"})
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["ok"]
    assert ["pool.max_sandboxes", "4", "file"] in lines
    assert ["pool.reclaim_idle_after", '"off"', "file"] in lines
    assert ["call.timeout", '"90s"', "environment"] in lines
    assert ["call.max_output", '"1MiB"', "default"] in lines
    assert ["sandbox.uid_range", '"1879048192:65536"', "default"] in lines


@pytest.mark.usefixtures("_plenty_of_memory")
def test_what_check_prints_is_a_configuration_that_means_the_same(write: Write) -> None:
    mounts = ["/:/[bold]:ro", f"/:/{'long ' * 60}:ro"]
    result = CliRunner().invoke(config_app, ["check", str(write(f"[sandbox]\nmounts = {json.dumps(mounts)}\n"))])
    rows = re.findall(r"^ *([a-z_]+\..*?) +(.*?) +(?:default|file)\s*$", result.stdout, re.MULTILINE)
    printed = tomllib.loads("\n".join(f"{where} = {value}" for where, value in rows))
    assert Settings(**printed) == Settings(sandbox={"mounts": mounts})
    assert len(rows) == sum(len(section.model_fields) for section in SECTIONS.values())


AGENT = """
[agents."my agent"]
env = ["TZ"]
allowed_tool_dirs = ["/srv/tools"]
max_sessions = 2
[agents."my agent".call]
timeout = "30s"
max_output = "64KiB"
[agents.plain]
"""


@pytest.mark.usefixtures("_plenty_of_memory")
def test_check_prints_what_an_agents_table_sets_as_a_file_writes_it(write: Write) -> None:
    result = CliRunner().invoke(config_app, ["check", str(write(AGENT))])
    rows = re.findall(r"^ *(agents\..*?) {2,}(.*?) +file\s*$", result.stdout, re.MULTILINE)
    assert rows == [
        ('agents."my agent".env', '["TZ"]'),
        ('agents."my agent".allowed_tool_dirs', '["/srv/tools"]'),
        ('agents."my agent".max_sessions', "2"),
        ('agents."my agent".call.timeout', '"30s"'),
        ('agents."my agent".call.max_output', '"64KiB"'),
    ]
    printed = tomllib.loads("\n".join(f"{where} = {value}" for where, value in rows))
    assert Settings(**printed).agent("my agent") == load(write(AGENT), {}).settings.agent("my agent")


@pytest.mark.usefixtures("_plenty_of_memory")
def test_check_json_holds_agents_and_where_their_keys_came_from(write: Write) -> None:
    answer = json.loads(CliRunner().invoke(config_app, ["check", str(write(AGENT)), "--json"]).stdout)
    agent = answer["settings"]["agents"]["my agent"]
    assert agent == {
        "python_tools": None,
        "env": ["TZ"],
        "allowed_tool_dirs": ["/srv/tools"],
        "max_sessions": 2,
        "call": {"timeout": 30.0, "max_output": 65536},
    }
    assert answer["origins"]['agents."my agent".env'] == "file"
    assert answer["origins"]["privileged.python_eval.timeout"] == "default"


@pytest.mark.usefixtures("_plenty_of_memory")
def test_check_json_is_one_object_in_seconds_and_bytes(write: Write) -> None:
    result = CliRunner().invoke(config_app, ["check", str(write('[pool]\nidle_timeout = "5m"\n')), "--json"])
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["ok"] is True
    assert answer["settings"]["pool"]["idle_timeout"] == 300.0
    assert answer["settings"]["sandbox"]["uid_range"] == "1879048192:65536"
    assert answer["origins"]["pool.idle_timeout"] == "file"


def test_check_prints_problems_one_a_line_on_stderr_and_ends_with_1(write: Write) -> None:
    result = CliRunner().invoke(config_app, ["check", str(write("[pool]\nmin_standby = 9\nmax_starting = 9\n"))])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["pool.min_standby", "pool.max_starting"]


def test_check_asks_the_host_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pool.cli.config.host_memory", lambda: GIB)
    path = write("")
    result = CliRunner().invoke(config_app, ["check", str(path)])
    assert result.exit_code == 1
    assert result.stderr.startswith("sandbox.memory_mb: ")
    as_json = CliRunner().invoke(config_app, ["check", str(path), "--json"])
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout) == {"ok": False, "problems": result.stderr.splitlines()}


# --- the documentation
def documented() -> dict[str, dict[str, str]]:
    """The keys of each section's table in docs/configuration.md, with the default that stands there."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## (?:`\[([\w.<>]+)\]`)?", line):
            section = heading[1] or ""
        elif section and (row := re.match(r"\| `(\w+)` \| (.*?) \| .+ \| .+ \|$", line)):
            found.setdefault(section, {})[row[1]] = row[2].strip("`")
    return found


def test_documentation_has_every_key_in_order_and_no_other() -> None:
    expected: dict[str, tuple[str, ...]] = {}
    for section, keys in known_keys().items():
        if section.startswith("privileged."):
            section = "privileged.<command>"
        tables = ("call",) if section == "agents.*" else ()
        if section != "privileged":
            expected[section.replace("*", "<name>")] = tuple(key for key in keys if key not in tables)
    assert {section: tuple(keys) for section, keys in documented().items()} == expected


def test_documented_defaults_are_the_defaults() -> None:
    written = documented()
    assert written["pool"].pop("state_dir") == "by user"
    command = written.pop("privileged.<command>")
    assert command.pop("timeout") == "by command"
    timeouts = dict(
        re.findall(r"^\| `(\w+)` \| `([^`]+)` \| [^|]+ \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert list(timeouts) == list(COMMANDS)
    agent, call = written.pop("agents.<name>"), written.pop("agents.<name>.call")
    assert agent.pop("env") == "[]"
    assert {*agent.values(), *call.values()} == {"the pool's"}
    given_back: dict[str, Any] = {section: values(keys) for section, keys in written.items()}
    given_back["privileged"] = {name: values({**command, "timeout": text}) for name, text in timeouts.items()}
    assert Settings(**given_back) == Settings()


def values(keys: dict[str, str]) -> dict[str, Any]:
    """What the documented defaults mean in TOML."""
    return {key: tomllib.loads(f"v = {text}")["v"] for key, text in keys.items()}


def test_example_file_is_valid_has_every_key_and_says_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # its state_dir is root's
    loaded = load(EXAMPLE, {})
    assert set(loaded.origins.values()) == {"file"}
    assert loaded.settings == Settings()


def test_example_file_shows_every_key_of_an_agent_behind_number_signs() -> None:
    _, found, rest = EXAMPLE.read_text(encoding="utf-8").partition("\n# [agents.")
    assert found
    tables = tomllib.loads("[agents." + re.sub(r"^# ", "", rest, flags=re.MULTILINE))
    (agent,) = tables["agents"].values()
    assert list(agent) == list(known_keys()["agents.*"])
    assert list(agent["call"]) == list(known_keys()["agents.*.call"])
    Settings(**tables)


def test_documented_problems_are_what_the_command_prints(write: Write) -> None:
    text = DOCS.read_text(encoding="utf-8")
    blocks = re.search(
        r"\$ cat broken\.toml\n(.*?)    \$ emberpool config check broken\.toml\n(.*?)\n\n", text, re.DOTALL
    )
    assert blocks is not None
    config, expected = (re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks.groups())
    result = CliRunner().invoke(config_app, ["check", str(write(config))])
    assert result.stderr.splitlines() == expected.splitlines()


def test_every_section_is_a_section_of_settings() -> None:
    for name, section in SECTIONS.items():
        assert type(attrgetter(name)(Settings())) is section
    assert {name.split(".")[0] for name in SECTIONS} | {"agents"} == set(Settings.model_fields)
    assert {name.partition(".")[2] for name in SECTIONS if "." in name} == set(PrivilegedSettings.model_fields)
