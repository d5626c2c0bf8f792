"""The rules that hold between keys of the configuration, once each key holds its own."""

from __future__ import annotations

from collections.abc import Iterator

from executor.sandbox.mount import normalized
from pool.config.errors import Problem, dotted
from pool.config.tables import COMMANDS, WORKSPACE, Tables
from pool.config.types import Section, format_duration, format_size


def combinations(settings: Tables) -> Iterator[Problem]:
    """Yield a problem for every rule between keys that ``settings`` breaks."""
    yield from _counts(settings)
    yield from _times(settings)
    yield from _sandbox(settings)
    yield from _agents(settings)


def _counts(settings: Tables) -> Iterator[Problem]:
    pool = settings.pool
    for key in ("min_standby", "max_starting"):
        count = getattr(pool, key)
        if count > pool.max_sandboxes:
            yield Problem(
                f"pool.{key}",
                f"{_value(pool, key, str(count))} is above pool.max_sandboxes ({pool.max_sandboxes}); "
                "lower one or raise the other",
            )


def _times(settings: Tables) -> Iterator[Problem]:
    longest, call = settings.pool.max_lifetime, settings.call
    if call.timeout > longest:
        yield Problem(
            "call.timeout",
            f"{_value(call, 'timeout', format_duration(call.timeout))} is above pool.max_lifetime "
            f"({format_duration(longest)}); a call must fit into its sandbox's life",
        )
    for name in COMMANDS:
        command = getattr(settings.privileged, name)
        if "timeout" in command.model_fields_set and command.timeout > longest:
            yield Problem(
                f"privileged.{name}.timeout",
                f"{format_duration(command.timeout)} is above pool.max_lifetime ({format_duration(longest)}); "
                "lower one or raise the other",
            )


def _sandbox(settings: Tables) -> Iterator[Problem]:
    pool, call, uids = settings.pool, settings.call, settings.sandbox.uid_range
    # A runner takes three processes: itself, the one that waits for the next call, and one that keeps that one's memory. PID 1
    # and its child are two more.
    taken = 3 * call.parallel + 2
    if settings.sandbox.pids < taken + call.parallel:
        yield Problem(
            "call.parallel",
            f"{_value(call, 'parallel', str(call.parallel))} runners take {taken} of sandbox.pids "
            f"({settings.sandbox.pids}), which leaves the calls too few; lower one or raise the other",
        )
    needed = pool.max_sandboxes + pool.max_cold + 1
    if uids.count < needed:
        yield Problem(
            "sandbox.uid_range",
            f"{uids} has {uids.count} uids; pool.max_sandboxes ({pool.max_sandboxes}) + pool.max_cold "
            f"({pool.max_cold}) and one for every PID 1 need {needed}",
        )
    targets = [normalized(mount.target) for mount in settings.sandbox.mounts]
    if settings.sandbox.workspace and WORKSPACE in targets:
        yield Problem(
            f"sandbox.mounts[{targets.index(WORKSPACE)}]",
            f"its target {WORKSPACE} is where privileged commands find sandbox.workspace; choose another target",
        )


def _agents(settings: Tables) -> Iterator[Problem]:
    for name, agent in settings.agents.items():
        for key, form in (("timeout", format_duration), ("max_output", format_size)):
            own, ceiling = getattr(agent.call, key), getattr(settings.call, key)
            if own is not None and own > ceiling:
                yield Problem(
                    dotted(("agents", name, "call", key)),
                    f"{form(own)} is above call.{key} ({form(ceiling)}), which holds for every agent; "
                    f"lower it, or raise call.{key}",
                )


def _value(section: Section, key: str, text: str) -> str:
    return text if key in section.model_fields_set else f"{text} (the default)"
