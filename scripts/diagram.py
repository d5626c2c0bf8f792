"""Draws the life of a sandbox into docs/architecture.md, between two marks, from the table in pool/core/transitions.py."""

from __future__ import annotations

from pathlib import Path

from pool.core.transitions import TABLE, Phase

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
BEGIN = "<!-- drawn by scripts/diagram.py from pool/core/transitions.py: begin -->\n"
END = "<!-- drawn by scripts/diagram.py from pool/core/transitions.py: end -->\n"


def diagram() -> str:
    """The table as a Mermaid state diagram in a fenced block, one arrow for each pair of phases."""
    arrows: dict[tuple[Phase | None, Phase | None], list[str]] = {}
    for (phase, trigger), following in TABLE.items():
        arrows.setdefault((phase, following), []).append(trigger.value.replace("_", " "))
    lines = [
        f"    {phase.value if phase else '[*]'} --> {following.value if following else '[*]'}: {', '.join(words)}"
        for (phase, following), words in arrows.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```", ""])


def redrawn(text: str) -> str:
    """``text`` with what is between the marks drawn anew. Raises ``ValueError`` unless it has both marks, once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{DOCUMENT} must hold these two lines once each, in this order:\n{BEGIN}{END}")
    before, rest = text.split(BEGIN)
    return before + BEGIN + diagram() + END + rest.split(END)[1]


if __name__ == "__main__":
    DOCUMENT.write_text(redrawn(DOCUMENT.read_text("utf-8")), "utf-8")
