"""Determines the owner of a source file: this package, Python or an installed package, or the user. On any side; the
kernel asks about files of other machines by `kernel/analysis/traceback_text.py`."""

from __future__ import annotations

import os
import sysconfig
import types
from functools import lru_cache

from jupyter_distrib.system import process_environment

LIBRARY_FOLDERS = tuple(
    {
        os.path.realpath(folder) + os.sep
        for folder in (*sysconfig.get_paths().values(), *process_environment.OWN)
        if folder
    }
)
"""The interpreter's own folders, and this package's."""
CALL = "call of "
"""Prefix of the file name under which the call of a distributed function is executed."""
_OWN = (*process_environment.OWN, CALL)
_IMPORT = "<frozen importlib._bootstrap>"


def is_own(filename: str) -> bool:
    """Return whether code with this file name is this package's, as is the code that calls a decorated function."""
    return filename.startswith(_OWN)


@lru_cache(maxsize=1 << 14)  # a training cell asks for every module, and `realpath` reads each folder of each path
def is_library(path: str) -> bool:
    """Return whether a file is this package's, Python's or an installed package's."""
    return is_own(path) or (os.path.isabs(path) and os.path.realpath(path).startswith(LIBRARY_FOLDERS))


def is_users(path: str) -> bool:
    """Return whether a file is the user's: neither a library's nor code without a file."""
    return not path.startswith("<") and not is_library(path)


def importing_library(frame: types.FrameType | None) -> bool:
    """Return whether this frame is part of the import of a library.

    Such an import must not be interrupted: whatever its C code has registered by then stays (operators of torch, the
    core of numpy), and every later import of it in this process fails ("Tried to register an operator ... twice") or
    ends the process by SIGSEGV.
    """
    while frame is not None and (outer := frame.f_back) is not None:
        code, name = frame.f_code, frame.f_code.co_filename
        if code.co_name == "<module>" and outer.f_code.co_filename == _IMPORT and is_library(name):
            return True
        # Its module may be complete, but not yet in `sys.modules`.
        if code.co_name == "_find_and_load_unlocked" and name == _IMPORT:
            found = frame.f_locals.get("spec")
            if found is not None and isinstance(found.origin, str) and is_library(found.origin):
                return True
        frame = outer
    return False
