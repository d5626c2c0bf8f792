"""How docker's command line reads the words after ``run`` and ``exec``: an independent little pflag.

Flags end at the first positional (docker turns interspersed flags off for both commands) or at ``--``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Parsed:
    flags: list[tuple[str, str | None]] = field(default_factory=list)
    positionals: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Grammar:
    """``switches`` need no value, ``valued`` take the next word; ``short`` maps a letter to its long name."""

    switches: frozenset[str]
    valued: frozenset[str]
    short: Mapping[str, str]


# `docker run --help` of docker 28.
RUN_FLAGS = Grammar(
    switches=frozenset(
        ["detach", "disable-content-trust", "help", "init", "interactive", "no-healthcheck", "oom-kill-disable", "privileged", "publish-all", "quiet", "read-only", "rm", "sig-proxy", "tty", "use-api-socket"]
    ),
    valued=frozenset(
        ["add-host", "annotation", "attach", "blkio-weight", "blkio-weight-device", "cap-add", "cap-drop", "cgroup-parent", "cgroupns", "cidfile", "cpu-count", "cpu-percent", "cpu-period", "cpu-quota", "cpu-rt-period", "cpu-rt-runtime", "cpu-shares", "cpus", "cpuset-cpus", "cpuset-mems", "detach-keys", "device", "device-cgroup-rule", "device-read-bps", "device-read-iops", "device-write-bps", "device-write-iops", "dns", "dns-option", "dns-search", "domainname", "entrypoint", "env", "env-file", "expose", "gpus", "group-add", "health-cmd", "health-interval", "health-retries", "health-start-interval", "health-start-period", "health-timeout", "hostname", "ip", "ip6", "ipc", "isolation", "kernel-memory", "label", "label-file", "link", "link-local-ip", "log-driver", "log-opt", "mac-address", "memory", "memory-reservation", "memory-swap", "memory-swappiness", "mount", "name", "network", "network-alias", "oom-score-adj", "pid", "pids-limit", "platform", "publish", "pull", "restart", "runtime", "security-opt", "shm-size", "stop-signal", "stop-timeout", "storage-opt", "sysctl", "tmpfs", "ulimit", "user", "userns", "uts", "volume", "volume-driver", "volumes-from", "workdir"]
    ),
    short={
        "a": "attach", "c": "cpu-shares", "d": "detach", "e": "env", "h": "hostname", "i": "interactive", "l": "label",
        "m": "memory", "p": "publish", "P": "publish-all", "q": "quiet", "t": "tty", "u": "user", "v": "volume",
        "w": "workdir",
    },
)  # fmt: skip

# `docker exec --help` of docker 28.
EXEC_FLAGS = Grammar(
    switches=frozenset(["detach", "help", "interactive", "privileged", "tty"]),
    valued=frozenset(["detach-keys", "env", "env-file", "user", "workdir"]),
    short={"d": "detach", "e": "env", "i": "interactive", "t": "tty", "u": "user", "w": "workdir"},
)


def parse(words: Sequence[str], grammar: Grammar) -> Parsed:
    """Read the words as pflag would; ``ValueError`` where it would refuse them."""
    parsed, rest = Parsed(), list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            parsed.positionals = [word, *rest]
            return parsed
        if word == "--":
            parsed.positionals = rest
            return parsed
        if word.startswith("--"):
            _long(word[2:], rest, grammar, parsed)
        else:
            _short(word[1:], rest, grammar, parsed)
    return parsed


def _long(text: str, rest: list[str], grammar: Grammar, parsed: Parsed) -> None:
    name, sign, value = text.partition("=")
    if name not in grammar.switches | grammar.valued:
        raise ValueError(f"unknown flag --{name}")
    if sign:
        parsed.flags.append((name, value))
    elif name in grammar.switches:
        parsed.flags.append((name, None))
    else:
        parsed.flags.append((name, _next(name, rest)))


def _short(text: str, rest: list[str], grammar: Grammar, parsed: Parsed) -> None:
    while text:
        letter, text = text[0], text[1:]
        name = grammar.short.get(letter)
        if name is None:
            raise ValueError(f"unknown flag -{letter}")
        if text.startswith("="):
            parsed.flags.append((name, text[1:]))
            return
        if name in grammar.valued:
            parsed.flags.append((name, text or _next(name, rest)))
            return
        parsed.flags.append((name, None))


def _next(name: str, rest: list[str]) -> str:
    if not rest:
        raise ValueError(f"flag --{name} needs a value")
    return rest.pop(0)
