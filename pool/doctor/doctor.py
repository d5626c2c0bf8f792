"""The doctor: every condition of a working pool, checked one by one, so that one that fails or hangs hides no other."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio

from executor.common.log import get_logger
from executor.common.printable import printable
from executor.engine.locate import find_engine
from executor.engine.protocol import Engine, EngineInfo, ImageInfo
from executor.errors import EmberpoolError, EngineUnavailable, ImageMissing
from executor.staging.threads import StagingThreads
from pool.config.load import ConfigError, Settings, load_settings
from pool.doctor import checks, host_facts
from pool.doctor.checks import Check
from pool.doctor.probe import probe
from pool.doctor.runc_cves import guards, judge, runc_version
from pool.supervisor.engine_link import FindEngine
from pool.supervisor.users import UserPolicy

__all__ = ["Check", "examine", "examine_file"]

log = get_logger("emberpool.doctor")

_T = TypeVar("_T")
_Work = Callable[[], Awaitable[list[Check]]]

_PATIENCE = 20.0
_FIND_PATIENCE = 60.0
_PROBE_PATIENCE = 180.0
_NO_ENGINE = "not checked: no engine answers"


async def examine_file(path: Path | None = None) -> list[Check]:
    """``examine`` the settings of a file and the environment; settings that do not load are failed checks."""
    try:
        settings = load_settings(path)
    except ConfigError as error:
        remedy = "correct it; docs/configuration.md lists every key"
        failed = [Check("configuration", "fail", printable(problem), remedy) for problem in error.problems]
        return [*failed, Check("everything else", "warn", "not checked: the configuration does not load")]
    source = path or os.environ.get("EMBERPOOL_CONFIG") or "the defaults"
    return [Check("configuration", "ok", f"loads from {source} and the environment"), *await examine(settings)]


async def examine(
    settings: Settings, *, find: FindEngine | None = None, changelogs: Iterable[Path] = host_facts.CHANGELOGS
) -> list[Check]:
    """Check everything that a pool with ``settings`` needs. Every check has a deadline; what fails is in the answer.

    A real sandbox is started and removed on the way. ``changelogs`` say what the distribution's runc fixed.
    """
    return await _Examination(settings, find, tuple(changelogs)).run()


class _Examination:
    """One run through all checks. What a check raises becomes its own failure."""

    def __init__(self, settings: Settings, find: FindEngine | None, changelogs: tuple[Path, ...]) -> None:
        self._settings, self._find, self._changelogs = settings, find or self._find_engine, changelogs
        self._engine: Engine | None = None
        self._info: EngineInfo | None = None
        self._image: ImageInfo | None = None

    async def run(self) -> list[Check]:
        return [
            *await _guarded("host", self._host),
            *await _guarded("python tools", self._tools),
            *await _guarded("state directory", self._state, "mend it, or choose another pool.state_dir"),
            *await _guarded("engine", self._reach, _engine_remedy(), patience=_FIND_PATIENCE),
            *await _guarded("engine facts", self._facts),
            *await _guarded("kernel", self._kernel),
            *await _guarded("runtime", self._runtime),
            *await _guarded("image", self._find_image, "look at the engine's log"),
            *await _guarded("user", self._user, "change sandbox.user, sandbox.uid_range or the mount"),
            *await _guarded("profile", self._boundary, "look at the engine's log", patience=_PROBE_PATIENCE),
            *await _guarded("memory", self._memory),
            *await _guarded("disk", self._disk),
            *await _guarded("crashes", self._crashes),
        ]

    async def _find_engine(self) -> tuple[Engine, EngineInfo]:
        return await find_engine(self._settings.sandbox.binary)

    async def _host(self) -> list[Check]:
        return await _in_thread(partial(checks.host_checks, self._settings))

    async def _tools(self) -> list[Check]:
        return [checks.tools_check(self._settings)]

    async def _state(self) -> list[Check]:
        path = self._settings.pool.state_dir
        return [Check("state directory", "ok", await _in_thread(partial(host_facts.state_directory, path)))]

    async def _reach(self) -> list[Check]:
        try:
            self._engine, self._info = await self._find()
        except EngineUnavailable as error:
            if error.retryable:
                raise
            return [Check("engine", "fail", printable(error), "install the command, or correct sandbox.binary")]
        text = f"{self._info.kind} {self._info.version} answers, found by {self._info.endpoint}"
        return [Check("engine", "ok", text)]

    async def _facts(self) -> list[Check]:
        return checks.engine_checks(self._info) if self._info else [Check("engine facts", "warn", _NO_ENGINE)]

    async def _kernel(self) -> list[Check]:
        return checks.kernel_checks(self._settings, self._info)

    async def _runtime(self) -> list[Check]:
        info, box = self._info, self._settings.sandbox
        if info is None:
            return [Check("runtime", "warn", _NO_ENGINE)]
        if box.runtime and info.kind == "docker" and box.runtime not in info.runtimes:
            remedy = f"install it, or set sandbox.runtime to one of: {', '.join(sorted(info.runtimes))}"
            return [Check("runtime", "fail", f"the engine has no runtime {box.runtime}", remedy)]
        name = box.runtime or info.default_runtime or "of an unknown name"
        if "runc" not in name:
            text = f"the runtime is {name}; known escapes are listed for runc only"
            return [Check("runtime", "warn", text, "follow its own security advisories")]
        version = runc_version(info.runtime_version)
        package = await _in_thread(partial(host_facts.runc_package, version, self._changelogs))
        held = guards(nested_mounts=bool(checks.nested(box.mounts)), kind=info.kind, rootless=info.rootless)
        return checks.runc_checks(version, judge(version, package, held))

    async def _find_image(self) -> list[Check]:
        reference = self._settings.sandbox.image
        if self._engine is None:
            return [Check("image", "warn", _NO_ENGINE)]
        try:
            image = await self._engine.image(reference)
        except ImageMissing:
            remedy = f"run: emberpool image build --image {reference}"
            return [Check("image", "fail", f"{reference} is not on the engine", remedy)]
        check = checks.image_check(image, reference)
        self._image = image if check.status == "ok" else None
        return [check]

    async def _user(self) -> list[Check]:
        box = self._settings.sandbox
        found: list[Check] = []
        clashes = await _in_thread(partial(host_facts.users_of, box.uid_range))
        if clashes:
            text = f"sandbox.uid_range {box.uid_range} holds uids that this host uses: {', '.join(clashes[:5])}"
            found.append(Check("user", "warn", text, "choose a range that nothing else uses"))
        if self._image is None and box.user == "image":
            return [*found, Check("user", "warn", "not checked: there is no image to name its user")]
        policy = UserPolicy(box.user, box.uid_range, tuple(box.mounts))
        user = policy.calls_user(self._image or ImageInfo(id=""), (), offset=0)
        uid = user.partition(":")[0]
        if uid == str(box.uid_range.keeper):
            text = f"calls would run as {user}, the uid of every sandbox's PID 1, and could end or inject it"
            return [*found, Check("user", "fail", text, "move sandbox.uid_range away from it")]
        if uid.isdigit() and int(uid) in box.uid_range.calls:
            user = f"a uid of its own for each sandbox out of {box.uid_range}"
        elif uid.isdigit():
            found.append(checks.shared_user_check(user))
        return [*found, Check("user", "ok", f"calls run as {user}; PID 1 as {policy.keeper}")]

    async def _boundary(self) -> list[Check]:
        if self._engine is None or self._info is None or self._image is None:
            why = _NO_ENGINE if self._engine is None else "not checked: there is no image that may run"
            return [Check("profile", "warn", why), Check("cold call", "warn", why)]
        return checks.probe_checks(await probe(self._settings, self._engine, self._info, self._image))

    async def _memory(self) -> list[Check]:
        if self._info is None:
            return [Check("memory", "warn", _NO_ENGINE)]
        return [checks.memory_check(self._settings, self._info)]

    async def _crashes(self) -> list[Check]:
        if await self._data_root() is None:
            why = _NO_ENGINE if self._info is None else "not checked: the engine is not on this host"
            return [Check("crashes", "warn", why)]
        handler = await _in_thread(host_facts.crash_handler)
        if handler is None:
            return [Check("crashes", "warn", "not checked: this system does not say what it does with a crash")]
        return [checks.crash_check(handler)]

    async def _data_root(self) -> Path | None:
        """Where the engine keeps its data, if that is on this host."""
        root = Path(self._info.data_root) if self._info and self._info.data_root else None
        return root if root is not None and await _in_thread(root.is_dir) else None

    async def _disk(self) -> list[Check]:
        found: list[Check] = []
        places = {"state directory": self._settings.pool.state_dir}
        if (root := await self._data_root()) is not None:
            places = {"engine": root, **places}
        else:
            why = _NO_ENGINE if self._info is None else "not checked: the engine's data is not on this host"
            found.append(Check("disk (engine)", "warn", why))
        for what, path in places.items():
            free = await _in_thread(partial(host_facts.free_bytes, path))
            found.append(checks.disk_check(what, path, free))
        return found


async def _guarded(name: str, work: _Work, remedy: str = "", *, patience: float = _PATIENCE) -> list[Check]:
    try:
        with anyio.fail_after(patience):
            return await work()
    except TimeoutError:
        return [Check(name, "fail", f"did not end within {patience:g} s", remedy or "look what hangs")]
    except EmberpoolError as error:
        return [Check(name, "fail", printable(error), remedy)]
    except Exception as error:  # whatever it is, the other checks have to run too
        log.debug("doctor.unexpected", check=name, exc_info=error)
        return [Check(name, "fail", f"{type(error).__name__}: {printable(error)}", remedy)]


async def _in_thread(look: Callable[[], _T]) -> _T:
    # A directory service or a network disk can hang: its thread is left behind, and the check fails by its deadline.
    return await StagingThreads().run("what a check looks at", look)


def _engine_remedy() -> str:
    named = next((name for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST") if os.environ.get(name)), "")
    if named:
        return f"start the engine that {named} names, or unset {named} and run: emberpool engine up"
    return "run: emberpool engine up"
