"""The kinds of values that the configuration holds: durations, sizes, sandbox uids, paths, names. Pure; ``ValueError`` on
bad input.

Nothing is coerced silently: ``true`` is not a number, ``"yes"`` is not a boolean, and a unit is never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from executor.sandbox.mount import Mount
from executor.sandbox.profile import ContainerProfile

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)\Z", re.ASCII)
_DURATION_UNITS: Final[dict[str, Fraction]] = {
    "d": Fraction(86_400), "h": Fraction(3_600), "m": Fraction(60), "s": Fraction(1), "ms": Fraction(1, 1_000),
}  # fmt: skip
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(B|kB|KB|MB|GB|KiB|MiB|GiB)\Z", re.ASCII)
_SIZE_UNITS: Final = {
    "GiB": 1024**3, "GB": 1000**3, "MiB": 1024**2, "MB": 1000**2, "KiB": 1024, "kB": 1000, "KB": 1000, "B": 1,
}  # fmt: skip
_UID_RANGE = re.compile(r"([0-9]{1,10}):([0-9]{1,10})\Z", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}\Z", re.ASCII)
_MAX_AGENT_NAME: Final = 200

MAX_DURATION: Final = 366 * 86_400
"""Seconds; a longer wait is a typing error, and no kernel timer is asked for it."""
MAX_SIZE: Final = 1024**3
"""Bytes; a call's input and output are held in memory."""
MAX_UID: Final = 2**31 - 1
"""The highest uid that docker accepts for ``--user`` (the kernel would take more)."""

_DURATION_RULE = 'a duration is a number of seconds, or a number with a unit such as "500ms", "30s", "10m", "2h", "1d"'
_SIZE_RULE = 'a size is a whole number of bytes, or a number with a unit such as "16KiB", "64MB", "64MiB"'


def shown(value: object) -> str:
    """``value`` as one short printable word for an error message."""
    try:
        text = ascii(value)
    except ValueError:  # an integer with too many digits for Python to print
        return "a number with thousands of digits"
    except RecursionError:
        return "a value that is nested too deep"
    return text if len(text) <= 60 else text[:57] + "..."


def parse_duration(value: object) -> float:
    """Seconds, above 0, out of ``30``, ``30.5``, ``"500ms"``, ``"30s"``, ``"10m"``, ``"2h"`` or ``"1d"``."""
    seconds: Fraction | float
    if isinstance(value, str):
        match = _DURATION.match(value)
        if not match or len(value) > 40:
            raise ValueError(f"{shown(value)} is not a duration; {_DURATION_RULE}")
        seconds = Fraction(match[1]) * _DURATION_UNITS[match[2]]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    else:  # not a TypeError: pydantic turns only a ValueError into a finding
        raise ValueError(f"{shown(value)} is not a duration; {_DURATION_RULE}")  # noqa: TRY004
    if not 0 < seconds <= MAX_DURATION:  # also refuses nan
        raise ValueError(f"{shown(value)} must be above 0 and at most 366d")
    return float(seconds)


def parse_duration_or_off(value: object) -> float | None:
    """Seconds as ``parse_duration`` reads them, or ``None`` for ``"off"``."""
    if value is None or value == "off":
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ValueError(f'{error}; "off" turns it off') from None


def format_duration(seconds: float) -> str:
    """The shortest configuration form of ``seconds``: ``600.0`` is ``"10m"``."""
    if seconds < 1:
        return f"{seconds * 1000:.12g}ms"
    for unit, factor in _DURATION_UNITS.items():
        if seconds >= factor and seconds % float(factor) == 0:
            return f"{int(seconds // float(factor))}{unit}"
    return f"{seconds!r}s"


def parse_size(value: object) -> int:
    """Bytes, above 0, out of ``4096``, ``"16KiB"`` (1024s), ``"64MB"`` (1000s) or ``"1.5MiB"``."""
    size: Fraction | int
    if isinstance(value, str):
        match = _SIZE.match(value)
        if not match or len(value) > 40:
            raise ValueError(f"{shown(value)} is not a size; {_SIZE_RULE}")
        size = Fraction(match[1]) * _SIZE_UNITS[match[2]]
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:  # not a TypeError: pydantic turns only a ValueError into a finding
        raise ValueError(f"{shown(value)} is not a size; {_SIZE_RULE}")  # noqa: TRY004
    if size != int(size):
        raise ValueError(f"{shown(value)} is not a whole number of bytes")
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"{shown(value)} must be at least 1 byte and at most 1GiB")
    return int(size)


def format_size(size: int) -> str:
    """The shortest configuration form of ``size`` bytes: ``1048576`` is ``"1MiB"``."""
    for unit, factor in _SIZE_UNITS.items():
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


@dataclass(frozen=True, slots=True)
class UidRange:
    """Uids on the host that are reserved for sandboxes: the keeper's first, then one for each sandbox's calls."""

    start: int
    count: int

    @property
    def keeper(self) -> int:
        """The uid of every sandbox's PID 1; no call ever has it."""
        return self.start

    @property
    def calls(self) -> range:
        """The uids that calls may have."""
        return range(self.start + 1, self.start + self.count)

    def __str__(self) -> str:
        return f"{self.start}:{self.count}"


def parse_uid_range(value: object) -> UidRange:
    """A range out of ``"start:count"``, wholly inside what docker accepts."""
    if isinstance(value, UidRange):
        start, count = value.start, value.count
    else:
        match = _UID_RANGE.match(value) if isinstance(value, str) else None
        if not match:
            raise ValueError(
                f'{shown(value)} is not a range of uids; write "start:count", for example "1879048192:65536"'
            )
        start, count = int(match[1]), int(match[2])
    if start < 1:
        raise ValueError(f"{shown(value)} holds uid 0; nothing in a sandbox runs as root")
    if count < 2:
        raise ValueError(f"{shown(value)} has a count below 2; PID 1 and calls need uids of their own")
    if start + count - 1 > MAX_UID:
        raise ValueError(f"{shown(value)} ends above {MAX_UID}, the highest uid that docker accepts")
    return UidRange(start, count)


def parse_mount(value: object) -> Mount:
    """A mount out of ``"/host/path:/container/path"`` or ``"/host/path:/container/path:ro"``."""
    if isinstance(value, Mount):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a text in quotes")  # noqa: TRY004 - see parse_duration
    return Mount.parse(value)


def absolute(value: object) -> Path:
    """An absolute path, as it is written: links and ``..`` are looked at when it is used."""
    path = Path(value) if isinstance(value, str | Path) and "\0" not in str(value) else Path()
    if not path.is_absolute():
        raise ValueError(f"{shown(value)} is not an absolute path")
    return path


def own_network(value: str) -> str:
    """An engine's network that gives a container a network namespace of its own."""
    if value == "host" or value.startswith(("container:", "ns:")):
        raise ValueError(
            f"{shown(value)} gives the sandbox a network that is not its own, and with it every local service"
        )
    return ContainerProfile(network=value).network


def variable_name(value: str) -> str:
    """The name of an environment variable that a tool may get."""
    name, sign, _ = value.partition("=")
    if sign:  # what stands behind it may be a secret: it is not shown
        raise ValueError(f"{shown(name)} comes with a value; give the name alone, the gateway's own value is used")
    if not _VARIABLE.match(value):
        raise ValueError(
            f"{shown(value)} is not the name of a variable: letters, digits and underscores, and no digit first"
        )
    if value.startswith(("LD_", "DYLD_")):
        raise ValueError(
            f"{shown(value)} is read by the dynamic loader, which may run other code before the tool's; leave it out"
        )
    return value


def agent_name(value: str) -> str:
    """An agent's name: any text that can be printed on one line."""
    if not value or len(value) > _MAX_AGENT_NAME or not value.isprintable():
        raise ValueError(f"an agent's name is 1 to {_MAX_AGENT_NAME} printable characters; {shown(value)} is not")
    return value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """A table of a file: frozen, nothing coerced, and no key that it does not know."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


Duration = Annotated[float, BeforeValidator(parse_duration)]
DurationOrOff = Annotated[float | None, BeforeValidator(parse_duration_or_off)]
Size = Annotated[int, BeforeValidator(parse_size)]
UidRangeField = Annotated[UidRange, BeforeValidator(parse_uid_range), PlainSerializer(str, return_type=str)]
MountField = Annotated[Mount, BeforeValidator(parse_mount), PlainSerializer(str, return_type=str)]
MountList = Annotated[tuple[MountField, ...], BeforeValidator(_tuple)]
StringList = Annotated[tuple[str, ...], BeforeValidator(_tuple)]
AbsolutePath = Annotated[Path, BeforeValidator(absolute)]
PathList = Annotated[tuple[AbsolutePath, ...], BeforeValidator(_tuple)]
VariableNames = Annotated[tuple[Annotated[str, AfterValidator(variable_name)], ...], BeforeValidator(_tuple)]
AgentName = Annotated[str, AfterValidator(agent_name)]
PythonTools = Literal["container", "limits"]
"""Where an agent's Python tools run: behind the container's boundary, or on the host under resource limits alone."""
