# mypy: ignore-errors
# ruff: noqa: PTH110, PTH118, S102 - pathlib costs an interpreter some milliseconds; the rest is compiled late on purpose
"""The program around a Python tool's function: arguments from stdin, the function called, its answer to stdout.

It runs where the tool runs, as a call's code, in any Python 3.8 or newer; ``executor.tool`` appends the line that starts
it. It imports only what a starting interpreter has imported already: `json` costs a call some 10 ms (it brings `re`), and
`importlib.util` some 5, and both would hide files of the tool's own that are named like one of the modules they bring. And
it is short, since every call compiles it: 100 lines take a millisecond. What most calls do without is in
`tool_errors`.
"""

import os
import sys
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import SourceFileLoader, spec_from_file_location


def make(name, file, places=None):
    """Load a file as a module that can be found by what looks its classes and functions up (pickle, dataclasses)."""
    loader = SourceFileLoader(name, file)
    module = module_from_spec(spec_from_file_location(name, file, loader=loader, submodule_search_locations=places))
    sys.modules[name] = module
    loader.exec_module(module)
    return sys.modules[name]


def unused(name):
    """A module's name that takes nothing away: what is loaded already stays what it is, as it does for a script."""
    name = name.replace(".", "_")
    return "_tool_" + name if name in sys.modules else name


def load(root, path, home, seldom):
    """The tool's module; siblings can be imported. ``home`` is the name of the root directory where it was written."""
    file = os.path.join(root, path)
    place, base = os.path.split(file)
    sys.path[:0] = [place] if place == root else [place, root]
    if os.path.exists(os.path.join(place, "__init__.py")):
        return seldom("load_packaged")(make, unused, root, file, home)
    return make(unused(base.rpartition(".")[0] or base), file)


def refuse(part):
    raise TypeError(part)


def codec():
    """What reads JSON, and what writes it in pieces: the parts of `json` that are written in C."""
    try:
        from _json import encode_basestring, make_encoder, make_scanner
    except ImportError:  # not CPython
        from json import JSONDecoder, JSONEncoder

        encoder = JSONEncoder(default=refuse, ensure_ascii=False, allow_nan=False)
        return JSONDecoder().scan_once, lambda value, _: encoder.encode(value)
    rules = type(sys.implementation)(
        strict=True, object_hook=None, object_pairs_hook=None, parse_float=float, parse_int=int, parse_constant=float
    )
    return make_scanner(rules), make_encoder({}, refuse, encode_basestring, None, ": ", ", ", False, False, False)


def run(root, path, home, function, seldom):
    process, module, arguments = os.getpid(), None, None
    sys.argv[:] = [os.path.join(root, path)]
    try:
        scan, encode = codec()
        arguments, _ = scan(sys.stdin.buffer.read().decode("utf-8").strip(), 0)
        # From here on what is printed, also by C code and by other programs, goes where errors go.
        answer = os.dup(1)
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
        module = load(root, path, home, seldom)
        value = getattr(module, function)(**arguments)
        if hasattr(type(value), "__await__"):
            value = seldom("finish")(value)
        try:
            text = value if isinstance(value, str) else "" if value is None else "".join(encode(value, 0))
            data = memoryview(str.encode(text))
        except (TypeError, ValueError, RecursionError) as error:
            data = memoryview(seldom("mended")(value, error))
        if os.getpid() != process:
            return  # a child that the tool forked came back too: it has no answer to give
        while data:
            data = data[os.write(answer, data) :]
    except SystemExit:
        raise
    except BaseException as error:
        seldom("explain")(error, run.__code__.co_filename, module, function, arguments)
        sys.exit(1)


def start(role, root, path, home, function, source):
    """``role`` is the name that this file runs under, ``source`` is that of `tool_errors`."""

    def seldom(name):
        names = {}
        exec(compile(source, "<seldom>", "exec"), names)
        return names[name]

    if role == "__mp_main__":
        load(root, path, home, seldom)  # a process of `multiprocessing`, which must know the tool's classes
    else:
        run(root, path, home, function, seldom)
