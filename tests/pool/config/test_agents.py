"""Agents and privileged commands in the configuration: what may differ, what never may, and what then holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.config.load import AgentSettings, ConfigError, Settings
from tests.pool.config.test_models import problems


def test_agent_without_a_table_has_what_the_pool_says() -> None:
    settings = Settings(
        sandbox={"python_tools": "limits", "allowed_tool_dirs": ["/srv/tools"]},
        call={"timeout": "30s", "max_output": "64KiB"},
        pool={"max_sessions_per_agent": 3},
    )
    assert settings.agent("anyone") == AgentSettings(
        python_tools="limits",
        env=(),
        allowed_tool_dirs=(Path("/srv/tools"),),
        timeout=30.0,
        max_output=65_536,
        max_sessions=3,
    )


def test_agent_has_what_its_table_says() -> None:
    table = {
        "python_tools": "container",
        "env": ["TZ", "_x1"],
        "allowed_tool_dirs": ["/srv/own"],
        "max_sessions": 0,
        "call": {"timeout": "10s", "max_output": "1kB"},
    }
    settings = Settings(
        sandbox={"python_tools": "limits", "allowed_tool_dirs": ["/srv/tools"]},
        pool={"max_sessions_per_agent": 3},
        agents={"analyst": table},
    )
    assert settings.agent("analyst") == AgentSettings(
        python_tools="container",
        env=("TZ", "_x1"),
        allowed_tool_dirs=(Path("/srv/own"),),
        timeout=10.0,
        max_output=1000,
        max_sessions=0,
    )
    assert settings.agent("other").python_tools == "limits"


def test_empty_list_of_directories_replaces_the_pools_list() -> None:
    settings = Settings(sandbox={"allowed_tool_dirs": ["/srv/tools"]}, agents={"a": {"allowed_tool_dirs": []}})
    assert settings.agent("a").allowed_tool_dirs == ()


def test_agents_are_kept_by_settings_that_are_made_of_others() -> None:
    other = Settings(agents={"a": {"env": ["TZ"]}})
    assert Settings(agents=other.agents) == other


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "timeout",
            "61s",
            "61s is above call.timeout (1m), which holds for every agent; lower it, or raise call.timeout",
        ),
        ("max_output", "2MiB", "2MiB is above call.max_output (1MiB), which holds for every agent"),
    ],
)
def test_agent_may_lower_a_ceiling_and_never_raise_it(key: str, value: str, words: str) -> None:
    (line,) = problems("agents.a.call", **{key: value})
    assert line.startswith(f"agents.a.call.{key}: {words}")


def test_ceiling_itself_is_allowed() -> None:
    assert Settings(agents={"a": {"call": {"timeout": "1m", "max_output": "1MiB"}}}).agent("a").timeout == 60.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TOKEN=hunter2", "'TOKEN' comes with a value; give the name alone"),
        ("=x", "'' comes with a value"),
        ("", "'' is not the name of a variable"),
        ("1A", "no digit first"),
        ("A-B", "is not the name of a variable"),
        ("A\n", "is not the name of a variable"),
        ("É", "is not the name of a variable"),
        ("A" * 201, "is not the name of a variable"),
        ("LD_PRELOAD", "dynamic loader, which may run other code before the tool's"),
        ("LD_LIBRARY_PATH", "dynamic loader"),
        ("DYLD_INSERT_LIBRARIES", "dynamic loader"),
        (3, "3 is not a text in quotes"),
    ],
)
def test_env_holds_names_of_variables_and_no_message_shows_a_value(name: object, words: str) -> None:
    (line,) = problems("agents.a", env=["TZ", name])
    assert line.startswith("agents.a.env[1]: ")
    assert words in line
    assert "hunter2" not in line


@pytest.mark.parametrize("name", ["a", "my agent", "a.b", "Größe", "a" * 200, "*", "[x]"])
def test_agent_may_be_called_by_any_printable_line(name: str) -> None:
    assert Settings(agents={name: {"env": ["TZ"]}}).agent(name).env == ("TZ",)


@pytest.mark.parametrize("name", ["", "a\nb", "a\x1b[31m", "a" * 201, "\u2028"])
def test_agents_name_that_is_no_printable_line_is_refused_printably(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(agents={name: {}})
    line = str(caught.value)
    assert "an agent's name is 1 to 200 printable characters" in line
    assert line.isprintable()


@pytest.mark.parametrize(
    ("section", "key", "line"),
    [
        ("agents.a", "memory_mb", "unknown key; memory_mb belongs to [sandbox] and cannot differ from agent to agent"),
        ("agents.a", "image", "unknown key; image belongs to [sandbox] and cannot differ from agent to agent"),
        ("agents.a.call", "grace", "unknown key; grace belongs to [call] and cannot differ from agent to agent"),
        ("agents.a", "timeout", "unknown key; timeout belongs to [agents.a.call]"),
        ("agents.a.call", "env", "unknown key; env belongs to [agents.a]"),
        ("agents.a", "python_tool", "unknown key; did you mean agents.a.python_tools?"),
        ("agents.a.call", "timout", "unknown key; did you mean agents.a.call.timeout?"),
        ("agents.a", "zzz", "unknown key; [agents.a] has python_tools, env, allowed_tool_dirs, max_sessions, call"),
        ("privileged.run_script", "timout", "unknown key; did you mean privileged.run_script.timeout?"),
        ("privileged.run_script", "memory_mb", "unknown key; memory_mb belongs to [sandbox]"),
        ("privileged", "shell", "unknown key; did you mean privileged.shell_exec?"),
        ("privileged", "zzz", "unknown key; [privileged] has shell_exec, run_script, python_eval, install_library"),
        ("tools", "timeout", "unknown key; timeout belongs to [call]"),
    ],
)
def test_unknown_key_of_a_table_below_is_named_with_the_place_that_it_belongs_to(
    section: str, key: str, line: str
) -> None:
    assert problems(section, **{key: 1}) == [f"{section}.{key}: {line}"]


def test_agents_name_is_quoted_where_the_file_has_to_quote_it() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(agents={"my agent": {"memory": 1}, "a.b": {"call": {"x": 1}}})
    assert [problem.where for problem in caught.value.problems] == ['agents."my agent".memory', 'agents."a.b".call.x']


def test_value_that_is_not_a_table_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"^agents: 3 is not a table of tables$"):
        Settings(agents=3)  # type: ignore[arg-type] # what a file may hold
    assert problems("agents", a=3) == ["agents.a: 3 is not a table of keys"]


# --- privileged commands
def test_privileged_commands_have_defaults_of_their_own() -> None:
    commands = Settings(privileged={"python_eval": {"max_output": "1kB"}}).privileged
    timeouts = (commands.shell_exec.timeout, commands.run_script.timeout, commands.python_eval.timeout)
    assert timeouts == (60.0, 60.0, 30.0)
    assert (commands.install_library.timeout, commands.install_library.network) == (300.0, "")
    assert (commands.python_eval.max_output, commands.shell_exec.max_output) == (1000, 1_048_576)


def test_privileged_timeout_above_max_lifetime_is_refused_where_it_was_written() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(privileged={"run_script": {"timeout": "3h"}})
    assert str(caught.value) == (
        "privileged.run_script.timeout: 3h is above pool.max_lifetime (2h); lower one or raise the other"
    )


def test_default_of_a_privileged_timeout_gives_way_to_a_shorter_max_lifetime() -> None:
    settings = Settings(
        pool={"max_lifetime": "45s"}, call={"timeout": "45s"}, privileged={"shell_exec": {"network": "n"}}
    )
    timeouts = {name: command.timeout for name, command in settings.privileged}
    assert timeouts == {"shell_exec": 45.0, "run_script": 45.0, "python_eval": 30.0, "install_library": 45.0}
    assert settings.privileged.shell_exec.network == "n"


@pytest.mark.parametrize("network", ["host", "container:db", "ns:/proc/1/ns/net", "--x", "a b"])
def test_privileged_command_never_gets_another_ones_network(network: str) -> None:
    (line,) = problems("privileged.install_library", network=network)
    assert line.startswith("privileged.install_library.network: ")


def test_no_mount_may_take_the_place_of_the_workspace() -> None:
    mounts = ["/a:/b:ro", "/a:/workspace/:ro"]
    with pytest.raises(ConfigError, match=r"^sandbox\.mounts\[1\]: its target /workspace is where privileged commands"):
        Settings(sandbox={"mounts": mounts, "workspace": "/srv/work"})
    assert Settings(sandbox={"mounts": mounts}).sandbox.workspace == ""


# --- all of it
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["limits", "30s", "/srv", "TZ"]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["python_tools", "env", "allowed_tool_dirs", "max_sessions", "call", "timeout", "max_output", "x"]
)


@given(st.dictionaries(st.text(max_size=8), st.dictionaries(KEYS, VALUES, max_size=4), max_size=3))
def test_whatever_stands_in_agents_is_settings_or_printable_problems(agents: dict[str, Any]) -> None:
    try:
        settings = Settings(agents=agents)
    except ConfigError as error:
        assert all(one.where.startswith("agents") and str(one).isprintable() for one in error.problems)  # noqa: PT017
        return
    for name in agents:
        agent = settings.agent(name)
        assert agent.timeout <= settings.call.timeout
        assert agent.max_output <= settings.call.max_output
