"""The programs that run inside a container. They use Python 3.8 and the standard library, and import nothing of emberpool.

A program is one file, or a folder of parts that are joined into one text when it is sent.
"""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

RUNNER_PARTS = ("start", "facts", "libc", "wire", "process", "serve", "fork", "exit", "child", "main", "enter")
"""In the order in which they run; each uses only names of those before it. ``start`` must come first."""
_OWN = "executor.inside."


def path(name: str) -> Path:
    """Return where a program of one file is on this host; ``name`` is its module's."""
    return Path(__file__).parent / f"{name}.py"


@cache
def source(name: str) -> str:
    """Return the text of a program, read once. A folder's parts are joined."""
    return join(parts(name)) if name == "runner" else path(name).read_text("utf-8")


def parts(name: str) -> dict[str, str]:
    """Return the texts of the runner's parts by their paths below this folder, in order."""
    return {f"{name}/{part}.py": path(f"{name}/{part}").read_text("utf-8") for part in RUNNER_PARTS}


def join(texts: Mapping[str, str]) -> str:
    """Join parts into one program that runs them in order in one namespace.

    Each is compiled under its own name and keeps its lines' numbers, so that a traceback shows the part and the line. What
    a part imports of other parts is left out: the namespace has it.
    """
    return "".join(
        f"exec(compile({_without_own_imports(text)!a}, '<emberpool/{name}>', 'exec'))\n" for name, text in texts.items()
    )


def _without_own_imports(text: str) -> str:
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OWN):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = "\n"
    return "".join(lines)
