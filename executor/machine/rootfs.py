"""Build a small Python root filesystem from the distribution's own packages, with mmdebstrap."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio

from executor.common.printable import printable
from executor.engine import process
from executor.errors import EngineFailed
from executor.machine.debian import Report, install, release, system_environment

PACKAGES = ("python3", "tzdata", "netbase", "ca-certificates", "libstdc++6")
"""Python with its whole standard library, the data files that ``zoneinfo``, ``socket`` and ``ssl`` read, and the C++ library
that wheels (numpy, pandas) expect of every system."""

CHANGES = ('CMD ["python3"]', "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
"""What an import adds to the files: an archive holds neither a command nor an environment."""

_BUILD_TIMEOUT = 900.0
# Takes usr-is-merged instead of usrmerge, which brings the whole of Perl: 103 MB instead of 153.
_MERGED_HOOK = Path("/usr/share/mmdebstrap/hooks/maybe-merged-usr")
_LEFT_OUT = ("man/*", "info/*", "doc/*", "locale/*", "lintian/*")
_HOOKS = (
    # Nothing in a sandbox may gain rights, and no-new-privileges is not the only thing to say so.
    r'find "$1" -xdev \( -type f -o -type d \) -perm /6000 -exec chmod a-s {} +',
    # Sources may hold a mirror's password.
    'rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d "$1"/var/cache/debconf/* "$1"/var/log/*',
)


async def build_rootfs(target: Path, report: Report) -> None:
    """Write the root filesystem as a tar file to ``target``; needs Debian or Ubuntu, and root. Raises ``EngineFailed``.

    What it writes besides is beside ``target``; the caller removes that directory, also after a cancel.
    """
    if shutil.which("mmdebstrap") is None:
        await install(["mmdebstrap"], report)
    suite = release().codename
    report(f"building a Python image from the packages of {release().id} {suite} (about half a minute)")
    argv = ["mmdebstrap", "--mode=root", "--variant=essential", f"--include={','.join(PACKAGES)}"]
    argv += [f"--dpkgopt=path-exclude=/usr/share/{pattern}" for pattern in _LEFT_OUT]
    argv += ["--dpkgopt=path-include=/usr/share/doc/*/copyright"]
    argv += [f"--customize-hook={hook}" for hook in _HOOKS]
    if await anyio.Path(_MERGED_HOOK).is_dir():
        argv += [f"--hook-dir={_MERGED_HOOK}"]
    argv += ["--format=tar", suite, str(target), *await _sources(suite)]
    # Namespaces of its own: its mounts (the host's /dev and /sys among them) are never seen from here, so removing its
    # directory can reach nothing else; and with its PID 1 every process of the build ends, so a kill leaves none.
    contained = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--", *argv]
    env = {**system_environment(), "TMPDIR": str(target.parent), "DEBIAN_FRONTEND": "noninteractive"}
    done = await process.run(contained, env, timeout=_BUILD_TIMEOUT)
    if done.code != 0:
        text = printable(done.stderr)[-400:]
        raise EngineFailed(f"mmdebstrap could not build the image (exit status {done.code}): {text}")


async def _sources(suite: str) -> list[str]:
    """The host's own sources of this suite, so that its mirror is used, and no third party's. Empty: the default."""
    fields = "$(ORIGIN)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)"
    argv = ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"]
    done = await process.run(argv, system_environment(), timeout=60.0)
    lines: dict[str, None] = {}
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        origin, uri, name, component = (*line.split("|"), "", "", "", "")[:4]
        if origin in ("Debian", "Ubuntu") and name.partition("-")[0] == suite and component == "main":
            lines[f"deb {uri} {name} {component}"] = None
    return list(lines)
