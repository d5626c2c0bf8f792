"""The words that the pure core and its shell exchange: events in, effects out, and the policy they are judged by.

Times are the shell's clock in seconds; durations are seconds; ``jitter`` is a number in [0, 1) that the shell drew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

SessionKey = tuple[str, str]
"""(agent, session)"""


class RefusalKind(Enum):
    """Which error a waiter gets; the shell turns each into the error of the same name."""

    ENGINE_UNAVAILABLE = "EngineUnavailable"
    IMAGE_MISSING = "ImageMissing"
    IMAGE_UNFIT = "ImageUnfit"
    PROFILE_MISMATCH = "ProfileMismatch"
    POOL_EXHAUSTED = "PoolExhausted"
    QUOTA_EXCEEDED = "QuotaExceeded"
    SESSION_BUSY = "SessionBusy"
    SANDBOX_DIED = "SandboxDied"
    STATE_LOST = "StateLost"
    SESSION_CLOSED = "SessionClosed"
    POOL_CLOSED = "PoolClosed"
    POOL_UNUSABLE = "PoolUnusable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the operator configured, as the core needs it. 0 means no limit where a limit may be absent.

    ``agent_quotas`` holds, by agent, what replaces ``max_sessions_per_agent`` for it; it is copied, and cannot be changed.
    """

    min_standby: int = 2
    max_sandboxes: int = 8
    max_starting: int = 2
    max_waiters: int = 100
    max_cold: int = 2
    max_cold_waiters: int = 32
    max_sessions_per_agent: int = 0
    agent_quotas: Mapping[str, int] = field(default_factory=dict, hash=False)
    max_calls: int = 0
    parallel: int = 1
    idle_timeout: float = 600.0
    standby_max_age: float = 3600.0
    max_lifetime: float = 7200.0
    reclaim_idle_after: float | None = 60.0
    restart_limit: int = 5
    restart_window: float = 60.0
    backoff_base: float = 0.5
    backoff_cap: float = 30.0
    failures_to_open: int = 3
    engine_grace: float = 15.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "agent_quotas", MappingProxyType(dict(self.agent_quotas)))

    def backoff(self, attempt: int, jitter: float) -> float:
        """Seconds before attempt number ``attempt`` (1 is the first repetition): doubled each time, capped, and spread
        over its upper half so that many pools on one engine do not return together."""
        full = min(self.backoff_cap, self.backoff_base * 2.0 ** min(attempt - 1, 16))
        return full * (0.5 + 0.5 * jitter)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why sandboxes cannot be had: the refusal that waiters get, and its message. ``permanent`` is true for an engine problem
    that lasts until the operator acts."""

    kind: RefusalKind
    message: str
    permanent: bool = False

    @property
    def may_pass(self) -> bool:
        """Whether the fault can end without the operator: an engine comes back, and a disk gets free space."""
        return not self.permanent and self.kind in (RefusalKind.ENGINE_UNAVAILABLE, RefusalKind.POOL_UNUSABLE)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal, ready to be raised. ``retry_after`` is seconds; ``started`` says whether the code may have run;
    ``permanent`` is that of the fault behind it."""

    kind: RefusalKind
    message: str
    retry_after: float | None = None
    cause: str = "unknown"
    started: bool = False
    permanent: bool = False


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class AcquireWanted:
    """``generation`` is the sandbox that the session must have already; then none is started for it."""

    waiter: int
    key: SessionKey
    deadline: float
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class CallWanted:
    waiter: int
    key: SessionKey
    epoch: int
    deadline: float
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class ColdWanted:
    waiter: int
    deadline: float


@dataclass(frozen=True, slots=True)
class WaiterGone:
    """The task behind a waiter was cancelled, whether or not it had been granted by then."""

    waiter: int


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A running call (cold or in a sandbox) has had its outcome; ``poisoned`` names why its sandbox must go, if it must."""

    waiter: int
    poisoned: str = ""
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class GrantDeclined:
    """A granted acquire whose caller was cancelled before it had its handle."""

    key: SessionKey
    epoch: int


@dataclass(frozen=True, slots=True)
class HandleReleased:
    key: SessionKey
    epoch: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Somebody closed the session, for all its handles."""

    key: SessionKey
    epoch: int


@dataclass(frozen=True, slots=True)
class SandboxStarted:
    """Started and verified. ``age`` is the seconds since its birth, where an earlier instance of the pool made it."""

    n: int
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class SandboxStartFailed:
    """A start failed and nothing of it is left on the engine."""

    n: int
    fault: Fault
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class SandboxStartUnknown:
    """A start whose result is not known: it occupies its place until its absence is confirmed."""

    n: int
    fault: Fault
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class SandboxDied:
    n: int
    cause: str
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class SandboxStopped:
    """Confirmed absent."""

    n: int


@dataclass(frozen=True, slots=True)
class SandboxStopFailed:
    n: int
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class BindRecorded:
    """The ledger says that the sandbox is bound; its session may now have it."""

    n: int


@dataclass(frozen=True, slots=True)
class BindFailed:
    n: int
    fault: Fault
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineUp:
    pass


@dataclass(frozen=True, slots=True)
class EngineDown:
    fault: Fault
    retry_after: float


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    policy: Policy


@dataclass(frozen=True, slots=True)
class CloseBegan:
    """The pool is to close; when it comes again, the earlier deadline holds."""

    drain_deadline: float


Event = (
    Tick | AcquireWanted | CallWanted | ColdWanted | WaiterGone | CallEnded | GrantDeclined | HandleReleased | SessionEnded
    | SandboxStarted | SandboxStartFailed | SandboxStartUnknown | SandboxDied | SandboxStopped | SandboxStopFailed
    | BindRecorded | BindFailed | EngineUp | EngineDown | PolicyChanged | CloseBegan
)  # fmt: skip


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartSandbox:
    n: int


@dataclass(frozen=True, slots=True)
class StopSandbox:
    """Destroy it and confirm its absence. ``reason`` is for the log."""

    n: int
    reason: str


@dataclass(frozen=True, slots=True)
class BindSandbox:
    """Record in the ledger that the sandbox is bound, then report ``BindRecorded`` or ``BindFailed``."""

    n: int
    key: SessionKey


@dataclass(frozen=True, slots=True)
class Grant:
    """The session owns a live sandbox: hand its caller a handle of this epoch."""

    waiter: int
    n: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RunCall:
    waiter: int
    n: int


@dataclass(frozen=True, slots=True)
class RunCold:
    waiter: int


@dataclass(frozen=True, slots=True)
class Refuse:
    waiter: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class EndCall:
    """End a running call now, with this error."""

    waiter: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class SessionForgotten:
    """The core keeps nothing of this epoch any more; ``granted`` says whether anybody ever had a handle on it."""

    key: SessionKey
    epoch: int
    reason: str
    granted: bool = False


Effect = StartSandbox | StopSandbox | BindSandbox | Grant | RunCall | RunCold | Refuse | EndCall | SessionForgotten
