"""Staged tool directories: what is read again and what is not, which versions are kept, and what threads and full disks do."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.errors import EmberpoolError, InvalidCall, StagingFailed
from executor.staging import fingerprints
from executor.staging.versions import Staging
from tests.support.stagings import Site, fails, once, reads, tree


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path).fast(monkeypatch)


# --- what is not read again ---------------------------------------------------------------------------------------------


def test_a_tool_that_looks_the_same_is_not_read_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write("deep/tool.py", "1")
    site.settle()
    other = site.another(site.root / "place 2")
    with reads(monkeypatch) as sizes:
        digest = site.stage()
        assert sizes == []
        assert other.stage(site.tool, [site.allowed]) == digest  # known, but its bytes have to get there
        assert sum(sizes) == 1
        sizes.clear()
        assert other.stage(site.tool, [site.allowed]) == digest
        assert sizes == []


def edit_in_place(file: Path) -> None:
    file.write_text("new")


def edit_by_rename(file: Path) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text("new")
    draft.rename(file)


def edit_and_hide(file: Path) -> None:
    before = file.stat()
    file.write_text("new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("edit", [edit_in_place, edit_by_rename, edit_and_hide])
@pytest.mark.parametrize("hold", [True, False])
def test_an_edit_of_equal_size_between_two_calls_is_seen_by_the_second(
    site: Site, edit: Callable[[Path], None], hold: bool
) -> None:
    file = site.write("deep/tool.py", "old")
    site.settle()
    before = site.stage(hold=hold)
    edit(file)
    after = site.stage()
    assert (site.place / after / "deep" / "tool.py").read_text() == "new"
    assert site.versions() == ({before, after} if hold else {after})


@pytest.mark.parametrize("change", ["mode", "added", "removed", "renamed", "link", "folder"])
def test_any_other_change_is_seen_too(site: Site, change: str) -> None:
    file = site.write("deep/tool.py", "1")
    site.write("more", "2")
    (site.tool / "link").symlink_to("more")
    site.settle()
    before = site.stage()
    if change == "mode":
        file.chmod(0o755)
    elif change == "added":
        site.write("deep/new", "")
    elif change == "removed":
        file.unlink()
    elif change == "renamed":
        file.rename(file.with_name("other.py"))
    elif change == "link":
        (site.tool / "link").unlink()
        (site.tool / "link").symlink_to("deep")
    else:
        (site.tool / "deep" / "empty").mkdir()
    after = site.stage()
    assert after != before
    assert tree(site.place / after) == tree(site.tool)


@pytest.mark.parametrize(("stamp", "tick"), [(1_000_000_007, 0.1), (1_000_000_000, 2.5)])
def test_two_edits_within_one_tick_of_the_file_systems_clock_are_both_seen(
    site: Site, monkeypatch: pytest.MonkeyPatch, stamp: int, tick: float
) -> None:
    # A file system whose clock stands still: both edits get one stamp, as if they fell into one tick.
    seen = attrgetter("st_ino", "st_mode", "st_size")
    for module in ("fingerprints", "copy"):
        monkeypatch.setattr(f"executor.staging.{module}.facts", lambda about: (*seen(about), stamp))
    file = site.write("tool.py", "one")
    digests = {site.stage()}
    for text in ("two", "six"):
        site.clock.now += tick * 0.45
        file.write_text(text)
        digests.add(site.stage())
    assert len(digests) == 3
    with reads(monkeypatch) as sizes:
        site.clock.now += tick * 0.2
        site.stage()
        assert sum(sizes) == 3  # read once more, more than a tick after it was first seen like this
        site.stage()
        assert sum(sizes) == 3


def test_fingerprints_forget_the_oldest_sources(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "_KEPT", 1)
    site.write("tool.py", "1")
    site.settle()
    (site.allowed / "other").mkdir()
    site.stage(site.allowed / "other")
    with reads(monkeypatch) as sizes:
        site.stage()
        assert sum(sizes) == 1


# --- what is kept and what goes -----------------------------------------------------------------------------------------


def test_a_replaced_version_goes_once_nobody_holds_it(site: Site) -> None:
    site.write("tool.py", "1")
    with site.staging.staged(site.tool, [site.allowed]) as first:
        site.staging.hold(first)
        site.write("tool.py", "2")
        second = site.stage()
        assert site.versions() == {first, second}
        site.staging.release(first)
        assert site.versions() == {first, second}
    assert site.versions() == {second}
    site.write("tool.py", "3")
    third = site.stage()
    assert site.versions() == {third}
    with pytest.raises(StagingFailed, match="stage it again"):
        site.staging.hold(first)
    with pytest.raises(ValueError, match="not held"):
        site.staging.release(third)


def test_a_version_that_is_current_again_stays(site: Site) -> None:
    site.write("tool.py", "1")
    first = site.stage(hold=True)
    site.write("tool.py", "2")
    site.stage()
    site.write("tool.py", "1")
    assert site.stage() == first
    site.staging.release(first)
    assert site.versions() == {first}


def test_a_version_that_two_sources_share_goes_with_the_last_of_them(site: Site) -> None:
    site.write("tool.py", "1")
    twin = site.allowed / "twin"
    twin.mkdir()
    (twin / "tool.py").write_text("1")
    shared = site.stage()
    assert site.stage(twin) == shared
    site.write("tool.py", "2")
    second = site.stage()
    assert site.versions() == {shared, second}
    (twin / "tool.py").write_text("2")
    assert site.stage(twin) == second
    assert site.versions() == {second}


def test_the_version_unused_for_longest_goes_first_beyond_the_limit_and_none_that_is_held(site: Site) -> None:
    site.staging = site.another(site.place, max_versions=3)
    sources = [site.allowed / name for name in "abcde"]
    for source in sources:
        source.mkdir()
        (source / "name").write_text(source.name)
    a, b, c = (site.stage(source, hold=source.name == "b") for source in sources[:3])
    assert site.stage(sources[0]) == a
    d = site.stage(sources[3])
    assert site.versions() == {a, b, d}
    e = site.stage(sources[4])
    assert site.versions() == {b, d, e}
    assert site.stage(sources[2]) == c
    site.staging.release(b)
    assert site.stage(sources[0]) == a
    assert site.versions() == {e, c, a}


def test_what_a_crash_cut_off_is_removed_and_what_was_finished_is_used(site: Site) -> None:
    site.write("tool.py", "1")
    digest = site.stage()
    inode = (site.place / digest).stat().st_ino
    for name in (".new-cut", ".old-off"):
        (site.place / name / "deep").mkdir(parents=True)
        (site.place / name / "link").symlink_to(site.tool)
    site.staging = site.another(site.place)
    assert site.stage() == digest
    assert site.versions() == {digest}
    assert (site.place / digest).stat().st_ino == inode
    assert (site.tool / "tool.py").exists()
    assert (site.place / "nonce").read_text() == "n"


def test_a_version_that_somebody_removed_is_copied_again(site: Site) -> None:
    site.write("tool.py", "1")
    site.settle()
    digest = site.stage()
    (site.place / digest).rename(site.root / "gone")
    assert site.stage() == digest
    assert tree(site.place / digest) == tree(site.tool)


# --- several threads ----------------------------------------------------------------------------------------------------


class WatchedLock:
    """A lock that tells when a second thread comes to it."""

    def __init__(self) -> None:
        self.lock, self.came, self.second = threading.Lock(), 0, threading.Event()

    def __enter__(self) -> None:
        self.came += 1
        if self.came == 2:
            self.second.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def locked(self) -> bool:
        return self.lock.locked()


def test_two_threads_that_stage_one_source_at_once_make_one_version(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        site.write(name, name)
    lock = WatchedLock()
    monkeypatch.setattr(site.staging, "_copying", {os.path.realpath(site.tool): lock})
    with ThreadPoolExecutor(2) as threads:
        second: list[Future[str]] = []

        def come() -> None:
            second.append(threads.submit(site.stage, hold=True))
            assert lock.second.wait(10)
            assert lock.lock.locked()  # so the second waits, and takes the first one's draft for nothing cut off

        once(monkeypatch, "read", "two", come)
        first = threads.submit(site.stage, hold=True).result(30)
        assert second[0].result(30) == first
    assert site.versions() == {first}
    assert tree(site.place / first) == tree(site.tool)
    assert site.pauses == []
    site.staging.release(first)
    site.staging.release(first)


def test_a_copy_holds_up_neither_other_places_nor_what_is_in_place(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write("tool.py", "1")
    site.settle()
    slow = site.allowed / "slow"
    slow.mkdir()
    (slow / "slow.py").write_text("slow")
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(30)

    once(monkeypatch, "read", "slow.py", wait)
    with ThreadPoolExecutor(2) as threads:
        copying = threads.submit(site.stage, slow)
        try:
            assert begun.wait(30)
            here = threads.submit(site.stage, hold=True).result(10)
            site.staging.release(here)
            assert site.another(site.root / "place 2").stage(site.tool, [site.allowed]) == here
            fresh = site.allowed / "fresh"
            fresh.mkdir()
            (fresh / "fresh.py").write_text("fresh")
            new = threads.submit(site.stage, fresh).result(10)  # it is copied too, and takes no draft for cut off
            assert not copying.done()
        finally:
            go_on.set()
        copied = copying.result(30)
    assert site.versions() == {here, copied, new}
    assert tree(site.place / copied) == tree(slow)


# --- the host's own troubles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "code", "kind", "words"),
    [
        ("write", errno.ENOSPC, StagingFailed, ("No space left", "pool.state_dir")),
        ("symlink", errno.EDQUOT, StagingFailed, ("pool.state_dir",)),
        ("mkdir", errno.EROFS, StagingFailed, ("pool.state_dir",)),
        ("read", errno.EIO, StagingFailed, ("tool.py", "host's disk")),
        ("open", errno.EMFILE, StagingFailed, ("Too many open files",)),
        ("open", errno.EACCES, InvalidCall, ("let the gateway's user read it",)),
    ],
)
def test_trouble_with_a_disk_is_told_from_a_wrong_source(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
    kind: type[EmberpoolError],
    words: tuple[str, ...],
) -> None:
    site.write("deep/tool.py", "1")
    (site.tool / "link").symlink_to("deep")
    with monkeypatch.context() as patch:
        fails(patch, call, code)
        site.refuses(*words, kind=kind)
    assert site.pauses == []
    assert tree(site.place / site.stage()) == tree(site.tool)


def test_a_place_that_is_gone_with_its_sandbox_is_told(site: Site) -> None:
    site.write("tool.py", "1")
    held = site.stage(hold=True)
    site.place.rename(site.root / "gone")
    with pytest.raises(StagingFailed, match="staging place"):
        site.stage()
    site.staging.release(held)


# --- any tree -----------------------------------------------------------------------------------------------------------


def part(name: bytes) -> bool:
    return b"/" not in name and b"\0" not in name and name.strip(b".") != b""


names = st.binary(min_size=1, max_size=3).filter(part).map(os.fsdecode)
files = st.tuples(st.binary(max_size=4), st.booleans())
trees = st.recursive(
    st.dictionaries(names, files, max_size=3),
    lambda inner: st.dictionaries(names, files | inner, max_size=3),
    max_leaves=8,
)


def build(content: dict[str, Any], top: Path) -> None:
    top.mkdir()
    for name, what in content.items():
        if isinstance(what, dict):
            build(what, top / name)
        else:
            (top / name).write_bytes(what[0])
            (top / name).chmod(0o755 if what[1] else 0o644)


def staged_tree(content: dict[str, Any]) -> tuple[str, dict[str, tuple[str, bool, bytes]]]:
    with tempfile.TemporaryDirectory() as root:
        build(content, Path(root, "tool"))
        place = Path(root, "place")
        place.mkdir()
        digest = Staging(place).stage(Path(root, "tool"), [Path(root)])
        copy = tree(place / digest)
        assert copy == tree(Path(root, "tool"))
        return digest, copy


@settings(deadline=None)  # it makes directories, on disks that others use too
@given(trees, trees)
def test_any_tree_is_copied_and_two_have_one_digest_only_if_they_are_equal(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    (first, copy), (second, other_copy) = staged_tree(one), staged_tree(other)
    assert staged_tree(one)[0] == first
    assert (first == second) == (copy == other_copy)


@settings(deadline=None)
@given(trees, st.data())
def test_any_one_change_gives_another_digest(content: dict[str, Any], data: st.DataObject) -> None:
    before, _ = staged_tree(content)
    folder = content
    while inner := [what for what in folder.values() if isinstance(what, dict)]:
        if data.draw(st.booleans()):
            break
        folder = data.draw(st.sampled_from(inner))
    free = data.draw(names.filter(lambda name: name not in folder))
    if data.draw(st.booleans()) and folder:
        name = data.draw(st.sampled_from(sorted(folder)))
        what = folder.pop(name)
        if data.draw(st.booleans()):
            folder[free] = what
        elif not isinstance(what, dict):
            folder[name] = data.draw(st.sampled_from([(what[0] + b"x", what[1]), (what[0], not what[1]), {}]))
    else:
        added: st.SearchStrategy[Any] = files | st.just({})
        folder[free] = data.draw(added)
    assert staged_tree(content)[0] != before
