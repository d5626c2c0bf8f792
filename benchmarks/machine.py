"""The machine that a result belongs to: without it a latency says nothing."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.bench import Bench

Facts = dict[str, str | int | float]


def machine(bench: Bench, backend: str) -> Facts:
    """What the figures depend on, as plain values. ``memory_mb`` is MiB, ``date`` is UTC."""
    info, box = bench.info, bench.settings.sandbox
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1_048_576,
        "load_1m": round(os.getloadavg()[0], 2),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "engine": f"{info.kind} {info.version}",
        "runtime": box.runtime or info.default_runtime,
        "cgroup": info.cgroup_version,
        "image": box.image,
        "image_id": bench.image.id,
        "backend": backend,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_model(place: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name from the kernel, or its architecture if the kernel gives no name."""
    try:
        lines = place.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, named), platform.machine())
