"""What tests of a pool under many clients share: accounts that have to balance, and a judge of the order of grants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import anyio

from executor.errors import EmberpoolError
from executor.result import CallResult
from pool.core import events as ev
from pool.pool import SandboxPool
from pool.session import Session
from tests.support.core import check_invariants


class Accounts:
    """What was asked of a pool, by kind (``acquire``, ``call``, ``cold``), and how each of it ended, by reason."""

    def __init__(self) -> None:
        self.accepted: Counter[str] = Counter()
        self.ended: Counter[tuple[str, str]] = Counter()

    async def ask(self, kind: str, act: Callable[[], Awaitable[Any]], patience: float) -> Any:
        """Ask, for ``patience`` seconds at most, and enter what came of it; that, or ``None``."""
        self.accepted[kind] += 1
        answer: Any = None
        with anyio.move_on_after(patience):
            try:
                answer = await act()
            except EmberpoolError as error:
                answer = error
        self.ended[kind, _word(answer)] += 1
        return answer

    def check(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Everything that was accepted has ended, once; the pool's audit ``lines`` tell of the very same calls."""
        for kind, accepted in self.accepted.items():
            assert accepted == sum(count for (of, _), count in self.ended.items() if of == kind), kind
        told = Counter(line["outcome"] for line in lines if line["event"] == "call.ended")
        calls: Counter[str] = Counter()
        for (kind, word), count in self.ended.items():
            if kind != "acquire":
                calls[word] += count
        assert told == calls

    def table(self) -> str:
        """The accounts in lines."""
        rows = [f"{kind} accepted {count}" for kind, count in sorted(self.accepted.items())]
        return "\n".join(rows + [f"  {kind}: {word} {count}" for (kind, word), count in sorted(self.ended.items())])


def _word(answer: object) -> str:
    """An outcome as the audit tells it; an acquire that came to something is ``granted``."""
    match answer:
        case None:
            return "cancelled"
        case Session():
            return "granted"
        case CallResult(timed_out=timed_out, ok=ok):
            return "timed_out" if timed_out else "ok" if ok else "failed"
        case EmberpoolError(reason=reason):
            return reason
    raise AssertionError(f"no outcome: {answer!r}")


class Judge:
    """Looks at every step of a pool's core: its invariants hold, and nobody is given a sandbox before somebody who came
    first and might have had it. A session's own restart goes before those who wait. ``grants`` counts the sandboxes given
    to who waited."""

    def __init__(self, pool: SandboxPool) -> None:
        self.grants = 0
        self._state, self._step = pool._shell.state, pool._shell.state.step
        self._waiting: dict[int, ev.SessionKey] = {}
        pool._shell.state.step = self.step  # type: ignore[method-assign]

    def step(self, event: ev.Event, now: float) -> list[ev.Effect]:
        restarting = {key for key, session in self._state.sessions.items() if session.restarting} | self._loses(event)
        if isinstance(event, ev.AcquireWanted | ev.CallWanted):
            self._waiting[event.waiter] = event.key
        elif isinstance(event, ev.WaiterGone):
            self._waiting.pop(event.waiter, None)
        effects = self._step(event, now)
        check_invariants(self._state, now)
        for effect in effects:
            if isinstance(effect, ev.Grant | ev.RunCall | ev.Refuse):
                self._waiting.pop(effect.waiter, None)
        for effect in effects:
            if isinstance(effect, ev.BindSandbox) and effect.key not in restarting:
                self._judge(effect.key, now)
        return effects

    def _loses(self, event: ev.Event) -> set[ev.SessionKey]:
        """The session that loses its sandbox by this very event, and may be given another in the same step."""
        if isinstance(event, ev.SandboxDied):
            boxes = [box for box in self._state.sandboxes.values() if box.n == event.n]
        elif isinstance(event, ev.CallEnded) and event.poisoned:
            boxes = [box for box in self._state.sandboxes.values() if event.waiter in box.running]
        else:
            return set()
        return {box.session for box in boxes if box.session is not None}

    def _judge(self, key: ev.SessionKey, now: float) -> None:
        self.grants += 1
        for other in dict.fromkeys(self._waiting.values()):
            if other == key:
                return
            session = self._state.sessions[other]
            might = now >= session.not_before and not self._state.past_restart_limit(session, now)
            assert session.sandbox is not None or not might, f"{key} was given a sandbox before {other}"
        raise AssertionError(f"{key} was given a sandbox that nobody waited for")
