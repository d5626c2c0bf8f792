"""Privileged commands: each call runs in a disposable container, with the workspace's ``data/sandbox`` and nothing else of it.

They are what a gateway's own built-in tools for shells, scripts, evaluation and installation come to. Nothing is kept of
the container; what a command writes below ``/workspace`` stays.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path, PurePosixPath

import anyio

from executor.errors import InvalidCall, StagingFailed
from executor.result import CallResult
from executor.sandbox.mount import Mount
from executor.sandbox.request import Call, check_code
from executor.staging.threads import StagingThreads
from pool.config.load import Settings
from pool.config.tables import WORKSPACE, CommandSettings
from pool.supervisor.containers import ColdSetting

RunCold = Callable[[Call, ColdSetting], Awaitable[CallResult]]

PLACE = Path("data/sandbox")
"""What of the workspace is mounted."""
LIBRARIES = f"{WORKSPACE}/lib"
"""Where ``install_library`` puts what it installs, and ``run_script`` finds it."""
_INTERPRETERS = {".py": ("python3", "-B"), ".sh": ("sh",)}
_ARCHIVE = re.compile(r"\.(?:whl|zip|tar|tgz|tbz|txz|tlz|tar\.[a-z0-9]+)\Z", re.IGNORECASE)
"""What `pip` takes for the path of a file, although it looks like a name."""
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:\[[A-Za-z0-9._, -]*\])?"
    r"(?:\s*(?:===?|~=|!=|<=?|>=?)\s*[A-Za-z0-9.*+!_-]+(?:\s*,\s*(?:===?|~=|!=|<=?|>=?)\s*[A-Za-z0-9.*+!_-]+)*)?\Z"
)


class Privileged:
    """The commands. Each takes its ceilings from ``[privileged.<command>]``; ``timeout`` is seconds, at most that.

    Raises ``InvalidCall`` (also where ``sandbox.workspace`` is not set, or its ``data/sandbox`` is not a directory of its
    own), ``StagingFailed`` (its file system hangs), ``ProfileMismatch`` (it belongs to root), and what ``SandboxPool.call_cold`` raises.
    """

    def __init__(self, settings: Settings, run_cold: RunCold, threads: StagingThreads) -> None:
        self._settings, self._run_cold, self._threads = settings, run_cold, threads

    async def shell_exec(self, command: str, *, stdin: bytes = b"", timeout: float | None = None) -> CallResult:
        """Run ``command`` by the image's ``sh``, in ``/workspace``."""
        return await self._call("shell_exec", timeout, argv=("sh", "-c", _text("command", command)), stdin=stdin)

    async def run_script(
        self, path: str, args: Sequence[str] = (), *, stdin: bytes = b"", timeout: float | None = None
    ) -> CallResult:
        """Run a script of the workspace, a ``.py`` or a ``.sh``; ``path`` is relative to its ``data/sandbox``."""
        place = PurePosixPath(_text("path", path))
        if isinstance(args, str | bytes):
            raise InvalidCall('args must be a list of strings, for example ["--all"], not one string')
        if place.is_absolute() or ".." in place.parts or place.suffix not in _INTERPRETERS:
            raise InvalidCall(
                f"path must be relative to the workspace's {PLACE}, without .., and end in "
                f"{' or '.join(_INTERPRETERS)}; it is {path!r:.80}"
            )
        argv = (*_INTERPRETERS[place.suffix], str(PurePosixPath(WORKSPACE) / place), *args)
        return await self._call("run_script", timeout, argv=argv, stdin=stdin, env={"PYTHONPATH": LIBRARIES})

    async def python_eval(self, code: str, *, stdin: bytes = b"", timeout: float | None = None) -> CallResult:
        """Run Python source, in ``/workspace``."""
        return await self._call("python_eval", timeout, code=_text("code", code), stdin=stdin)

    async def install_library(self, *requirements: str, timeout: float | None = None) -> CallResult:
        """Install packages by name (``"tabulate"``, ``"tabulate>=0.9"``) into ``/workspace/lib`` with the image's ``pip``.

        It runs the packages' own code, in the container. Refused unless ``privileged.install_library.network`` is set: by
        default no container has a network.
        """
        if not self._settings.privileged.install_library.network:
            raise InvalidCall(
                "install_library needs a network, and no container has one by default; choose it with "
                "privileged.install_library.network in the configuration"
            )
        for one in requirements or ("",):
            if not isinstance(one, str) or not _REQUIREMENT.match(one) or _is_archive(one):
                raise InvalidCall(
                    f"{one!r:.80} is not a package name with an optional version, such as tabulate>=0.9; options, paths and "
                    "addresses are not taken"
                )
        # Isolated: with the working directory on its path, pip would run what the workspace calls json.py, and with a
        # network. Without --upgrade it leaves a package that is there as it is, whatever version was asked for.
        pip = ("python3", "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-cache-dir")
        argv = (*pip, "--upgrade", "--target", LIBRARIES, "--", *requirements)
        return await self._call("install_library", timeout, argv=argv)

    async def _call(
        self,
        name: str,
        timeout: float | None,
        *,
        argv: tuple[str, ...] = (),
        code: str | None = None,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
    ) -> CallResult:
        limits: CommandSettings = getattr(self._settings.privileged, name)
        wanted = limits.timeout if timeout is None else timeout
        if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not wanted > 0:
            raise InvalidCall(f"timeout must be above 0 seconds; it is {wanted!r:.40}")
        if wanted > limits.timeout:
            raise InvalidCall(
                f"timeout is {wanted:g} s; at most {limits.timeout:g} s are allowed (privileged.{name}.timeout)"
            )
        call = Call(
            argv=argv,
            code=code,
            stdin=stdin,
            env=env or {},
            timeout=wanted,
            max_output=limits.max_output,
            max_input=self._settings.call.max_input,
            cwd=WORKSPACE,
        )
        check_code(call, self._settings.sandbox.file_size_mb)
        deadline, place = anyio.current_time() + call.timeout, ""
        with anyio.move_on_after(call.timeout):
            place = await self._threads.run(self._settings.sandbox.workspace, lambda: self._place(name))
        if not place:
            raise StagingFailed(
                f"sandbox.workspace was not found within the call's {call.timeout:g} s; look after its file system",
                retry_after=1.0,
            )
        left = max(0.001, deadline - anyio.current_time())
        return await self._run_cold(call.within(left), ColdSetting(workspace=place, network=limits.network))

    def _place(self, name: str) -> str:
        """The directory that is mounted: of the workspace itself, not one that a link makes look so."""
        if not self._settings.sandbox.workspace:
            raise InvalidCall(f"{name} needs a workspace; set sandbox.workspace in the configuration")
        try:
            place = Path(self._settings.sandbox.workspace).resolve() / PLACE
            found = [(path, path.is_symlink(), path.is_dir()) for path in (place.parent, place)]
            above = [(path, path.stat()) for path in (place.parents[1], place.parent) if path.is_dir()]
        except (OSError, RuntimeError) as error:  # the second is a circle of links
            raise InvalidCall(f"sandbox.workspace cannot be looked at: {error}; correct it, or its rights") from error
        shown = shlex.quote(str(place))
        for path, is_link, is_directory in found:
            if is_link:
                raise InvalidCall(f"{path} must be a directory of the workspace itself, not a link; put one there")
            if not is_directory:
                raise InvalidCall(
                    f"{path} is not there, or is no directory; run: mkdir -p {shown} && chown UID:GID {shown}, with an "
                    "owner other than root, whom the command then runs as"
                )
        for path, facts in above:
            # Whoever may write there could put another directory in its place after this look, and have it mounted.
            if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
                raise InvalidCall(
                    f"{path} must be writable by root or this process's user alone; run: chown {os.geteuid()} "
                    f"{shlex.quote(str(path))} && chmod go-w {shlex.quote(str(path))}"
                )
        try:
            Mount(str(place), WORKSPACE)
        except ValueError:
            raise InvalidCall(
                f"{str(place)!r:.300} holds a colon or a control character, which no mount can; choose another "
                "sandbox.workspace"
            ) from None
        return str(place)


def _is_archive(requirement: str) -> bool:
    return any(_ARCHIVE.search(text) for text in (requirement, requirement.partition("[")[0]))


def _text(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidCall(f"{name} must be a non-empty string")
    return value
