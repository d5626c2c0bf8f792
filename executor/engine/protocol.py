"""The engine seam: what emberpool asks of a container engine, and the words in which it answers.

Kept small on purpose. ``executor.engine.docker`` fills it with the docker and podman command lines; a cluster's engine could
fill it without touching anything above. Tests fill it with a scripted engine under virtual time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from executor.errors import EngineFailed


class ContainerGone(EngineFailed):
    """The named container does not exist, or no longer runs."""

    reason = "container_gone"


class NameTaken(EngineFailed):
    """Another container already has this name; it was not touched."""

    reason = "name_taken"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine says of itself. ``memory`` is bytes; ``time`` is the engine's own clock, RFC 3339."""

    kind: str
    version: str
    endpoint: str
    cgroup_driver: str = ""
    cgroup_version: str = ""
    memory: int = 0
    cpus: int = 0
    rootless: bool = False
    runtimes: tuple[str, ...] = ()
    default_runtime: str = ""
    runtime_version: str = ""
    data_root: str = ""
    time: str = ""
    warnings: tuple[str, ...] = ()
    private: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """An image as the engine holds it; ``id`` is what containers are run by. ``size`` is bytes, ``architecture`` the
    manifest's word for the machine (``amd64``)."""

    id: str
    digests: tuple[str, ...] = ()
    user: str = ""
    env: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    size: int = 0
    architecture: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One row of a listing by label. ``running`` is false for a paused container too."""

    id: str
    name: str
    running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent:
    """One container event. ``time`` is the engine's nanoseconds; ``detail`` is an exec's command line where it has one."""

    action: str
    container: str
    name: str
    time: int
    detail: str = ""
    exec_id: str = ""
    exit_code: int | None = None


class Channel(Protocol):
    """One attached engine client: bytes in, bytes out of two streams, and an end.

    ``receive_stdout`` and ``receive_stderr`` return ``b""`` at the end of their stream. ``send`` raises
    ``BrokenPipeError`` once nobody reads any more. ``send_at_once`` writes all of a few bytes without waiting, or says that it
    has written nothing. ``kill`` ends the client only, never what runs in the container.
    """

    def send_at_once(self, data: bytes) -> bool: ...
    async def send(self, data: bytes) -> None: ...
    async def close_stdin(self) -> None: ...
    async def receive_stdout(self) -> bytes: ...
    async def receive_stderr(self) -> bytes: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...


class Engine(Protocol):
    """A container engine. Every method has a deadline of its own and raises a typed error past it."""

    async def info(self) -> EngineInfo:
        """Ask the engine what it is. Raises ``EngineUnavailable``."""
        ...

    async def image(self, reference: str) -> ImageInfo:
        """Look an image up, never pull it. Raises ``ImageMissing``."""
        ...

    async def start(self, args: Sequence[str]) -> str:
        """Run a detached container by ``run`` args; returns its full ID."""
        ...

    def attach(self, args: Sequence[str]) -> AbstractAsyncContextManager[Channel]:
        """Run an attached client (``run -i`` or ``exec -i``); leaving the block kills and reaps the client."""
        ...

    async def inspect(self, name: str) -> dict[str, Any]:
        """The engine's own record of a container. Raises ``ContainerGone``."""
        ...

    async def kill(self, name: str) -> None:
        """SIGKILL a container's PID 1 and return once nothing in it runs any more; waits for no other question.

        Raises ``ContainerGone`` where it does not run.
        """
        ...

    async def remove(self, name: str) -> None:
        """Remove a container, running or not, and return once it is absent. A missing one is no error."""
        ...

    async def list(self, label: str, value: str) -> list[Listed]:
        """All containers, running or not, that carry ``label=value``."""
        ...

    def events(self, label: str, value: str, since: str) -> AbstractAsyncContextManager[AsyncIterator[EngineEvent]]:
        """Container events from ``since`` on (engine time: RFC 3339 or seconds.nanoseconds); ends when the engine does."""
        ...
