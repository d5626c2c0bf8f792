"""What a start needs on this host is looked at first, and nothing is made for a start that would lack it."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.errors import ProfileMismatch
from executor.sandbox.host_files import require_host_files
from executor.sandbox.mount import Mount
from executor.sandbox.profile import ContainerProfile
from pool.pool import SandboxPool
from tests.support.pools import outcome, settings_of, until
from tests.support.scripted import ScriptedEngine


@pytest.mark.parametrize("options", [(), ("ro",)])
def test_missing_mount_source_is_refused_and_not_made(tmp_path: Path, options: tuple[str, ...]) -> None:
    source = tmp_path / "nowhere"
    with pytest.raises(ProfileMismatch, match=r"mount source .*nowhere cannot be used: No such file"):
        require_host_files(ContainerProfile(mounts=(Mount(str(source), "/data", options),)))
    source.mkdir()
    require_host_files(ContainerProfile(mounts=(Mount(str(source), "/data", options),)))


@pytest.mark.parametrize("content", [None, b"", b"print(1)", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_seccomp_profile_that_is_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "profile.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ProfileMismatch, match=r"seccomp profile .*profile.json cannot be used"):
        require_host_files(ContainerProfile(seccomp=str(file)))
    file.write_text('{"defaultAction": "SCMP_ACT_ALLOW"}')
    require_host_files(ContainerProfile(seccomp=str(file)))


@pytest.mark.anyio
@pytest.mark.parametrize("what", ["mounts", "seccomp"])
async def test_start_that_would_lack_a_file_is_refused_before_anything_is_made(tmp_path: Path, what: str) -> None:
    missing = tmp_path / "nowhere"
    value = {"mounts": (Mount(str(missing), "/data", ("ro",)),), "seccomp": str(missing)}[what]
    async with ScriptedEngine() as engine:
        settings = settings_of(tmp_path / "state")
        settings = settings.model_copy(update={"sandbox": settings.sandbox.model_copy(update={what: value})})
        async with SandboxPool(settings, find=engine.find) as pool:
            await until(lambda: pool.snapshot().engine == "up", limit=5)
            for attempt in (lambda: pool.acquire("agent", "chat"), lambda: pool.call_cold(["true"])):
                error = await outcome(attempt)
                assert isinstance(error, ProfileMismatch)
                assert "nowhere" in str(error)
            assert engine.asked["start"] == engine.asked["attach"] == 0
            assert list((tmp_path / "state" / "ledger").iterdir()) == []
    assert not missing.exists()
