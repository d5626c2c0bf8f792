"""Recorded real records pass point by point, and every single weakening is found at its own point."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engine.protocol import ImageInfo
from executor.errors import ProfileMismatch
from executor.sandbox.mount import Mount
from executor.sandbox.profile import ContainerProfile, Limits
from executor.sandbox.seccomp import STRICT_PROFILE, WITNESS_ERRNO, strict_profile
from executor.sandbox.verify import Finding, check_inspect, mount_facts, require
from executor.sandbox.verify_inside import INSIDE_FILES, check_inside, probe_argv
from tests.support import DATA

META = json.loads((DATA / "docker_meta.json").read_text())
RECORD = json.loads((DATA / "docker_inspect.json").read_text())
RECORD["HostConfig"]["SecurityOpt"].append(f"seccomp={json.dumps(strict_profile(), separators=(',', ':'))}")
INSIDE = (DATA / "docker_inside.txt").read_text()
PROFILE = ContainerProfile(user=META["keeper"])
IMAGE = ImageInfo(id=META["image_id"], env=tuple(META["image_env"]))


def inspected(facts: Any, profile: ContainerProfile = PROFILE, image: ImageInfo = IMAGE) -> list[Finding]:
    return check_inspect(facts, profile, image, staging=META["staging"], labels=META["labels"])


def looked(text: str, profile: ContainerProfile = PROFILE, user: str = META["user"]) -> list[Finding]:
    return check_inside(text.encode(), profile, user=user, nonce=META["nonce"], witness=WITNESS_ERRNO)


def bad(findings: list[Finding]) -> dict[str, str]:
    return {finding.point: finding.verdict for finding in findings if finding.verdict != "equal"}


def _deep(depth: int) -> list[Any]:
    lists: list[Any] = []
    for _ in range(depth):
        lists = [lists]
    return lists


def test_recorded_docker_sandbox_is_equal_at_every_point() -> None:
    assert bad(inspected(RECORD)) == {}
    assert bad(looked(INSIDE)) == {}
    assert len(inspected(RECORD)) > 20
    assert len(looked(INSIDE)) > 12
    require([*inspected(RECORD), *looked(INSIDE)])


def test_recorded_podman_sandbox_differs_only_where_podman_adds_writable_places() -> None:
    facts = json.loads((DATA / "podman_inspect.json").read_text())[0]
    facts["HostConfig"]["SecurityOpt"].append(f"seccomp={STRICT_PROFILE}")  # podman keeps the path
    image = ImageInfo(id=facts["Image"], env=("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",))
    assert bad(inspected(facts, image=image)) == {"tmpfs": "weaker"}
    inside = (DATA / "podman_inside.txt").read_text()
    assert bad(looked(inside, replace(PROFILE, tmp_owned=False), "1879048200:1879048200")) == {
        "writable places besides": "weaker"
    }


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(facts: dict[str, Any]) -> None:
        place: Any = facts
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def add(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(facts: dict[str, Any]) -> None:
        place: Any = facts
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = [*(place[path[-1]] or ()), value]

    return change


def bind(source: str, target: str, *, rw: bool) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Destination": target, "Mode": "", "RW": rw, "Propagation": "rprivate"}


HOST = "HostConfig"
CORE, NOFILE = ([row["Name"] for row in RECORD[HOST]["Ulimits"]].index(name) for name in ("core", "nofile"))
WEAKER: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "another image": ("image", put("Image", value="sha256:other")),
    "bridge": ("network", put(HOST, "NetworkMode", value="bridge")),
    "host network": ("network", put(HOST, "NetworkMode", value="host")),
    "writable root": ("read-only root", put(HOST, "ReadonlyRootfs", value=False)),
    "privileged": ("privileged", put(HOST, "Privileged", value=True)),
    "capability added": ("capabilities added", put(HOST, "CapAdd", value=["NET_ADMIN"])),
    "capabilities kept": ("capabilities dropped", put(HOST, "CapDrop", value=None)),
    "one capability dropped": ("capabilities dropped", put(HOST, "CapDrop", value=["NET_RAW"])),
    "new privileges": ("no-new-privileges", put(HOST, "SecurityOpt", value=RECORD[HOST]["SecurityOpt"][1:])),
    "seccomp off": ("seccomp profile", put(HOST, "SecurityOpt", 1, value="seccomp=unconfined")),
    "seccomp off besides": ("seccomp profile", add(HOST, "SecurityOpt", value="seccomp=unconfined")),
    "seccomp of the engine": ("seccomp profile", put(HOST, "SecurityOpt", value=["no-new-privileges"])),
    "seccomp of another list": (
        "seccomp profile",
        put(HOST, "SecurityOpt", 1, value='seccomp={"defaultAction":"SCMP_ACT_ALLOW"}'),
    ),
    "seccomp of another file": ("seccomp profile", put(HOST, "SecurityOpt", 1, value="seccomp=/etc/seccomp.json")),
    "apparmor off": ("security options besides", add(HOST, "SecurityOpt", value="apparmor=unconfined")),
    "label off": ("security options besides", add(HOST, "SecurityOpt", value="label=disable")),
    "more pids": ("pids limit", put(HOST, "PidsLimit", value=256)),
    "no pids limit": ("pids limit", put(HOST, "PidsLimit", value=None)),
    "no tmpfs": ("tmpfs", put(HOST, "Tmpfs", value=None)),
    "another tmpfs": ("tmpfs", put(HOST, "Tmpfs", "/run", value="rw")),
    "more memory": ("memory", put(HOST, "Memory", value=1 << 40)),
    "no memory limit": ("memory", put(HOST, "Memory", value=0)),
    "swap": ("memory and swap", put(HOST, "MemorySwap", value=-1)),
    "cpus": ("cpus", put(HOST, "NanoCpus", value=0)),
    "open files": ("ulimit nofile", put(HOST, "Ulimits", NOFILE, "Hard", value=4096)),
    "core files": ("ulimit core", put(HOST, "Ulimits", CORE, "Hard", value=-1)),
    "pid namespace": ("PidMode", put(HOST, "PidMode", value="host")),
    "uts namespace": ("UTSMode", put(HOST, "UTSMode", value="host")),
    "ipc of the host": ("IpcMode", put(HOST, "IpcMode", value="host")),
    "ipc of another": ("IpcMode", put(HOST, "IpcMode", value="container:db")),
    "device": ("devices", put(HOST, "Devices", value=[{"PathOnHost": "/dev/kvm"}])),
    "gpu": ("devices", put(HOST, "DeviceRequests", value=[{"Driver": "nvidia"}])),
    "volumes from": ("volumes from others", put(HOST, "VolumesFrom", value=["db"])),
    "port": ("published ports", put(HOST, "PortBindings", value={"80/tcp": [{"HostPort": "80"}]})),
    "log driver": ("log driver", put(HOST, "LogConfig", "Type", value="json-file")),
    "root": ("user", put("Config", "User", value="")),
    "extra mount": ("mounts", add("Mounts", value=bind("/", "/host", rw=False))),
    "docker socket": ("mounts", add("Mounts", value=bind("/run/docker.sock", "/run/docker.sock", rw=True))),
    "writable tool mount": ("mounts", put("Mounts", 0, "RW", value=True)),
    "other tool mount": ("mounts", put("Mounts", 0, "Source", value="/srv/staging/other")),
    "no tool mount": ("mounts", put("Mounts", value=[])),
    "anonymous volume": ("mounts", add("Mounts", value={**bind("/v", "/data", rw=True), "Type": "volume"})),
    "proxy of the client's config": (
        "environment besides the image's and the profile's",
        add("Config", "Env", value="HTTP_PROXY=http://user:secret@proxy"),
    ),
    "changed variable": (
        "environment besides the image's and the profile's",
        add("Config", "Env", value="PATH=/elsewhere"),
    ),
    "label lost": ("labels missing", put("Config", "Labels", value=None)),
}


@pytest.mark.parametrize("case", WEAKER)
def test_each_weakening_of_a_record_flips_its_own_point(case: str) -> None:
    point, change = WEAKER[case]
    facts = copy.deepcopy(RECORD)
    change(facts)
    assert bad(inspected(facts)) == {point: "weaker"}


@pytest.mark.parametrize("options", [None, [], ["no-new-privileges:false"]])
def test_record_without_security_options_lacks_both(options: list[str] | None) -> None:
    facts = copy.deepcopy(RECORD)
    facts[HOST]["SecurityOpt"] = options
    assert {"no-new-privileges", "seccomp profile"} <= set(bad(inspected(facts)))


def test_leaked_value_is_not_repeated_in_the_refusal() -> None:
    facts = copy.deepcopy(RECORD)
    facts["Config"]["Env"].append("HTTP_PROXY=http://user:secret@proxy")
    with pytest.raises(ProfileMismatch, match="HTTP_PROXY") as caught:
        require(inspected(facts))
    assert "secret" not in str(caught.value)


ASKED: dict[str, tuple[str, ContainerProfile]] = {
    "runtime": ("runtime", replace(PROFILE, runtime="runsc")),
    "ulimit fsize": ("ulimit fsize", replace(PROFILE, limits=Limits(file_size_mb=1))),
    "ulimit cpu": ("ulimit cpu", replace(PROFILE, limits=Limits(cpu_seconds=1))),
    "mount": ("mounts", replace(PROFILE, mounts=(Mount("/srv/data", "/data", ("ro",)),))),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_a_profile_asks_besides_must_be_in_the_record(case: str) -> None:
    point, profile = ASKED[case]
    assert bad(inspected(RECORD, profile)) == {point: "weaker"}


def test_asked_seccomp_profile_is_accepted_and_unconfined_is_not() -> None:
    profile = replace(PROFILE, seccomp="/etc/seccomp.json")
    facts = copy.deepcopy(RECORD)
    for kept in ('{"defaultAction":"SCMP_ACT_ERRNO"}', "/etc/seccomp.json"):
        facts[HOST]["SecurityOpt"][1:] = [f"seccomp={kept}"]
        assert bad(inspected(facts, profile)) == {}
    facts[HOST]["SecurityOpt"][1:] = ["seccomp=unconfined"]
    assert bad(inspected(facts, profile)) == {"seccomp profile": "weaker"}


def test_engine_profile_allows_no_option_of_its_own() -> None:
    profile = replace(PROFILE, seccomp="engine")
    facts = copy.deepcopy(RECORD)
    facts[HOST]["SecurityOpt"][1:] = []
    assert bad(inspected(facts, profile)) == {}
    facts[HOST]["SecurityOpt"].append("seccomp=unconfined")
    assert bad(inspected(facts, profile)) == {"security options besides": "weaker"}


@pytest.mark.parametrize(
    ("witness", "verdict"), [(None, "unreadable"), (0, "weaker"), (1, "weaker"), (22, "weaker"), ("76", "weaker")]
)
def test_strict_profile_is_in_force_only_where_its_own_question_is_answered(witness: object, verdict: str) -> None:
    def asked(profile: ContainerProfile) -> dict[str, str]:
        return bad(check_inside(INSIDE.encode(), profile, user=META["user"], nonce="NONCE", witness=witness))

    assert asked(PROFILE) == {"strict seccomp profile in force": verdict}
    assert asked(replace(PROFILE, seccomp="engine")) == {}


def test_cpus_are_accepted_as_a_quota_too() -> None:
    facts = copy.deepcopy(RECORD)
    facts[HOST].update(NanoCpus=0, CpuPeriod=100_000, CpuQuota=100_000)
    assert bad(inspected(facts)) == {}
    facts[HOST]["CpuQuota"] = 200_000
    assert bad(inspected(facts)) == {"cpus": "weaker"}


def test_asked_mounts_are_compared_without_doubled_and_trailing_slashes() -> None:
    profile = replace(PROFILE, mounts=(Mount("/srv//data/", "/data/", ("ro",)), Mount("/srv/work", "/work")))
    assert sorted(mount_facts(profile)) == [("/srv/data", "/data", False), ("/srv/work", "/work", True)]
    facts = copy.deepcopy(RECORD)
    facts["Mounts"] += [bind("/srv/data", "/data", rw=False), bind("/srv/work", "/work", rw=True)]
    assert bad(inspected(facts, profile)) == {}


def line(start: str, replacement: str) -> Callable[[str], str]:
    """Replace the one recorded line that begins so."""

    def change(text: str) -> str:
        lines = text.split("\n")
        (index,) = [index for index, row in enumerate(lines) if row.startswith(start)]
        lines[index : index + 1] = [replacement] if replacement else []
        return "\n".join(lines)

    return change


def swap(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert text.count(old) == 1
        return text.replace(old, new)

    return change


def _mount(target: str, mode: str) -> str:
    return f"99 72 254:0 /srv/x {target} {mode},relatime - ext4 /dev/vda rw"


LO = "    lo:"
ROOT_LINE = next(row for row in INSIDE.split("\n") if " / / ro," in row)
TMP_LINE = next(row for row in INSIDE.split("\n") if " / /tmp rw," in row)
INSIDE_WEAKER: dict[str, tuple[str, str, Callable[[str], str]]] = {
    "effective capability": ("CapEff", "weaker", line("CapEff", "CapEff:\t0000000000000001")),
    "bounding set": ("CapBnd", "weaker", line("CapBnd", "CapBnd:\t00000000a80425fb")),
    "ambient": ("CapAmb", "weaker", line("CapAmb", "CapAmb:\t0000000000000400")),
    "no capability line": ("CapEff", "unreadable", line("CapEff", "")),
    "new privileges": ("NoNewPrivs", "weaker", line("NoNewPrivs", "NoNewPrivs:\t0")),
    "no line of new privileges": ("NoNewPrivs", "unreadable", line("NoNewPrivs", "")),
    "no seccomp": ("Seccomp", "weaker", line("Seccomp:", "Seccomp:\t0")),
    "no seccomp line": ("Seccomp", "unreadable", line("Seccomp:", "")),
    "root": ("uids inside", "weaker", line("Uid", "Uid:\t0\t0\t0\t0")),
    "saved root": ("uids inside", "weaker", line("Uid", "Uid:\t{0}\t{0}\t0\t{0}".format(META["user"].split(":")[0]))),
    "root's group": ("gids inside", "weaker", line("Gid", "Gid:\t0\t0\t0\t0")),
    "writable root": ("root inside", "weaker", swap(ROOT_LINE, ROOT_LINE.replace(" / / ro,", " / / rw,"))),
    "executable /tmp": ("tmpfs inside", "weaker", swap(TMP_LINE, TMP_LINE.replace("noexec,", ""))),
    "setuid /tmp": ("tmpfs inside", "weaker", swap(TMP_LINE, TMP_LINE.replace("nosuid,", ""))),
    "/tmp of another mode": ("tmpfs mode", "weaker", swap(TMP_LINE, TMP_LINE + ",mode=755")),
    "root's /tmp": ("tmpfs owner", "weaker", swap(TMP_LINE, TMP_LINE.partition(",uid=")[0])),
    "larger /tmp": ("tmpfs size", "weaker", swap(TMP_LINE, TMP_LINE.replace("size=65536k", "size=655360k"))),
    "unbounded /tmp": ("tmpfs size", "unreadable", swap(TMP_LINE, TMP_LINE.replace(",size=65536k", ""))),
    "another writable place": (
        "writable places besides",
        "weaker",
        swap(TMP_LINE, TMP_LINE + "\n" + _mount("/data", "rw")),
    ),
    "writable place with a space": (
        "writable places besides",
        "weaker",
        swap(TMP_LINE, TMP_LINE + "\n" + _mount("/a\\040b", "rw")),
    ),
    "writable /proc/sys": (
        "writable places besides",
        "weaker",
        swap(" /sys /proc/sys ro,", " /sys /proc/sys rw,"),
    ),
    "an interface": ("interfaces", "weaker", lambda text: text.replace(LO, f"  eth0: 0 0\n{LO}", 1)),
    "more pids": ("pids.max", "weaker", swap("\n128\n", "\n1024\n")),
    "unlimited pids": ("pids.max", "weaker", swap("\n128\n", "\nmax\n")),
    "no pids.max": ("pids.max", "unreadable", swap("\n128\n", "\n")),
    "more memory": ("memory limit", "weaker", swap("\n536870912\n", "\n9223372036854771712\n")),
    "no memory limit": ("memory limit", "unreadable", swap("\n536870912\n", "\n")),
    "no nonce": ("nonce in /tool", "unreadable", lambda text: text.replace("NONCE\n", "")),
    "another nonce": ("nonce in /tool", "unreadable", lambda text: text.replace("NONCE\n", "OTHER\n")),
    "cut short": ("probe", "unreadable", lambda text: text[: text.rindex("NONCE", 0, -6)]),
    "one file too many": ("probe", "unreadable", lambda text: f"{text}more\nNONCE\n"),
    "nothing": ("nonce in /tool", "unreadable", lambda _: ""),
    "garbage": ("nonce in /tool", "unreadable", lambda _: "\udcff\x00garbage".encode("utf-8", "replace").decode()),
}


@pytest.mark.parametrize("case", INSIDE_WEAKER)
def test_each_weakening_inside_flips_its_own_point(case: str) -> None:
    point, verdict, change = INSIDE_WEAKER[case]
    changed = change(INSIDE)
    assert changed != INSIDE
    assert bad(looked(changed)) == {point: verdict}


@pytest.mark.parametrize("seccomp", ["strict", "engine", "/etc/seccomp.json"])
def test_runtime_that_does_not_report_seccomp_is_refused_under_every_profile(seccomp: str) -> None:
    profile, text = replace(PROFILE, seccomp=seccomp), line("Seccomp:", "")(INSIDE)
    found = bad(check_inside(text.encode(), profile, user=META["user"], nonce="NONCE", witness=WITNESS_ERRNO))
    assert found == {"Seccomp": "unreadable"}


def test_user_of_the_image_is_checked_as_far_as_its_name_allows() -> None:
    uid = META["user"].partition(":")[0]
    assert bad(looked(INSIDE, user=uid)) == {}
    assert bad(looked(INSIDE, user="1")) == {"uids inside": "weaker"}
    as_root = line("Uid", "Uid:\t0\t0\t0\t0")(INSIDE)
    for user in ("", "nobody", "nobody:nogroup"):
        assert bad(looked(INSIDE, user=user)) == {}
        assert bad(looked(as_root, user=user)) == {"uid inside": "weaker"}


def test_asked_writable_mount_is_no_surprise_inside_whatever_its_name() -> None:
    text = INSIDE.replace(TMP_LINE, TMP_LINE + "\n" + _mount("/d\\040onnées", "rw"))
    assert bad(looked(text, replace(PROFILE, mounts=(Mount("/srv/x", "/d onnées/"),)))) == {}
    assert bad(looked(text)) == {"writable places besides": "weaker"}


def test_limits_that_are_not_asked_are_not_looked_for() -> None:
    profile = replace(PROFILE, limits=Limits(memory_mb=None), network="inner")
    text = INSIDE.replace("\n536870912\n", "\n").replace(LO, f"  eth0: 0 0\n{LO}", 1)
    assert bad(looked(text, profile)) == {}


def test_probe_parts_every_file_by_the_nonce() -> None:
    argv = probe_argv()
    assert argv[:2] == ("cat", "/tool/nonce")
    assert argv[2::2] == INSIDE_FILES
    assert set(argv[1::2]) == {"/tool/nonce"}


ODD: dict[str, object] = {
    "a number of thousands of digits": 16**10_000,
    "the same in a list": [-(16**10_000)],
    "no number": float("nan"),
    "words that steer a terminal": "\x1b[2J\udcff" * 100,
    "bytes": b"\xff",
    "lists in lists": _deep(5_000),
}


@pytest.mark.parametrize("found", ODD.values(), ids=ODD)
def test_a_refusal_names_whatever_was_found_in_few_printable_words(found: object) -> None:
    with pytest.raises(ProfileMismatch, match="point: asked 1, found") as refused:
        require([Finding("point", 1, found, "weaker")])
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1_000


def test_number_beyond_all_numbers_is_unreadable() -> None:
    facts = copy.deepcopy(RECORD)
    facts[HOST]["NanoCpus"] = json.loads("Infinity")
    assert bad(inspected(facts)) == {"inspect": "unreadable"}


def paths(node: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here] if here else []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        found += paths(value, (*here, key))
    return found


CHECKED = ("HostConfig", "Config", "Mounts", "Image")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([path for path in paths(RECORD) if path[0] in CHECKED]), json_values)
def test_no_record_makes_the_check_raise(path: tuple[Any, ...], value: Any) -> None:
    facts = copy.deepcopy(RECORD)
    put(*path, value=value)(facts)
    assert all(finding.verdict in ("equal", "weaker", "unreadable") for finding in inspected(facts))
    place: Any = facts
    for step in path[:-1]:
        place = place[step]
    if isinstance(place, dict):
        del place[path[-1]]
        assert inspected(facts)


@given(json_values)
def test_no_foreign_record_is_equal(facts: Any) -> None:
    with pytest.raises(ProfileMismatch):
        require(inspected(facts))


@given(st.binary(max_size=200), st.integers(0, len(INSIDE)), st.integers(0, 300))
def test_no_answer_from_inside_makes_the_check_raise(junk: bytes, at: int, cut: int) -> None:
    data = INSIDE.encode()
    for output in (junk, data[:at] + junk + data[at + cut :], data[:at]):
        check_inside(output, PROFILE, user=META["user"], nonce="NONCE", witness=WITNESS_ERRNO)


@given(st.integers(0, len(INSIDE) - 1))
def test_truncated_answer_is_never_equal(at: int) -> None:
    with pytest.raises(ProfileMismatch):
        require(looked(INSIDE[:at]))
