"""TOML that is too deep, in every form: a typed error at once, in files, variables and tables made by code."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.config.load import ConfigError, Settings, load_settings
from pool.config.toml import MAX_DEPTH, TooDeep, parse_toml
from pool.manifest.load import Manifest, ManifestError, load_manifest

DEEP = [1_200, 20_000]


def _forms(parts: int) -> dict[str, str]:
    names, quoted = ".".join(["a"] * parts), " . ".join(['"a b"'] * parts)
    half = parts // 2
    return {
        "name": f"{names} = 1",
        "quoted name": f"{quoted} = 1",
        "key of a section": f"[pool]\n{names} = 1",
        "agent": f"agents.x.call.timeout.{names} = 1",
        "header": f"[{names}]",
        "header of a list": f"[[{names}]]",
        "list": "x = " + "[" * parts + "]" * parts,
        "inline table": "x = " + "{a = " * parts + "1" + "}" * parts,
        "both": "[pool]\nname = " + "[{a = " * half + "1" + "}]" * half,
        "name in an inline table": "x = {y = 1, " + names + " = 1}",
        "name after a string": "x = {y = '''it's''''', " + names + " = 1}",
        "names that add up": "".join(f"[{'.'.join(['a'] * 60)}]\n{'.'.join(['b'] * 60)} = 1\n"),
    }


@pytest.mark.parametrize("parts", DEEP)
@pytest.mark.parametrize("form", _forms(1))
def test_a_file_that_is_too_deep_is_a_typed_error(form: str, parts: int, tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(_forms(parts)[form])
    with pytest.raises(ConfigError, match=f"nested more than {MAX_DEPTH} deep"):
        load_settings(path, {})
    with pytest.raises(ManifestError, match=f"nested more than {MAX_DEPTH} deep"):
        load_manifest(path)


def test_the_line_of_a_name_that_is_too_deep_is_told() -> None:
    with pytest.raises(TooDeep, match="at line 3"):
        parse_toml('a = """\n\n"""; ' + ".".join(["a"] * 100))


@pytest.mark.parametrize("parts", DEEP)
def test_a_variable_that_is_too_deep_is_a_typed_error(parts: int) -> None:
    for value in ("{" + ".".join(["a"] * parts) + " = 1}", "[" * parts + "]" * parts):
        with pytest.raises(ConfigError, match="is not a list"):
            load_settings(None, {"EMBERPOOL_SANDBOX__MOUNTS": value})


@pytest.mark.parametrize("levels", [1_200, 100_000])
def test_tables_from_code_that_are_too_deep_are_a_typed_error(levels: int) -> None:
    deep: Any = 1
    for _ in range(levels):
        deep = {"a": deep}
    for sections in ({"pool": deep}, {"pool": {"name": deep}}, {"agents": {"a": deep}}, {"x": deep}):
        with pytest.raises(ConfigError):
            Settings(**sections)
    with pytest.raises(ManifestError):
        Manifest.from_tables({"agents": deep}, Path("/"))


def test_dots_in_strings_comments_and_numbers_are_no_names() -> None:
    dots = "a." * 500
    text = f"""
    x = "{dots} \\" {dots}"  # {dots}
    y = '{dots}'
    z = [{", ".join(["1.5"] * 500)}]
    w = \"\"\"{dots} "" \\\"\"\" {dots}\"\"\"
    v = '''{dots} '' {dots}'''
    """
    assert parse_toml(text) == tomllib.loads(text)
    assert parse_toml(".".join(["a"] * (MAX_DEPTH - 1)) + " = 1")


@given(st.text(alphabet="ab.\"'\\\n#=[]{},1 ", max_size=60))
def test_what_is_not_too_deep_is_parsed_as_ever(text: str) -> None:
    try:
        wanted: object = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        wanted = str(error)
    try:
        got: object = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        got = str(error)
    assert got == wanted
