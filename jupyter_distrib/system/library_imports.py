"""Whether an interrupt would cut the import of a library. Called in a signal's handler, in the kernel and in ranks."""

from __future__ import annotations

import os
import sysconfig
import types

from jupyter_distrib.system import process_environment

FOLDERS = tuple(
    {
        os.path.realpath(folder) + os.sep
        for folder in (*sysconfig.get_paths().values(), *process_environment.OWN)
        if folder
    }
)
"""The interpreter's own folders: a module outside of them is local."""
_IMPORT = "<frozen importlib._bootstrap>"


def importing_library(frame: types.FrameType | None) -> bool:
    """Whether this is part of an import of a module that is not local.

    It is not to be interrupted: what its C code has registered by then stays (operators of torch, the core of numpy),
    and every later import of it in this process fails ("Tried to register an operator ... twice") or ends the process
    by SIGSEGV.
    """
    while frame is not None and (outer := frame.f_back) is not None:
        code, name = frame.f_code, frame.f_code.co_filename
        if code.co_name == "<module>" and outer.f_code.co_filename == _IMPORT and _is_library(name):
            return True
        frame = outer
    return False


def _is_library(path: str) -> bool:
    return os.path.isabs(path) and os.path.realpath(path).startswith(FOLDERS)
