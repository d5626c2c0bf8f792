"""Every argv of the profile, word for word, and the proof that no caller's string can become a flag."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.sandbox.mount import Mount
from executor.sandbox.profile import PROXY_VARIABLES, ContainerProfile, Identity, Limits, exec_args
from executor.sandbox.seccomp import STRICT_PROFILE
from tests.support.flags import EXEC_FLAGS, RUN_FLAGS, Parsed, parse

MEMO = [
    "run",
    "--rm",
    "-i",
    "--network",
    "none",
    "--read-only",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
    "--pids-limit",
    "128",
    "--tmpfs",
    "/tmp:rw,noexec,nosuid,size=64m,mode=1777",
]
LIMITS = [
    "--memory",
    "512m",
    "--cpus",
    "1",
    "--ulimit",
    "nofile=256",
    "--ulimit",
    "fsize=67108864",
    "--ulimit",
    "cpu=30:31",
    "--memory-swap",
    "512m",
]
UNCONFIGURED = ["--ulimit", "core=0", "--log-driver", "none", "--pull", "never", "--no-healthcheck"]
TIGHTER = [*UNCONFIGURED, "--security-opt", f"seccomp={STRICT_PROFILE}"]
NO_PROXIES = [word for name in PROXY_VARIABLES for word in ("--env", name)]
ENV = ["--env", "HOME=/tmp", "--env", "PYTHONDONTWRITEBYTECODE=1", "--env", "LANG=C.UTF-8", *NO_PROXIES]
UNLIMITED = Limits(cpu_seconds=None, memory_mb=None, open_files=None, file_size_mb=None)


def test_default_profile_word_for_word() -> None:
    assert ContainerProfile().run_args("img:1", "python3", "-c", "1") == [
        *MEMO, "--workdir", "/tmp", *LIMITS, *TIGHTER, "--entrypoint", "", "--init", *ENV, "img:1", "python3", "-c", "1",
    ]  # fmt: skip


def test_every_field_set_word_for_word() -> None:
    profile = ContainerProfile(
        network="inner",
        limits=Limits(cpu_seconds=5, memory_mb=256, open_files=64, file_size_mb=1),
        pids=32,
        tmpfs_mb=8,
        user="1000:1001",
        workdir="/srv/work dir",
        mounts=(Mount.parse("/a:/b:ro"), Mount.parse("/c d:/e")),
        env=("A=1", "B=two words", "C="),
        cpus=0.25,
        runtime="runsc",
        seccomp="/etc/seccomp.json",
        cgroup_parent="/emberpool-1",
    )
    identity = Identity(name="box-1", labels={"b.key": "2", "a.key": "1 2"})
    assert profile.run_args("img@sha256:ab", "x", "", "-v", identity=identity, env_file="/run/env") == [
        "run", "--rm", "-i", "--network", "inner", "--read-only", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--pids-limit", "32",
        "--tmpfs", "/tmp:rw,noexec,nosuid,size=8m,mode=1777,uid=1000,gid=1001",
        "-v", "/a:/b:ro", "-v", "/c d:/e",
        "--workdir", "/srv/work dir", "--user", "1000:1001",
        "--memory", "256m", "--cpus", "0.25",
        "--ulimit", "nofile=64", "--ulimit", "fsize=1048576", "--ulimit", "cpu=5:6", "--memory-swap", "256m",
        *UNCONFIGURED, "--runtime", "runsc", "--security-opt", "seccomp=/etc/seccomp.json", "--cgroup-parent", "/emberpool-1",
        "--entrypoint", "", "--name", "box-1", "--label", "a.key=1 2", "--label", "b.key=2", "--init", "--env-file", "/run/env",
        "--env", "A=1", "--env", "B=two words", "--env", "C=", *NO_PROXIES, "img@sha256:ab", "x", "", "-v",
    ]  # fmt: skip


def test_absent_limits_leave_their_flags_out() -> None:
    profile = ContainerProfile(limits=UNLIMITED, cpus=None, env=())
    assert profile.run_args("img", "x") == [
        *MEMO,
        "--workdir",
        "/tmp",
        *TIGHTER,
        "--entrypoint",
        "",
        "--init",
        *NO_PROXIES,
        "img",
        "x",
    ]


def test_sandbox_word_for_word() -> None:
    args = ContainerProfile(user="7:7", cpu_limit=False).sandbox_args(
        "img", identity=Identity(name="box", labels={"k": "v"}), staging='/s/a,b "c"', lifetime=90.4, calls="8:9"
    )
    unlimited_cpu = [word for word in LIMITS if word != "cpu=30:31"]
    unlimited_cpu.pop(unlimited_cpu.index("fsize=67108864") + 1)
    assert args == [
        *MEMO[:-1], f"{MEMO[-1]},uid=8,gid=9", "--workdir", "/tmp", "--user", "7:7", *unlimited_cpu, *TIGHTER,
        "--entrypoint", "", "--name", "box", "--label", "k=v", "-d", "--init",
        "--mount", 'type=bind,"source=/s/a,b ""c""",target=/tool,readonly', *ENV, "img", "sleep", "90",
    ]  # fmt: skip


def test_exec_word_for_word_and_without_a_working_directory() -> None:
    assert exec_args("box", ["sh", "-w", "/"], user="") == ["exec", "-i", "box", "sh", "-w", "/"]
    assert exec_args("box", ["x"], user="1:2", env_file="/e") == [
        "exec",
        "-i",
        "-u",
        "1:2",
        "--env-file",
        "/e",
        "box",
        "x",
    ]


@pytest.mark.parametrize(
    ("cpus", "shown"), [(1.0, "1"), (2, "2"), (0.123456789, "0.123456789"), (1234.5678, "1234.5678"), (1e-5, "0.00001")]
)
def test_cpus_are_written_to_the_nanosecond_that_is_read_back(cpus: float, shown: str) -> None:
    args = ContainerProfile(cpus=cpus).run_args("img", "x")
    assert args[args.index("--cpus") + 1] == shown


BAD: dict[str, Callable[[], object]] = {
    "network flag": lambda: ContainerProfile(network="--privileged"),
    "network empty": lambda: ContainerProfile(network=""),
    "network of the host": lambda: ContainerProfile(network="host"),
    "network of another container": lambda: ContainerProfile(network="container:db"),
    "no pids": lambda: ContainerProfile(pids=0),
    "no tmpfs": lambda: ContainerProfile(tmpfs_mb=0),
    "no cpus": lambda: ContainerProfile(cpus=0),
    "cpus nan": lambda: ContainerProfile(cpus=float("nan")),
    "memory": lambda: Limits(memory_mb=0),
    "cpu seconds": lambda: Limits(cpu_seconds=-1),
    "relative workdir": lambda: ContainerProfile(workdir="tmp"),
    "workdir newline": lambda: ContainerProfile(workdir="/a\nb"),
    "user flag": lambda: ContainerProfile(user="--privileged"),
    "env without sign": lambda: ContainerProfile(env=("HOME",)),
    "env flag": lambda: ContainerProfile(env=("--privileged=1",)),
    "env nul": lambda: ContainerProfile(env=("A=\0",)),
    "runtime flag": lambda: ContainerProfile(runtime="-x"),
    "seccomp off": lambda: ContainerProfile(seccomp="unconfined"),
    "cgroup up": lambda: ContainerProfile(cgroup_parent="../x"),
    "image flag": lambda: ContainerProfile().run_args("--privileged", "x"),
    "image empty": lambda: ContainerProfile().run_args("", "x"),
    "image newline": lambda: ContainerProfile().run_args("img\n", "x"),
    "no argv": lambda: ContainerProfile().run_args("img"),
    "empty program": lambda: ContainerProfile().run_args("img", ""),
    "nul in argv": lambda: ContainerProfile().run_args("img", "a", "b\0"),
    "name flag": lambda: Identity(name="-x"),
    "label key": lambda: Identity(name="x", labels={"a=b": "c"}),
    "label newline": lambda: Identity(name="x", labels={"a": "b\nc"}),
    "staging relative": lambda: sandbox_of(ContainerProfile(), "img", "box", {}, "tool"),
    "exec name flag": lambda: exec_args("-d", ["x"], user=""),
    "exec user flag": lambda: exec_args("box", ["x"], user="-d"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match=r"must|holds|env entry|label|share"):
        BAD[case]()


# What a caller may hand over, biased towards what could be taken for a flag.
hostile = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["--privileged", "-v", "-v=/:/host", "--", "-", "--network=host", "/a:/b", "--cap-add=ALL", "x --privileged",
         "x\n--privileged", "", "/", "img", "a=b", "--env", "-w", "host", "A=--privileged", "/a:/b:ro,--privileged",
         '/x",--privileged', "/x,readonly=false", "1000:1000", "unconfined"]
    ),
    st.text(alphabet="-=:/,\"' \n\tav0", max_size=12),
)  # fmt: skip
words = st.lists(hostile, max_size=4)


def sandbox_of(profile: ContainerProfile, image: str, name: str, labels: dict[str, str], staging: str) -> list[str]:
    return profile.sandbox_args(image, identity=Identity(name=name, labels=labels), staging=staging, lifetime=60)


def made(build: Callable[[], list[str]]) -> list[str] | None:
    try:
        return build()
    except ValueError:
        return None


def tmpfs_of(profile: ContainerProfile, calls: str) -> str:
    owner = profile.tmp_owner(calls)
    return MEMO[-1] + (f",uid={owner[0]},gid={owner[1]}" if owner else "")


def expected_run(
    profile: ContainerProfile, identity: Identity, *more: tuple[str, str | None], calls: str = ""
) -> list[tuple[str, str | None]]:
    """The flags that a profile means, in an order of no meaning."""
    flags: list[tuple[str, str | None]] = [
        ("rm", None), ("interactive", None), ("network", profile.network), ("read-only", None), ("cap-drop", "ALL"),
        ("security-opt", "no-new-privileges"), ("pids-limit", "128"), ("tmpfs", tmpfs_of(profile, calls)),
        ("workdir", profile.workdir), ("memory", "512m"), ("cpus", "1"), ("ulimit", "nofile=256"),
        ("ulimit", "fsize=67108864"), ("ulimit", "cpu=30:31"), ("ulimit", "core=0"), ("memory-swap", "512m"),
        ("log-driver", "none"),
        ("pull", "never"), ("no-healthcheck", None), ("entrypoint", ""), ("init", None), ("name", identity.name), *more,
    ]  # fmt: skip
    flags += [("volume", str(mount)) for mount in profile.mounts]
    flags += [("env", item) for item in profile.env]
    own = {item.partition("=")[0] for item in profile.env}
    flags += [("env", name) for name in PROXY_VARIABLES if name not in own]
    flags += [("label", f"{key}={value}") for key, value in identity.labels.items()]
    optional = {
        "user": profile.user,
        "runtime": profile.runtime,
        "security-opt": f"seccomp={profile.seccomp_file}" if profile.seccomp_file else "",
        "cgroup-parent": profile.cgroup_parent,
    }
    return flags + [(key, value) for key, value in optional.items() if value]


def profile_of(fields: dict[str, Any]) -> ContainerProfile:
    """The profile of these fields, its mounts given as text."""
    mounts = tuple(Mount.parse(spec) for spec in fields.get("mounts", ()))
    return ContainerProfile(**{**fields, "mounts": mounts})


def same(parsed: Parsed, flags: Sequence[tuple[str, str | None]], positionals: Sequence[str]) -> bool:
    key = repr
    return sorted(parsed.flags, key=key) == sorted(flags, key=key) and parsed.positionals == list(positionals)


profiles = st.fixed_dictionaries(
    {},
    optional={
        "network": hostile, "user": hostile, "workdir": hostile | hostile.map("/{}".format), "runtime": hostile,
        "seccomp": hostile | hostile.map("/{}".format), "cgroup_parent": hostile,
        "mounts": st.lists(hostile | hostile.map("/{}:/b".format) | hostile.map("/a:/{}".format), max_size=2).map(tuple),
        "env": st.lists(hostile | hostile.map("A={}".format), max_size=2).map(tuple),
    },
)  # fmt: skip
labels = st.dictionaries(hostile | st.sampled_from(["a", "b.c"]), hostile, max_size=2)
names = hostile | st.just("box")


@given(profiles, hostile | st.just("img"), names, labels, words.map(lambda rest: ["prog", *rest]) | words)
def test_no_string_of_a_run_becomes_a_flag_or_adds_one(
    fields: dict[str, Any], image: str, name: str, marks: dict[str, str], argv: list[str]
) -> None:
    # One hostile field at a time as well, so that a refusal of one does not hide the others.
    for chosen in [fields, *({key: value} for key, value in fields.items())]:
        for img, box, mark in ((image, name, marks), ("img", "box", {}), (image, "box", {}), ("img", "box", marks)):
            try:
                profile = profile_of(chosen)
                identity = Identity(name=box, labels=mark)
                args = profile.run_args(img, *argv, identity=identity)
            except ValueError:
                continue
            assert args[0] == "run"
            assert same(parse(args[1:], RUN_FLAGS), expected_run(profile, identity, calls=profile.user), [img, *argv])


@given(hostile | hostile.map("/{}".format))
def test_staging_stays_one_field_of_its_mount(staging: str) -> None:
    profile, identity = ContainerProfile(), Identity(name="box")
    args = made(lambda: sandbox_of(profile, "img", "box", {}, staging))
    if args is None:
        return
    parsed = parse(args[1:], RUN_FLAGS)
    mount = next(value for key, value in parsed.flags if key == "mount")
    assert mount is not None
    assert next(csv.reader([mount], strict=True)) == ["type=bind", f"source={staging}", "target=/tool", "readonly"]
    more = [("mount", mount), ("detach", None)]
    assert same(parsed, expected_run(profile, identity, *more), ["img", "sleep", "60"])


@given(names, hostile | st.just("1:1"), words.map(lambda rest: ["prog", *rest]) | words)
def test_no_string_of_an_exec_becomes_a_flag_or_adds_one(name: str, user: str, argv: list[str]) -> None:
    for box, who in ((name, user), ("box", user), (name, ""), ("box", "")):
        args = made(lambda box=box, who=who: exec_args(box, argv, user=who))  # type: ignore[misc]
        if args is None:
            continue
        flags: list[tuple[str, str | None]] = [("interactive", None)] + ([("user", who)] if who else [])
        assert args[0] == "exec"
        assert same(parse(args[1:], EXEC_FLAGS), flags, [box, *argv])


def test_the_parser_of_these_tests_sees_a_flag_that_slips_in() -> None:
    args = ContainerProfile().run_args("img", "x")
    slipped = [*args[1:3], "--privileged", *args[3:]]
    assert ("privileged", None) in parse(slipped, RUN_FLAGS).flags
    assert parse(["-iv/:/host", "-w=/x", "--init=false", "img", "-d"], RUN_FLAGS) == Parsed(
        [("interactive", None), ("volume", "/:/host"), ("workdir", "/x"), ("init", "false")], ["img", "-d"]
    )
    with pytest.raises(ValueError, match="unknown"):
        parse(["--no-such-flag", "img"], RUN_FLAGS)


def test_profile_is_a_value() -> None:
    profile = ContainerProfile()
    assert replace(profile, user="1:1") != profile
    with pytest.raises(AttributeError):
        profile.pids = 4096  # type: ignore[misc]
