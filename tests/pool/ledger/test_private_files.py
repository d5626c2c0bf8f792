"""The state directory: whose it must be, and whom its lock keeps out."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from executor.errors import PoolUnusable
from pool.ledger.ledger import Entry, StateDirectory
from pool.ledger.private_files import StateLocked
from tests.support import ROOT


def _files(path: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a directory: modes and contents."""
    return {
        str(file.relative_to(path)): (file.lstat().st_mode, file.read_bytes() if file.is_file() else b"")
        for file in sorted(path.rglob("*"))
    }


def _made(path: Path) -> StateDirectory:
    """A state directory that was used once, open."""
    return StateDirectory.open(path)


def _disk_is_full(*args: Any, **words: Any) -> Any:
    """What a call of the system meets then."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_new_state_directory_is_private(state_dir: Path) -> None:
    _made(state_dir).close()
    for file in (state_dir, state_dir / "ledger", state_dir / "staging"):
        assert file.stat().st_mode & 0o777 == 0o700
    for name in ("pool.json", "lock"):
        assert (state_dir / name).stat().st_mode & 0o777 == 0o600


def test_its_identity_outlives_it(state_dir: Path) -> None:
    first = _made(state_dir)
    first.close()
    first.close()
    second = _made(state_dir)
    assert (second.pool_id, second.session_id("a", "b")) == (first.pool_id, first.session_id("a", "b"))
    second.close()


def test_a_live_pools_directory_is_locked_and_names_its_holder(state_dir: Path) -> None:
    holder = _made(state_dir)
    with pytest.raises(StateLocked, match=f"in use by a live pool .pid {os.getpid()}, since 20..-..-..T") as refused:
        StateDirectory.open(state_dir)
    since = datetime.fromisoformat(refused.value.holder.partition("since ")[2])
    assert 0 <= (datetime.now(UTC) - since).total_seconds() < 60
    holder.close()
    _made(state_dir).close()


def test_a_process_that_ends_while_the_holder_is_looked_for_changes_nothing(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, gone = _made(state_dir), f"/proc/{os.getppid()}/fd"

    def vanishing(listing: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def listed(place: Any = ".") -> Any:
            if os.fspath(place) == gone:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return listing(place)

        return listed

    with monkeypatch.context() as patched:
        for name in ("listdir", "scandir"):
            patched.setattr(os, name, vanishing(getattr(os, name)))
        with pytest.raises(StateLocked, match=f"in use by a live pool .pid {os.getpid()}"):
            StateDirectory.open(state_dir)
    holder.close()


@pytest.mark.parametrize("text", ["1 2001-02-03T04:05:06+00:00\n", "1\n", "", "\0\xff", "9" * 5_000])
def test_who_is_named_in_the_lock_file_locks_nobody_out(state_dir: Path, text: str) -> None:
    _made(state_dir).close()
    (state_dir / "lock").write_text(text)  # pid 1 always lives
    _made(state_dir).close()


@pytest.mark.parametrize("text", ["", "pid 7\n", "7\033[2J\n", "-1\n", "7 yesterday\n", "9" * 5_000])
def test_error_says_when_the_lock_file_names_no_process(state_dir: Path, text: str) -> None:
    holder = _made(state_dir)
    (state_dir / "lock").write_text(text)
    with pytest.raises(StateLocked, match=r"in use by a live pool \(pid unknown\); stop it"):
        StateDirectory.open(state_dir)
    holder.close()


def test_a_full_disk_does_not_keep_a_pool_from_its_lock(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _made(state_dir).close()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", _disk_is_full)
        holder = _made(state_dir)
    with pytest.raises(StateLocked, match="pid unknown"):
        StateDirectory.open(state_dir)
    holder.close()


def test_a_full_disk_at_the_first_start_is_a_refusal_that_holds_no_lock(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _disk_is_full)
        with pytest.raises(PoolUnusable, match="No space left"):
            StateDirectory.open(state_dir)
    _made(state_dir).close()


def test_another_processs_lock_holds_until_it_ends(state_dir: Path) -> None:
    program = "import sys; from pathlib import Path; from pool.ledger.ledger import StateDirectory\n"
    program += "d = StateDirectory.open(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(state_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(PoolUnusable, match=f"pid {other.pid}"):
            StateDirectory.open(state_dir)
        other.kill()
    _made(state_dir).close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o705, 0o701])
def test_a_directory_that_is_open_to_others_is_refused(state_dir: Path, mode: int) -> None:
    state_dir.mkdir()
    state_dir.chmod(mode)
    with pytest.raises(PoolUnusable, match="chmod 700"):
        StateDirectory.open(state_dir)
    assert _files(state_dir) == {}


@pytest.mark.parametrize("part", ["ledger", "staging"])
def test_a_part_that_is_open_to_others_is_refused(state_dir: Path, part: str) -> None:
    _made(state_dir).close()
    (state_dir / part).chmod(0o777)
    with pytest.raises(PoolUnusable, match="chmod 700"):
        StateDirectory.open(state_dir)


def test_a_parent_that_everybody_may_write_is_refused(state_dir: Path) -> None:
    parent = state_dir / "open"
    parent.mkdir(parents=True)
    parent.chmod(0o777)
    with pytest.raises(PoolUnusable, match="can be written by others"):
        StateDirectory.open(parent / "state")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize(("owner", "group", "mode"), [(1000, 1000, 0o755), (0, 1000, 0o770)])
def test_a_parent_in_which_another_user_could_replace_it_is_refused(
    state_dir: Path, owner: int, group: int, mode: int
) -> None:
    parent = state_dir / "given"
    parent.mkdir(parents=True)
    os.chown(parent, owner, group)
    parent.chmod(mode)
    with pytest.raises(PoolUnusable, match="choose another place"):
        StateDirectory.open(parent / "state")


def test_a_link_in_place_of_the_directory_is_refused(state_dir: Path) -> None:
    target = state_dir.with_name("target")
    target.mkdir(mode=0o700)
    state_dir.symlink_to(target)
    with pytest.raises(PoolUnusable, match="links are not followed"):
        StateDirectory.open(state_dir)
    assert _files(target) == {}


@pytest.mark.parametrize("part", ["ledger", "staging"])
def test_a_link_in_place_of_a_part_is_refused(state_dir: Path, part: str) -> None:
    target = state_dir.with_name("target")
    target.mkdir(mode=0o700)
    state_dir.mkdir(mode=0o700)
    (state_dir / part).symlink_to(target)
    with pytest.raises(PoolUnusable, match="links are not followed"):
        StateDirectory.open(state_dir)


def test_a_link_in_place_of_the_lock_is_refused_and_its_target_left_alone(state_dir: Path) -> None:
    state_dir.mkdir(mode=0o700)
    target = state_dir.with_name("target")
    target.write_text("precious")
    (state_dir / "lock").symlink_to(target)
    with pytest.raises(PoolUnusable, match="symbolic link"):
        StateDirectory.open(state_dir)
    assert target.read_text() == "precious"


def test_a_dangling_link_in_place_of_a_part_is_refused_and_not_followed(state_dir: Path) -> None:
    state_dir.mkdir(mode=0o700)
    target = state_dir.with_name("target")
    (state_dir / "ledger").symlink_to(target)
    with pytest.raises(PoolUnusable, match="links are not followed"):
        StateDirectory.open(state_dir)
    assert not target.exists()


def test_a_link_in_place_of_the_identity_is_refused_and_not_followed(state_dir: Path) -> None:
    _made(state_dir).close()
    target = (state_dir / "pool.json").rename(state_dir.with_name("target.json"))
    before = target.read_bytes()
    (state_dir / "pool.json").symlink_to(target)
    with pytest.raises(PoolUnusable, match=r"pool.json is damaged \(it is a symbolic link\)"):
        StateDirectory.open(state_dir)
    assert target.read_bytes() == before


def test_a_link_in_place_of_an_entry_is_refused_and_not_followed(state_dir: Path) -> None:
    directory = _made(state_dir)
    directory.enter(Entry("box", "bound", "c" * 64))
    file = state_dir / "ledger" / "box.bound"
    target = file.rename(state_dir.with_name("target.bound"))
    file.symlink_to(target)
    with pytest.raises(PoolUnusable, match=r"box.bound is damaged \(it is a symbolic link\)"):
        directory.entries()
    assert target.exists()


def test_a_link_in_place_of_an_entrys_draft_is_not_written_through(state_dir: Path) -> None:
    directory = _made(state_dir)
    target = state_dir.with_name("target")
    target.write_text("precious")
    (state_dir / "ledger" / ".new-box.standby").symlink_to(target)
    with pytest.raises(PoolUnusable):
        directory.enter(Entry("box", "standby"))
    assert target.read_text() == "precious"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["pool.json", "ledger/box.bound"])
def test_what_is_no_file_is_refused_without_waiting_for_it(
    state_dir: Path, make: Callable[[Path], None], name: str
) -> None:
    _made(state_dir).close()
    (state_dir / name).unlink(missing_ok=True)
    make(state_dir / name)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths
    with pytest.raises(PoolUnusable, match=f"{name} is damaged .it is not a regular file of this user"):
        StateDirectory.open(state_dir)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - names, not paths


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_lock_is_refused_without_waiting(state_dir: Path) -> None:
    state_dir.mkdir(mode=0o700)
    os.mkfifo(state_dir / "lock")
    with pytest.raises(PoolUnusable, match="regular file"):
        StateDirectory.open(state_dir)


def test_a_directory_of_another_user_is_refused(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _made(state_dir).close()
    before = _files(state_dir)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PoolUnusable, match="belongs to uid"):
        StateDirectory.open(state_dir)
    assert _files(state_dir) == before


def test_a_file_in_place_of_the_directory_is_refused(state_dir: Path) -> None:
    state_dir.write_text("not a directory")
    with pytest.raises(PoolUnusable):
        StateDirectory.open(state_dir)
    assert state_dir.read_text() == "not a directory"
