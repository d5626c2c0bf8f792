"""Settings: each key's rule, the rules between keys, unknown names, and the words of every refusal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pool.config.load import ConfigError, Settings
from pool.config.tables import default_state_dir


def problems(section: str = "", /, **keys: object) -> list[str]:
    """What `Settings` says against these keys of one section, given by its dotted name."""
    first, *below = section.split(".")
    table: dict[str, object] = keys
    for name in reversed(below):
        table = {name: table}
    with pytest.raises(ConfigError) as caught:
        Settings(**{first: table})
    return str(caught.value).splitlines()


# --- settings in code
def test_settings_without_anything_have_the_defaults() -> None:
    settings = Settings()
    assert settings.sandbox.memory_mb == 512
    assert settings.sandbox.network == "none"
    assert settings.pool.max_sandboxes == 8
    assert settings.call.max_output == 1_048_576


def test_settings_accept_sections_that_are_models() -> None:
    other = Settings(pool={"max_sandboxes": 4})
    assert Settings(pool=other.pool, call=other.call, sandbox=other.sandbox) == other


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.pool = settings.pool
    with pytest.raises(ValidationError, match="frozen"):
        settings.pool.max_sandboxes = 3


def test_state_dir_follows_the_name_and_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert Settings(pool={"name": "blue"}).pool.state_dir == Path("/var/lib/emberpool/pools/blue")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Settings(pool={"name": "blue"}).pool.state_dir == tmp_path / "emberpool/pools/blue"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_state_dir("x") == tmp_path / "home/.local/state/emberpool/pools/x"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_state_dir("x") == tmp_path / "home/.local/state/emberpool/pools/x"


def test_wrong_name_is_one_problem_and_not_one_of_state_dir_too() -> None:
    assert len(problems("pool", name="../x")) == 1


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        # Types: nothing is coerced.
        ("pool", "max_sandboxes", True, "True is not a whole number"),
        ("pool", "max_sandboxes", "8", "'8' is not a whole number"),
        ("pool", "max_sandboxes", 8.0, "8.0 is not a whole number"),
        ("pool", "max_sandboxes", None, "None is not a whole number"),
        ("pool", "overcommit", "yes", "'yes' is not true or false"),
        ("pool", "overcommit", 1, "1 is not true or false"),
        ("pool", "name", 3, "3 is not a text in quotes"),
        ("sandbox", "cpus", True, "True is not a number"),
        ("sandbox", "cpus", "1", "'1' is not a number"),
        ("sandbox", "mounts", "/a:/b", "'/a:/b' is not a list"),
        ("pool", "idle_timeout", False, "False is not a duration"),
        ("call", "max_input", False, "False is not a size"),
        # Bounds.
        ("pool", "max_sandboxes", 0, "0 must be at least 1"),
        ("pool", "max_sandboxes", 10_001, "10001 must be at most 10000"),
        ("pool", "min_standby", -1, "-1 must be at least 0"),
        ("pool", "max_starting", 0, "0 must be at least 1"),
        ("pool", "max_cold", -1, "-1 must be at least 0"),
        ("pool", "max_cold_waiters", -1, "-1 must be at least 0"),
        ("pool", "max_waiters", -1, "-1 must be at least 0"),
        ("pool", "max_calls", -1, "-1 must be at least 0"),
        ("pool", "max_sessions_per_agent", -1, "-1 must be at least 0"),
        ("pool", "restart_limit", 0, "0 must be at least 1"),
        ("sandbox", "memory_mb", 15, "15 must be at least 16"),
        ("sandbox", "memory_mb", 0, "0 must be at least 16"),
        ("sandbox", "pids", 15, "15 must be at least 16"),
        ("sandbox", "open_files", 0, "0 must be at least 64"),
        ("sandbox", "cpu_seconds", 0, "0 must be at least 1"),
        ("sandbox", "file_size_mb", 0, "0 must be at least 1"),
        ("sandbox", "tmpfs_mb", 0, "0 must be at least 1"),
        ("sandbox", "cpus", 0, "must be at least 0.01"),
        ("sandbox", "cpus", float("nan"), "nan is not a finite number"),
        ("sandbox", "cpus", float("inf"), "inf is not a finite number"),
        # Texts that would be something else than they say.
        ("sandbox", "image", "--privileged", "must match"),
        ("sandbox", "image", "", "must match"),
        ("sandbox", "binary", "-x", "name of a command, or its absolute path"),
        ("sandbox", "binary", "bin/docker", "name of a command, or its absolute path"),
        ("sandbox", "binary", "a\nb", "name of a command, or its absolute path"),
        ("sandbox", "runtime", "--rm", "must match"),
        ("sandbox", "seccomp", "unconfined", "absolute path"),
        ("sandbox", "network", "", "must match"),
        ("sandbox", "network", "--x", "must match"),
        ("sandbox", "network", "host", "network that is not its own"),
        ("sandbox", "network", "container:db", "network that is not its own"),
        ("sandbox", "user", "", 'must be "auto", "image", or a numeric uid:gid'),
        ("sandbox", "user", "root", 'must be "auto", "image", or a numeric uid:gid'),
        ("sandbox", "user", "1000", 'must be "auto", "image", or a numeric uid:gid'),
        ("sandbox", "user", "1000:1000 ", 'must be "auto", "image", or a numeric uid:gid'),
        ("sandbox", "user", "0:0", "is root"),
        ("sandbox", "user", "00:1000", "is root"),
        ("sandbox", "user", "2147483648:1", "highest uid and gid"),
        ("sandbox", "user", "1:2147483648", "highest uid and gid"),
        ("sandbox", "uid_range", "0:9", "holds uid 0"),
        ("sandbox", "mounts", ["/a:/x", "/b:/x/"], "two mounts have the target '/x'"),
        ("sandbox", "python_tools", "docker", "'docker' must be 'container' or 'limits'"),
        ("sandbox", "python_tools", "", "must be 'container' or 'limits'"),
        ("sandbox", "python_tools", True, "must be 'container' or 'limits'"),
        ("sandbox", "limits_strict", 1, "1 is not true or false"),
        ("sandbox", "allowed_tool_dirs", "/srv", "'/srv' is not a list"),
        ("sandbox", "workspace", "work", "'work' is not an absolute path"),
        ("sandbox", "workspace", "/a\0b", "is not an absolute path"),
        ("sandbox", "workspace", "/a:b", "'/a:b' cannot be mounted; it must hold no colon"),
        ("sandbox", "workspace", "/a/../b", "cannot be mounted"),
        ("tools", "max_bytes", 0, "0 must be at least 1 byte"),
        ("tools", "max_files", 0, "0 must be at least 1"),
        ("pool", "name", "", "letters, digits"),
        ("pool", "name", "..", "letters, digits"),
        ("pool", "name", "a/b", "letters, digits"),
        ("pool", "name", "é", "letters, digits"),
        ("pool", "name", "a\n", "letters, digits"),
        ("pool", "name", "a" * 65, "letters, digits"),
        ("pool", "state_dir", "state", "'state' is not an absolute path"),
        ("pool", "state_dir", "/a\0b", "is not an absolute path"),
        ("pool", "state_dir", 3, "3 is not an absolute path"),
        ("pool", "reclaim_idle_after", 0, '"off" turns it off'),
        ("pool", "reclaim_idle_after", "never", '"off" turns it off'),
    ],
)
def test_value_outside_its_rule_is_one_problem_that_names_key_and_rule(
    section: str, key: str, value: object, words: str
) -> None:
    (line,) = problems(section, **{key: value})
    assert line.startswith(f"{section}.{key}: ")
    assert words in line


DURATIONS = [
    *(("pool", key) for key in ("idle_timeout", "standby_max_age", "max_lifetime", "acquire_timeout")),
    *(("pool", key) for key in ("reclaim_idle_after", "restart_window", "resync_interval", "drain_timeout")),
    ("call", "timeout"),
    ("call", "grace"),
    ("privileged.shell_exec", "timeout"),
    ("agents.analyst.call", "timeout"),
]


@pytest.mark.parametrize(("section", "key"), DURATIONS)
@pytest.mark.parametrize("value", [0, -1, "0s", float("nan"), float("inf"), "soon"])
def test_every_time_has_to_be_a_duration_above_zero(section: str, key: str, value: object) -> None:
    (line,) = problems(section, **{key: value})
    assert line.startswith(f"{section}.{key}: ")


def test_number_with_thousands_of_digits_is_refused_like_any_other() -> None:
    assert problems("pool", max_sandboxes=10**5000) == [
        "pool.max_sandboxes: a number with thousands of digits must be at most 10000"
    ]


def test_wrong_item_of_a_list_is_named_by_its_place() -> None:
    assert problems("sandbox", mounts=["/a:/b", 3]) == ["sandbox.mounts[1]: 3 is not a text in quotes"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("data:/data", "both paths must be absolute"),
        ("/data", "a mount is /host/path:/container/path"),
        ("/data:/data:exec", "unknown option"),
        ("/data:/tool", "belongs to the sandbox itself"),
        ("/a/../b:/x", "must not contain"),
    ],
)
def test_wrong_mount_is_named_by_its_place_and_text(spec: str, words: str) -> None:
    (line,) = problems("sandbox", mounts=["/a:/b", spec])
    assert line.startswith(f"sandbox.mounts[1]: mount {spec!r}: ")
    assert words in line


def test_doubled_slashes_do_not_make_another_target() -> None:
    assert problems("sandbox", mounts=["/a:/x", "/b://x/"]) == [
        "sandbox.mounts: two mounts have the target '/x'; keep one"
    ]


@pytest.mark.parametrize("user", ["auto", "image", "1000:1000", "1000:0", "2147483647:2147483647"])
def test_user_forms_that_are_allowed(user: str) -> None:
    assert Settings(sandbox={"user": user}).sandbox.user == user


def test_reclaim_can_be_turned_off() -> None:
    assert Settings(pool={"reclaim_idle_after": "off"}).pool.reclaim_idle_after is None


def test_wrong_tool_directory_is_named_by_its_place() -> None:
    assert problems("sandbox", allowed_tool_dirs=["/srv/tools", "~/tools"]) == [
        "sandbox.allowed_tool_dirs[1]: '~/tools' is not an absolute path"
    ]


def test_whole_numbers_are_numbers_where_fractions_are_allowed() -> None:
    assert Settings(sandbox={"cpus": 2}).sandbox.cpus == 2.0


# --- rules between keys
def test_min_standby_above_max_sandboxes_is_refused_naming_both() -> None:
    assert problems("pool", min_standby=9, max_sandboxes=8) == [
        "pool.min_standby: 9 is above pool.max_sandboxes (8); lower one or raise the other"
    ]


def test_max_starting_above_max_sandboxes_is_refused_naming_both() -> None:
    assert problems("pool", max_starting=9) == [
        "pool.max_starting: 9 is above pool.max_sandboxes (8); lower one or raise the other"
    ]


def test_default_that_breaks_a_rule_is_called_a_default() -> None:
    assert problems("pool", max_sandboxes=1, max_starting=1) == [
        "pool.min_standby: 2 (the default) is above pool.max_sandboxes (1); lower one or raise the other"
    ]


def test_equal_counts_are_allowed() -> None:
    assert Settings(pool={"min_standby": 3, "max_starting": 3, "max_sandboxes": 3}).pool.min_standby == 3


def test_call_timeout_has_to_fit_into_a_sandbox_life() -> None:
    with pytest.raises(ConfigError, match=r"call\.timeout: 1m \(the default\) is above pool\.max_lifetime \(30s\)"):
        Settings(pool={"max_lifetime": "30s"})
    assert Settings(pool={"max_lifetime": "30s"}, call={"timeout": "30s"}).call.timeout == 30.0


def test_runners_must_leave_the_calls_some_pids() -> None:
    with pytest.raises(ConfigError, match=r"call\.parallel: 64 runners take 194 of sandbox\.pids \(128\)"):
        Settings(call={"parallel": 64})
    assert Settings(call={"parallel": 64}, sandbox={"pids": 258}).call.parallel == 64


def test_uid_range_needs_a_uid_for_each_container_and_one_for_pid_1() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.uid_range: 5000:10 has 10 uids; .*\(8\).*\(2\).* need 11"):
        Settings(sandbox={"uid_range": "5000:10"})
    assert Settings(sandbox={"uid_range": "5000:11"}).sandbox.uid_range.count == 11


def test_all_broken_rules_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(pool={"max_sandboxes": 1, "max_lifetime": 1}, sandbox={"uid_range": "5000:2"})
    keys = [problem.where for problem in caught.value.problems]
    assert keys == ["pool.min_standby", "pool.max_starting", "call.timeout", "sandbox.uid_range"]


@given(
    st.integers(0, 12),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 12),
    st.integers(2, 30),
    st.integers(1, 9),
)
def test_settings_exist_exactly_where_every_rule_holds(
    standby: int, most: int, starting: int, cold: int, uids: int, timeout: int
) -> None:
    allowed = standby <= most and starting <= most and uids >= most + cold + 1 and timeout <= 5
    try:
        Settings(
            pool={
                "min_standby": standby,
                "max_sandboxes": most,
                "max_starting": starting,
                "max_cold": cold,
                "max_lifetime": 5,
            },
            sandbox={"uid_range": f"5000:{uids}"},
            call={"timeout": timeout},
        )
    except ConfigError:
        assert not allowed
    else:
        assert allowed


# --- unknown names
SECTION_NAMES = "[sandbox], [pool], [call], [tools], [host], [privileged], [agents]"


@pytest.mark.parametrize(
    ("section", "key", "line"),
    [
        ("pool", "max_sandbox", "pool.max_sandbox: unknown key; did you mean pool.max_sandboxes?"),
        ("sandbox", "memory", "sandbox.memory: unknown key; did you mean sandbox.memory_mb?"),
        ("pool", "memory_mb", "pool.memory_mb: unknown key; memory_mb belongs to [sandbox]"),
        (
            "call",
            "qqq",
            "call.qqq: unknown key; [call] has timeout, grace, calls_per_exec, parallel, max_input, max_output, unbuffered",
        ),
        (
            "call",
            "a\nb\x1b[31m",
            "call.a\\nb\\x1b[31m: unknown key; [call] has timeout, grace, calls_per_exec, parallel, max_input, max_output, unbuffered",
        ),
    ],
)
def test_unknown_key_is_named_with_the_nearest_one(section: str, key: str, line: str) -> None:
    assert problems(section, **{key: 1}) == [line]


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("pol", "pol: unknown section; did you mean [pool]?"),
        ("max_sandboxes", "max_sandboxes: unknown section; max_sandboxes is a key of [pool]"),
        ("tool", "tool: unknown section; did you mean [tools]?"),
        ("env", "env: unknown section; env is a key of [agents.<name>]"),
        ("python_tools", "python_tools: unknown section; python_tools is a key of [sandbox]"),
        ("zzz", f"zzz: unknown section; the sections are {SECTION_NAMES}"),
        ("self", f"self: unknown section; the sections are {SECTION_NAMES}"),
    ],
)
def test_unknown_section_is_named_with_the_nearest_one(section: str, line: str) -> None:
    assert problems(section, name="x") == [line]


@pytest.mark.parametrize("section", ["server", "egress"])
def test_sections_that_would_do_nothing_are_refused(section: str) -> None:
    assert problems(section)[0].startswith(f"{section}: unknown section")


@pytest.mark.parametrize(("section", "key"), [("sandbox", "require_digest"), ("pool", "standby_bounds")])
def test_keys_that_would_do_nothing_are_refused(section: str, key: str) -> None:
    assert problems(section, **{key: 1})[0].startswith(f"{section}.{key}: unknown key")
