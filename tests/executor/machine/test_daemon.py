"""The private daemon's process is known again by its record, and nothing else is ever taken for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.common.proc import shares_files
from executor.engine.paths import EnginePaths, engine_paths
from executor.machine import daemon, private_engine
from executor.machine.leftovers import mounts_below

pytestmark = pytest.mark.anyio


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own for a private engine; short, since its sockets' paths are limited and pytest's are long."""
    with tempfile.TemporaryDirectory(prefix="ember-", dir="/tmp") as directory:
        monkeypatch.setenv("EMBERPOOL_ENGINE_HOME", directory)
        monkeypatch.delenv("DOCKER_HOST", raising=False)
        yield Path(directory)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not ours to stop."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it runs: until then its argv may still be another's
    yield process
    process.kill()
    process.communicate()


def record_of(process: subprocess.Popen[bytes]) -> daemon.Started:
    """What a start of that process would have recorded."""
    argv = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[:-1]
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return daemon.Started(pid=process.pid, start_time=int(stat[19]), boot_id=boot, argv=tuple(argv))


def written(paths: EnginePaths, started: daemon.Started, **changes: object) -> None:
    paths.run.mkdir(exist_ok=True)
    raw = {
        "pid": started.pid,
        "start_time": started.start_time,
        "boot_id": started.boot_id,
        "argv": list(started.argv),
    }
    paths.started_file.write_text(json.dumps({**raw, **changes}))
    paths.pid_file.write_text(str(started.pid))


def test_process_is_known_again_by_its_record(home: Path, sleeper: subprocess.Popen[bytes]) -> None:
    paths, started = engine_paths(), record_of(sleeper)
    paths.run.mkdir()
    daemon.write_started(paths.started_file, started)
    assert daemon.find_daemon(paths) == started


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot_id": "another boot"}, {"argv": ["/usr/sbin/dockerd"]}])
async def test_reused_pid_is_not_stopped(
    home: Path, sleeper: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    paths = engine_paths()
    written(paths, record_of(sleeper), **change)
    assert daemon.find_daemon(paths) is None
    assert await private_engine.down() is False
    assert sleeper.poll() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "1", "start_time": 1, "boot_id": "", "argv": []}', "\0"])
def test_damaged_record_names_no_process(home: Path, text: str) -> None:
    paths = engine_paths()
    paths.run.mkdir()
    paths.started_file.write_text(text)
    assert daemon.find_daemon(paths) is None


def test_daemon_gets_its_own_places_and_changes_no_network(home: Path) -> None:
    argv = daemon.daemon_argv("/usr/sbin/dockerd", engine_paths())
    assert {"--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"} <= set(argv)
    values = dict(zip(argv[1::2], argv[2::2], strict=False))
    for flag in ("--config-file", "--data-root", "--exec-root", "--pidfile"):
        assert Path(values[flag]).is_relative_to(home)
    assert values["--host"] == f"unix://{home}/run/docker.sock"


def test_mounts_below_are_found_in_order_and_no_others() -> None:
    lines = [
        "1 0 8:1 / / rw - ext4 a rw",
        "2 1 8:1 /x /e/data rw - ext4 a rw",
        "3 1 8:1 /x /e/data2 rw - ext4 a rw",
    ]
    lines += [r"4 2 0:9 / /e/data/a\040b/merged rw - overlay overlay rw"]
    found = mounts_below("\n".join(lines), (Path("/e/data"),))
    assert found == [Path("/e/data"), Path("/e/data/a b/merged")]
    # A disk that the operator mounted there is his, and what the daemon left on it is not.
    disk = lines[1].replace("/x /e/data", "/ /e/data")
    found = mounts_below("\n".join([lines[0], disk, *lines[2:]]), (Path("/e/data"),))
    assert found == [Path("/e/data/a b/merged")]


@pytest.mark.skipif(not hasattr(os, "chroot") or os.geteuid() != 0, reason="only root may change its root directory")
def test_a_process_with_another_root_directory_shares_no_files(tmp_path: Path) -> None:
    assert shares_files(os.getpid())
    code = f"import os, sys; os.chroot({str(tmp_path)!r}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        assert not shares_files(other.pid)
        other.communicate()
    assert not shares_files(other.pid)
