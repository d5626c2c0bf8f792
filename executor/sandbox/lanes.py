"""The runners of one sandbox, one in each lane, and what their states allow to begin. Pure: nothing here waits."""

from __future__ import annotations

from executor.sandbox.runner_client import ArmedRunner, RunnerState


class Lanes:
    """The current runner of each lane, ``None`` before its first; ``count`` lanes are ``count`` calls at a time.

    Everything is decided from the runners' states, without an ``await`` between a decision and the change that shows it.
    """

    def __init__(self, count: int) -> None:
        self.runners: list[ArmedRunner | None] = [None] * count

    def others(self, besides: ArmedRunner | None) -> list[ArmedRunner]:
        """Every runner but ``besides``."""
        return [one for one in self.runners if one is not None and one is not besides]

    def working(self, besides: ArmedRunner | None = None) -> list[ArmedRunner]:
        """The runners, but ``besides``, whose call runs or is being cleaned up after: tool code may live beside them."""
        return [one for one in self.others(besides) if one.state in (RunnerState.BUSY, RunnerState.CLEANING)]

    def sweeping(self) -> bool:
        """Whether a runner is killing everything of the calls' uid, the other runners included."""
        return any(one.state is RunnerState.CLEANING and one.sweeps for one in self.others(None))

    def should_sweep(self, runner: ArmedRunner) -> bool | None:
        """How ``runner``, whose call has ended, cleans up: by a sweep, by its own call's tree alone, or not yet (``None``).

        A runner that cleans up its own call's tree needs only time: the last one waits for it, since a sweep would end it
        half-way. Of two that end at once, one must sweep.
        """
        working = self.working(besides=runner)
        if not working:
            return True
        if any(one.state is RunnerState.BUSY or one.sweeps is None for one in working):
            return False
        return None

    def free(self) -> ArmedRunner | None:
        """A runner for a call to claim now, if there is one.

        While no call runs, all lanes have to be armed first: a runner that is still starting would do so beside the call's
        code. During a sweep every runner but the one that sweeps is retired, so none is free.
        """
        armed = [one for one in self.runners if one is not None and one.verified and one.state is RunnerState.ARMED]
        armed = [one for one in armed if not one.retired]
        return armed[0] if armed and (len(armed) == len(self.runners) or self.working()) else None
