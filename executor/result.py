"""What a call returns: what the caller's code did. What the boundary did instead is an error (``executor.errors``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What the caller's code did.

    ``exit_code`` is 0..255, or ``None`` where the process was ended by ``signal`` or by its deadline. A plain exec
    cannot distinguish ``exit(137)`` from SIGKILL: there, ``signal`` is only set where an engine event explains the death.
    ``stdout`` and ``stderr`` are the first ``max_output`` bytes of each; ``stdout_total`` and ``stderr_total`` count every
    byte that the code wrote. Durations are seconds; ``max_rss`` is bytes; both resource figures are ``None`` where
    nothing inside the container measured them. ``generation`` names the sandbox that the call ran in (``""`` when cold).
    A streamed call's result has no bytes of its own: ``stdout_streamed`` and ``stderr_streamed`` count those handed out
    before it.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    stdout_total: int
    stderr_total: int
    duration: float
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    cpu_limit: bool = False
    cpu_seconds: float | None = None
    max_rss: int | None = None
    generation: str = ""
    stdout_streamed: int = 0
    stderr_streamed: int = 0

    @property
    def truncated(self) -> bool:
        """Whether either stream lost bytes to ``max_output``."""
        return (
            self.stdout_total > len(self.stdout) + self.stdout_streamed
            or self.stderr_total > len(self.stderr) + self.stderr_streamed
        )

    def ran_in(self, generation: str) -> CallResult:
        """Set the generation of a new result, and return it."""
        object.__setattr__(self, "generation", generation)
        return self

    @property
    def ok(self) -> bool:
        """Whether the code ended by itself with exit status 0."""
        return self.exit_code == 0 and not self.timed_out
