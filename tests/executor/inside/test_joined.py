"""The parts of the runner, joined to the one text that is sent."""

from __future__ import annotations

import ast
import subprocess
import sys

from executor import inside


def _bodies() -> dict[str, str]:
    """What each part is compiled from in the joined text, by the name that a traceback shows."""
    bodies = {}
    for statement in ast.parse(inside.source("runner")).body:
        assert isinstance(statement, ast.Expr)
        compiled = statement.value.args[0]  # type: ignore[attr-defined]
        text, name, _ = [ast.literal_eval(argument) for argument in compiled.args]
        bodies[name] = text
    return bodies


def test_every_file_of_the_folder_is_a_part() -> None:
    files = {path.stem for path in inside.path("runner/main").parent.glob("*.py")} - {"__init__"}
    assert files == set(inside.RUNNER_PARTS)
    assert len(inside.RUNNER_PARTS) == len(files)


def test_the_joined_text_imports_the_standard_library_and_nothing_else() -> None:
    for name, text in _bodies().items():
        for node in ast.walk(ast.parse(text)):
            imported = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            for module in imported:
                assert module.partition(".")[0] in sys.stdlib_module_names, name


def test_the_first_statement_notes_what_is_loaded_before_anything_is_imported() -> None:
    first, *_ = _bodies().values()
    docstring, of_sys, noted, *_ = ast.parse(first).body
    assert isinstance(docstring, ast.Expr)
    assert ast.unparse(of_sys) == "import sys"
    assert ast.unparse(noted).startswith("BASELINE, BASELINE_PATHS = ")


def test_lines_of_the_joined_text_have_their_parts_numbers() -> None:
    for name, text in _bodies().items():
        part = inside.parts("runner")[name.removeprefix("<emberpool/").removesuffix(">")]
        pairs = list(zip(text.splitlines(), part.splitlines(), strict=True))
        changed = [theirs for ours, theirs in pairs if ours != theirs]
        assert all(line == "" for line, theirs in pairs if line != theirs)
        assert ("executor.inside" in "".join(changed)) == ("from executor.inside" in part)


def test_a_traceback_of_the_joined_text_shows_the_part_and_its_line() -> None:
    parts = {
        "runner/a.py": "import os\n",
        "runner/b.py": "from executor.inside.runner.a import os\n\nos.no_such_name\n",
    }
    done = subprocess.run((sys.executable, "-I", "-c", inside.join(parts)), capture_output=True, text=True, check=False)
    assert 'File "<emberpool/runner/b.py>", line 3, in <module>' in done.stderr
    assert "no_such_name" in done.stderr
