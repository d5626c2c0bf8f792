"""Build the strict seccomp profile from the readable list beside this file. Pure, but for reading files.

The kernel is shared by all containers. An engine's default filter keeps a container from governing the host; it still lets
tool code take what the whole kernel has only once (room for BPF programs, aio contexts), reach a hypervisor by vsock, and
try interfaces that no tool needs. The list of what is allowed is ``seccomp_strict.txt``, with the reason of each exception.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

STRICT_LIST = Path(__file__).with_name("seccomp_strict.txt")
STRICT_PROFILE = Path(__file__).with_name("seccomp_strict.json")

WITNESS_WHICH = 0x454D4250
"""``getpriority(WITNESS_WHICH, 0)`` is the system call by which the strict profile is recognised from inside."""
WITNESS_ERRNO = errno.ENOTUNIQ if hasattr(errno, "ENOTUNIQ") else 76
"""The error that the strict profile returns; the kernel itself says EINVAL, another profile EINVAL or EPERM."""

ARCHITECTURES = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
_LOW_32 = 0xFFFFFFFF
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_REFUSE = re.compile(r"refuse (?P<name>\S+) with (?P<errno>[A-Z0-9]+)(?: if (?P<conditions>.+))?\Z")
_ALLOW_IF = re.compile(r"(?P<name>\S+) if (?P<conditions>.+)\Z")
_MASKED = re.compile(r"arg([0-5]) & (\w+) == (\w+)\Z")
_IN = re.compile(r"arg([0-5]) (not )?in ((?:\w+ ?)+)\Z")

Rule = dict[str, Any]


def build(text: str) -> dict[str, Any]:
    """Build the profile, in the form that docker and podman read, from a list like ``seccomp_strict.txt``.

    Raises ``ValueError`` naming the line that is not of a known form.
    """
    plain: list[str] = []
    special: list[Rule] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            if match := _REFUSE.match(line):
                refused = {"action": "SCMP_ACT_ERRNO", "errnoRet": getattr(errno, match["errno"])}
                special += _rules(match["name"], match["conditions"] or "", refused)
            elif match := _ALLOW_IF.match(line):
                special += _rules(match["name"], match["conditions"], {"action": "SCMP_ACT_ALLOW"})
            elif line.startswith("refuse "):
                raise ValueError("a refusal names a call and is `with` an error")
            else:
                plain += [_checked(name) for name in line.split()]
        except (ValueError, AttributeError) as error:
            raise ValueError(f"line {number}, {line[:60]!r}: {error}") from error
    both = sorted(set(plain) & {rule["names"][0] for rule in special})
    twice = sorted({name for name in plain if plain.count(name) > 1})
    if both or twice:
        raise ValueError(f"named twice: {both or twice}")
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "archMap": [{"architecture": name, "subArchitectures": []} for name in ARCHITECTURES],
        "syscalls": [{"names": sorted(plain), "action": "SCMP_ACT_ALLOW"}, *special],
    }


def as_json(profile: dict[str, Any]) -> str:
    """The text of the profile's file."""
    return json.dumps(profile, indent=1) + "\n"


@cache
def strict_profile() -> dict[str, Any]:
    """The strict profile as its file holds it."""
    return json.loads(STRICT_PROFILE.read_text("utf-8"))  # type: ignore[no-any-return]


def digest(path: str) -> str:
    """Hash a profile's file, to distinguish containers of different profiles. Raises ``OSError``."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def allowed(profile: dict[str, Any]) -> dict[str, list[tuple[Any, ...]]]:
    """List what a profile, or the ``linux.seccomp`` of a container's OCI configuration, allows: for each call the conditions
    (``()`` where there are none), each a sorted tuple of (argument, operator, value, second value)."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for rule in profile["syscalls"] or ():
        if rule["action"] == "SCMP_ACT_ALLOW":
            conditions = tuple(
                sorted(
                    (arg["index"], arg["op"], arg["value"], arg.get("valueTwo", 0)) for arg in rule.get("args") or ()
                )
            )
            for name in rule["names"]:
                found.setdefault(name, []).append(conditions)
    return found


def beyond(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """List the system calls that ``ours`` allows where ``theirs`` may not; empty where ours is nowhere weaker.

    A call that theirs allows on conditions must have conditions in ours that hold only where those do.
    """
    base = allowed(theirs)
    return sorted(
        name
        for name, alternatives in allowed(ours).items()
        if name not in base or (() not in base[name] and not all(_implied(one, base[name]) for one in alternatives))
    )


def _implied(ours: tuple[Any, ...], theirs: list[tuple[Any, ...]]) -> bool:
    """Whether conditions hold only where one of ``theirs`` does."""
    return any(all(any(_narrower(mine, other) for mine in ours) for other in one) for one in theirs)


def _narrower(mine: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    index, op, value, second = mine
    other_index, other_op, other_value, other_second = other
    if index != other_index:
        return False
    if (op, value, second) == (other_op, other_value, other_second):
        return True
    if op == "SCMP_CMP_MASKED_EQ" and other_op == "SCMP_CMP_MASKED_EQ":
        # Ours compares all the bits that theirs compares, with the same values.
        return bool(value & other_value == other_value and second & other_value == other_second)
    if op == "SCMP_CMP_MASKED_EQ" and value == _LOW_32:
        # The kernel reads only these bits of an `int`, so the two conditions are the same.
        return bool(
            (other_op == "SCMP_CMP_EQ" and second == other_value)
            or (other_op == "SCMP_CMP_NE" and second != other_value)
        )
    return False


def _rules(name: str, text: str, action: Rule) -> Iterator[Rule]:
    """One rule for each choice of values: the conditions of one rule must all hold."""
    conditions = [list(_condition(part)) for part in text.split(" and ")] if text else []
    for choice in product(*conditions):
        yield {"names": [_checked(name)], **action, **({"args": list(choice)} if choice else {})}


def _condition(text: str) -> Iterator[Rule]:
    if match := _MASKED.match(text):
        yield _masked(int(match[1]), int(match[2], 0), int(match[3], 0))
    elif match := _IN.match(text):
        index, values = int(match[1]), {int(value, 0) for value in match[3].split()}
        pairs = _all_but(values) if match[2] else ((_LOW_32, value) for value in sorted(values))
        for mask, value in pairs:
            yield _masked(index, mask, value)
    else:
        raise ValueError(f"{text!r} is not a condition")


def _all_but(values: set[int], bits: int = 0, prefix: int = 0) -> Iterator[tuple[int, int]]:
    """Masks and values of 32 bits that together hold for every number but ``values``: the largest ranges of a common prefix
    (its first ``bits``) without one of them. A filter cannot refuse a value of a call that it allows, only allow the others."""
    mask = _LOW_32 & ~(_LOW_32 >> bits)
    if not any(value & mask == prefix for value in values):
        yield mask, prefix
    elif bits < 32:
        yield from _all_but(values, bits + 1, prefix)
        yield from _all_but(values, bits + 1, prefix | 1 << (31 - bits))


def _masked(index: int, mask: int, value: int) -> Rule:
    return {"index": index, "op": "SCMP_CMP_MASKED_EQ", "value": mask, "valueTwo": value}


def _checked(name: str) -> str:
    if not _NAME.match(name):
        raise ValueError(f"{name!r} is not the name of a system call")
    return name
