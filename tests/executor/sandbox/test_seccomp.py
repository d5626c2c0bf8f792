"""The strict seccomp profile: its file is what its list makes, and a part of what engines allow by default."""

from __future__ import annotations

import copy
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import inside
from executor.sandbox import witness
from executor.sandbox.seccomp import (
    STRICT_LIST,
    STRICT_PROFILE,
    WITNESS_ERRNO,
    WITNESS_WHICH,
    allowed,
    as_json,
    beyond,
    build,
    strict_profile,
)
from tests.support import DATA

DEFAULT = json.loads((DATA / "engine_seccomp.json").read_text())
"""What docker 20.10.24 of Debian 12 gives a container without capabilities, on amd64."""

REFUSED = [
    "acct",
    "add_key",
    "bpf",
    "chroot",
    "clone3",
    "delete_module",
    "fanotify_init",
    "fsconfig",
    "fsmount",
    "fsopen",
    "init_module",
    "io_destroy",
    "io_getevents",
    "io_pgetevents",
    "io_setup",
    "io_submit",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "ioperm",
    "iopl",
    "kcmp",
    "kexec_load",
    "keyctl",
    "lookup_dcookie",
    "mbind",
    "memfd_secret",
    "modify_ldt",
    "mount",
    "mount_setattr",
    "move_mount",
    "move_pages",
    "name_to_handle_at",
    "open_by_handle_at",
    "open_tree",
    "perf_event_open",
    "pidfd_getfd",
    "pivot_root",
    "process_vm_readv",
    "process_vm_writev",
    "ptrace",
    "quotactl",
    "reboot",
    "remap_file_pages",
    "request_key",
    "sched_setattr",
    "seccomp",
    "set_mempolicy",
    "setns",
    "settimeofday",
    "swapon",
    "sync",
    "syslog",
    "umount2",
    "unshare",
    "userfaultfd",
    "vhangup",
    "vmsplice",
]


def test_profile_is_what_its_list_makes() -> None:
    assert STRICT_PROFILE.read_text("utf-8") == as_json(build(STRICT_LIST.read_text("utf-8")))


def test_nothing_is_allowed_that_the_default_of_an_engine_refuses() -> None:
    assert beyond(strict_profile(), DEFAULT) == []
    assert len(allowed(strict_profile())) < len(allowed(DEFAULT)) - 80


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_tool_needs_is_not_allowed(name: str) -> None:
    assert name not in allowed(strict_profile())


def test_only_the_native_abi_is_allowed() -> None:
    assert [row["subArchitectures"] for row in strict_profile()["archMap"]] == [[], []]


def test_every_condition_on_an_int_compares_the_bits_that_the_kernel_reads_and_no_others() -> None:
    """A comparison of 64 bits is passed by a value with a bit set above the 32 that count."""
    for rule in strict_profile()["syscalls"]:
        for condition in rule.get("args", ()):
            assert condition["op"] == "SCMP_CMP_MASKED_EQ"
            assert 0 < condition["value"] < 2**32
            assert condition["valueTwo"] & ~condition["value"] == 0


def test_filters_and_programs_cannot_be_loaded_by_a_socket_option() -> None:
    options = {
        (rule["args"][0]["valueTwo"], rule["args"][1]["valueTwo"])
        for rule in strict_profile()["syscalls"]
        if rule["names"] == ["setsockopt"]
    }
    assert not options & {(1, 26), (1, 27), (1, 44), (1, 50), (1, 51), (1, 52), (1, 60), (6, 31), (0, 64), (41, 64)}
    assert {level for level, _ in options} == {0, 1, 6, 17, 41}


def more(change: dict[str, Any]) -> dict[str, Any]:
    profile = copy.deepcopy(strict_profile())
    profile["syscalls"].append({"action": "SCMP_ACT_ALLOW", **change})
    return profile


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"names": ["bpf"]}, "bpf"),
        ({"names": ["clone"]}, "clone"),
        ({"names": ["clone"], "args": [{"index": 0, "op": "SCMP_CMP_MASKED_EQ", "value": 0x10000000, "valueTwo": 0}]}, "clone"),
        ({"names": ["personality"], "args": [{"index": 0, "op": "SCMP_CMP_EQ", "value": 4}]}, "personality"),
        ({"names": ["personality"], "args": [{"index": 1, "op": "SCMP_CMP_EQ", "value": 0}]}, "personality"),
    ],
)  # fmt: skip
def test_comparison_finds_what_is_allowed_beyond(change: dict[str, Any], name: str) -> None:
    assert beyond(more(change), DEFAULT) == [name]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("read\nread", "named twice"),
        ("read\nread if arg0 in 1", "named twice"),
        ("Read", "line 1.*not the name"),
        ("# fine\nread if arg0 is 1", "line 2.*not a condition"),
        ("read if arg6 in 1", "not a condition"),
        ("read if arg0 in one", "line 1"),
        ("refuse read with EWHAT", "line 1"),
        ("refuse read", "line 1.*with. an error"),
    ],
)
def test_list_of_an_unknown_form_is_named_by_its_line(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build(text)


def test_conditions_of_one_line_are_all_asked_and_their_values_are_alternatives() -> None:
    rules = build("socket if arg0 in 1 2 and arg1 & 0xf == 3\nrefuse clone3 with ENOSYS")["syscalls"][1:]
    assert [[(a["index"], a["value"], a["valueTwo"]) for a in rule["args"]] for rule in rules[:2]] == [
        [(0, 0xFFFFFFFF, 1), (1, 0xF, 3)],
        [(0, 0xFFFFFFFF, 2), (1, 0xF, 3)],
    ]
    assert rules[2] == {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}


@given(st.sets(st.integers(0, 2**32 - 1), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_not_in_holds_for_every_number_but_those(values: set[int], other: int) -> None:
    rules = build(f"ioctl if arg1 not in {' '.join(map(hex, sorted(values)))}")["syscalls"][1:]

    def holds(number: int) -> int:
        return sum(number & arg["value"] == arg["valueTwo"] for rule in rules for arg in rule["args"])

    assert [holds(value) for value in values] == [0] * len(values)
    near = {value ^ 1 << bit for value in values for bit in range(32)} | {other}
    assert {holds(number) for number in near - values} <= {1}


def test_the_runner_and_the_bootstrap_ask_the_question_that_the_profile_answers() -> None:
    asked = f"WITNESS_WHICH = 0x{WITNESS_WHICH:08X}"
    for name in ("runner", "plain"):
        assert asked in inside.source(name)
    answers = [rule for rule in strict_profile()["syscalls"] if rule["names"] == ["getpriority"]]
    assert {key: value for key, value in answers[-1].items() if key != "args"} == {
        "names": ["getpriority"],
        "action": "SCMP_ACT_ERRNO",
        "errnoRet": WITNESS_ERRNO,
    }
    assert answers[-1]["args"][0]["valueTwo"] == WITNESS_WHICH


@pytest.mark.skipif(sys.platform != "linux", reason="runs a program of Linux")
def test_witness_program_says_the_kernels_own_error_where_no_filter_answers(tmp_path: Path) -> None:
    words = {"x86_64": "amd64", "aarch64": "arm64"}
    file = tmp_path / "witness"
    assert witness.write(file, words[platform.machine()])
    assert subprocess.run([file], check=False, timeout=60).returncode == 22  # EINVAL
    assert not witness.write(tmp_path / "none", "riscv64")
    assert not (tmp_path / "none").exists()
