"""Note what a fresh interpreter holds, before anything is imported. This part comes first."""

import sys

# A call's interpreter is brought back to this before the call's code begins.
BASELINE, BASELINE_PATHS = frozenset(sys.modules), frozenset(sys.path_importer_cache)
# Whatever a call's code changes in the built-in names must not reach the code that runs after it.
__builtins__ = dict(sys.modules["builtins"].__dict__)
