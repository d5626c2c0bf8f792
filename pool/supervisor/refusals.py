"""Refusals of the pure core as errors, and errors of the executor as faults that the core understands."""

from __future__ import annotations

from executor import errors
from executor.errors import DeathCause, EmberpoolError
from pool.core.events import Fault, Refusal, RefusalKind

_ERRORS: dict[RefusalKind, type[EmberpoolError]] = {
    RefusalKind.ENGINE_UNAVAILABLE: errors.EngineUnavailable,
    RefusalKind.IMAGE_MISSING: errors.ImageMissing,
    RefusalKind.IMAGE_UNFIT: errors.ImageUnfit,
    RefusalKind.PROFILE_MISMATCH: errors.ProfileMismatch,
    RefusalKind.POOL_EXHAUSTED: errors.PoolExhausted,
    RefusalKind.QUOTA_EXCEEDED: errors.QuotaExceeded,
    RefusalKind.SESSION_BUSY: errors.SessionBusy,
    RefusalKind.STATE_LOST: errors.StateLost,
    RefusalKind.SESSION_CLOSED: errors.SessionClosed,
    RefusalKind.POOL_CLOSED: errors.PoolClosed,
    RefusalKind.POOL_UNUSABLE: errors.PoolUnusable,
}
_CAUSES: dict[str, DeathCause] = {
    "oom": "oom", "killed": "killed", "runner": "runner", "protocol": "protocol", "drained": "drained", "engine": "engine",
}  # fmt: skip


_CERTAIN = (
    RefusalKind.IMAGE_MISSING, RefusalKind.IMAGE_UNFIT, RefusalKind.PROFILE_MISMATCH, RefusalKind.POOL_UNUSABLE,
)  # fmt: skip


def error_of(refusal: Refusal) -> EmberpoolError:
    """Return the error that a waiter gets for a refusal."""
    if refusal.kind is RefusalKind.SANDBOX_DIED:
        cause = _CAUSES.get(refusal.cause, "unknown")
        return errors.SandboxDied(
            refusal.message, cause=cause, retry_after=refusal.retry_after, started=refusal.started
        )
    if refusal.permanent:
        return errors.EngineUnavailable(refusal.message, started=refusal.started, retryable=False)
    kind = _ERRORS[refusal.kind]
    return kind(refusal.message, retry_after=refusal.retry_after, started=refusal.started)


def fault_of(error: EmberpoolError) -> Fault:
    """Return why sandboxes cannot be had, after a start or a connection failed with ``error``."""
    for kind in _CERTAIN:
        if isinstance(error, _ERRORS[kind]):
            return Fault(kind, str(error))
    permanent = isinstance(error, errors.EngineUnavailable) and not error.retryable
    return Fault(RefusalKind.ENGINE_UNAVAILABLE, str(error), permanent)
