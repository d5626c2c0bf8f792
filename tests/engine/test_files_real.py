"""Files of a session on a real engine: what its calls see of them, and where the sandbox's limits show."""

from __future__ import annotations

import os

import pytest

from executor.errors import FileFailed, InvalidCall, SessionClosed, StateLost
from executor.sandbox import files
from pool.config.load import CallSettings, Settings
from pool.config.tables import AgentCall, AgentOverrides
from pool.pool import SandboxPool

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


async def test_files_go_in_and_out_to_the_byte_and_calls_see_the_same(engine_settings: Settings) -> None:
    call = CallSettings(max_output=16_000_000)
    async with SandboxPool(engine_settings.model_copy(update={"call": call})) as pool:
        session = await pool.acquire("agent", "files")
        data = os.urandom(10_000_000)
        for path in ("data/deep/file", "/dev/shm/file"):
            await session.write_file(path, data, parents=True)
            assert await session.read_file(path) == data
        seen = await session.call(code="import os; print(os.path.getsize('/tmp/data/deep/file'), os.listdir('/tmp'))")
        assert seen.stdout == b"10000000 ['data']\n"
        await session.call(
            ["sh", "-c", "printf out > /tmp/made; ln -s /etc /tmp/away; mkdir /tmp/locked; chmod 0 /tmp/locked"]
        )
        assert await session.read_file("made") == b"out"
        assert [(entry.name, entry.kind) for entry in await session.list_files()] == [
            ("away", "symlink"), ("data", "directory"), ("locked", "directory"), ("made", "file"),
        ]  # fmt: skip
        assert [entry.name for entry in await session.list_files("/tool")] == ["nonce"]
        with pytest.raises(InvalidCall, match="leads to /etc/passwd"):
            await session.read_file("away/passwd")
        with pytest.raises(FileFailed) as failed:
            await session.list_files("locked")
        assert failed.value.code == "EACCES"
        with pytest.raises(InvalidCall, match="outside"):
            await session.write_file("/tool/file", b"")


async def test_names_and_link_targets_reach_an_error_only_as_printable_words(engine_settings: Settings) -> None:
    async with SandboxPool(engine_settings) as pool:
        session = await pool.acquire("agent", "names")
        made = await session.call(
            code="import os; os.symlink('/etc/\\x1b]0;owned\\x07\\nerror: EngineUnavailable: all is lost\\r\\u202e', '/tmp/link')"
        )
        assert made.ok
        with pytest.raises(
            InvalidCall, match=r"leads to /etc/\\x1b\]0;owned\\x07 error: Engine.*\\u202e, outside"
        ) as refused:
            await session.read_file("link")
        assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "says",
    [
        "print('[[\"x\", \"file\", 1, 1' + '0' * 400 + ']]')",
        'print(\'[["x", "file", 1, NaN]]\')',
        'print(\'[["../x", "file", 1, 1]]\')',
        'print(\'[["x\\\\u0000", "file", 1, 1]]\')',
        'print(\'[["x", "file", -1, 1]]\')',
        'import sys; sys.stderr.write(\'{"kind": [], "code": {}, "message": 1}\'); sys.exit(3)',
    ],
)
async def test_an_answer_of_another_program_than_ours_is_a_typed_failure(
    engine_settings: Settings, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    async with SandboxPool(engine_settings) as pool:
        session = await pool.acquire("agent", "forged")
        monkeypatch.setattr(files, "program", lambda: says)
        with pytest.raises(FileFailed, match="listing '/tmp'"):
            await session.list_files()


async def test_a_full_tmpfs_is_told_and_the_old_file_stays(engine_settings: Settings) -> None:
    async with SandboxPool(engine_settings) as pool:
        session = await pool.acquire("agent", "full")
        await session.write_file("file", b"old")
        await session.call(code="open('/tmp/big', 'wb').write(bytes(62_000_000))")
        with pytest.raises(FileFailed) as failed:
            await session.write_file("file", bytes(8_000_000))
        assert (failed.value.code, failed.value.started) == ("ENOSPC", True)
        assert await session.read_file("file") == b"old"
        assert sorted(entry.name for entry in await session.list_files()) == ["big", "file"]
        with pytest.raises(FileFailed, match="62000000 bytes") as failed:
            await session.read_file("big")
        assert failed.value.code == "EFBIG"


async def test_a_file_belongs_to_its_generation_and_its_session(engine_settings: Settings) -> None:
    async with SandboxPool(engine_settings) as pool:
        session, other = await pool.acquire("agent", "one"), await pool.acquire("agent", "two")
        await session.write_file("mine", b"1", generation=session.generation)
        with pytest.raises(FileFailed):
            await other.read_file("mine")
        with pytest.raises(StateLost):
            await session.read_file("mine", generation="00000000-1")
        await session.close()
        with pytest.raises(SessionClosed):
            await session.read_file("mine")


async def test_an_agents_lower_output_ceiling_holds_for_its_files(engine_settings: Settings) -> None:
    agents = {name: AgentOverrides(call=AgentCall(max_output=most)) for name, most in (("low", 5_000), ("lowest", 10))}
    limits = {"call": CallSettings(max_output=100_000), "agents": agents}
    async with SandboxPool(engine_settings.model_copy(update=limits)) as pool:
        low, lowest, other = [await pool.acquire(agent, "files") for agent in ("low", "lowest", "other")]
        for session, most in ((low, 5_000), (lowest, 10), (other, 100_000)):
            await session.write_file("file", bytes(most))
            assert await session.read_file("file") == bytes(most)
            with pytest.raises(InvalidCall, match=f"0 to {most} whole bytes"):
                await session.read_file("file", max_bytes=most + 1)
            await session.write_file("file", bytes(most + 1))
            with pytest.raises(FileFailed, match=f"it is {most + 1} bytes; at most {most} are read") as failed:
                await session.read_file("file")
            assert failed.value.code == "EFBIG"
        with pytest.raises(FileFailed, match="at most 10 are listed") as failed:
            await lowest.list_files()
        assert failed.value.code == "EFBIG"
        with pytest.raises(FileFailed) as failed:  # what is wrong is told in more than 10 bytes
            await lowest.read_file("missing")
        assert (failed.value.code, str(failed.value)) == ("ENOENT", "reading 'missing': No such file or directory")


async def test_a_file_beyond_the_sandboxs_size_limit_is_told_with_the_limit(engine_settings: Settings) -> None:
    box = engine_settings.sandbox.model_copy(update={"file_size_mb": 1})
    async with SandboxPool(engine_settings.model_copy(update={"sandbox": box})) as pool:
        session = await pool.acquire("agent", "size")
        with pytest.raises(FileFailed, match="it is 1048577 bytes; a file may grow to 1048576") as failed:
            await session.write_file("file", bytes(1_048_577))
        assert failed.value.code == "EFBIG"
        assert await session.list_files() == []
