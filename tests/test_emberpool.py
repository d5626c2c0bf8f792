"""The public face: one import for everything a user needs, documented, and sure that it is this distribution's."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import emberpool
from executor.errors import EmberpoolError
from tests.support import ROOT

NAMES = sorted(set(emberpool.__all__))


def methods() -> Iterator[tuple[str, Any]]:
    for cls in (
        emberpool.SandboxPool,
        emberpool.Session,
        emberpool.Privileged,
        emberpool.CallStream,
        emberpool.Manifest,
    ):
        for name, member in vars(cls).items():
            if not name.startswith("_") and isinstance(member, FunctionType | property | classmethod):
                yield f"{cls.__name__}.{name}", member


METHODS = dict(methods())


def test_every_public_name_is_there_once() -> None:
    assert len(emberpool.__all__) == len(NAMES)
    assert [name for name in NAMES if not hasattr(emberpool, name)] == []


def test_every_error_is_public_by_its_name() -> None:
    def below(cls: type[EmberpoolError]) -> Iterator[type[EmberpoolError]]:
        for one in cls.__subclasses__():
            if one.__module__ == EmberpoolError.__module__:
                yield one
                yield from below(one)

    errors = {cls.__name__ for cls in below(EmberpoolError)} | {"EmberpoolError", "ConfigError", "ManifestError"}
    assert len(errors) > 15
    assert errors - set(NAMES) == set()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "DeathCause"])
def test_every_public_name_has_a_docstring(name: str) -> None:
    text = inspect.getdoc(getattr(emberpool, name)) or ""
    # A dataclass without one gets its own signature from Python.
    assert text
    assert not text.startswith(f"{name}(")


@pytest.mark.parametrize("name", METHODS)
def test_every_public_method_has_a_docstring_with_units_and_errors(name: str) -> None:
    member = METHODS[name]
    function: Any = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    text = " ".join((inspect.getdoc(member) or "").split())
    whole = f"{text} {inspect.getdoc(getattr(emberpool, name.split('.')[0]))}"
    assert text
    words = inspect.signature(function).parameters
    if "timeout" in words:
        assert re.search(r"\bseconds\b", whole), "in which unit is timeout?"
    if "max_output" in words or "max_bytes" in words:
        assert re.search(r"\bbytes\b", whole), "in which unit is max_output?"
    if inspect.iscoroutinefunction(function):
        assert re.search(r"[Rr]aise", whole), "which errors does it raise?"


def test_whoever_needs_it_imports_it_in_one_line() -> None:
    code = "from emberpool import SandboxPool, SandboxDied, Tool; import emberpool; print(emberpool.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert re.fullmatch(r"\d+\.\d+\S*\n", done.stdout)


@pytest.mark.parametrize("name", ["pool", "executor"])
@pytest.mark.parametrize("kind", ["file", "package"])
def test_a_shadowed_package_is_named_on_import(tmp_path: Path, name: str, kind: str) -> None:
    shadow = tmp_path / f"{name}.py" if kind == "file" else tmp_path / name / "__init__.py"
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", "import emberpool"], capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: emberpool needs its own package")
    assert str(shadow) in last
    assert "rename that file or directory" in last


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.name)
def test_every_script_finds_what_it_imports(script: Path) -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='imported')"
    done = subprocess.run(
        [sys.executable, "-c", code, script], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
