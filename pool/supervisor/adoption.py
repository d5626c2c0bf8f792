"""Taking over the standbys that a killed instance of the same pool left: which may be, and the proof that each is fit.

Only a standby is ever taken over: its entry moves to bound before any session has it, so that the ledger is the proof that
nobody has used it. Everything else is proven anew, as for a sandbox of this instance's own making. In doubt it is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from executor.engine.protocol import ImageInfo
from executor.errors import ProfileMismatch
from executor.sandbox.profile import LABEL_CONFIG, LABEL_KIND, LABEL_POOL
from pool.ledger.cleanup import Leftover
from pool.ledger.ledger import Entry
from pool.supervisor.users import UserPolicy


@dataclass(slots=True)
class Inheritance:
    """Standbys of an earlier instance: ``offered`` may be taken over, and ``taken`` are sandboxes of this one, by number.
    They keep their names."""

    offered: list[Entry] = field(default_factory=list)
    taken: dict[int, Entry] = field(default_factory=dict)

    def claim(self, n: int) -> bool:
        """Let sandbox ``n`` be one of the offered, if there is one."""
        if self.offered:
            self.taken[n] = self.offered.pop(0)
            return True
        return False

    def number(self, name: str) -> int | None:
        """The sandbox that has the container ``name`` of an earlier instance."""
        return next((n for n, entry in self.taken.items() if entry.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standard:
    """What a standby has to be like to be taken over. ``now`` is wall clock seconds, ``max_age`` seconds; ``taken`` are the
    users of this instance's other sandboxes; ``boot`` is the boot whose entries can be trusted, ``""`` for none."""

    pool_id: str
    config_hash: str
    image: ImageInfo
    users: UserPolicy
    taken: frozenset[str]
    now: float
    max_age: float
    boot: str


def unfit(left: Leftover, standard: Standard) -> str:
    """Why a leftover may not be taken over, as far as the ledger and the engine's record tell; ``""`` where it may."""
    entry, facts = left.entry, left.facts
    if left.found != "ours" or entry.state != "standby":
        return "it is no standby of ours"
    if not entry.container:
        return "its start was cut off"
    # A loss of power may have undone the move to bound.
    if not standard.boot or entry.boot != standard.boot:
        return "the ledger may have lost what came last: the machine was started anew since, or a file was damaged"
    # A clock that was set back says nothing of its age.
    if not 0 <= standard.now - entry.created < standard.max_age:
        return "it is older than pool.standby_max_age"
    try:
        labels, image = dict(facts["Config"]["Labels"]), str(facts["Image"])
    except (LookupError, TypeError, ValueError):
        return "the engine's record of it has an unknown form"
    if not _runs(facts):
        return "it does not run"
    if any(labels.get(key) != value for key, value in labels_of(standard.pool_id, standard.config_hash).items()):
        return "it was made from other settings"
    if image.removeprefix("sha256:") != standard.image.id.removeprefix("sha256:"):
        return "it was made from another image"
    if not _user_fits(entry.user, standard):
        return "its calls' user is not one that the settings give"
    return ""


def labels_of(pool_id: str, config_hash: str) -> dict[str, str]:
    """The labels by which instances of one pool recognise each other's sandboxes."""
    return {LABEL_POOL: pool_id, LABEL_CONFIG: config_hash, LABEL_KIND: "sandbox"}


def _user_fits(user: str, standard: Standard) -> bool:
    policy = standard.users
    try:
        chosen = policy.calls_user(standard.image, standard.taken, offset=0)
    except ProfileMismatch:
        return False  # no sandbox can be had now; a start says why
    if _of_its_own(chosen, policy):
        return _of_its_own(user, policy) and user not in standard.taken
    return user == chosen


def _of_its_own(user: str, policy: UserPolicy) -> bool:
    """Whether a user is one that each sandbox has for itself."""
    uid, _, gid = user.partition(":")
    return uid == gid and uid.isdecimal() and int(uid) in policy.uids.calls


def _runs(facts: Mapping[str, Any]) -> bool:
    status = facts.get("State")
    return isinstance(status, Mapping) and status.get("Running") is True and not status.get("Paused")
