"""What the boundary can say instead of a result: one tree of errors.

A *result* (``executor.result``) says what the caller's code did. An *error* says what the boundary did. The two are never
confused: a missing container, a dead daemon or a lost exec is an error, not "exit status 1".
"""

from __future__ import annotations

from typing import ClassVar, Literal

from executor.common.printable import printable

DeathCause = Literal["oom", "killed", "runner", "protocol", "drained", "engine", "unknown"]


class EmberpoolError(Exception):
    """The root of every refusal and error.

    ``reason`` is a stable word for logs and metrics. ``retryable`` says whether the same request can succeed later without
    anyone changing anything; ``retry_after`` is a hint in seconds. ``started`` is true where the caller's code may have
    run: an automatic retry is allowed only where it is false. The message is one printable line, whatever words of others it
    quotes.
    """

    reason: ClassVar[str] = "error"
    retryable: bool = False

    def __init__(self, message: str, *, retry_after: float | None = None, started: bool = False) -> None:
        super().__init__(printable(message))
        self.retry_after = retry_after
        self.started = started


class EngineUnavailable(EmberpoolError):
    """The engine cannot be reached, did not answer in time, or its circuit is open.

    ``retryable`` is false on an error that lasts until somebody changes something: ``sandbox.binary`` is not on this host.
    """

    reason = "engine_unavailable"
    retryable = True

    def __init__(
        self, message: str, *, retry_after: float | None = None, started: bool = False, retryable: bool = True
    ) -> None:
        super().__init__(message, retry_after=retry_after, started=started)
        self.retryable = retryable


class EngineFailed(EngineUnavailable):
    """The engine answered, and declined for a reason of its own (its message is kept, shortened)."""

    reason = "engine_failed"


class ImageMissing(EmberpoolError):
    """The image is not on the engine; nothing is ever pulled on the way to a call."""

    reason = "image_missing"


class ImageUnfit(EmberpoolError):
    """The image cannot be a sandbox, or lacks what the configuration asks of it; the message names what is wrong."""

    reason = "image_unfit"


class ProfileMismatch(EmberpoolError):
    """The boundary is weaker than the profile asks, or cannot be read back."""

    reason = "profile_mismatch"


class PoolExhausted(EmberpoolError):
    """No capacity within the caller's deadline, or the queue is full."""

    reason = "pool_exhausted"
    retryable = True


class QuotaExceeded(EmberpoolError):
    """This agent already holds its share of sessions."""

    reason = "quota_exceeded"
    retryable = True


class SessionBusy(EmberpoolError):
    """The session's earlier calls, or what follows each of them, took this call's whole deadline; it never started."""

    reason = "session_busy"
    retryable = True


class SandboxDied(EmberpoolError):
    """The sandbox ended under the call; whatever the session kept in it is gone."""

    reason = "sandbox_died"
    retryable = True

    def __init__(
        self, message: str, *, cause: DeathCause, retry_after: float | None = None, started: bool = True
    ) -> None:
        super().__init__(message, retry_after=retry_after, started=started)
        self.cause: DeathCause = cause


class StateLost(EmberpoolError):
    """The caller asked for a generation that is gone."""

    reason = "state_lost"


class SessionClosed(EmberpoolError):
    """The session was closed, or the handle was released, before this call."""

    reason = "session_closed"


class PoolClosed(EmberpoolError):
    """The pool is closed or closing."""

    reason = "pool_closed"


class PoolUnusable(EmberpoolError):
    """The pool cannot be used: its state directory is locked, foreign, writable by others, symlinked or damaged; or it belongs to
    another event loop, thread or process than the caller's; or its supervisor has failed. Nothing was touched."""

    reason = "pool_unusable"


class InvalidCall(EmberpoolError):
    """The request itself is wrong; the message names the field and what is allowed."""

    reason = "invalid_call"


class FileFailed(EmberpoolError):
    """A file of a session could not be written, read or listed; the message says why.

    ``code`` is the errno's name where the operation met one (``ENOENT``, ``ENOSPC``, ``EISDIR``, ...), ``EFBIG`` for what
    is larger than asked for, ``EINVAL`` for what is not a regular file, ``ETIMEDOUT`` past the deadline, else ``""``.
    """

    reason = "file_failed"

    def __init__(self, message: str, *, code: str = "", started: bool = True) -> None:
        super().__init__(message, started=started)
        self.code = code


class StagingFailed(EmberpoolError):
    """A tool directory cannot be staged now because of the host: a full disk, a file system that hangs, a file that keeps
    changing."""

    reason = "staging_failed"
    retryable = True
