"""Where the symbolic links of a tool directory lead. Pure: it looks at the names that were found and at nothing else."""

from __future__ import annotations

from collections.abc import Container, Mapping

MAX_LINKS = 40
"""Links that Linux follows in one path (MAXSYMLINKS)."""
_MAX_STEPS = 1_000
"""Names that one link may lead through; a thousand links of thousands of names each would take minutes."""


def fault(path: str, folders: Container[str], files: Container[str], links: Mapping[str, str]) -> str:
    """Why a link must not be staged, ``""`` where it leads to something that is staged with it.

    All paths are relative to the tool directory, which is ``""`` itself; ``links`` maps each link to what it says. A path
    is followed name by name as the kernel does: ``..`` after a link goes up from where the link led.
    """
    here = path.split("/")[:-1]
    names = [links[path]]
    followed = 1
    for _ in range(_MAX_STEPS):
        if "/" in names[-1]:
            if names[-1].startswith("/"):
                return f"is absolute ({links[path]!r:.100}); make it relative"
            names[-1:] = names[-1].split("/")[::-1]
        name = names.pop()
        below = "/".join((*here, name))
        if name == "..":
            if not here:
                return f"leads out of the tool directory ({links[path]!r:.100})"
            here.pop()
        elif below in links and name not in ("", "."):
            followed += 1
            if followed > MAX_LINKS:
                return "leads in a circle, or through too many other links"
            names.append(links[below])
        elif below in files and not names:
            return ""
        elif name not in ("", "."):
            if below not in folders:
                return f"leads to nothing that is staged with it ({links[path]!r:.100})"
            here.append(name)
        if not names:
            return ""
    return "leads in a circle, or through too many other names"
