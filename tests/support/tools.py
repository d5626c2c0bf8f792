"""What tests of Python tools share: a directory of tools with its manifest, made as a test goes along."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from pool.config.load import Settings
from pool.manifest.load import Manifest
from pool.tools import ToolPlan, plan_tool

AGENT = "agent"


def changed(settings: Settings, **sections: dict[str, Any]) -> Settings:
    """The same settings with some keys more."""
    whole = settings.model_dump(exclude_unset=True)
    return Settings(**{**whole, **{name: {**whole.get(name, {}), **keys} for name, keys in sections.items()}})


@dataclass(frozen=True)
class Toolbox:
    """A directory that holds tools; it is what a manifest in it allows."""

    root: Path

    def write(self, path: str, text: str = "", **more: str) -> Path:
        """A file of a tool, by default of one that does nothing, and beside it one for each of ``more`` (``columns="..."`` is
        columns.py)."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text) or f"def {file.stem}(**arguments):\n    pass\n", "utf-8")
        for name, source in more.items():
            (file.parent / f"{name}.py").write_text(dedent(source), "utf-8")
        return file

    def edit(self, path: str, old: str, new: str) -> None:
        """Change a file so that neither its size nor its time of writing tells."""
        assert len(old) == len(new)
        file = self.root / path
        before = file.stat()
        text = file.read_text("utf-8")
        assert old in text
        file.write_text(text.replace(old, new), "utf-8")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    def manifest(self, *, agent: str = AGENT, **tables: Any) -> Manifest:
        """A manifest of one agent; ``tables`` are the keys of its own table."""
        return Manifest.from_tables({"agents": {agent: tables}}, self.root)

    def plan(self, settings: Settings, name: str, *, agent: str = AGENT, **table: Any) -> ToolPlan:
        """The plan of the only tool of an agent; ``table`` are its keys, by default the file called like it."""
        keys = table if table.keys() & {"file", "inline"} else {"file": f"{name}/{name}.py", **table}
        return plan_tool(self.manifest(agent=agent, tools={name: keys}).find(name, agent), settings)
