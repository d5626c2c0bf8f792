"""Where settings come from: a TOML file with the environment on top of it, and what is wrong with either."""

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

from executor.sandbox.mount import Mount
from pool.config.load import ConfigError, Settings, load, load_settings
from pool.config.types import UidRange
from tests.support import ROOT

EXAMPLE = ROOT / "docs" / "emberpool.example.toml"

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


# --- files
def test_file_is_read(write: Write) -> None:
    settings = load_settings(write('[pool]\nmax_sandboxes = 4\nidle_timeout = "90s"\n[call]\nmax_input = "1MiB"\n'), {})
    assert (settings.pool.max_sandboxes, settings.pool.idle_timeout, settings.call.max_input) == (4, 90.0, 1_048_576)
    assert settings == Settings(pool={"max_sandboxes": 4, "idle_timeout": 90}, call={"max_input": 1_048_576})


def test_without_file_and_variables_the_defaults_hold() -> None:
    assert load_settings(None, {}) == Settings()


def test_process_environment_is_the_default_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERPOOL_POOL__MAX_WAITERS", "7")
    assert load_settings().pool.max_waiters == 7


def test_variable_names_the_default_file_and_an_argument_goes_before_it(write: Write, tmp_path: Path) -> None:
    environ = {"EMBERPOOL_CONFIG": str(write("[pool]\nmax_waiters = 7\n"))}
    assert load_settings(None, environ).pool.max_waiters == 7
    other = tmp_path / "other.toml"
    other.write_text("[pool]\nmax_waiters = 8\n")
    assert load_settings(other, environ).pool.max_waiters == 8
    assert load_settings(None, {"EMBERPOOL_CONFIG": ""}).pool.max_waiters == 100


def test_syntax_error_gives_file_line_and_column(write: Write) -> None:
    path = write('[pool]\nname = "x\n')
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {})
    assert re.fullmatch(rf"{re.escape(str(path))}: is not TOML: .*\(at line 2, column \d+\)", str(caught.value))


def test_repeated_key_is_an_error(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"is not TOML: .*line 3"):
        load_settings(write("[pool]\nmax_waiters = 1\nmax_waiters = 2\n"), {})


def test_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {"EMBERPOOL_CONFIG": str(path)})
    assert str(caught.value) == f"{path}: there is no such file"


def test_directory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path, {})
    assert str(caught.value) == f"{tmp_path}: is a directory; name the file in it"


def test_unreadable_file_is_one_clear_line(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write("")
    monkeypatch.setattr(Path, "open", denied)  # root reads every file, so the refusal is made up
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {})
    assert str(caught.value) == f"{path}: cannot be read: Permission denied"


def test_path_that_no_kernel_takes_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="cannot be read: embedded null byte"):
        load_settings(Path("/a\0b"), {})


def test_file_that_is_not_utf8_gives_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[pool]\nname = "caf\xe9"\n')
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {})
    assert str(caught.value) == f"{path}: is not UTF-8: line 2 holds the byte 0xe9"


def test_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf[pool]\r\nmax_waiters = 3\r\n")
    assert load_settings(path, {}).pool.max_waiters == 3


@pytest.mark.parametrize(
    "text", [pytest.param("a = " + "[" * 100_000, id="nested"), pytest.param("a = " + "9" * 5_000, id="digits")]
)
def test_hostile_toml_is_an_error_of_its_own(write: Write, text: str) -> None:
    with pytest.raises(ConfigError, match="is not usable TOML"):
        load_settings(write(text), {})


def test_endless_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="is larger than 1,000,000 bytes"):
        load_settings(Path("/dev/zero"), {})


def test_section_that_is_no_table_is_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"^pool: 3 is not a table of keys$"):
        load_settings(write("pool = 3\n"), {})
    with pytest.raises(ConfigError, match=r"^pool: 3 is not a table of keys$"):
        load_settings(write("pool = 3\n"), {"EMBERPOOL_POOL__NAME": "x"})


def test_table_below_a_section_that_is_no_table_is_refused_too(write: Write) -> None:
    path = write("[privileged]\nshell_exec = 3\n")
    with pytest.raises(ConfigError, match=r"^privileged\.shell_exec: 3 is not a table of keys$"):
        load_settings(path, {"EMBERPOOL_PRIVILEGED__SHELL_EXEC__TIMEOUT": "3s"})


def test_environment_goes_on_top_of_a_table_below_a_section_key_by_key(write: Write) -> None:
    path = write('[privileged.shell_exec]\ntimeout = "5s"\nmax_output = "1kB"\n')
    loaded = load(path, {"EMBERPOOL_PRIVILEGED__SHELL_EXEC__TIMEOUT": "3s"})
    command = loaded.settings.privileged.shell_exec
    assert (command.timeout, command.max_output, command.network) == (3.0, 1000, "")
    keys = ("timeout", "max_output", "network")
    assert [loaded.origins[f"privileged.shell_exec.{key}"] for key in keys] == ["environment", "file", "default"]


def test_agents_come_from_the_file_whatever_they_are_called(write: Write) -> None:
    loaded = load(write('[agents."a.b c"]\nenv = ["TZ"]\n[agents.privileged.call]\ntimeout = "3s"\n'), {})
    assert loaded.settings.agent("a.b c").env == ("TZ",)
    agents = {key: origin for key, origin in loaded.origins.items() if key.startswith("agents")}
    assert agents == {'agents."a.b c".env': "file", "agents.privileged.call.timeout": "file"}


def test_settings_in_code_read_neither_environment_nor_file(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    monkeypatch.setenv("EMBERPOOL_POOL__MIN_STANDBY", "1")
    monkeypatch.setenv("EMBERPOOL_CONFIG", str(write("[pool]\nmax_waiters = 7\n")))
    settings = Settings(pool={"max_sandboxes": 4})
    assert (settings.pool.max_sandboxes, settings.pool.min_standby, settings.pool.max_waiters) == (4, 2, 100)


# --- environment
def test_environment_beats_the_file_key_by_key(write: Write) -> None:
    path = write('[pool]\nmax_sandboxes = 4\nmax_waiters = 5\n[sandbox]\nmounts = ["/a:/a:ro", "/b:/b:ro"]\n')
    loaded = load(path, {"EMBERPOOL_POOL__MAX_SANDBOXES": "6", "EMBERPOOL_SANDBOX__MOUNTS": '["/c:/c:ro"]'})
    assert (loaded.settings.pool.max_sandboxes, loaded.settings.pool.max_waiters) == (6, 5)
    assert loaded.settings.sandbox.mounts == (Mount("/c", "/c", ("ro",)),)
    assert loaded.origins["pool.max_sandboxes"] == "environment"
    assert loaded.origins["pool.max_waiters"] == "file"
    assert loaded.origins["pool.name"] == "default"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("POOL__IDLE_TIMEOUT", "10m", 600.0),
        ("POOL__IDLE_TIMEOUT", '"10m"', 600.0),
        ("POOL__IDLE_TIMEOUT", "30", 30.0),
        ("POOL__IDLE_TIMEOUT", "30.5", 30.5),
        ("POOL__RECLAIM_IDLE_AFTER", "off", None),
        ("POOL__OVERCOMMIT", "true", True),
        ("POOL__NAME", "123", "123"),
        ("POOL__NAME", "true", "true"),
        ("POOL__STATE_DIR", "/srv/state", Path("/srv/state")),
        ("SANDBOX__CPUS", "0.5", 0.5),
        ("SANDBOX__USER", "1000:1000", "1000:1000"),
        ("SANDBOX__UID_RANGE", "5000:100", UidRange(5000, 100)),
        ("SANDBOX__RUNTIME", "", ""),
        ("SANDBOX__PYTHON_TOOLS", "limits", "limits"),
        ("SANDBOX__PYTHON_TOOLS", '"limits"', "limits"),
        ("SANDBOX__LIMITS_STRICT", "false", False),
        ("SANDBOX__ALLOWED_TOOL_DIRS", '["/srv/tools"]', (Path("/srv/tools"),)),
        ("SANDBOX__WORKSPACE", "/srv/work", "/srv/work"),
        ("TOOLS__MAX_BYTES", "1MiB", 1_048_576),
        ("PRIVILEGED__SHELL_EXEC__TIMEOUT", "90s", 90.0),
        ("PRIVILEGED__INSTALL_LIBRARY__NETWORK", "packages", "packages"),
        ("CALL__MAX_INPUT", "64MB", 64_000_000),
        ("CALL__MAX_INPUT", "4096", 4096),
    ],
)
def test_environment_value_is_written_as_in_the_file(variable: str, text: str, value: object) -> None:
    loaded = load(None, {f"EMBERPOOL_{variable}": text})
    where = variable.lower().replace("__", ".")
    assert attrgetter(where)(loaded.settings) == value
    assert [key for key, origin in loaded.origins.items() if origin == "environment"] == [where]


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("POOL__OVERCOMMIT", "yes"),
        ("POOL__OVERCOMMIT", "1"),
        ("POOL__OVERCOMMIT", ""),
        ("POOL__MAX_WAITERS", "4.0"),
        ("POOL__MAX_WAITERS", "true"),
        ("POOL__MAX_WAITERS", "4\nname = 3"),
        pytest.param("POOL__MAX_WAITERS", "[" * 100_000, id="nested"),
        ("SANDBOX__MOUNTS", "/a:/a"),
        ("SANDBOX__PYTHON_TOOLS", "docker"),
        ("SANDBOX__ALLOWED_TOOL_DIRS", "/srv/tools"),
        ("PRIVILEGED__SHELL_EXEC__TIMEOUT", "soon"),
        ("PRIVILEGED__SHELL_EXEC__TIMEOUT", "3h"),
        ("POOL__IDLE_TIMEOUT", "1979-05-27"),
        pytest.param("POOL__NAME", "\udc80", id="not UTF-8"),
    ],
)
def test_wrong_environment_value_names_key_and_variable_in_one_line(variable: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {f"EMBERPOOL_{variable}": text})
    line = str(caught.value)
    assert line.startswith(f"{variable.lower().replace('__', '.')}: ")
    assert line.endswith(f"(set by EMBERPOOL_{variable})")
    assert line.isprintable()
    assert len(line) < 400


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("EMBERPOOL_POOL__TYPO", "unknown setting; [pool] has name, state_dir, min_standby,"),
        ("EMBERPOOL_POOL__MAX_SANDBOX", "unknown setting; did you mean EMBERPOOL_POOL__MAX_SANDBOXES?"),
        ("EMBERPOOL_POOL_MAX_SANDBOXES", "unknown setting; did you mean EMBERPOOL_POOL__MAX_SANDBOXES?"),
        ("EMBERPOOL_POL__NAME", "unknown setting; did you mean EMBERPOOL_POOL__NAME?"),
        ("EMBERPOOL_pool__name", "unknown setting; did you mean EMBERPOOL_POOL__NAME?"),
        ("EMBERPOOL_POOL", "unknown setting; [pool] has name, state_dir, min_standby,"),
        (
            "EMBERPOOL_PRIVILEGED__SHELL_EXEC__TIMOUT",
            "unknown setting; did you mean EMBERPOOL_PRIVILEGED__SHELL_EXEC__TIMEOUT?",
        ),
        ("EMBERPOOL_PRIVILEGED__SHELL_EXEC__X", "unknown setting; [privileged.shell_exec] has timeout, max_output,"),
        ("EMBERPOOL_PRIVILEGED", "unknown setting; settings are named EMBERPOOL_<SECTION>__<KEY>"),
        ("EMBERPOOL_AGENTS__ANALYST__ENV", "unknown setting; what holds for one agent is set in the file"),
        ("EMBERPOOL_AGENT", "unknown setting; what holds for one agent is set in the file"),
        ("EMBERPOOL_", "unknown setting; settings are named EMBERPOOL_<SECTION>__<KEY>"),
        ("EMBERPOOL_TOKEN", "unknown setting; settings are named EMBERPOOL_<SECTION>__<KEY>"),
    ],
)
def test_unknown_variable_is_an_error_that_names_it_and_never_its_value(variable: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {variable: "hunter2", "EMBERPOOL_POOL__MAX_WAITERS": "-1"})
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{variable}: {sentence}")
    assert second.startswith("pool.max_waiters: -1 must be at least 0")
    assert "hunter2" not in str(caught.value)


def test_variables_that_are_no_settings_and_other_programs_variables_are_left_alone() -> None:
    environ = {"EMBERPOOL_CI": "1", "EMBERPOOL_ENGINE_HOME": "/x", "EMBERPOOL_CONFIG": "", "emberpool_pool__name": "x"}
    assert load_settings(None, {**environ, "POOL__NAME": "x", "PATH": "/bin"}) == Settings()


def test_every_key_can_be_set_by_the_environment() -> None:
    example = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))

    def variables(name: str, tables: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for key, value in tables.items():
            if isinstance(value, dict):
                found |= variables(f"{name}{key.upper()}__", value)
            else:
                found[f"{name}{key.upper()}"] = value if isinstance(value, str) else json.dumps(value)
        return found

    environ = variables("EMBERPOOL_", example)
    loaded = load(None, environ)
    assert set(loaded.origins.values()) == {"environment"}
    assert loaded.settings == Settings(**example)


# --- what Kubernetes sets for a service of this name
@pytest.mark.parametrize("service", ["EMBERPOOL", "EMBERPOOL_GATEWAY", "EMBERPOOL_POOL", "EMBERPOOL_SERVER_2"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SERVICE_HOST", "10.96.0.7"),
        ("SERVICE_HOST", "fd00:10:96::7"),
        ("SERVICE_PORT", "80"),
        ("SERVICE_PORT_HTTP", "80"),
        ("SERVICE_PORT_HTTP_ADMIN", "8080"),
        ("PORT", "tcp://10.96.0.7:80"),
        ("PORT", "udp://[fd00:10:96::7]:53"),
        ("PORT_80_TCP", "tcp://10.96.0.7:80"),
        ("PORT_80_TCP_PROTO", "tcp"),
        ("PORT_80_TCP_PORT", "80"),
        ("PORT_80_TCP_ADDR", "10.96.0.7"),
        ("PORT_9999_SCTP_ADDR", "fd00::1"),
    ],
)
def test_service_links_are_ignored(service: str, name: str, value: str) -> None:
    assert load_settings(None, {f"{service}_{name}": value, "EMBERPOOL_POOL__NAME": "a"}).pool.name == "a"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EMBERPOOL_PORT", "8080"),
        ("EMBERPOOL_PORT", "tcp://somewhere:80"),
        ("EMBERPOOL_SERVICE_HOST", "somewhere"),
        ("EMBERPOOL_SERVICE_PORT", "http"),
        ("EMBERPOOL_PORT_80_TCP_PROTO", "http"),
        ("EMBERPOOL_PORT_80_TCP_WHAT", "10.96.0.7"),
        ("EMBERPOOL_PORT_TCP_ADDR", "10.96.0.7"),
        ("EMBERPOOL_POOL__SERVICE_HOST", "10.96.0.7"),
        ("EMBERPOOL_POOL__PORT", "tcp://10.96.0.7:80"),
        ("EMBERPOOL_service_host", "10.96.0.7"),
        ("EMBERPOOL__SERVICE_HOST", "10.96.0.7"),
    ],
)
def test_what_only_resembles_a_service_link_is_an_unknown_setting(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="unknown setting") as caught:
        load_settings(None, {name: value})
    assert value not in str(caught.value).removeprefix(name)
