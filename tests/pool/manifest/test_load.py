"""Manifests: what a file may say, what is told about it, and that it only ever narrows the configuration."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.config.load import ConfigError, Settings, load_settings
from pool.config.types import Section
from pool.manifest.load import Manifest, ManifestError, ToolEntry, load_manifest, problems, resolve
from pool.manifest.models import KNOWN, AgentTable, PluginTable, ToolTable
from tests.support import ROOT

DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
BASE = Path("/srv/agents")


def manifest(**agents: Any) -> Manifest:
    return Manifest.from_tables({"agents": agents}, BASE)


def tool(**keys: Any) -> ToolEntry:
    """The one tool of an agent."""
    (entry,) = manifest(a={"tools": {"t": {"file": "t.py", **keys}}}).tools()
    return entry


def refused(**agents: Any) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        manifest(**agents)
    return str(caught.value).splitlines()


def refused_tool(name: str = "t", **keys: Any) -> str:
    """The one problem with an agent's one tool, without the path of the tool's table."""
    (line,) = refused(a={"tools": {name: keys}})
    return line.removeprefix(f"agents.a.tools.{name}").lstrip(".")


# --- what a tool is
def test_tool_of_a_file_has_absolute_paths_and_the_function_of_its_name() -> None:
    entry = tool(description="what it does", timeout="10s", retries=2, backoff="1s")
    assert entry == ToolEntry(
        agent="a",
        name="t",
        base=BASE,
        file=BASE / "t.py",
        function="t",
        timeout=10.0,
        retries=2,
        backoff=1.0,
        description="what it does",
        key="agents.a.tools.t",
        env_key="agents.a.env",
        python_tools_key="agents.a.python_tools",
    )


def test_tool_without_more_has_the_defaults() -> None:
    entry = tool()
    assert (entry.timeout, entry.retries, entry.backoff) == (None, 0, 0.2)
    assert (entry.env, entry.python_tools, entry.plugin, entry.directory, entry.inline) == (
        None,
        None,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("keys", "file", "function"),
    [
        ({"file": "dir/x.py"}, "/srv/agents/dir/x.py", "t"),
        ({"file": "dir/x.py:main"}, "/srv/agents/dir/x.py", "main"),
        ({"file": "dir/x.py", "function": "main"}, "/srv/agents/dir/x.py", "main"),
        ({"file": "x.py:main", "function": "main"}, "/srv/agents/x.py", "main"),
        ({"file": "/opt/x.py:main"}, "/opt/x.py", "main"),
        ({"file": "a:b/x.py"}, "/srv/agents/a:b/x.py", "t"),
        ({"file": "a:b/x.py:main"}, "/srv/agents/a:b/x.py", "main"),
        ({"file": "../x.py"}, "/srv/agents/../x.py", "t"),
        ({"file": "./x.py"}, "/srv/agents/x.py", "t"),
    ],
)
def test_file_is_relative_to_the_manifest_and_may_name_the_function(keys: Any, file: str, function: str) -> None:
    entry = tool(**keys)
    assert (str(entry.file), entry.function) == (file, function)


def test_inline_tool_has_no_file_and_no_function() -> None:
    (entry,) = manifest(a={"tools": {"now": {"inline": "import time; print(time.time())"}}}).tools()
    assert (entry.inline, entry.file, entry.function) == ("import time; print(time.time())", None, "")


def test_plugins_tool_has_a_name_of_its_own_and_the_plugins_directory() -> None:
    tables = {"plugins": {"acme-1_x": {"directory": "plugins/acme", "tools": {"shout": {"file": "sub/shout.py"}}}}}
    (entry,) = manifest(a=tables).tools()
    assert (entry.name, entry.plugin, entry.function) == ("plugin__acme-1_x__shout", "acme-1_x", "shout")
    assert entry.directory == BASE / "plugins/acme"
    assert entry.file == BASE / "plugins/acme/sub/shout.py"
    assert entry.key == "agents.a.plugins.acme-1_x.tools.shout"


def test_tool_has_its_own_env_and_place_or_its_agents() -> None:
    agents = {
        "env": ["A", "B"],
        "python_tools": "limits",
        "tools": {
            "own": {"file": "x.py", "env": ["B"], "python_tools": "container"},
            "none": {"file": "x.py", "env": []},
            "agents": {"file": "x.py"},
        },
    }
    own, none, of_agent = manifest(a=agents).tools()
    assert (own.env, own.python_tools) == (("B",), "container")
    assert (none.env, none.python_tools) == ((), "limits")
    assert (of_agent.env, of_agent.python_tools) == (("A", "B"), "limits")
    assert (own.env_key, of_agent.env_key) == ("agents.a.tools.own.env", "agents.a.env")


# --- what is told
@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, ": a tool has either a file or inline code; give one"),
        ({"file": "x.py", "inline": "pass"}, ": a tool has either a file or inline code, not both"),
        ({"inline": "pass", "function": "f"}, ": inline code runs as it is and has no function to call;"),
        ({"file": "x.py:f", "function": "g"}, ": file names the function 'f' and function 'g'; keep one"),
        ({"file": "x.py:"}, ": '' is not the name of a Python function"),
        ({"file": "x.py:3"}, ": '3' is not the name of a Python function"),
        ({"file": ":f"}, ": '' is not a path"),
        ({"file": ""}, "file: '' is not a path"),
        ({"file": "a\0b"}, "file: 'a\\x00b' is not a path"),
        ({"file": 3}, "file: 3 is not a text in quotes"),
        ({"file": "x.py", "function": "a.b"}, "function: 'a.b' is not the name of a Python function"),
        ({"file": "x.py", "function": "class"}, "function: 'class' is not the name of a Python function"),
        ({"inline": "  \n"}, "inline: is empty; give the code, or a file"),
        ({"inline": "a\0"}, "inline: holds a NUL character"),
        (
            {"inline": "é" * 500_001},
            "inline: is 1,000,002 bytes; at most 1,000,000 are taken, put the code into a file",
        ),
        ({"file": "x.py", "timeout": 0}, "timeout: 0 must be above 0"),
        ({"file": "x.py", "retries": 11}, "retries: 11 must be at most 10"),
        ({"file": "x.py", "retries": True}, "retries: True is not a whole number"),
        ({"file": "x.py", "backoff": "x"}, "backoff: 'x' is not a duration"),
        ({"file": "x.py", "env": ["A=b"]}, "env[0]: 'A' comes with a value"),
        ({"file": "x.py", "python_tools": "docker"}, "python_tools: 'docker' must be 'container' or 'limits'"),
        ({"file": "x.py", "timout": 3}, "timout: unknown key; did you mean agents.a.tools.t.timeout?"),
        ({"file": "x.py", "directory": 3}, "directory: unknown key; directory belongs to [agents.a.plugins.t]"),
    ],
)
def test_wrong_key_of_a_tool_is_one_problem(keys: Any, line: str) -> None:
    assert refused_tool(**keys).startswith(line)


@pytest.mark.parametrize("name", ["", "a/b", "1a", "a-b", "a b", "é", "a" * 65, "a\n", ".."])
def test_name_that_is_no_tools_name_is_refused(name: str) -> None:
    (line,) = refused(a={"tools": {name: {"file": "x.py"}}})
    assert "is not the name of a tool: 1 to 64 letters" in line
    assert line.isprintable()


def test_ordinary_tool_may_not_be_called_like_a_plugins() -> None:
    (line,) = refused(a={"tools": {"plugin__x__y": {"file": "x.py"}}})
    assert line.endswith("put it into [agents.<name>.plugins.<id>.tools]")


@pytest.mark.parametrize("name", ["", "A", "a__b", "_a", "a_", "-a", "a/b", "a.b", "a" * 65])
def test_id_that_could_be_read_in_two_ways_is_refused(name: str) -> None:
    (line,) = refused(a={"plugins": {name: {"directory": "p"}}})
    assert "is not the id of a plugin" in line


def test_tool_called_by_a_keyword_has_to_name_its_function() -> None:
    assert refused_tool("class", file="x.py") == (
        ": no function can be called class; name the tool's function with function = ..."
    )
    assert manifest(a={"tools": {"class": {"file": "x.py:f"}}}).find("class").function == "f"
    assert manifest(a={"tools": {"class": {"inline": "pass"}}}).find("class").function == ""


def test_plugin_needs_a_directory() -> None:
    assert refused(a={"plugins": {"p": {}}}) == [
        "agents.a.plugins.p.directory: is missing; every table of this kind needs it"
    ]


def test_agent_may_have_a_thousand_tools_and_no_more() -> None:
    def agent(own: int, of_plugin: int) -> dict[str, Any]:
        plugin = {"directory": "p", "tools": {f"t{index}": {"file": "x.py"} for index in range(of_plugin)}}
        return {"tools": {f"t{index}": {"file": "x.py"} for index in range(own)}, "plugins": {"p": plugin}}

    assert len(manifest(a=agent(600, 400)).tools()) == 1000
    assert refused(a=agent(600, 401)) == ["agents.a: has 1001 tools; one agent may have 1000"]


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"agent": {}}, "agent: unknown section; did you mean [agents]?"),
        ({"tools": {}}, "tools: unknown section; tools is a key of [agents.<name>]"),
        ({"base": "/x"}, "base: unknown section; the sections are [agents]"),
        ({"agents": 3}, "agents: 3 is not a table of tables"),
        ({"agents": {"a": {"tool": {}}}}, "agents.a.tool: unknown key; did you mean agents.a.tools?"),
        (
            {"agents": {"a": {"timeout": 3}}},
            "agents.a.timeout: unknown key; timeout belongs to [agents.a.tools.<name>]",
        ),
        ({"agents": {"a": {"tools": {"t": 3}}}}, "agents.a.tools.t: 3 is not a table of keys"),
        (
            {"agents": {"a b": {"x": 3}}},
            'agents."a b".x: unknown key; [agents."a b"] has env, python_tools, tools, plugins',
        ),
        ({"agents": {"": {}}}, "agents.\"\": an agent's name is 1 to 200 printable characters; '' is not"),
    ],
)
def test_what_stands_in_the_wrong_place_is_told_where_it_goes(tables: Any, line: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_tables(tables, BASE)
    assert str(caught.value) == line


def test_all_problems_are_told_at_once() -> None:
    lines = refused(
        a={"env": ["1"], "tools": {"t": {"file": ""}, "u": {"inline": "x", "retries": -1}}},
        b={"plugins": {"p": {"directory": "", "tools": {"x": {}}}}},
    )
    assert [line.split(": ")[0] for line in lines] == [
        "agents.a.env[0]",
        "agents.a.tools.t.file",
        "agents.a.tools.u.retries",
        "agents.b.plugins.p.directory",
        "agents.b.plugins.p.tools.x",
    ]


def test_tool_may_not_widen_what_the_manifest_gives_its_agent() -> None:
    lines = refused(
        a={"env": ["A"], "python_tools": "container", "tools": {"t": {"file": "x.py", "env": ["A", "B"]}}},
        b={"python_tools": "container", "tools": {"t": {"file": "x.py", "python_tools": "limits"}}},
    )
    assert lines == [
        "agents.a.tools.t.env: B: not in agents.a.env, and a tool only narrows it; add it there, or leave it out here",
        'agents.b.tools.t.python_tools: "limits" is weaker than agents.b.python_tools, "container"; leave one of them out',
    ]


# --- the file
def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "manifest.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_paths_of_a_file_are_below_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, '[agents.a.tools.t]\nfile = "t.py"\n')
    assert load_manifest(path).find("t").file == tmp_path / "t.py"
    monkeypatch.chdir(tmp_path)
    assert load_manifest(Path("manifest.toml")).find("t").file == tmp_path / "t.py"


def test_paths_are_not_followed_through_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "real", '[agents.a.tools.t]\nfile = "../t.py"\n')
    entry = load_manifest(tmp_path / "link/manifest.toml").find("t")
    assert (entry.base, str(entry.file)) == (tmp_path / "link", f"{tmp_path}/link/../t.py")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[agents.a\n", r"is not TOML: .*\(at line 1, column 10\)"),
        ("[agents.a.tools.t]\nfile = 'x'\n[agents.a.tools.t]\n", "is not TOML: .*line 3"),
        (b"[agents.caf\xe9]\n", "is not UTF-8: line 1 holds the byte 0xe9"),
        ("#" * 1_000_001, "is larger than 1,000,000 bytes; this is not a manifest"),
    ],
)
def test_file_that_cannot_be_read_is_one_problem_that_names_it(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ManifestError, match=f"^{re.escape(str(path))}: {words}"):
        load_manifest(path)


def test_missing_file_is_a_manifest_error_and_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="there is no such file"):
        load_manifest(tmp_path / "none.toml")
    assert issubclass(ManifestError, ConfigError)


def test_relative_base_is_refused() -> None:
    with pytest.raises(ManifestError, match="base: tools is not an absolute path"):
        Manifest.from_tables({}, Path("tools"))


def test_empty_manifest_has_no_tools(tmp_path: Path) -> None:
    assert load_manifest(write(tmp_path, "")).tools() == []


# --- finding
TWO = {
    "a": {
        "tools": {"csv_summary": {"file": "x.py"}, "both": {"file": "x.py"}},
        "plugins": {"acme": {"directory": "p", "tools": {"shout": {"file": "x.py"}}}},
    },
    "b": {"tools": {"both": {"file": "y.py"}}},
}


def lookup(name: str, agent: str | None = None) -> str:
    with pytest.raises(ManifestError) as caught:
        manifest(**TWO).find(name, agent)
    return str(caught.value)


def test_tools_are_listed_in_the_order_of_the_file() -> None:
    listed = [(entry.agent, entry.name) for entry in manifest(**TWO).tools()]
    assert listed == [("a", "csv_summary"), ("a", "both"), ("a", "plugin__acme__shout"), ("b", "both")]
    assert [entry.name for entry in manifest(**TWO).tools("b")] == ["both"]


def test_tool_is_found_by_its_name_and_its_agent() -> None:
    assert manifest(**TWO).find("csv_summary").agent == "a"
    assert manifest(**TWO).find("plugin__acme__shout").file == BASE / "p/x.py"
    assert manifest(**TWO).find("both", "b").file == BASE / "y.py"


def test_tool_of_two_agents_wants_to_know_which() -> None:
    assert lookup("both") == "both: several agents have this tool: a, b; pass --agent"


def test_unknown_tool_is_told_with_the_nearest_and_all_there_are() -> None:
    there = "csv_summary, both, plugin__acme__shout"
    assert lookup("csv_sumary") == (
        f"csv_sumary: there is no such tool in the manifest; did you mean csv_summary? It has {there}"
    )
    assert "did you mean plugin__acme__shout?" in lookup("shout")
    assert lookup("zzz\n") == f"zzz\\n: there is no such tool in the manifest; it has {there}"
    assert lookup("csv_summary", "b") == "csv_summary: there is no such tool in the manifest; it has both"


def test_unknown_agent_is_told_with_the_agents() -> None:
    assert lookup("both", "c") == "c: there is no such agent in the manifest; it has a, b"
    with pytest.raises(ManifestError, match="it has none"):
        manifest().tools("a")


def test_long_list_of_tools_is_cut() -> None:
    tools = {f"tool{index:02}": {"file": "x.py"} for index in range(25)}
    with pytest.raises(ManifestError, match=r"it has tool00, .*, tool19 and 5 more$"):
        manifest(a={"tools": tools}).find("zzz")


# --- against the configuration
def test_resolved_tool_has_the_configurations_values_where_the_manifest_has_none() -> None:
    settings = Settings(
        sandbox={"python_tools": "limits"},
        agents={
            "a": {"env": ["A", "B"], "allowed_tool_dirs": ["/opt"], "call": {"timeout": "9s", "max_output": "1kB"}}
        },
    )
    resolved = resolve(tool(), settings)
    assert (resolved.python_tools, resolved.env) == ("limits", ("A", "B"))
    assert (resolved.timeout, resolved.max_output) == (9.0, 1000)
    assert resolved.allowed_tool_dirs == (Path("/opt"),)


def test_resolved_tool_has_the_manifests_values_where_they_narrow() -> None:
    settings = Settings(sandbox={"python_tools": "limits"}, agents={"a": {"env": ["A", "B"]}})
    resolved = resolve(tool(env=["B"], timeout="5s", python_tools="container"), settings)
    assert (resolved.python_tools, resolved.env, resolved.timeout) == ("container", ("B",), 5.0)


def test_tools_lie_below_their_manifest_where_the_configuration_names_no_directory() -> None:
    assert resolve(tool(), Settings()).allowed_tool_dirs == (BASE,)
    assert resolve(tool(), Settings(sandbox={"allowed_tool_dirs": ["/opt"]})).allowed_tool_dirs == (Path("/opt"),)


@pytest.mark.parametrize(
    ("keys", "settings", "line"),
    [
        (
            {"env": ["A", "B"]},
            {"agents": {"a": {"env": ["A"]}}},
            "agents.a.tools.t.env[1]: B is not in the configuration's agents.a.env; add it there, or leave it out here",
        ),
        (
            {"python_tools": "limits"},
            {},
            'agents.a.tools.t.python_tools: "limits" would run it on the host, and the configuration\'s '
            'sandbox.python_tools is "container"; leave it out here, or set agents.a.python_tools = "limits" in the '
            "configuration",
        ),
        (
            {"python_tools": "limits"},
            {"sandbox": {"python_tools": "limits"}, "agents": {"a": {"python_tools": "container"}}},
            'agents.a.tools.t.python_tools: "limits" would run it on the host, and the configuration\'s '
            'agents.a.python_tools is "container"; leave it out here, or set agents.a.python_tools = "limits" in the '
            "configuration",
        ),
        (
            {"timeout": "61s"},
            {},
            "agents.a.tools.t.timeout: 61s is above the configuration's call.timeout (1m); lower it, or raise call.timeout",
        ),
        (
            {"timeout": "31s"},
            {"agents": {"a": {"call": {"timeout": "30s"}}}},
            "agents.a.tools.t.timeout: 31s is above the configuration's agents.a.call.timeout (30s); lower it, or raise "
            "agents.a.call.timeout",
        ),
    ],
)
def test_tool_that_asks_for_more_is_refused_naming_both_keys(keys: Any, settings: Any, line: str) -> None:
    with pytest.raises(ManifestError) as caught:
        resolve(tool(**keys), Settings(**settings))
    assert str(caught.value) == line
    found = problems(manifest(a={"tools": {"t": {"file": "x.py", **keys}}}), Settings(**settings))
    assert [str(problem) for problem in found] == [line]


def test_agent_that_asks_for_more_is_told_once_and_refuses_each_of_its_tools() -> None:
    tools = {"t": {"file": "x.py"}, "u": {"file": "x.py"}}
    asking = manifest(
        a={"env": ["A"], "python_tools": "limits", "tools": tools}, b={"env": ["B"], "python_tools": "limits"}
    )
    where = [problem.where for problem in problems(asking, Settings())]
    assert where == ["agents.a.env[0]", "agents.a.python_tools", "agents.b.env[0]", "agents.b.python_tools"]
    with pytest.raises(ManifestError) as caught:
        resolve(asking.find("u"), Settings())
    assert [problem.where for problem in caught.value.problems] == where[:2]


NAMES = st.sets(st.sampled_from(["A", "B", "C"])).map(sorted)
PLACE = st.sampled_from(["container", "limits"])
TIMES = st.integers(1, 60)


@given(
    st.fixed_dictionaries({"env": NAMES}, optional={"python_tools": PLACE, "call": st.builds(dict, timeout=TIMES)}),
    st.fixed_dictionaries({}, optional={"env": NAMES, "python_tools": PLACE}),
    st.fixed_dictionaries({"file": st.just("x.py")}, optional={"env": NAMES, "python_tools": PLACE, "timeout": TIMES}),
    PLACE,
)
def test_what_is_resolved_is_never_more_than_the_configuration_allows(
    allowed: dict[str, Any], agent: dict[str, Any], table: dict[str, Any], everywhere: str
) -> None:
    settings = Settings(sandbox={"python_tools": everywhere}, agents={"a": allowed})
    ceiling = settings.agent("a")
    try:
        asking = manifest(a={**agent, "tools": {"t": table}})
        resolved = resolve(asking.find("t"), settings)
    except ManifestError:
        return
    assert set(resolved.env) <= set(ceiling.env) & set(agent.get("env", ceiling.env))
    assert resolved.timeout <= ceiling.timeout
    assert resolved.python_tools == "container" or ceiling.python_tools == "limits"
    assert resolved.python_tools == "container" or agent.get("python_tools") != "container"
    if set(agent.get("env", ())) <= set(ceiling.env) and agent.get("python_tools") != "limits":
        assert problems(asking, settings) == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["limits", "x.py", "x.py:f"]),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.text(max_size=5), below, max_size=2),
    max_leaves=5,
)
TOOL_KEYS = st.sampled_from([*ToolTable.model_fields, "zzz"])
AGENT_KEYS = st.sampled_from([*AgentTable.model_fields, "zzz"])
TOOLS = st.dictionaries(st.text(max_size=4), st.dictionaries(TOOL_KEYS, VALUES, max_size=4), max_size=2)
AGENT: st.SearchStrategy[dict[str, Any]] = st.dictionaries(AGENT_KEYS, VALUES, max_size=2) | st.builds(
    dict, tools=TOOLS
)


@given(st.dictionaries(st.text(max_size=5), AGENT, max_size=2))
def test_whatever_stands_in_a_manifest_is_tools_or_printable_problems(agents: dict[str, Any]) -> None:
    try:
        found = Manifest.from_tables({"agents": agents}, BASE)
    except ManifestError as error:
        told = error.problems
    else:
        told = ()
        assert all((entry.file is None) != (entry.inline is None) for entry in found.tools())
    assert all(problem.where.startswith("agents") and str(problem).isprintable() for problem in told)


# --- the documentation and the examples
def test_documentation_has_every_key_in_order_with_its_default() -> None:
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in (DOCS / "manifest.md").read_text("utf-8").splitlines():
        if heading := re.match(r"## (?:`\[([\w.<>]+)\]`)?", line):
            section = heading[1] or ""
        elif section and (row := re.match(r"\| `(\w+)` \| (.*?)\|.*\|$", line)):
            found.setdefault(section, {})[row[1]] = row[2].strip(" `")
    models: dict[str, type[Section]] = {
        "agents.<name>": AgentTable,
        "agents.<name>.tools.<tool>": ToolTable,
        "agents.<name>.plugins.<id>": PluginTable,
    }
    assert {name: list(keys) for name, keys in found.items()} == {
        name: list(model.model_fields) for name, model in models.items()
    }
    of_tool = found["agents.<name>.tools.<tool>"]
    assert (of_tool["retries"], of_tool["backoff"], of_tool["description"]) == ("0", '"200ms"', '""')
    assert (tool().retries, tool().backoff, tool().description) == (0, 0.2, "")
    assert len(KNOWN) == 4


def test_documented_manifest_and_code_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EMBERPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(DOCS.parent)
    text = (DOCS / "manifest.md").read_text("utf-8")
    (toml,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = [entry.name for entry in Manifest.from_tables(tomllib.loads(toml), BASE).tools()]
    assert names == ["csv_summary", "now", "plugin__acme__shout"]
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(code, "manifest.md", "exec"), {})  # noqa: S102 - the documentation's own example


def test_example_asks_for_nothing_that_its_configuration_does_not_allow() -> None:
    example = load_manifest(EXAMPLES / "manifest.toml")
    settings = load_settings(EXAMPLES / "emberpool.toml", {})
    assert problems(example, settings) == []
    assert [entry.agent for entry in example.tools() if resolve(entry, settings).python_tools == "limits"] == ["legacy"]


def test_example_holds_only_where_its_configuration_does() -> None:
    where = [problem.where for problem in problems(load_manifest(EXAMPLES / "manifest.toml"), Settings())]
    assert where == ["agents.analyst.env[0]", "agents.legacy.tools.host_disk.python_tools"]


@pytest.mark.parametrize("entry", load_manifest(EXAMPLES / "manifest.toml").tools(), ids=lambda entry: entry.name)
def test_examples_tool_is_there_with_its_function(entry: ToolEntry) -> None:
    assert entry.description
    if entry.file is None:
        compile(entry.inline or "", entry.name, "exec")
        return
    assert re.search(rf"^def {entry.function}\(", entry.file.read_text("utf-8"), re.MULTILINE)
    assert entry.directory is None or entry.file.is_relative_to(entry.directory)
