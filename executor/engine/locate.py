"""Find the engine: what the operator named, or else the first that answers.

A named engine (``EMBERPOOL_ENGINE_HOME``, ``binary``, ``DOCKER_HOST``, ``DOCKER_CONTEXT``) is the only candidate: when it
does not answer, that is an error and never a reason to run elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from executor.common.log import get_logger
from executor.common.printable import printable
from executor.engine.docker import CommandLineEngine, Endpoint
from executor.engine.paths import ENGINE_HOME, EnginePaths, engine_paths
from executor.engine.protocol import EngineInfo
from executor.errors import EmberpoolError, EngineUnavailable

log = get_logger("emberpool.engine")

_PROBE_TIMEOUT = 10.0


def private_endpoint(paths: EnginePaths) -> Endpoint:
    """How the private engine is reached."""
    words = ("--host", paths.url)
    return Endpoint("docker", words=words, found=f"private engine at {paths.socket}", private=True)


def candidates(binary: str = "") -> Iterator[Endpoint]:
    """The endpoints worth asking, best first. ``binary`` narrows the search to that command."""
    if os.environ.get(ENGINE_HOME):
        yield private_endpoint(engine_paths())
        return
    docker = binary if "podman" not in binary.rpartition("/")[2] else ""
    docker = docker or ("" if binary else "docker")
    podman = "" if docker and binary else (binary or "podman")
    if docker and shutil.which(docker):
        if host := os.environ.get("DOCKER_HOST"):
            private = host == f"unix://{engine_paths().socket}"
            yield Endpoint(docker, env=(("DOCKER_HOST", host),), found=f"DOCKER_HOST={host}", private=private)
            return
        context = os.environ.get("DOCKER_CONTEXT", "")
        yield Endpoint(docker, found=f"docker context {context_in_use()}")
        if context:
            return
        if engine_paths().socket.exists():
            yield private_endpoint(engine_paths())
    if podman and shutil.which(podman):
        yield Endpoint(podman, kind="podman", found="podman")


def context_in_use() -> str:
    """The context that a docker client uses here, and where it leads, as the client's own configuration says."""
    place = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    name = os.environ.get("DOCKER_CONTEXT") or str(_object(place / "config.json").get("currentContext") or "default")
    if name == "default":
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    try:
        host = _object(place / "contexts" / "meta" / digest / "meta.json")["Endpoints"]["docker"]["Host"]
    except (LookupError, TypeError):
        return printable(name)
    return printable(f"{name} ({host})")


def _object(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty where there is none. The client says itself what is wrong with it."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def missing_binary(binary: str) -> str:
    """Say that the command ``binary`` is not on this host, where it was looked for, and what to do; empty if it is there."""
    if shutil.which(binary):
        return ""
    name = printable(binary, name=True, limit=300)
    if binary.startswith("/"):
        problem = f"there is no executable file {name} on this host"
    else:
        path = printable(os.environ.get("PATH", ""), limit=600) or "empty or not set"
        problem = f"there is no command {name} on this host (PATH is {path})"
    return f"{problem}; install it, or change the setting (empty: docker or podman, whichever answers)"


async def find_engine(binary: str = "") -> tuple[CommandLineEngine, EngineInfo]:
    """Return the first engine that answers, and what it says of itself. ``binary`` is the value of ``sandbox.binary``.

    Raises ``EngineUnavailable`` naming all that were asked. It is not retryable where ``binary`` is not on this host.
    """
    if binary and not os.environ.get(ENGINE_HOME) and (problem := missing_binary(binary)):
        raise EngineUnavailable(f"sandbox.binary: {problem}", retryable=False)
    failures: list[str] = []
    for endpoint in candidates(binary):
        try:
            info = await CommandLineEngine(endpoint, timeout=_PROBE_TIMEOUT).info()
        except EmberpoolError as error:
            failures.append(f"{endpoint.found}: {error}")
            log.debug("engine.no_answer", endpoint=endpoint.found, error=str(error))
            continue
        return CommandLineEngine(endpoint), info
    asked = "; ".join(failures) or f"no {binary or 'docker or podman'} command on PATH"
    named = next((name for name in ("DOCKER_HOST", "DOCKER_CONTEXT") if os.environ.get(name)), "")
    remedy = f"Start the one that {named} names, or unset {named}; then `emberpool" if named else "`emberpool"
    raise EngineUnavailable(f"no container engine answers ({asked}). {remedy} engine up` starts one", retry_after=2.0)
