"""Programs that are run twice, by the runner and by ``python3 -I -B``: name to source, one table for each subject."""

from __future__ import annotations

from tests.engine.corpus import ends, errors, processes, state, streams

_MODULES = {"ends": ends, "errors": errors, "processes": processes, "state": state, "streams": streams}

TABLES = tuple(_MODULES)
PROGRAMS: dict[str, str] = {
    f"{table}.{name}": source for table, module in _MODULES.items() for name, source in module.PROGRAMS.items()
}
STDIN = streams.STDIN
