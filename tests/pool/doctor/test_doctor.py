"""The doctor tells how every condition stands, whatever the others do, and leaves nothing behind."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import structlog.testing
import typer
from typer.testing import CliRunner, Result

from executor.engine.events import EventHub
from executor.engine.locate import find_engine
from executor.engine.protocol import ContainerGone, Engine, EngineEvent, EngineInfo, ImageInfo
from executor.errors import EngineFailed, EngineUnavailable, ImageMissing
from executor.machine.image import DEFAULT_IMAGE
from executor.sandbox.profile import LABEL_POOL
from executor.sandbox.sandbox import Sandbox, SandboxSpec
from executor.sandbox.start import start_sandbox
from pool.cli import doctor as cli_doctor
from pool.config.load import Settings
from pool.config.types import UidRange
from pool.doctor import doctor, probe
from pool.doctor.checks import crash_check, disk_check, memory_check
from pool.doctor.doctor import Check, examine
from pool.doctor.host_facts import crash_handler, users_of
from pool.ledger.ledger import StateDirectory
from pool.supervisor import containers
from pool.supervisor.containers import Connection, connection

_INFO = EngineInfo(
    kind="docker", version="28.0", endpoint="a test", memory=64 << 30, cpus=2, cgroup_version="2",
    cgroup_driver="cgroupfs", runtimes=("runc",), default_runtime="runc", runtime_version="1.1.5+ds1-1+deb12u1",
)  # fmt: skip
_IMAGE = ImageInfo(id="sha256:" + "1" * 64, size=50_000_000)


class Scripted:
    """An engine that holds one image and refuses to start anything."""

    def __init__(self, image: ImageInfo | None = _IMAGE, info: EngineInfo = _INFO) -> None:
        self._image, self.known = image, info
        self.started: list[str] = []
        self.removed: list[str] = []

    async def find(self) -> tuple[Engine, EngineInfo]:
        return cast(Engine, self), self.known

    async def image(self, reference: str) -> ImageInfo:
        if self._image is None:
            raise ImageMissing(f"no such image: {reference}")
        return self._image

    @asynccontextmanager
    async def events(self, label: str, value: str, since: str) -> AsyncIterator[AsyncIterator[EngineEvent]]:
        async def none() -> AsyncIterator[EngineEvent]:
            await anyio.sleep_forever()
            yield EngineEvent(action="", container="", name="", time=0)

        yield none()

    async def start(self, args: Sequence[str]) -> str:
        self.started.append(args[args.index("--name") + 1])
        raise EngineFailed("starting a container: no space left on device")

    def attach(self, args: Sequence[str]) -> Any:
        self.started.append(args[args.index("--name") + 1])
        raise EngineFailed("starting a container: no space left on device")

    async def inspect(self, name: str) -> dict[str, Any]:
        raise ContainerGone(f"no such container: {name}")

    async def remove(self, name: str) -> None:
        self.removed.append(name)


def _settings(tmp_path: Path, **sections: dict[str, Any]) -> Settings:
    sections["pool"] = {"state_dir": tmp_path / "state"} | sections.get("pool", {})
    return Settings(**sections)


def _named(checks: Sequence[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


async def _nothing() -> tuple[Engine, EngineInfo]:
    raise EngineUnavailable("no container engine answers (asked everywhere)")


# --- each check stands alone ------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_without_an_engine_the_rest_is_told_and_what_needs_it_is_not_checked(tmp_path: Path) -> None:
    checks = await examine(_settings(tmp_path), find=_nothing)
    failed = [check.name for check in checks if check.status == "fail"]
    assert failed == ["engine"]
    assert "emberpool engine up" in _named(checks, "engine").remedy
    for name in ("runtime", "image", "profile", "cold call", "memory"):
        assert _named(checks, name).status == "warn"
        assert _named(checks, name).detail.startswith("not checked: ")
    assert _named(checks, "disk (state directory)").detail


@pytest.mark.anyio
async def test_an_engine_that_never_answers_fails_its_check_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang() -> tuple[Engine, EngineInfo]:
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(doctor, "_FIND_PATIENCE", 0.01)
    checks = await examine(_settings(tmp_path), find=hang)
    assert _named(checks, "engine").status == "fail"
    assert "did not end within" in _named(checks, "engine").detail
    assert _named(checks, "user").status == "ok"


@pytest.mark.anyio
async def test_an_unexpected_error_becomes_a_failed_check(tmp_path: Path) -> None:
    async def broken() -> tuple[Engine, EngineInfo]:
        raise RuntimeError("a surprise\nin two lines")

    check = _named(await examine(_settings(tmp_path), find=broken), "engine")
    assert (check.status, check.detail) == ("fail", "RuntimeError: a surprise in two lines")


@pytest.mark.anyio
async def test_a_missing_image_names_the_command_that_makes_it(tmp_path: Path) -> None:
    checks = await examine(_settings(tmp_path), find=Scripted(image=None).find)
    assert _named(checks, "image").status == "fail"
    assert f"emberpool image build --image {DEFAULT_IMAGE}" in _named(checks, "image").remedy
    assert _named(checks, "profile").status == "warn"


@pytest.mark.anyio
async def test_an_image_with_a_volume_fails_and_is_not_started(tmp_path: Path) -> None:
    engine = Scripted(image=ImageInfo(id=_IMAGE.id, volumes=("/data",)))
    checks = await examine(_settings(tmp_path), find=engine.find)
    assert _named(checks, "image").status == "fail"
    assert "/data" in _named(checks, "image").detail
    assert _named(checks, "profile").status == _named(checks, "cold call").status == "warn"
    assert engine.started == []


@pytest.mark.anyio
async def test_probes_that_cannot_start_fail_with_the_engines_reason_and_are_removed(tmp_path: Path) -> None:
    engine = Scripted()
    checks = await examine(_settings(tmp_path), find=engine.find)
    for name in ("profile", "cold call"):
        assert _named(checks, name).status == "fail"
        assert "no space left on device" in _named(checks, name).detail
    assert len(engine.started) == 2
    assert set(engine.started) <= set(engine.removed)


@pytest.mark.anyio
async def test_the_distributions_changelog_decides_what_its_runc_has_fixed(tmp_path: Path) -> None:
    changelog = tmp_path / "changelog.Debian.gz"
    changelog.write_bytes(
        gzip.compress(b"runc (1.1.5+ds1-1+deb12u1) bookworm-security; urgency=high\n  * CVE-2024-21626\n")
    )
    with_it = await examine(_settings(tmp_path), find=Scripted().find, changelogs=[changelog])
    without = await examine(_settings(tmp_path), find=Scripted().find, changelogs=[])
    assert "CVE-2024-21626" not in [check.name for check in with_it]
    assert _named(without, "CVE-2024-21626").detail.startswith("unknown: ")
    assert _named(with_it, "CVE-2025-31133").detail.startswith("open: ")
    assert "blocked here: " in _named(with_it, "CVE-2025-31133").detail


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("mounts", "status"),
    [(("/a:/data",), "warn"), (("/a:/data", "/b:/data/sub"), "fail"), (("/a:/data:ro", "/b:/data/sub"), "warn")],
)
async def test_an_open_escape_fails_where_a_mount_target_inside_a_writable_mount_lets_it_through(
    tmp_path: Path, mounts: Sequence[str], status: str
) -> None:
    settings = _settings(tmp_path, sandbox={"mounts": list(mounts), "user": "1000:1000"})
    checks = await examine(settings, find=Scripted().find, changelogs=[])
    assert _named(checks, "CVE-2025-52881").status == status
    assert (":ro" in _named(checks, "CVE-2025-52881").remedy) == (status == "fail")
    assert _named(checks, "CVE-2025-31133").status == "warn"


@pytest.mark.anyio
async def test_a_mount_source_that_tool_code_can_swap_for_a_link_fails(tmp_path: Path) -> None:
    (tmp_path / "data" / "models").mkdir(parents=True)
    mounts = [f"{tmp_path}/data:/data", f"{tmp_path}/data/models:/models:ro"]
    settings = _settings(tmp_path, sandbox={"mounts": mounts, "user": "1000:1000"})
    check = _named(await examine(settings, find=_nothing), "host")
    assert check.status == "fail"
    assert "/models:ro" in check.detail
    mounts[0] += ":ro"
    settings = _settings(tmp_path, sandbox={"mounts": mounts, "user": "1000:1000"})
    assert _named(await examine(settings, find=_nothing), "host").status == "ok"


@pytest.mark.anyio
async def test_a_runtime_that_the_engine_does_not_have_fails_and_another_kind_is_not_judged(tmp_path: Path) -> None:
    settings = _settings(tmp_path, sandbox={"runtime": "runsc"})
    assert _named(await examine(settings, find=Scripted().find), "runtime").status == "fail"
    info = EngineInfo(kind="podman", version="5", endpoint="a test", default_runtime="crun")
    check = _named(await examine(_settings(tmp_path), find=Scripted(info=info).find), "runtime")
    assert check.status == "warn"
    assert "crun" in check.detail


@pytest.mark.anyio
@pytest.mark.parametrize(("seccomp", "status"), [("strict", "ok"), ("engine", "warn"), (__file__, "warn")])
async def test_any_seccomp_profile_but_our_own_is_warned_of(tmp_path: Path, seccomp: str, status: str) -> None:
    for find in (Scripted().find, _nothing):
        check = _named(await examine(_settings(tmp_path, sandbox={"seccomp": seccomp}), find=find), "seccomp")
        assert check.status == status
        assert (__file__ in check.detail) == (seccomp == __file__)
        assert ("strict" in check.remedy) == (status == "warn")


@pytest.mark.anyio
@pytest.mark.parametrize(("version", "warned"), [("1", True), ("2", False), ("", False)])
async def test_kernel_memory_that_no_container_is_charged_for_is_warned_of(
    tmp_path: Path, version: str, warned: bool
) -> None:
    info = EngineInfo(kind="docker", version="20", endpoint="a test", cgroup_version=version)
    found = await examine(_settings(tmp_path), find=Scripted(info=info).find)
    assert ["tcp_mem" in check.remedy for check in found if check.name == "kernel memory"] == [True] * warned


@pytest.mark.anyio
@pytest.mark.parametrize(("user", "warned"), [("1000:1000", True), ("200001:200001", False)])
async def test_one_uid_for_the_calls_of_all_sandboxes_is_warned_of(tmp_path: Path, user: str, warned: bool) -> None:
    settings = _settings(tmp_path, sandbox={"user": user, "uid_range": "200000:100"})
    found = [check for check in await examine(settings, find=_nothing) if check.name == "user"]
    assert [check.status for check in found] == ["warn"] * warned + ["ok"]


@pytest.mark.anyio
async def test_calls_that_would_share_the_uid_of_pid_1_fail(tmp_path: Path) -> None:
    settings = _settings(tmp_path, sandbox={"user": "200000:200000", "uid_range": "200000:100"})
    assert _named(await examine(settings, find=_nothing), "user").status == "fail"


@pytest.mark.anyio
async def test_a_state_directory_of_a_live_pool_is_well_and_an_open_one_fails(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    state = StateDirectory.open(settings.pool.state_dir)
    check = _named(await examine(settings, find=_nothing), "state directory")
    assert check.status == "ok"
    assert f"pid {os.getpid()}" in check.detail
    state.close()
    settings.pool.state_dir.chmod(0o777)
    check = _named(await examine(settings, find=_nothing), "state directory")
    assert check.status == "fail"
    assert "chmod 700" in check.detail


@pytest.mark.anyio
async def test_a_state_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    assert _named(await examine(settings, find=_nothing), "state directory").status == "ok"
    assert not settings.pool.state_dir.exists()


@pytest.mark.parametrize(
    ("pattern", "handler", "status"),
    [
        ("core", "", "ok"),
        ("/var/crash/core.%p", "", "ok"),
        ("", "", "ok"),
        ("|/usr/share/apport/apport -p%p -s%s", "/usr/share/apport/apport", "warn"),
        ("| /bin/false", "/bin/false", "warn"),
    ],
)
def test_a_program_that_the_host_starts_for_crashes_is_named(
    tmp_path: Path, pattern: str, handler: str, status: str
) -> None:
    file = tmp_path / "core_pattern"
    assert crash_handler(file) is None
    file.write_text(f"{pattern}\n")
    assert crash_handler(file) == handler
    check = crash_check(handler)
    assert check.status == status
    assert handler in check.detail


def test_users_and_subordinate_uids_inside_the_range_are_found(tmp_path: Path) -> None:
    subordinate = tmp_path / "subuid"
    subordinate.write_text("ann:300000:65536\nbob:900000:10\n# a comment\n")
    assert users_of(UidRange(365_535, 10), subordinate) == ["ann (subordinate uids from 300000)"]
    assert users_of(UidRange(365_536, 10), subordinate) == []
    assert any("(65534)" in user for user in users_of(UidRange(65_534, 1), subordinate))


def test_memory_that_does_not_fit_fails_and_overcommit_only_warns(tmp_path: Path) -> None:
    small = EngineInfo(kind="docker", version="28", endpoint="a test", memory=1 << 30)
    assert memory_check(_settings(tmp_path), small).status == "fail"
    assert memory_check(_settings(tmp_path, pool={"overcommit": True}), small).status == "warn"
    assert memory_check(_settings(tmp_path), _INFO).status == "ok"


@pytest.mark.parametrize(("free", "status"), [(1 << 29, "fail"), (2 << 30, "warn"), (6 << 30, "ok")])
def test_free_space_is_judged(free: int, status: str) -> None:
    assert disk_check("engine", Path("/"), free).status == status


# --- the command ------------------------------------------------------------------------------------------------------


def _command(*args: str) -> Result:
    app = typer.Typer()
    app.command()(cli_doctor.doctor)
    with structlog.testing.capture_logs():  # only the whole command sends logs to stderr
        return CliRunner().invoke(app, args)


def _report(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    async def examine_file(path: Path | None = None) -> list[Check]:
        return list(checks)

    monkeypatch.setattr(cli_doctor, "examine_file", examine_file)


def test_json_holds_every_check_and_a_failure_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    _report(monkeypatch, Check("a", "ok", "well"), Check("b", "fail", "bad", "mend it"))
    result = _command("--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "ok": False,
        "checks": [
            {"name": "a", "status": "ok", "detail": "well", "remedy": ""},
            {"name": "b", "status": "fail", "detail": "bad", "remedy": "mend it"},
        ],
    }


def test_warnings_alone_are_exit_status_0_and_each_check_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _report(monkeypatch, Check("a", "ok", "well"), Check("b", "warn", "odd", "look"))
    result = _command()
    assert result.exit_code == 0
    *lines, verdict = result.stdout.splitlines()
    assert lines == ["ok    a  well", "warn  b  odd -> look"]
    assert verdict == "a pool can run: 1 ok, 1 to know of, 0 failed"


def test_a_configuration_that_does_not_load_is_told_problem_by_problem(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text("[pool]\nmin_standby = 99\nmax_sandboxs = 2\n")
    result = _command("--config", str(file), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [check["status"] for check in report["checks"]] == ["fail"] * (len(report["checks"]) - 1) + ["warn"]
    assert "pool.max_sandboxes?" in result.stdout


def test_a_named_engine_that_is_dead_fails_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("EMBERPOOL_POOL__STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("EMBERPOOL_SANDBOX__BINARY", "docker")
    result = _command("--json")
    check = next(check for check in json.loads(result.stdout)["checks"] if check["name"] == "engine")
    assert result.exit_code == 1
    assert check["status"] == "fail"
    assert "DOCKER_HOST" in check["remedy"]


# --- a real engine ----------------------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.anyio
async def test_a_sound_engine_has_no_failed_check_and_nothing_is_left_behind(
    engine_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[str] = []

    def noted(settings: Settings, engine: Engine, info: EngineInfo, image: ImageInfo, pool_id: str) -> Connection:
        pools.append(pool_id)
        return connection(settings, engine, info, image, pool_id)

    monkeypatch.setattr(probe, "connection", noted)
    checks = await examine(engine_settings)
    assert [check for check in checks if check.status == "fail"] == []
    assert _named(checks, "profile").status == _named(checks, "cold call").status == "ok"
    engine, _ = await find_engine()
    assert [await engine.list(LABEL_POOL, pool_id) for pool_id in pools] == [[]]
    assert [path async for path in anyio.Path("/sys/fs/cgroup").glob(f"**/emberpool-{pools[0]}*")] == []


@pytest.mark.engine
@pytest.mark.anyio
async def test_a_cancel_while_the_probe_runs_removes_it(
    engine_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = await find_engine()
    seen: list[str] = []
    with anyio.CancelScope() as scope:

        async def start_then_cancel(engine: Engine, hub: EventHub, spec: SandboxSpec, **how: Any) -> Sandbox:
            box = await start_sandbox(engine, hub, spec, **how)
            seen.append(spec.identity.name)
            scope.cancel()
            return box

        monkeypatch.setattr(containers, "start_sandbox", start_then_cancel)
        await examine(engine_settings)
    assert scope.cancelled_caught
    with pytest.raises(ContainerGone):
        await engine.inspect(seen[0])
