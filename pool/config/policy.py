"""The operator's configuration as the core judges by it."""

from __future__ import annotations

from pool.config.load import Settings
from pool.core.events import Policy


def policy_of(settings: Settings) -> Policy:
    """What ``settings`` say of sizes, waits, ages and quotas."""
    pool = settings.pool
    return Policy(
        min_standby=pool.min_standby,
        max_sandboxes=pool.max_sandboxes,
        max_starting=pool.max_starting,
        max_waiters=pool.max_waiters,
        max_cold=pool.max_cold,
        max_cold_waiters=pool.max_cold_waiters,
        max_sessions_per_agent=pool.max_sessions_per_agent,
        max_calls=pool.max_calls,
        parallel=settings.call.parallel,
        idle_timeout=pool.idle_timeout,
        standby_max_age=pool.standby_max_age,
        max_lifetime=pool.max_lifetime,
        reclaim_idle_after=pool.reclaim_idle_after,
        restart_limit=pool.restart_limit,
        restart_window=pool.restart_window,
        agent_quotas={name: own.max_sessions for name, own in settings.agents.items() if own.max_sessions is not None},
    )
