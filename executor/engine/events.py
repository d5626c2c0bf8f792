"""What engine events say of each container: the only witness of how an exec or a container ended.

An engine client's exit status proves nothing (1, 125, 126, 127 and 137 each have several meanings). So every container
has a ``Watch`` from before its start, and outcomes are read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from executor.common.notifier import Notifier
from executor.engine.protocol import EngineEvent
from executor.errors import DeathCause


class ExecWatch:
    """One exec, recognised by its command line: whether it was created, and how it ended."""

    def __init__(self, command: str) -> None:
        self.command = command.rstrip(" ")
        self.exec_id = ""
        self.exit_code: int | None = None
        self.ended = anyio.Event()

    @property
    def created(self) -> bool:
        return bool(self.exec_id)


class Watch:
    """One container. ``container`` is its full ID, ``""`` until its creation was seen; ``on_created`` is called with it.

    ``ooms`` counts out-of-memory events (they come in storms; only "any since" means something). ``died`` is set where
    nobody should wait for it any more; ``ended`` where an event said that its processes are gone.
    """

    def __init__(self, name: str) -> None:
        self.name, self.container = name, ""
        self.on_created: Callable[[str], None] = lambda container: None
        self.created = self.started = self.killed = False
        self.exit_code: int | None = None
        self.ooms = 0
        self.start_seen = anyio.Event()
        self.died = anyio.Event()
        self.ended = anyio.Event()
        self.destroyed = anyio.Event()
        self.paused = self.engine_lost = False
        self._execs: list[ExecWatch] = []

    def expect(self, argv: Sequence[str]) -> ExecWatch:
        """Announce an exec before it is made; forget it with ``dismiss``."""
        watch = ExecWatch(" ".join(argv))
        self._execs.append(watch)
        return watch

    def dismiss(self, watch: ExecWatch) -> None:
        self._execs.remove(watch)

    def take(self, event: EngineEvent) -> None:
        """Note one event of this container; unknown actions say nothing."""
        if event.action == "create":
            self.created, self.container = True, event.container
            self.on_created(event.container)
        elif event.action == "start":
            self.started = True
            self.start_seen.set()
        elif event.action == "oom":
            # A cgroup that is taken down signals its out-of-memory watcher too: after a kill it says nothing.
            if not self.killed and not self.died.is_set():
                self.ooms += 1
        elif event.action == "kill":
            self.killed = True
        elif event.action == "die":
            self.exit_code = event.exit_code
            self.ended.set()
            self.died.set()
        elif event.action == "pause":
            # Only a hand does this. Nothing in there runs or can be asked any more, and nobody says for how long: to
            # anyone who waits for it, it has ended, and its owner removes it.
            self.paused = True
            self.died.set()
        elif event.action == "destroy":
            self.ended.set()
            self.died.set()
            self.destroyed.set()
        elif event.action == "exec_create":
            for watch in self._execs:
                # Docker writes a space after a program without arguments.
                if not watch.exec_id and watch.command == event.detail.rstrip(" "):
                    watch.exec_id = event.exec_id
                    break
        elif event.action == "exec_die":
            for watch in self._execs:
                if watch.exec_id and watch.exec_id == event.exec_id:
                    watch.exit_code = event.exit_code
                    watch.ended.set()

    def lost(self) -> None:
        """The engine says that this container is no more, without an event of its end having been seen."""
        self.engine_lost = True
        self.died.set()
        self.destroyed.set()

    @property
    def cause(self) -> DeathCause:
        """The cause of the container's death, as far as its events show."""
        if self.engine_lost:
            return "engine"
        if self.exit_code is None:
            return "killed" if self.paused else "unknown"
        # A container that was killed from outside did not die of an earlier OOM that it survived.
        if self.ooms and self.exit_code == 137 and not self.killed:
            return "oom"
        return "killed" if self.exit_code in (137, 143) else "unknown"


class EventHub:
    """All watches of one engine connection. ``connected`` is false while its event stream is not running; ``links``
    counts how often it began to."""

    def __init__(self) -> None:
        self.links = 0
        self._connected, self._link = False, Notifier()
        self._watches: dict[str, Watch] = {}

    @property
    def connected(self) -> bool:
        return self._connected

    @connected.setter
    def connected(self, connected: bool) -> None:
        if connected and not self._connected:
            self.links += 1
        self._connected = connected
        if connected:
            self._link.notify()

    async def linked(self) -> None:
        """Wait until the event stream runs."""
        while not self._connected:
            await self._link.wait()

    def watch(self, name: str) -> Watch:
        """The watch of the container ``name``, made on first use; make it before the container."""
        return self._watches.setdefault(name, Watch(name))

    def forget(self, name: str) -> None:
        self._watches.pop(name, None)

    def publish(self, event: EngineEvent) -> Watch | None:
        """Hand an event to its container's watch, and return that; ``None`` for a container that nobody watches."""
        watch = self._watches.get(event.name)
        if watch is not None:
            watch.take(event)
        return watch
