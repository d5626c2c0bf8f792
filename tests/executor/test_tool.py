"""A gateway's Python tool: what is checked before it runs, what its call does (run here, by this interpreter), what its
end means."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engine.attached import PROVED
from executor.errors import InvalidCall
from executor.result import CallResult
from executor.sandbox.request import Call
from executor.tool import MAX_ERROR, Tool, ToolResult, encode_arguments, tool_code, tool_result

MAX = 10_000_000
PYTHON = os.environ.get("EMBERPOOL_TEST_PYTHON", sys.executable)
"""What carries calls out here: an image may hold another Python than the host, 3.8 or newer."""
ENV = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/"}

# --- what a tool may be -------------------------------------------------------------------------------------------------

HERE = Path("/tools/weather.py")

BAD: dict[str, tuple[str, Callable[[], object]]] = {
    "no name": ("name must be", lambda: Tool(name="", inline="1")),
    "slash": ("name must be", lambda: Tool(name="a/b", inline="1")),
    "nul": ("name must be", lambda: Tool(name="a\0", inline="1")),
    "number": ("name must be", lambda: Tool(name=1, inline="1")),  # type: ignore[arg-type]
    "neither": ("either file", lambda: Tool(name="a")),
    "both": ("not both", lambda: Tool(name="a", file=HERE, inline="1")),
    "inline bytes": ("inline must be a string", lambda: Tool(name="a", inline=b"1")),  # type: ignore[arg-type]
    "inline function": ("leave them out", lambda: Tool(name="a", inline="1", function="f")),
    "inline directory": ("leave them out", lambda: Tool(name="a", inline="1", directory=Path("/tools"))),
    "file text": ("file must be a path", lambda: Tool(name="a", file="/a.py")),  # type: ignore[arg-type]
    "file nul": ("file must be a path", lambda: Tool(name="a", file=Path("/a\0.py"))),
    "outside": ("below", lambda: Tool(name="a", file=HERE, directory=Path("/tool"))),
    "climbs": ("without \\.\\.", lambda: Tool(name="a", file=Path("/tools/../x.py"), directory=Path("/tools"))),
    "the directory": ("below", lambda: Tool(name="a", file=Path("/tools"), directory=Path("/tools"))),
    "function": ("Python identifier", lambda: Tool(name="a", file=HERE, function="f()")),
    "keyword": ("Python identifier", lambda: Tool(name="class", file=HERE)),
    "name is none": ("give function", lambda: Tool(name="get-weather", file=HERE)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tool_is_refused_and_the_message_says_what_is_allowed(case: str) -> None:
    message, build = BAD[case]
    with pytest.raises(InvalidCall, match=message) as caught:
        build()
    assert len(str(caught.value)) < 700


def test_function_and_directory_are_the_tools_own_by_default() -> None:
    tool = Tool(name="plugin__wx__weather", file=HERE)
    assert (tool.function, tool.directory, tool.path) == ("plugin__wx__weather", HERE.parent, "weather.py")
    tool = Tool(name="get-weather", file=HERE, function="now", directory=Path("/"))
    assert (tool.function, tool.path) == ("now", "tools/weather.py")
    assert Tool(name="t", file=Path("t.py")).directory == Path.cwd()


# --- what arguments may be ----------------------------------------------------------------------------------------------


def deep(levels: int) -> str:
    return '{"a": ' + "[" * levels + "]" * levels + "}"


REFUSED: list[tuple[str, object]] = [
    ("must be one JSON object.*not list", [1]),
    ("not list", "[1]"),
    ("not NoneType", None),
    ("not int", "1"),
    ("not JSON: .* at character 0", ""),
    ("not JSON: .* at character 6", '{"a": }'),
    ("not UTF-8 at byte 7", b'{"a": "\xff"}'),
    ("not JSON", '\ufeff{"a": 1}'),
    ("argument 'n' is not JSON", {"n": float("nan")}),
    ("argument 'n' is not JSON", {"n": [{"m": float("-inf")}]}),
    ("argument 'n' is not JSON", '{"n": NaN}'),
    ("argument 'n' is not JSON", b'{"n": [-Infinity]}'),
    ("argument 'n' is not JSON", '{"n": 1e999}'),
    ("argument 's' holds a lone surrogate", {"s": "\ud800"}),
    ("argument 's' holds a lone surrogate", '{"s": ["\\udfff"]}'),
    ("argument 's' holds a lone surrogate", '{"s": {"\\ud800": 1}}'),
    ("argument '.ud800' holds a lone surrogate", {"\ud800": 1}),
    ("argument 's' holds a lone surrogate", '{"s": "\udc80"}'),
    ("a name must be a string, not int", {1: 2}),
    ("argument 'd' has a key .* int", {"d": {1: 2}}),
    ("argument 'd' has a key .* NoneType", {"d": [({"x": {None: 2}},)]}),
    ("argument 'd' is not JSON: .*keys", {"d": {(1,): 2}}),
    ("argument 'v' is not JSON: .*set", {"v": [{1}]}),
    ("argument 'v' is not JSON: .*bytes", {"v": b"x"}),
    ("argument 'a' stands twice", '{"a": 1, "a": 1}'),
    ("argument 'b' stands twice", '{"a": [{"b": 1, "b": 2}]}'),
    ("nested too deeply", deep(200_000)),
    ("not usable: .*digits", '{"n": ' + "9" * 5_000 + "}"),
    ("argument 'n' is not JSON: .*digits", {"n": 10**5_000}),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_what_json_cannot_say_is_refused_and_the_argument_named(index: int) -> None:
    message, arguments = REFUSED[index]
    with pytest.raises(InvalidCall, match=message) as caught:
        encode_arguments(arguments, max_input=MAX)
    assert len(str(caught.value)) < 300


def test_circles_and_depth_of_a_mapping_are_refused() -> None:
    circle: dict[str, object] = {}
    circle["self"] = circle
    with pytest.raises(InvalidCall, match=r"argument 'c' is not JSON: .*[Cc]ircular"):
        encode_arguments({"c": circle}, max_input=MAX)
    nest: object = 0
    for _ in range(200_000):
        nest = [nest]
    with pytest.raises(InvalidCall, match="argument 'n' is nested too deeply"):
        encode_arguments({"n": nest}, max_input=MAX)
    while isinstance(nest, list):  # taken apart level by level: the interpreter would do it recursively
        nest = nest.pop()


@pytest.mark.parametrize("form", ["text", "bytes", "mapping"])
def test_arguments_have_a_size_that_is_taken_and_not_a_byte_more(form: str) -> None:
    text = json.dumps({"a": "é", "b": "x" * 100}, ensure_ascii=False)
    size = len(text.encode())
    arguments = {"text": text, "bytes": text.encode(), "mapping": json.loads(text)}[form]
    assert encode_arguments(arguments, max_input=size) == text.encode()
    with pytest.raises(InvalidCall, match=rf"at most {size - 1} bytes are taken \(call\.max_input\)"):
        encode_arguments(arguments, max_input=size - 1)
    with pytest.raises(InvalidCall, match="too large"):
        encode_arguments("x" * 50_000_000, max_input=1_000)


def test_no_argument_at_all_is_an_empty_object() -> None:
    assert encode_arguments({}, max_input=2) == encode_arguments(" { }\n", max_input=5) == b"{}"


plain = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(plain, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(plain, values, max_size=5))
def test_arguments_arrive_as_they_were_given(arguments: dict[str, object]) -> None:
    data = encode_arguments(arguments, max_input=MAX)
    assert json.loads(data) == arguments
    for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False).encode()):
        assert json.loads(encode_arguments(text, max_input=MAX)) == arguments


# --- what a call does ---------------------------------------------------------------------------------------------------


def run(tool: Tool, arguments: object = (), *, loader: bool = False, root: Path | None = None) -> ToolResult:
    """Carry a tool's call out here, as ``python3 -I -B -c`` or by the program that plain calls are carried out by."""
    arguments = arguments or {}
    code = tool_code(tool, str(root or tool.directory))
    call = Call(code=code, stdin=encode_arguments(arguments, max_input=MAX), max_output=MAX)
    argv = call.client_argv("token")[1:] if loader else ("-I", "-B", "-c", code)
    # The program becomes the python3 that PATH leads to: here the one that this variant is about.
    path = f"PATH={Path(PYTHON).parent}:{os.environ['PATH']}"
    data = call.payload([path]) + call.stdin if loader else call.stdin
    done = subprocess.run([PYTHON, *argv], input=data, capture_output=True, timeout=60, check=False, env=ENV)
    stdout = done.stdout.removeprefix(PROVED) if loader else done.stdout
    return tool_result(tool, ended(done.returncode, stdout, done.stderr))


def ended(code: int | None, stdout: bytes = b"", stderr: bytes = b"", **changes: Any) -> CallResult:
    facts: dict[str, Any] = {
        "exit_code": code, "stdout": stdout, "stderr": stderr, "stdout_total": len(stdout), "stderr_total": len(stderr),
        "duration": 0.5,
    }  # fmt: skip
    return CallResult(**{**facts, **changes})


@pytest.fixture(params=["-c", "loader"])
def do(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., ToolResult]:
    """Write a tool's source to ``tool.py`` and call its ``tool``, in each of the two ways."""

    def act(source: str, arguments: object = (), *, name: str = "tool.py", **more: object) -> ToolResult:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(source), "utf-8")
        tool = Tool(name="tool", file=file, directory=tmp_path, **more)  # type: ignore[arg-type]
        return run(tool, arguments, loader=request.param == "loader")

    return act


Do = Callable[..., ToolResult]

RETURNED: list[tuple[str, object, str]] = [
    ("def tool(city, units='m'): return f'{city} {units}'", {"city": "Jerez é \U0001f600"}, "Jerez é \U0001f600 m"),
    ("def tool(**all): return all", {"class": [1, None, True, 0.5], "": {"é\n\0": "\u2028"}},
     '{"class": [1, null, true, 0.5], "": {"é\\n\\u0000": "\u2028"}}'),
    ("def tool(): return ''", {}, ""),
    ("def tool(): return None", {}, ""),
    ("def tool(): pass", {}, ""),
    ("def tool(): return 0", {}, "0"),
    ("def tool(): return False", {}, "false"),
    ("def tool(): return []", {}, "[]"),
    ("def tool(): return 2 ** 200", {}, str(2**200)),
    ("def tool(): return {1: (2,), True: 1.5, None: 3}", {}, '{"1": 1.5, "null": 3}'),
    ("class S(str): pass\ndef tool(): return S('own')", {}, "own"),
    ("async def tool(a): return a + 1", {"a": 1}, "2"),
    ("import asyncio\nasync def tool():\n    await asyncio.sleep(0)\n    return 'slept'", {}, "slept"),
    ("class A:\n    def __await__(self):\n        return iter(())\ndef tool(): return A()", {}, ""),
    ("tool = lambda a: a * 2", {"a": "x"}, "xx"),
    ("import functools\ntool = functools.partial(max, 1, 3)", {}, "3"),
    ("class tool(dict): pass", {"a": 1}, '{"a": 1}'),
    ("def tool(): return 'a\\ud83d\\ude00b\\ud800c\\udcff'", {}, "a\U0001f600b\ufffdc\ufffd"),
    ("def tool(): return ['\\ud800']", {}, '["\ufffd"]'),
    ("import sys\ndef tool(): sys.exit(0)", {}, ""),
    ("import sys\ndef tool(): sys.exit()", {}, ""),
    ("import os\ndef tool(): os._exit(0)", {}, ""),
    ("def tool(): return input.__name__ + repr(__import__('sys').stdin.read())", {}, "input''"),
    ("import sys, os\ndef tool(): return [os.path.basename(word) for word in sys.argv]", {}, '["tool.py"]'),
    ("import __main__\ndef tool(): return [__name__, __main__ is __import__(__name__)]", {}, '["tool", false]'),
    ("def tool(): return 'x'\nif __name__ == '__main__': raise SystemExit('ran as a script')", {}, "x"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(RETURNED)))
def test_what_the_function_returns_is_the_result(do: Do, index: int) -> None:
    source, arguments, output = RETURNED[index]
    done = do(source, arguments)
    assert (done.error, done.output, done.ok) == ("", output, True)
    assert done.result.stderr == b""


NOT_JSON = {
    "{1}": "a set, which is not JSON",
    "b'x'": "a bytes, which is not JSON",
    "object()": "an object, which is not JSON",
    "(n for n in 'ab')": "a generator, which is not JSON",
    "[{'k': {1}}]": "a list, which is not JSON: it holds a set",
    "float('nan')": "a float, which is not JSON: Out of range",
    "{'x': float('inf')}": "a dict, which is not JSON: Out of range",
    "{(1, 2): 3}": "a dict, which is not JSON: keys must be",
    "circle": "a list, which is not JSON: Circular",
    "10 ** 5000": "an int, which is not JSON: Exceeds the limit",
}


@pytest.mark.parametrize("value", NOT_JSON)
def test_what_is_not_json_is_an_error_that_names_its_type(do: Do, value: str) -> None:
    if value == "10 ** 5000" and not hasattr(sys, "get_int_max_str_digits"):
        pytest.skip("this Python writes any number")
    done = do(f"circle = []\ncircle.append(circle)\ndef tool(): return {value}")
    assert done.error.startswith(f"the tool returned {NOT_JSON[value]}")
    assert (done.ok, done.output, done.result.stdout) == (False, "", b"")


def test_result_that_is_nested_too_deeply_is_an_error(do: Do) -> None:
    done = do("def tool():\n    nest = []\n    for _ in range(100_000): nest = [nest]\n    return nest")
    assert done.error.startswith("the tool returned a list, which is not JSON: maximum recursion depth")


def test_whatever_is_printed_goes_to_stderr_in_order_and_never_into_the_result(do: Do) -> None:
    done = do("""
        import os, subprocess, sys
        print("while it is loaded")
        def tool():
            print("print é \\ud800")
            os.write(1, b"os.write\\n")
            subprocess.run(["echo", "child"], check=True)
            os.system("echo shell")
            sys.__stdout__.write("dunder\\n")
            print("to stderr", file=sys.stderr, flush=True)
            sys.stdout.buffer.write(b"\\xff\\0 bytes\\n")
            print("unfinished", end="")
            return "result"
    """)
    assert done.output == "result"
    assert done.result.stderr == (
        b"while it is loaded\nprint \xc3\xa9 \\ud800\nos.write\nchild\nshell\ndunder\nto stderr\n\xff\0 bytes\nunfinished"
    )


@pytest.mark.parametrize(
    "closing",
    [
        "sys.stdout.close()",
        "os.close(1)",
        "sys.stdout = None",
        "sys.stdout = io.TextIOWrapper(sys.stdout.detach())",
        "sys.stderr.close()",
    ],
)
def test_result_arrives_although_the_tool_closed_its_streams(do: Do, closing: str) -> None:
    done = do(f"import io, os, sys\ndef tool():\n    {closing}\n    return 'result'")
    assert (done.output, done.ok) == ("result", True)


def test_large_result_is_written_to_its_end(do: Do) -> None:
    done = do("def tool(n): return 'x' * n", {"n": 3_000_000})
    assert done.output == "x" * 3_000_000


def test_result_is_whole_although_signals_interrupt_its_writing(do: Do) -> None:
    done = do("""
        import atexit, signal
        def tool(n):
            atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
            return "x" * n
    """, {"n": 30_000_000})  # fmt: skip
    assert (done.error, len(done.output)) == ("", 30_000_000)


FAILED: list[tuple[str, object, list[str]]] = [
    ("def tool(city, units='m'): pass", {"town": "x"},
     ["the arguments do not fit: tool() got an unexpected keyword argument 'town'; the function is tool(city, units='m')"]),
    ("def tool(city: str, *, n: int = 3): pass", {},
     ["the arguments do not fit: tool() missing 1 required positional argument: 'city'; the function is tool(city: str, *, n: int = 3)"]),
    ("async def tool(city): pass", {}, ["the arguments do not fit: tool() missing", "tool(city)"]),
    ("class tool:\n    def __init__(self, a): pass", {}, ["the arguments do not fit", "the function is tool(a)"]),
    ("def other(): pass\ndef _own(): pass\nfrom os import getcwd\nclass Thing: pass", {},
     ["the tool's file has no function tool; it has other, Thing"]),
    ("tool = 5", {}, ["the tool's file has no function tool; it has none"]),
    ("import sys\ndef tool(): sys.exit('why not')", {}, ["why not"]),
    ("raise SystemExit('at once')", {}, ["at once"]),
    ("import sys\ndef tool(): sys.exit(7)", {}, ["the tool ended with exit status 7 and said nothing"]),
    ("import os\ndef tool(): os._exit(9)", {}, ["the tool ended with exit status 9 and said nothing"]),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(FAILED)))
def test_call_that_did_not_fit_or_ended_itself_is_told_in_one_line(do: Do, index: int) -> None:
    source, arguments, lines = FAILED[index]
    done = do(source, arguments)
    assert (done.ok, done.output) == (False, "")
    assert "\n" not in done.error
    for line in lines:
        assert line in done.error


TRACEBACKS: list[tuple[str, list[str]]] = [
    ("def tool():\n    return inner()\ndef inner():\n    return 1 / 0",
     ['FILE", line 2, in tool', "    return inner()", 'FILE", line 4, in inner', "ZeroDivisionError: division by zero"]),
    ("async def tool():\n    return await inner()\nasync def inner():\n    raise LookupError('x')",
     ['FILE", line 2, in tool', 'FILE", line 4, in inner', "LookupError: x"]),
    ("def tool():\n    len(1, 2)", ['FILE", line 2, in tool', "TypeError: len()"]),
    ("def tool(:\n    pass", ['FILE", line 1', "    def tool(:", "SyntaxError: "]),
    ("import no_such_module", ['FILE", line 1, in <module>', "ModuleNotFoundError: No module named 'no_such_module'"]),
    ("import broken", ['FILE", line 1, in <module>', 'broken.py", line 1, in <module>', "NameError"]),
    ("import unreadable", ['FILE", line 1, in <module>', 'unreadable.py", line 1', "SyntaxError: "]),
    ("from os import nothing_such", ["ImportError: cannot import name 'nothing_such'"]),
    ("def tool():\n    try:\n        1 / 0\n    except Exception as e:\n        raise KeyError('k') from e",
     ["ZeroDivisionError", "direct cause", "KeyError: 'k'"]),
    ("def tool():\n    try:\n        1 / 0\n    except Exception:\n        raise KeyError('k')",
     ["ZeroDivisionError", "During handling", "KeyError: 'k'"]),
    ("class Own(BaseException): pass\ndef tool():\n    raise Own('base')", ["Own: base"]),
    ("def tool():\n    raise MemoryError", ["in tool", "MemoryError"]),
    ("def tool():\n    raise KeyboardInterrupt", ["in tool", "KeyboardInterrupt"]),
    ("import sys\ndef hook(*_): 1 / 0\nsys.excepthook = hook\ndef tool():\n    raise KeyError('k')", ["KeyError: 'k'"]),
    ("def tool():\n    return tool()", ["more times", "RecursionError"]),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(TRACEBACKS)))
def test_traceback_is_the_tools_own_and_shows_nothing_of_what_called_it(do: Do, tmp_path: Path, index: int) -> None:
    source, lines = TRACEBACKS[index]
    (tmp_path / "broken.py").write_text("nothing_such")
    (tmp_path / "unreadable.py").write_text("a = = b")
    done = do(source)
    shown = done.error.replace(str(tmp_path / "tool.py"), "FILE")
    assert (done.ok, done.output) == (False, "")
    at = 0
    for line in lines:
        assert line in shown[at:]
        at = shown.index(line, at)
    assert re.findall(r"<seldom>|<string>|<emberpool>|frozen|asyncio|/proc/|codec|in run\b|in start", shown) == []


def test_what_was_printed_before_is_not_part_of_the_error(do: Do) -> None:
    done = do("def tool():\n    print('working')\n    1 / 0")
    assert done.error.startswith("Traceback (most recent call last):\n")
    assert done.result.stderr.startswith(b"working\n")


# --- what a tool may import and be named --------------------------------------------------------------------------------


def write(place: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(dedent(text))


def test_siblings_and_packages_beside_the_tool_can_be_imported(do: Do, tmp_path: Path) -> None:
    write(tmp_path, {
        "sub/sibling.py": "NAME = 'sibling'", "sibling.py": "NAME = 'wrong'", "at_root.py": "NAME = 'root'",
        "sub/pack/__init__.py": "from .inner import NAME", "sub/pack/inner.py": "NAME = 'package'",
    })  # fmt: skip
    done = do(
        "import at_root, pack, sibling\ndef tool(): return [sibling.NAME, pack.NAME, at_root.NAME]", name="sub/tool.py"
    )
    assert (done.error, done.output) == ("", '["sibling", "package", "root"]')


@pytest.mark.parametrize("place", ["", "plugin", "plugin/inner", "lib/plugin"])
def test_tool_in_a_package_can_import_relatively(do: Do, tmp_path: Path, place: str) -> None:
    where = tmp_path
    for part in place.split("/") if place else [""]:
        where = where / part
        if part != "lib":
            write(where, {"__init__.py": "", "helper.py": f"NAME = {part!r}"})
    done = do(
        "from .helper import NAME\nfrom . import helper\ndef tool(): return [NAME, __name__.rpartition('.')[2]]",
        name=f"{place}/tool.py" if place else "tool.py",
    )
    assert (done.error, json.loads(done.output)) == ("", [place.rpartition("/")[2], "tool"])


@pytest.mark.parametrize("name", ["os", "codecs"])
def test_package_named_like_a_module_that_is_loaded_already_takes_its_place_from_nobody(
    do: Do, tmp_path: Path, name: str
) -> None:
    write(tmp_path, {f"{name}/__init__.py": "", f"{name}/helper.py": "NAME = 'helper'"})
    done = do(
        f"from .helper import NAME\nimport {name} as other\ndef tool(): return [NAME, hasattr(other, 'helper')]",
        name=f"{name}/tool.py",
    )
    assert (done.error, done.output) == ("", '["helper", false]')


def test_package_is_known_by_its_directorys_name_wherever_it_is_shown(tmp_path: Path) -> None:
    write(tmp_path, {
        "wx/__init__.py": "", "wx/helper.py": "NAME = 'absolute'",
        "wx/tool.py": "from wx.helper import NAME\nimport wx\ndef tool(): return [NAME, __name__, wx.tool.__name__]",
    })  # fmt: skip
    tool = Tool(name="tool", file=tmp_path / "wx/tool.py")
    (tmp_path / "0dig.est").symlink_to("wx")
    (tmp_path / "wx").rename(tmp_path / "elsewhere")
    (tmp_path / "0dig.est").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "0dig.est")
    done = run(tool, root=tmp_path / "0dig.est")
    assert (done.error, done.output) == ("", '["absolute", "wx.tool", "wx.tool"]')


def test_tool_that_its_own_package_imports_is_loaded_once(do: Do, tmp_path: Path) -> None:
    write(tmp_path, {"pack/__init__.py": "from .tool import tool"})
    done = do("import sys\nsys.stderr.write('loaded ')\ndef tool(): return 'once'", name="pack/tool.py")
    assert (done.output, done.result.stderr) == ("once", b"loaded ")


def test_function_may_stand_in_a_packages_own_file(do: Do, tmp_path: Path) -> None:
    write(tmp_path, {"pack/helper.py": "NAME = 'helper'"})
    done = do("from .helper import NAME\ndef tool(): return [NAME, __name__]", name="pack/__init__.py")
    assert (done.error, done.output) == ("", '["helper", "pack"]')


@pytest.mark.parametrize(
    "name", ["json.py", "re.py", "types.py", "enum.py", "asyncio.py", "importlib.py", "inspect.py", "traceback.py"]
)
def test_tool_named_like_a_module_of_the_library_is_called_all_the_same(do: Do, name: str) -> None:
    done = do("def tool(a): return {'a': a, 'name': __name__}", {"a": [1.5, {"b": None}]}, name=name)
    assert done.error == ""
    assert json.loads(done.output) == {"a": [1.5, {"b": None}], "name": name[:-3]}
    assert "ZeroDivisionError" in do("def tool(): 1 / 0", name=name).error


@pytest.mark.parametrize("name", ["os.py", "sys.py", "time.py", "codecs.py", "__main__.py", "_json.py"])
def test_tool_named_like_a_module_that_is_loaded_already_takes_its_place_from_nobody(do: Do, name: str) -> None:
    done = do(
        f"import os, sys, time, {name[:-3]} as other\n"
        "class Kept: pass\n"
        "def tool():\n"
        "    import pickle\n"
        "    return [os.sep, isinstance(pickle.loads(pickle.dumps(Kept())), Kept), hasattr(other, 'Kept')]",
        name=name,
    )
    assert (done.error, done.output) == ("", '["/", true, false]')


def test_sibling_named_like_a_module_of_the_library_is_found_first_as_for_a_script(do: Do, tmp_path: Path) -> None:
    write(tmp_path, {"json.py": "NAME = 'sibling'", "re.py": "NAME = 'sibling'"})
    done = do("import json, re\ndef tool(): return {'names': [json.NAME, re.NAME]}")
    assert (done.error, done.output) == ("", '{"names": ["sibling", "sibling"]}')


@pytest.mark.parametrize("name", ["my-tool.py", "my.tool.py", "tool", "t ö\n'\"\\.py", "{x}.py"])
def test_file_may_have_any_name(do: Do, name: str) -> None:
    done = do(
        "from dataclasses import dataclass, field\n"
        "import pickle\n"
        "@dataclass\n"
        "class Kept:\n"
        "    a: 'list[int]' = field(default_factory=list)\n"
        "def tool(): return pickle.loads(pickle.dumps(Kept([1]))).a",
        name=name,
    )
    assert (done.error, done.output) == ("", "[1]")


def test_path_of_bytes_that_are_no_text_is_found(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"d\xff") / os.fsdecode(b"f\xfe.py")
    file.parent.mkdir()
    file.write_text("def tool(): return 'found'")
    assert run(Tool(name="tool", file=file, directory=tmp_path)).output == "found"


def test_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    done = run(Tool(name="tool", file=tmp_path / "absent.py"))
    assert done.error == f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/absent.py'"


# --- what a tool may start ----------------------------------------------------------------------------------------------

PROCESSES = """
    import multiprocessing, threading
    class Job:
        def __init__(self, n): self.n = n
    def double(job): return job.n * 2
    def tool(method):
        print("once")
        found = []
        thread = threading.Thread(target=found.append, args=["thread"])
        thread.start()
        thread.join()
        with multiprocessing.get_context(method).Pool(2) as pool:
            return found + pool.map(double, [Job(1), Job(2)])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("name", ["tool.py", "time.py", "pack/tool.py"])
def test_tool_may_use_threads_and_processes(tmp_path: Path, method: str, name: str) -> None:
    write(tmp_path, {name: PROCESSES, "pack/__init__.py": ""})
    tool = Tool(name="tool", file=tmp_path / name, directory=tmp_path)
    done = run(tool, {"method": method}, loader=True)
    assert (done.error, done.output) == ("", '["thread", 2, 4]')
    assert done.result.stderr == b"once\n"


def test_forked_child_that_comes_back_gives_no_second_answer(do: Do) -> None:
    done = do("import os\ndef tool():\n    if pid := os.fork():\n        os.waitpid(pid, 0)\n    return 'once'")
    assert (done.error, done.output) == ("", "once")


def test_exit_handlers_and_threads_run_after_the_result_and_cannot_add_to_it(do: Do) -> None:
    done = do("""
        import atexit, threading
        atexit.register(print, "at exit")
        gate = threading.Event()
        def late():
            gate.wait()
            print("late")
        def tool():
            threading.Thread(target=late).start()
            gate.set()
            return "result"
    """)
    assert (done.output, sorted(done.result.stderr.splitlines())) == ("result", [b"at exit", b"late"])


def test_no_module_but_the_tools_own_is_loaded_for_it(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import sys\ndef tool(): return sorted(sys.modules)")
    bare = subprocess.run(
        [PYTHON, "-I", "-B", "-c", "import sys; print(*sys.modules)"], capture_output=True, check=True, env=ENV
    )
    loaded = json.loads(run(Tool(name="tool", file=tmp_path / "tool.py")).output)
    assert set(loaded) - set(bare.stdout.decode().split()) == {"_json", "tool"}


def test_arguments_that_are_no_object_never_reach_the_tool(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("raise SystemExit('was loaded')")
    tool = Tool(name="tool", file=tmp_path / "tool.py")
    argv = [PYTHON, "-I", "-B", "-c", tool_code(tool, str(tmp_path))]
    for data in (b"", b"nonsense", b"\xff", b'{"a": '):
        done = subprocess.run(argv, input=data, capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"the arguments on stdin are not one JSON object" in done.stderr


def test_interpreter_without_the_c_half_of_json_serves_tools_too(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("def tool(a): return {'a': a} if a else {1}")
    code = tool_code(Tool(name="tool", file=tmp_path / "tool.py"), str(tmp_path))
    for value, output, error in (("é", '{"a": "é"}', ""), ("", "", "a set, which is not JSON")):
        done = subprocess.run(
            [PYTHON, "-I", "-B", "-c", f"import sys\nsys.modules['_json'] = None\n{code}"],
            input=json.dumps({"a": value}).encode(),
            capture_output=True,
            check=False,
        )
        assert (done.stdout.decode(), error in done.stderr.decode()) == (output, True)


# --- the source of a call -----------------------------------------------------------------------------------------------


def test_inline_code_is_its_own_to_the_letter() -> None:
    source = "import sys\nprint(sys.stdin.read())  # é \n\n"
    assert tool_code(Tool(name="get-weather", inline=source), "/tool/x") == source


names = st.text(st.characters(exclude_characters="/\0"), min_size=1).filter(lambda name: name not in (".", ".."))


@given(st.text(), names, names)
def test_no_string_of_the_caller_can_end_its_literal(root: str, place: str, file: str) -> None:
    tool = Tool(name="t", file=Path("/") / place / file)
    code = tool_code(tool, root)
    code.encode("ascii")
    head, _, line = code.rstrip("\n").rpartition("\n")
    started: list[tuple[str, ...]] = []
    exec(line, {"__name__": "__main__", "start": lambda *words: started.append(words)})  # noqa: S102
    assert [words[:5] for words in started] == [("__main__", root, file, place, "t")]
    assert head.rstrip() == tool_code(Tool(name="u", file=Path("/x/y.py")), "/").rpartition("\n\nstart(")[0].rstrip()


# --- what the end of a call means ---------------------------------------------------------------------------------------

FILE_TOOL, INLINE = Tool(name="t", file=HERE), Tool(name="t", inline="1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"exit_code": None, "signal": 15, "timed_out": True, "duration": 61.96},
            "timed out after 62 s (its own timeout, else call.timeout)",
        ),
        ({"exit_code": 0, "timed_out": True}, "timed out after 0.5 s"),
        ({"exit_code": None, "signal": 9, "oom_killed": True}, "killed by its memory limit (sandbox.memory_mb)"),
        ({"exit_code": None, "signal": 24, "cpu_limit": True}, "killed by its CPU limit (sandbox.cpu_seconds)"),
        ({"exit_code": None, "signal": 11}, "killed by signal 11 (SIGSEGV)"),
        ({"exit_code": None, "signal": 99}, "killed by signal 99"),
        ({"exit_code": 3}, "exit status 3 and said nothing"),
        ({"exit_code": 3, "stderr": b"no \xff\n", "stderr_total": 4}, "no \ufffd"),
        (
            {"exit_code": 1, "stderr": b"chat", "stderr_total": 5_000},
            "printed 5000 bytes, and of why it failed nothing",
        ),
    ],
)
def test_every_bad_end_says_what_happened_and_has_no_output(changes: dict[str, Any], words: str) -> None:
    for tool in (FILE_TOOL, INLINE):
        done = tool_result(tool, ended(0, b"half", **changes))
        assert words in done.error
        assert (done.ok, done.output) == (False, "")


def test_output_that_was_cut_off_is_an_error_for_a_function_and_none_for_inline_code() -> None:
    result = ended(0, b"[1, ", stdout_total=9_000)
    done = tool_result(FILE_TOOL, result)
    assert "returned 9000 bytes, and only 4 are taken (call.max_output)" in done.error
    assert (done.ok, done.output) == (False, "")
    assert tool_result(INLINE, result) == ToolResult(ok=True, output="[1, ", error="", result=result)
    printed = ended(0, b"[1]", b"chat", stderr_total=9_000)
    assert tool_result(FILE_TOOL, printed).output == "[1]"


def test_output_of_bytes_that_are_no_text_has_them_replaced() -> None:
    assert tool_result(INLINE, ended(0, b"a\xff\xc3\xa9")).output == "a\ufffdé"


def test_long_error_keeps_its_end() -> None:
    text = "Traceback (most recent call last):\n" + "x" * 10_000 + "\nLastError: this"
    error = tool_result(FILE_TOOL, ended(1, b"", text.encode())).error
    assert len(error) == MAX_ERROR
    assert error.startswith("... x")
    assert error.endswith("LastError: this")


@given(st.binary(max_size=300) | st.text("T(:)\n \\dAhv", max_size=50).map(str.encode))
def test_whatever_was_printed_a_failure_has_an_error_and_a_success_none(data: bytes) -> None:
    for tool in (FILE_TOOL, INLINE):
        failed = tool_result(tool, ended(1, data, data))
        assert failed.error
        assert len(failed.error) <= MAX_ERROR
        assert tool_result(tool, ended(0, data, data)).ok
