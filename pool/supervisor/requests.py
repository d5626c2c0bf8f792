"""Checks of what callers ask for, against the configuration, before anybody waits for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import anyio.lowlevel

from executor.errors import EmberpoolError, InvalidCall
from executor.sandbox.request import Call, check_code
from pool.config.descriptors import shortage
from pool.config.host import host_memory, memory_problem
from pool.config.load import AgentSettings, CallSettings, Settings
from pool.core.events import Policy

MAX_KEY = 65_536
"""Characters of an agent's or a session's name."""
MAX_SANDBOXES = 10_000
P = ParamSpec("P")
T = TypeVar("T")


def yielding(method: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let other tasks run before an error is raised: a caller that retries at once must not keep them from it."""

    @wraps(method)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except EmberpoolError:
            await anyio.lowlevel.cancel_shielded_checkpoint()
            raise

    return wrapper


def ceilings(settings: Settings, agent: str) -> AgentSettings | CallSettings:
    """Return what holds ``timeout`` and ``max_output`` for the calls of ``agent``: its own table, or ``[call]``."""
    return settings.agent(agent) if agent in settings.agents else settings.call


def checked_call(
    settings: Settings,
    agent: str,
    argv: Sequence[str] | None,
    code: str | None,
    stdin: bytes,
    env: Mapping[str, str] | None,
    timeout: float | None,
    max_output: int | None,
    unbuffered: bool | None = None,
) -> Call:
    """A call under the configuration's ceilings, those of ``agent`` where it has its own. Raises ``InvalidCall``."""
    limits = ceilings(settings, agent)
    if argv is not None and not isinstance(argv, list | tuple):
        kind = type(argv).__name__
        raise InvalidCall(f'argv must be a list of strings, for example ["ls", "-l"], not {kind}')
    if env is not None and not isinstance(env, Mapping):
        raise InvalidCall(f"env must be a mapping of names to values, not {type(env).__name__}")
    wanted = limits.timeout if timeout is None else positive_seconds(timeout)
    if wanted > limits.timeout:
        raise InvalidCall(f"timeout is {wanted:g} s; at most {limits.timeout:g} s are allowed (call.timeout)")
    kept = limits.max_output if max_output is None else max_output
    if isinstance(kept, bool) or not isinstance(kept, int):
        raise InvalidCall(f"max_output must be a whole number of bytes, not {type(kept).__name__}")
    if kept > limits.max_output:
        raise InvalidCall(f"max_output is {kept} bytes; at most {limits.max_output} are allowed (call.max_output)")
    call = Call(
        argv=tuple(argv or ()),
        code=code,
        stdin=stdin,
        env=dict(env or {}),
        timeout=wanted,
        max_output=kept,
        max_input=settings.call.max_input,
        unbuffered=settings.call.unbuffered if unbuffered is None else unbuffered,
    )
    check_code(call, settings.sandbox.file_size_mb)
    return call


def key_part(name: str, value: str) -> str:
    """A part of a session's key, as it came. Raises ``InvalidCall`` that calls it ``name``."""
    if not isinstance(value, str) or not value:
        raise InvalidCall(f"{name} must be a non-empty string")
    if len(value) > MAX_KEY:
        raise InvalidCall(f"{name} has {len(value)} characters; at most {MAX_KEY} are taken")
    return value


def positive_seconds(value: float) -> float:
    """A timeout, as it came. Raises ``InvalidCall``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InvalidCall(f"timeout must be above 0 seconds; it is {value!r}")
    return float(value)


def resized(settings: Settings, policy: Policy, min_standby: int | None, max_sandboxes: int | None) -> Policy:
    """The policy of a pool of another size. Raises ``InvalidCall`` where the sizes, or what this host has, do not allow it."""
    standby = policy.min_standby if min_standby is None else min_standby
    most = policy.max_sandboxes if max_sandboxes is None else max_sandboxes
    for name, count, least in (("min_standby", standby, 0), ("max_sandboxes", most, 1)):
        if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= MAX_SANDBOXES:
            raise InvalidCall(f"{name} must be a whole number from {least} to {MAX_SANDBOXES}; it is {count!r:.40}")
    if standby > most:
        raise InvalidCall(f"min_standby ({standby}) is above max_sandboxes ({most}); lower one or raise the other")
    uids = settings.sandbox.uid_range
    if most + policy.max_cold + 1 > uids.count:
        raise InvalidCall(f"max_sandboxes ({most}) is more than sandbox.uid_range ({uids}) has uids for")
    grows = most > policy.max_sandboxes  # what shrinks never asks for more memory than there was
    if grows and (memory := host_memory()) and (text := memory_problem(settings, memory, max_sandboxes=most)):
        raise InvalidCall(f"max_sandboxes: {text}")
    if text := shortage(settings, most):
        raise InvalidCall(text)
    return replace(policy, min_standby=standby, max_sandboxes=most)
