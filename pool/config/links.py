"""Recognise the variables by which Kubernetes announces its namespace's services to a pod.

A service called ``emberpool`` or ``emberpool-gateway`` brings ``EMBERPOOL_SERVICE_HOST=10.0.0.7``,
``EMBERPOOL_GATEWAY_PORT=tcp://10.0.0.8:80`` and their like into each pod, unless the pod says ``enableServiceLinks: false``.
They have one underscore where a setting has two, and values that no setting has. ``docker run --link`` sets the same
``..._PORT`` ones.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

_WORDS = r"[A-Z0-9]+(?:_[A-Z0-9]+)*"
_URL = re.compile(r"(tcp|udp|sctp)://(?:\[(.+)\]|([^\[\]:]+)):([0-9]{1,5})\Z", re.ASCII)


def is_service_link(name: str, value: str) -> bool:
    """Whether a variable has both the name and the value of a service link."""
    return any(shape.fullmatch(name) and right(value) for shape, right in _SHAPES)


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _is_port(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= 5


def _is_url(value: str) -> bool:
    match = _URL.match(value)
    return match is not None and _is_address(match[2] or match[3])


def _is_protocol(value: str) -> bool:
    return value in ("tcp", "udp", "sctp")


_SHAPES: tuple[tuple[re.Pattern[str], Callable[[str], bool]], ...] = (
    (re.compile(rf"{_WORDS}_SERVICE_HOST"), _is_address),
    (re.compile(rf"{_WORDS}_SERVICE_PORT(_{_WORDS})?"), _is_port),
    (re.compile(rf"{_WORDS}_PORT(_[0-9]+_(TCP|UDP|SCTP))?"), _is_url),
    (re.compile(rf"{_WORDS}_PORT_[0-9]+_(TCP|UDP|SCTP)_PROTO"), _is_protocol),
    (re.compile(rf"{_WORDS}_PORT_[0-9]+_(TCP|UDP|SCTP)_PORT"), _is_port),
    (re.compile(rf"{_WORDS}_PORT_[0-9]+_(TCP|UDP|SCTP)_ADDR"), _is_address),
)
