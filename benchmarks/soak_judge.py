"""What fails a soak: a request without exactly one end, a wrong answer, a session that stays down, anything that grew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from benchmarks.soak_books import PoolState, Tally

MIB = 1_048_576


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at everything that could grow, taken at rest. ``None`` is what this machine does not let be read.

    ``memory`` is the resident bytes of this process, ``threads`` is without AnyIO's idle workers (it keeps each for ten
    seconds after its last use, at most forty), ``clients`` are this process's children: engine clients and nothing else.
    ``containers`` and ``running`` are those of the pool; ``shims`` the processes that hold them, and any that holds one
    that is gone; ``daemon_descriptors`` are without ``daemon_sockets``. ``others`` are shims of somebody else's containers.
    """

    descriptors: int | None = None
    threads: int | None = None
    memory: int | None = None
    clients: int | None = None
    containers: int = 0
    running: int = 0
    shims: int | None = None
    shim_descriptors: int | None = None
    daemons: int | None = None
    daemon_descriptors: int | None = None
    daemon_sockets: int | None = None
    daemon_memory: int | None = None
    others: int | None = None

    def steady(self) -> tuple[int | None, ...]:
        """All that must stand still while nothing happens: two readings that agree in it were taken at rest."""
        moving = {"memory", "daemon_memory", "daemon_sockets", "others"}
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in moving)


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a figure of a ``Reading`` may grow from the warmed-up rest to the last one; ``None``: it is only shown."""

    name: str
    about: str
    may_grow: int | None
    of_engine: bool = False


LIMITS = (
    Limit("descriptors", "our descriptors", 0),
    Limit("threads", "our threads", 0),
    # Seen: 1.4 to 2.6 MiB in two minutes. One of them is what the pool remembers of the engine's last 4,096 events; the
    # rest is the allocator's, which does not give back everything that a flood took. A leak of 8 KiB a call is found
    # within two minutes, a smaller one by a longer soak.
    Limit("memory", "our memory", 8 * MIB),
    Limit("clients", "engine clients", 0),
    Limit("containers", "containers", 0),
    Limit("shims", "their shims", 0),
    Limit("shim_descriptors", "the shims' descriptors", 0),
    Limit("daemons", "daemon processes", 0, of_engine=True),
    Limit("daemon_descriptors", "the daemon's files, pipes", 0, of_engine=True),
    # The connection of a client that was killed is closed by the daemon's garbage collector: seven were still there a
    # minute later, and none after the next soak.
    Limit("daemon_sockets", "the daemon's sockets", None, of_engine=True),
    # Go's heap is as large as its collector lets it become, and what it has, it gives back when it likes.
    Limit("daemon_memory", "the daemon's memory", None, of_engine=True),
)


def growth(limit: Limit, before: Reading, after: Reading) -> int | None:
    """By how much a figure grew; ``None`` where it was not read both times."""
    old, new = getattr(before, limit.name), getattr(after, limit.name)
    return None if old is None or new is None else new - old


def is_judged(limit: Limit, before: Reading, after: Reading) -> bool:
    """Whether growth of this figure fails a soak. What belongs to the engine is everybody's: with other containers on
    it, its growth says nothing about this pool."""
    alone = not before.others and not after.others
    return limit.may_grow is not None and (alone or not limit.of_engine)


def grown(before: Reading, after: Reading) -> list[str]:
    """What grew by more than it may, one line each."""
    faults = []
    for limit in LIMITS:
        more = growth(limit, before, after)
        if more is not None and is_judged(limit, before, after) and more > (limit.may_grow or 0):
            old, new = (getattr(reading, limit.name) for reading in (before, after))
            faults.append(f"{limit.about} grew from {old:,} to {new:,}; {limit.may_grow or 0:,} more are allowed")
    return faults


def miscounted(reading: Reading, min_standby: int) -> list[str]:
    """Faults where the containers at rest differ from what the pool is configured to keep."""
    faults = []
    if (reading.containers, reading.running) != (min_standby, min_standby):
        faults.append(
            f"at rest there are {reading.containers} containers of the pool, {reading.running} of them running; "
            f"min_standby is {min_standby}"
        )
    if reading.shims is not None and reading.shims != reading.running:
        faults.append(f"{reading.shims} shims hold {reading.running} running containers of the pool")
    return faults


def unbalanced(name: str, tally: Tally) -> list[str]:
    """The one line that says so where requests did not end in exactly one of result, error and cancellation."""
    if tally.accepted == tally.ended:
        return []
    return [
        f"{name} do not balance: {tally.accepted} accepted, and {tally.ended} ended ({tally.results.total()} results, "
        f"{tally.errors.total()} errors, {tally.cancelled} cancelled)"
    ]


def misled(books: PoolState, ended: int, *, ended_early: bool) -> list[str]:
    """Faults that the records show. ``ended`` is the number of calls whose end the pool's own log reports."""
    return [
        *unbalanced("calls", books.calls),
        *unbalanced("acquires", books.acquires),
        *([f"the pool's log reported {ended} calls, and callers made {books.calls.accepted}"]
          if ended != books.calls.accepted else []),
        *_odd("results are not what the code must have done", books.wrong.count, books.wrong.first),
        *_odd("ends are neither a result nor an error", books.strange.count, books.strange.first),
        # Whoever ends a soak early leaves no time to recover.
        *([] if ended_early else _lost(books)),
    ]  # fmt: skip


def _odd(what: str, count: int, first: list[str]) -> list[str]:
    return [f"{count} {what}; the first: {'; '.join(first[:3])}"] if count else []


def _lost(books: PoolState) -> Iterator[str]:
    for session, wound in books.wounds.items():
        yield f"{session} has not recovered from the kill of {wound.generation} (by {wound.by})"
