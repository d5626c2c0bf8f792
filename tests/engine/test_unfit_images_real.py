"""Images that cannot be a sandbox, or that lack what the configuration asks of them: each is refused by its own name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from executor.engine.protocol import ImageInfo
from executor.errors import EmberpoolError, ImageUnfit, InvalidCall
from executor.sandbox.cold import ColdSpec, has_python
from executor.sandbox.profile import ContainerProfile
from executor.sandbox.request import Call
from pool.config.load import Settings
from pool.doctor.checks import Check
from pool.doctor.doctor import examine
from pool.pool import SandboxPool
from pool.session import Session
from tests.engine.conftest import KEEPER, Room
from tests.engine.faulty import until
from tests.engine.tiny import changed_image, pack
from tests.support.pools import outcome

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

WRAPPER = '#!/bin/sh\n{}/usr/bin/python3 "$@"\n{}'
PLACE = "usr/local/bin/python3"
"""Where a wrapper is found before the interpreter."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # what is tested is the engine's and the image's doing


@contextmanager
def unfit(match: str) -> Iterator[None]:
    """The block is refused for the image's sake, whatever group the error comes in."""
    try:
        yield
    except BaseException as caught:
        error = caught
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, ImageUnfit):
            raise
        assert re.search(match, str(error)), str(error)
        assert "weaker" not in str(error)
        assert not error.retryable
        return
    pytest.fail("it was not refused")


async def python_of(room: Room, image: ImageInfo) -> bool:
    profile = ContainerProfile(user=f"{KEEPER + 1}:{KEEPER + 1}")
    return await has_python(room.engine, room.hub, ColdSpec(identity=room.identity(), profile=profile, image=image))


@pytest.mark.parametrize("mode", [None, 0o755, 0o700], ids=["absent", "0755", "0700"])
async def test_tmp_is_everybodys_whatever_the_image_has_there(
    real_engine: Room, tmp_path: Path, mode: int | None
) -> None:
    image = await real_engine.import_image(pack(tmp_path / "tiny.tar", tmp=mode))
    async with real_engine.sandbox(python=False, image=image) as box:
        assert (await box.call(Call(argv=("sh", "-c", "echo 1 > /tmp/mine")))).ok
    assert (await real_engine.cold(Call(argv=("sh", "-c", "echo 1 > /tmp/mine")), python=False, image=image)).ok


async def test_image_without_sleep_is_refused_by_that_name(real_engine: Room, tmp_path: Path) -> None:
    image = await real_engine.import_image(pack(tmp_path / "tiny.tar", ("cat", "sh")))
    with unfit("`sleep`.* exit status 127"):
        async with real_engine.sandbox(python=False, image=image):
            pass
    with unfit("`sleep`.* exit status 3"):
        broken = await changed_image(real_engine, tmp_path, {"usr/local/bin/sleep": "#!/bin/sh\nexit 3\n"})
        async with real_engine.armed(image=broken):
            pass


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({PLACE: WRAPPER.format("echo welcome\nexec ", "")}, "prints text of its own.*'welcome'"),
        ({"usr/lib/python3.11/sitecustomize.py": "print('hello')"}, "prints text of its own.*'hello'"),
        ({PLACE: "#!/bin/sh\necho no license >&2\nexit 3\n"}, "exit status 3: no license"),
        ({"usr/lib/python3.11/ctypes/__init__.py": "raise ImportError('no libffi')"}, "exit status 1.*no libffi"),
        ({PLACE: WRAPPER.format("echo ", "")}, "cannot run calls, exit status 0"),
    ],
    ids=["banner", "sitecustomize", "fails", "no ctypes", "no interpreter"],
)
async def test_python_that_cannot_carry_calls_out_is_refused_with_what_it_says(
    real_engine: Room, tmp_path: Path, files: dict[str, str], match: str
) -> None:
    image = await changed_image(real_engine, tmp_path, files)
    with unfit(match):
        await python_of(real_engine, image)


async def test_python_is_there_or_not(real_engine: Room, tmp_path: Path) -> None:
    assert await python_of(real_engine, real_engine.image)
    assert not await python_of(real_engine, await real_engine.import_image(pack(tmp_path / "tiny.tar")))


async def test_python_that_is_a_wrapper_serves_where_it_execs_and_is_refused_where_it_stays(
    real_engine: Room, tmp_path: Path
) -> None:
    image = await changed_image(real_engine, tmp_path, {PLACE: WRAPPER.format("exec ", "")})
    async with real_engine.armed(image=image) as box:
        assert (await box.call(Call(code="print(1)"))).stdout == b"1\n"
    image = await changed_image(real_engine, tmp_path, {PLACE: WRAPPER.format("", "exit $?\n")})
    with unfit("python3 is a wrapper that keeps running.*/usr/local/bin/python3"):
        async with real_engine.armed(image=image):
            pass


PACKAGES = "usr/lib/python3/dist-packages"
PRELOADS = {
    "absent": (None, "sandbox.preload: absent cannot be imported: ModuleNotFoundError"),
    "raises": (
        "raise RuntimeError('not today')",
        "sandbox.preload: raises cannot be imported: RuntimeError.*not today",
    ),
    "exits": ("import sys; sys.exit(0)", "sandbox.preload: exits cannot be imported: SystemExit"),
    "threads": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "left a thread",
    ),
    "ends": ("import os; os._exit(3)", "before its first call.*sandbox.preload"),
}
CHATTY = "import os\nprint('loaded')\nos.write(1, b'raw')"


async def test_preload_that_cannot_be_had_is_named_and_one_that_prints_is_no_word_of_the_runner(
    real_engine: Room, tmp_path: Path
) -> None:
    sources = {**{name: source for name, (source, _) in PRELOADS.items() if source}, "chatty": CHATTY}
    files = {f"{PACKAGES}/{name}.py": source for name, source in sources.items()}
    image = await changed_image(real_engine, tmp_path, files)
    for name, (_, match) in PRELOADS.items():
        with unfit(match):
            async with real_engine.armed(image=image, preload=(name,)):
                pass
    async with real_engine.armed(image=image, preload=("chatty",)) as box:
        result = await box.call(Call(code="import chatty\nprint(1)"))
    assert (result.stdout, result.stderr) == (b"1\n", b"")


async def test_doctor_finds_what_a_pool_would_refuse(real_engine: Room, tmp_path: Path, state_dir: Path) -> None:
    async def found(image: ImageInfo, **sandbox: Any) -> dict[str, Check]:
        settings = Settings(sandbox={"image": image.id, **sandbox}, pool={"state_dir": state_dir, "overcommit": True})
        return {check.name: check for check in await examine(settings)}

    broken = {"usr/lib/python3.11/ctypes/__init__.py": "raise ImportError('no libffi')"}
    profile = (await found(await changed_image(real_engine, tmp_path, broken)))["profile"]
    assert profile.status == "fail"
    assert "no libffi" in profile.detail
    checks = await found(real_engine.image, preload=["no_such_module"])
    assert checks["profile"].status == "fail"
    assert "sandbox.preload: no_such_module cannot be imported" in checks["profile"].detail
    assert checks["cold call"].status == "ok"
    tiny = await real_engine.import_image(pack(tmp_path / "tiny.tar"))
    checks = await found(tiny)
    assert (checks["profile"].status, checks["cold call"].status) == ("ok", "ok")
    assert "argv calls only" in checks["profile"].detail
    checks = await found(real_engine.image)
    assert (checks["profile"].status, checks["cold call"].status) == ("ok", "ok")
    assert "a runner was armed, and answered" in checks["profile"].detail


async def test_pool_refuses_an_unfit_image_at_once_and_heals_once_its_name_is_another(
    real_engine: Room, tmp_path: Path, engine_settings: Settings
) -> None:
    broken = await changed_image(real_engine, tmp_path, {PLACE: "#!/bin/sh\nexit 3\n"})
    name = f"localhost/{real_engine.pool}:live"
    await real_engine.engine.tag(broken.id, name)
    real_engine.images.append(name)
    sandbox = engine_settings.sandbox.model_copy(update={"image": name})
    async with SandboxPool(engine_settings.model_copy(update={"sandbox": sandbox})) as pool:
        with unfit("exit status 3"):
            await pool.acquire("agent", "session")
        assert pool.snapshot().fault == "ImageUnfit"
        await real_engine.engine.tag(real_engine.image.id, name)
        with anyio.fail_after(60):
            while isinstance(session := await outcome(lambda: pool.acquire("agent", "session")), EmberpoolError):
                assert isinstance(session, ImageUnfit)
                await anyio.sleep(0.1)
        assert isinstance(session, Session)
        assert (await session.call(code="print(1)")).ok


async def test_cold_call_in_an_image_without_python_runs_a_program_and_refuses_code(
    real_engine: Room, tmp_path: Path, engine_settings: Settings
) -> None:
    tiny = await real_engine.import_image(pack(tmp_path / "tiny.tar"))
    sandbox = engine_settings.sandbox.model_copy(update={"image": tiny.id})
    async with SandboxPool(engine_settings.model_copy(update={"sandbox": sandbox})) as pool:
        await until(lambda: pool.snapshot().engine == "up")
        assert (await pool.call_cold(["sh", "-c", "echo $((6 * 7))"])).stdout == b"42\n"
        with pytest.raises(InvalidCall, match="no python3"):
            await pool.call_cold(code="print(1)")
