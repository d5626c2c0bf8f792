"""Decide whether the process of a call may end without finalising its interpreter."""

import _thread
import _warnings
import atexit
import gc
import sys
import weakref

from executor.inside.runner.facts import read_file
from executor.inside.runner.start import BASELINE


class ExitCheck:
    """Whether a call's process may end at once, without finalising its interpreter, and nothing would show it.

    To finalise an interpreter writes to most of its pages, which a forked process first has to copy: more than half of a
    short call's time. Only few things can observe it: exit handlers, threads, finalizers, weak references' callbacks,
    suspended generators, and what some extension modules do at their end. This looks for anything that may be one of
    those, without running any of the caller's code, and says no when in doubt.
    """

    def __init__(self):
        self._streams = id(sys.stdout), id(sys.stderr)
        self._filters = list(_warnings.filters)
        self.settle()

    def settle(self):
        """Take all that exists now for older than the call."""
        self._collected = self._collections()

    def _collections(self):
        return [one["collections"] for one in gc.get_stats()[1:]]

    def rehearse(self, *types):
        """Look at everything that is looked at after a call; ``types`` are those of objects that the call itself adds."""
        self._quiet(), self._plain_modules(), self._noticing()
        for made in [*types, *map(type, gc.get_objects(generation=0)), *map(type, gc.get_objects(generation=1))]:
            verdict = classify(made)
            if not FLAGS(made) & HEAPTYPE:
                VERDICTS[id(made)] = verdict

    def allows_exit(self):
        """Whether nothing could notice an end without finalisation."""
        return self._quiet() and self._plain_modules() and not self._noticing()

    def _quiet(self):
        if (
            atexit._ncallbacks()
            or THREAD_COUNT()
            or not NO_HOOK
            or gc.callbacks
            or gc.get_debug()
            or gc.get_freeze_count()
        ):
            return False
        if (id(sys.stdout), id(sys.stderr)) != self._streams:
            return False
        warnings = sys.modules.get("warnings", _warnings)
        if type(warnings) is not MODULE or warnings.__dict__.get("filters") != self._filters:
            return False
        threading = sys.modules.get("threading")
        if threading is None:
            return True
        if type(threading) is not MODULE or threading.__dict__.get("_threading_atexits"):
            return False
        shutdown = threading.__dict__.get("_shutdown")
        return type(shutdown) is type(read_file) and shutdown.__code__.co_filename == threading.__dict__.get("__file__")

    def _plain_modules(self):
        if type(sys.modules) is not dict:
            return False
        for name in sys.modules:
            if name in BASELINE:
                continue
            module = sys.modules[name]
            if type(module) is not MODULE:
                return False
            loader = getattr(module.__dict__.get("__spec__"), "loader", None)
            compiled = loader is BUILTIN or type(loader).__name__ == "ExtensionFileLoader"
            if compiled and name not in SILENT:
                return False
        return True

    def _noticing(self):
        if self._collections() != self._collected:
            return True  # young objects can no longer be told from those that are older than the call
        verdicts = {}
        for young in (0, 1):
            for thing in gc.get_objects(generation=young):
                made = type(thing)
                verdict = VERDICTS.get(id(made)) or verdicts.get(id(made))
                if verdict is None:
                    verdict = verdicts[id(made)] = classify(made)
                if verdict == FINALIZED:
                    return True
                if verdict == CLASS and finalizes(thing):
                    return True
                if verdict == REFERENCE:
                    # Built-in callbacks of this name only tidy the caches of abstract base classes.
                    callback = CALLBACK(thing)
                    if callback is not None and not (type(callback) is type(len) and callback.__name__ == "_destroy"):
                        return True
        return False


THREAD_COUNT = _thread._count  # as it was before any code of a call
PLAIN, FINALIZED, CLASS, REFERENCE = 1, 2, 3, 4
MODULE, BUILTIN = type(sys), sys.modules["_frozen_importlib"].BuiltinImporter
SOURCE = sys.modules["_frozen_importlib_external"].SourceFileLoader
CALLBACK, BASES, NAMES, FLAGS = (
    weakref.ref.__callback__.__get__,
    type.__dict__["__mro__"].__get__,
    type.__dict__["__dict__"].__get__,
    type.__dict__["__flags__"].__get__,
)
HEAPTYPE = 1 << 9  # the flag of a type that is not built in: only such a type can be changed
VERDICTS = {}  # of built-in types, by id: found ahead of the call
# Compiled modules that do nothing when an interpreter is finalised.
SILENT = frozenset((
    "array", "atexit", "binascii", "cmath", "errno", "fcntl", "gc", "grp", "itertools", "math", "pwd", "pyexpat",
    "resource", "select", "syslog", "unicodedata", "zlib", "_abc", "_ast", "_asyncio", "_bisect", "_blake2", "_bz2",
    "_codecs", "_collections", "_contextvars", "_csv", "_datetime", "_decimal", "_elementtree", "_functools",
    "_hashlib", "_heapq", "_imp", "_io", "_json", "_locale", "_lzma", "_md5", "_opcode", "_operator", "_pickle",
    "_posixsubprocess", "_queue", "_random", "_sha1", "_sha2", "_sha256", "_sha3", "_sha512", "_signal", "_socket",
    "_sre", "_ssl", "_stat", "_statistics", "_string", "_struct", "_symtable", "_thread", "_tokenize",
    "_tracemalloc", "_typing", "_uuid", "_warnings", "_weakref", "_zoneinfo",
))  # fmt: skip
# Emptied by the first audit hook that is added after this one (prepare_child adds ``pop``); otherwise without an effect.
NO_HOOK = {"sys.addaudithook": True}


def finalizes(made):
    """Whether a class has ``__del__``, found without running any code of the class."""
    return any("__del__" in NAMES(base) for base in BASES(made))


def classify(made):
    """Return what the end of an instance of a type may run."""
    bases = BASES(made)
    if finalizes(made) or made is weakref.ProxyType or made is weakref.CallableProxyType:
        return FINALIZED
    if any(base is type for base in bases):
        return CLASS
    return REFERENCE if any(base is weakref.ref for base in bases) else PLAIN
