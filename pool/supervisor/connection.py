"""A reachable engine with the configured image on it, and what is fixed for every container that a pool makes over it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from executor.engine.protocol import Engine, EngineInfo, ImageInfo
from executor.sandbox import seccomp
from executor.sandbox.profile import ContainerProfile, Limits
from pool.config.load import Settings


@dataclass(frozen=True, slots=True)
class Connection:
    """See the module. ``config_hash`` differs between containers of different settings."""

    engine: Engine
    info: EngineInfo
    image: ImageInfo
    profile: ContainerProfile
    config_hash: str


def shared_profile(settings: Settings, info: EngineInfo, pool_id: str) -> ContainerProfile:
    """The one profile that every container of a pool is made from; only its user differs from container to container."""
    box = settings.sandbox
    parent = {"cgroupfs": f"/emberpool-{pool_id}", "systemd": f"emberpool-{pool_id}.slice"}
    return ContainerProfile(
        network=box.network,
        limits=Limits(
            cpu_seconds=box.cpu_seconds,
            memory_mb=box.memory_mb,
            open_files=box.open_files,
            file_size_mb=box.file_size_mb,
        ),
        pids=box.pids,
        tmpfs_mb=box.tmpfs_mb,
        mounts=tuple(box.mounts),
        cpus=box.cpus,
        runtime=box.runtime,
        seccomp=box.seccomp,
        tmp_owned=info.kind != "podman",  # which refuses the words for it
        cgroup_parent="" if info.rootless else parent.get(info.cgroup_driver, ""),
    )


def connection(settings: Settings, engine: Engine, info: EngineInfo, image: ImageInfo, pool_id: str) -> Connection:
    """Everything fixed at create time, and a hash of it: two containers of one hash are interchangeable."""
    profile, box = shared_profile(settings, info, pool_id), settings.sandbox
    facts = {
        "profile": {**asdict(profile), "mounts": [str(mount) for mount in profile.mounts]},
        "seccomp": _seccomp_digest(profile),
        "image": image.id,
        "user": box.user,
        "uids": str(box.uid_range),
        "lifetime": lifetime(settings),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return Connection(engine, info, image, profile, digest)


def _seccomp_digest(profile: ContainerProfile) -> str:
    """A hash of the seccomp profile's content: a file can change, and so can our own from release to release."""
    try:
        return seccomp.digest(profile.seccomp_file) if profile.seccomp_file else ""
    except OSError:
        return ""  # the engine's client says what is wrong with it


def lifetime(settings: Settings) -> float:
    """Seconds after which a sandbox ends by itself, so that a pool that dies for good leaks nothing for ever: the longest
    that a standby waits, a session has it, and its last call takes."""
    call, pool = settings.call, settings.pool
    return pool.standby_max_age + pool.max_lifetime + call.timeout + call.grace
