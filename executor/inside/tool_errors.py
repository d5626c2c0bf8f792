# mypy: ignore-errors
# ruff: noqa: PTH110, PTH118, PTH119, PTH120 - pathlib costs an interpreter some milliseconds
"""What most calls of `tool` do without: packages, coroutines, and what to say when a tool fails.

Compiled where the tool runs, only when one of its functions is needed.
"""

import os
import sys

SHOWN = 500  # characters of a signature, or of a list of names


def load_packaged(make, unused, root, file, home):
    """The module of a tool in a package, under its dotted name, so that relative imports work."""
    top, base = os.path.split(file)
    packages = []
    while os.path.exists(os.path.join(top, "__init__.py")):
        packages.insert(0, (home if top == root else os.path.basename(top), top))
        if top == root:
            break
        top = os.path.dirname(top)
    name, place = packages[0]
    name = unused(name)
    make(name, os.path.join(place, "__init__.py"), [place])
    for below, _ in packages[1:]:
        name += "." + below
        __import__(name)
    if base == "__init__.py":
        return sys.modules[name]
    package, stem = sys.modules[name], (base.rpartition(".")[0] or base).replace(".", "_")
    name += "." + stem
    module = sys.modules.get(name) or make(name, file)
    setattr(package, stem, module)
    return module


def finish(value):
    """Await what an asynchronous function returned."""
    import asyncio

    async def wait():
        return await value

    return asyncio.run(wait())


def mended(value, error):
    """The bytes of a result that was no JSON or no valid Unicode; where there is no help, the end."""
    if isinstance(error, UnicodeEncodeError):
        # A lone surrogate is no character (a file's name may hold one, say): it is replaced, as it would be on reading.
        return error.object.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode("utf-8")
    name = type(value).__name__
    why = ": " + str(error)
    if error.args and not isinstance(error.args[0], str):
        part = error.args[0]
        why = "" if part is value else ": it holds " + named(type(part).__name__)
    sys.exit(f"the tool returned {named(name)}, which is not JSON{why}")


def named(kind):
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def explain(error, here, module, function, arguments):
    """Say on stderr why the tool failed; ``here`` is the file name of the program around it."""
    trace = error.__traceback__
    while trace is not None and is_ours(trace.tb_frame.f_code.co_filename, here):
        trace = trace.tb_next
    if arguments is None:
        sys.exit(f"the arguments on stdin are not one JSON object: {error}")
    if trace is None and module is not None:
        # Nothing of the tool's own ran, so the call did not fit.
        target = getattr(module, function, None)
        if not callable(target):
            sys.exit(missing(module, function))
        if isinstance(error, TypeError):
            misfit(error, target, function, arguments)
    error = error.with_traceback(trace)
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException:  # it was a hook of the tool's own
        sys.__excepthook__(type(error), error, trace)


def is_ours(name, here):
    if name in (here, "<seldom>") or name.startswith("<frozen importlib"):
        return True
    loop = sys.modules.get("asyncio")
    return loop is not None and name.startswith(os.path.join(os.path.dirname(loop.__file__), ""))


def missing(module, function):
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and name[:1] != "_" and getattr(value, "__module__", "") == module.__name__
    ]
    return f"the tool's file has no function {function}; it has {', '.join(names)[:SHOWN] or 'none'}"


def misfit(error, target, function, arguments):
    """End with how the function is called, if that is what is wrong."""
    try:
        import inspect  # takes some 20 ms, and so comes afterwards

        signature = inspect.signature(target)
        shown = function + str(signature)
    except Exception:  # code in C has none; and what stands in a signature is the tool's own
        return
    try:
        signature.bind(**arguments)
    except TypeError:
        sys.exit(f"the arguments do not fit: {error}; the function is {shown[:SHOWN]}")
