"""Tool directories as they are read: where they may be, what is copied and refused, and what a change or a swapped link does."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from executor.errors import InvalidCall, StagingFailed
from executor.staging.versions import resolve_tool_dir
from tests.support.stagings import Site, fails, once, reads, tree


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path).fast(monkeypatch)


# --- where a tool may be ------------------------------------------------------------------------------------------------


def test_a_tool_is_found_inside_an_allowed_directory_with_every_link_followed(site: Site) -> None:
    link, allowed_link = site.allowed / "link", site.root / "allowed-link"
    link.symlink_to("tool")
    allowed_link.symlink_to("tools")
    file = site.write("tool.py", "")
    for path in (site.tool, link, site.allowed / "x" / ".." / "tool", allowed_link / "link"):
        (site.allowed / "x").mkdir(exist_ok=True)
        assert resolve_tool_dir(path, [site.root / "none", site.allowed]) == site.tool
        assert resolve_tool_dir(path, [allowed_link]) == site.tool
    assert resolve_tool_dir(site.allowed, [site.allowed]) == site.allowed
    assert resolve_tool_dir(file, [site.allowed]) == file
    assert resolve_tool_dir(file, [Path("/")]) == file


def test_a_tool_elsewhere_is_refused_with_its_path_and_the_setting(site: Site) -> None:
    (site.root / "tools-too").mkdir()
    (site.allowed / "away").symlink_to("../place")
    (site.allowed / "round").symlink_to("round")
    for path, why in (
        (site.allowed / ".." / "place", "outside"),
        (site.allowed / "away", "outside"),
        (site.root / "tools-too", "outside"),
        (site.root, "outside"),
        (site.allowed / "missing", "cannot be found"),
        (site.allowed / "round", "cannot be found"),
        (Path(f"{site.allowed}/a\0b"), "cannot be found"),
    ):
        with pytest.raises(InvalidCall, match=why) as refused:
            resolve_tool_dir(path, [site.allowed])
        assert path.name.split("\0")[0] in str(refused.value)
        assert "allowed_tool_dirs" in str(refused.value)
    with pytest.raises(InvalidCall, match="it is empty"):
        resolve_tool_dir(site.tool, [])


# --- what is copied -----------------------------------------------------------------------------------------------------


def test_a_copy_is_equal_and_has_plain_modes_whatever_the_source_and_the_umask_say(site: Site) -> None:
    site.write("tool.py", "secret").chmod(0o600)
    site.write("bin/run", b"#!\0\xff").chmod(0o6755)
    (site.tool / "empty").mkdir(mode=0o700)
    os.link(site.tool / "tool.py", site.root / "other name")
    umask = os.umask(0o077)
    try:
        site.place.chmod(0o2755)
        version = site.place / site.stage()
    finally:
        os.umask(umask)
    assert tree(version) == tree(site.tool)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (version, *version.rglob("*"))}
    assert modes == {
        version.name: "0o755",
        "tool.py": "0o644",
        "bin": "0o755",
        "run": "0o755",
        "empty": "0o755",
    }
    copied = (version / "tool.py").stat()
    assert (copied.st_nlink, copied.st_uid) == (1, os.geteuid())
    assert copied.st_ino != (site.tool / "tool.py").stat().st_ino


def test_what_python_compiles_and_git_keeps_is_neither_copied_nor_counted(site: Site) -> None:
    site.write("tool.py", "pass")
    plain = site.stage()
    for name in ("__pycache__/a.py", "b.pyc", ".git/config", "deep/.git"):
        site.write(name, "x" * 20)
    site.staging = site.another(site.place, max_files=2, max_bytes=19)
    version = site.stage()
    assert set(tree(site.place / version)) == {"tool.py", "deep"}
    (site.tool / "deep" / ".git").unlink()
    (site.tool / "deep").rmdir()
    assert site.stage() == plain


def test_an_unchanged_tool_is_copied_once_also_when_it_was_touched(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    file = site.write("tool.py", "1")
    digest = site.stage()
    inode = (site.place / digest).stat().st_ino
    fails(monkeypatch, "write", errno.ENOSPC)
    for _ in range(3):
        os.utime(file)
        assert site.stage() == digest
        assert (site.place / digest).stat().st_ino == inode
    assert site.versions() == {digest}


def test_equal_content_has_one_digest_wherever_and_whenever_it_was_written(site: Site) -> None:
    site.write("a/tool.py", "1")
    twin = site.allowed / "twin"
    (twin / "a").mkdir(parents=True)
    (twin / "a" / "tool.py").write_text("1")
    os.utime(twin / "a" / "tool.py", (0, 0))
    assert site.stage() == site.stage(twin)


def test_trees_that_run_together_into_the_same_bytes_have_different_digests(site: Site) -> None:
    contents = ({"a": "fb"}, {"a": "", "b": ""}, {"a": "f", "b": ""}, {"afb": ""}, {"a/fb": ""}, {"a": "\0b"})
    digests = set()
    for number, content in enumerate(contents):
        site.tool = site.allowed / str(number)
        for name, data in content.items():
            site.write(name, data)
        digests.add(site.stage())
    assert len(digests) == len(contents)


def test_what_is_not_a_directory_or_not_allowed_is_refused(site: Site) -> None:
    file = site.write("tool.py", "")
    with pytest.raises(InvalidCall, match="not a directory"):
        site.stage(file)
    with pytest.raises(InvalidCall, match="allowed_tool_dirs"):
        site.stage(site.place)
    assert site.pauses == []
    assert site.versions() == set()


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_refused_by_name_without_being_opened(site: Site, kind: str, tmp_path: Path) -> None:
    path = site.write("deep/x", "").parent / "odd\nname"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as sock, tempfile.TemporaryDirectory(dir="/tmp") as short:
            sock.bind(f"{short}/s")
            Path(short, "s").rename(path)
    else:
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    site.refuses("odd\\nname", f"is a {'named ' * (kind == 'pipe')}{kind}")


# --- links --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["tool.py", "./tool.py", "lib/../tool.py", "lib", "lib/", "lib/.", ".", "hop/one.py", "hop/../tool.py", "hop"],
)
def test_a_link_that_stays_inside_is_copied_as_it_is(site: Site, target: str) -> None:
    site.write("tool.py", "tool")
    site.write("lib/one.py", "one")
    (site.tool / "hop").symlink_to("lib")
    (site.tool / "link").symlink_to(target)
    (site.tool / "lib" / "up").symlink_to(f"../{target}")
    version = site.place / site.stage()
    assert tree(version) == tree(site.tool)
    assert (version / "lib" / "up").exists()


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("/etc/passwd", "is absolute"),
        ("../other", "leads out"),
        ("../tool/tool.py", "leads out"),
        ("lib/../../tool/tool.py", "leads out"),
        ("hop/../../tool.py", "leads out"),
        ("missing", "leads to nothing"),
        ("tool.py/", "leads to nothing"),
        ("tool.py/..", "leads to nothing"),
        ("lib/one.pyc", "leads to nothing"),
        ("link", "circle"),
        ("ping", "circle"),
        ("chain0", "circle"),
        ("./" * 2_000 + "tool.py", "circle"),
        ("a\udcff\n", "leads to nothing"),
    ],
)
def test_a_link_that_leads_anywhere_else_is_refused_by_name(site: Site, target: str, why: str) -> None:
    site.write("tool.py", "")
    site.write("lib/one.pyc", "")
    (site.allowed / "other").mkdir()
    (site.tool / "hop").symlink_to("lib")
    if target == "ping":
        (site.tool / "ping").symlink_to("pong")
        (site.tool / "pong").symlink_to("ping")
    if target == "chain0":
        for number in range(41):
            (site.tool / f"chain{number}").symlink_to(f"chain{number + 1}" if number < 40 else "tool.py")
    (site.tool / "link").symlink_to(target)
    site.refuses("link", why)


# --- limits -------------------------------------------------------------------------------------------------------------


def test_a_gigabyte_is_refused_without_a_byte_being_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write("tool.py", "")
    os.truncate(site.write("big", ""), 1 << 30)
    with reads(monkeypatch) as sizes:
        site.refuses("tools.max_bytes", "16777216", "'big' has 1073741824")
    assert sum(sizes) == 0


def test_limits_are_reached_and_not_passed_wherever_the_entries_are(site: Site) -> None:
    site.write("a/1", "12")
    site.write("a/2", "34")
    site.write("b", "5")
    (site.tool / "c").symlink_to("b")
    site.staging = site.another(site.place, max_files=5, max_bytes=5, max_depth=1)
    site.stage()
    more = site.tool / "a" / "more"
    more.mkdir()
    site.refuses("more than 5 files and directories", "tools.max_files")
    (site.tool / "c").unlink()
    site.refuses("1 directories deep", "more")
    more.rmdir()
    more.write_text("6")
    site.refuses("tools.max_bytes")


def test_a_file_that_grows_past_the_limit_while_it_is_read_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = site.write("grows", "1")
    once(monkeypatch, "read", "grows", lambda: os.truncate(file, 1 << 30))
    site.refuses("tools.max_bytes")


# --- changes while it is read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["a", "b", "new", "deep/c"])
def test_the_copy_is_one_moment_of_a_source_that_changes_meanwhile(
    site: Site, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    for name in ("a", "b", "deep/c", "z"):
        site.write(name, "old")
    once(monkeypatch, "read", "z", lambda: site.write(changed, "new"))
    version = site.place / site.stage()
    assert tree(version) == tree(site.tool)
    assert (version / changed).read_text() == "new"
    assert len(site.pauses) == 1
    assert site.versions() == {version.name}


@pytest.mark.parametrize("how", ["longer", "shorter", "gone", "replaced by a pipe"])
def test_a_file_that_changes_just_before_it_is_read_is_read_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    file = site.write("tool.py", "old")
    site.write("other", "")

    def change() -> None:
        file.unlink()
        if how == "replaced by a pipe":
            os.mkfifo(file)
        elif how != "gone":
            file.write_text({"longer": "new one", "shorter": ""}[how])

    once(monkeypatch, "read" if how == "shorter" else "open", "tool.py", change)
    if how == "replaced by a pipe":
        site.refuses("named pipe")
    else:
        assert tree(site.place / site.stage()) == tree(site.tool)
    assert len(site.pauses) <= 1


def test_a_tool_that_is_not_there_for_a_moment_is_waited_for_and_no_longer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write("tool.py", "1")
    site.tool.rename(site.root / "draft")

    def come(pause: float) -> None:
        site.pauses.append(pause)
        if len(site.pauses) == 2:
            (site.root / "draft").rename(site.tool)

    with monkeypatch.context() as patch:
        patch.setattr("executor.staging.versions.time.sleep", come)
        assert tree(site.place / site.stage()) == tree(site.tool)
    site.tool.rename(site.root / "gone")
    site.pauses.clear()
    site.refuses("cannot be found", "allowed_tool_dirs")
    assert len(site.pauses) == 4


def test_a_file_that_never_stops_changing_is_named_and_may_be_tried_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, count = site.write("deep/busy", ""), iter(range(100))
    once(monkeypatch, "read", "busy", lambda: busy.write_text(str(next(count))), times=100)
    site.refuses("deep/busy", "kept changing", kind=StagingFailed)
    assert len(site.pauses) == 4
    assert sum(site.pauses) < 0.5
    assert (StagingFailed.reason, StagingFailed.retryable) == ("staging_failed", True)


# --- links swapped in ---------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(site: Site) -> Path:
    """A directory that is not allowed, with what a tool has too."""
    place = site.root / "secret"
    (place / "deep").mkdir(parents=True)
    for name in ("tool.py", "deep/tool.py"):
        (place / name).write_text("secret")
    return place


def test_a_file_that_becomes_a_link_between_check_and_open_is_not_followed(
    site: Site, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = site.write("tool.py", "mine")

    def swap() -> None:
        file.unlink()
        file.symlink_to(secret / "tool.py")

    once(monkeypatch, "open", "tool.py", swap)
    with reads(monkeypatch) as sizes:
        site.refuses("tool.py", "is absolute")
    assert sizes == []


@pytest.mark.parametrize("part", ["tool", "deep", "above"])
def test_a_directory_that_becomes_a_link_between_check_and_open_is_not_followed(
    site: Site, secret: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    above = site.allowed / "above"
    source = above / "tool"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "tool.py").write_text("mine")
    (secret / "tool" / "deep").mkdir(parents=True)
    (secret / "tool" / "deep" / "tool.py").write_text("secret")
    target, leads = {"above": (above, secret), "tool": (source, secret), "deep": (source / "deep", secret / "deep")}[
        part
    ]

    def swap() -> None:
        target.rename(site.root / "gone")
        target.symlink_to(leads)

    once(monkeypatch, "open", part, swap)
    with reads(monkeypatch) as sizes, pytest.raises(InvalidCall):
        site.stage(source)
    assert sizes == []
    assert site.versions() == set()


def test_a_link_swapped_in_for_an_unchanged_tool_is_seen(site: Site, secret: Path) -> None:
    site.write("tool.py", "secret")
    site.settle()
    site.tool.rename(site.root / "gone")
    site.tool.symlink_to(secret)
    site.refuses("allowed_tool_dirs")


# --- locks --------------------------------------------------------------------------------------------------------------


def test_a_lock_on_a_source_file_is_not_waited_for(site: Site) -> None:
    file = site.write("tool.py", "locked")
    code = (
        "import fcntl,sys\nf=open(sys.argv[1],'r+')\nfcntl.flock(f,2)\nfcntl.lockf(f,2)\nprint(1,flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as locking:
        assert locking.stdout is not None
        assert locking.stdout.readline() == b"1\n"
        assert tree(site.place / site.stage()) == tree(site.tool)
        locking.communicate(b"\n")


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_a_lease_on_a_source_file_is_not_waited_for(site: Site) -> None:
    file = site.write("tool.py", "leased")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        with file.open("r+") as holder:
            fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            site.refuses("tool.py", "kept changing", kind=StagingFailed)
    finally:
        signal.signal(signal.SIGIO, before)
