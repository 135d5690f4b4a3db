"""Detects whether an interrupt would cut the import of a library. Called in a signal's handler, in the kernel and in
ranks."""

from __future__ import annotations

import types

from jupyter_distrib.system import file_owner

_IMPORT = "<frozen importlib._bootstrap>"


def importing_library(frame: types.FrameType | None) -> bool:
    """Return whether this is part of an import of a module that is not local.

    It is not to be interrupted: what its C code has registered by then stays (operators of torch, the core of numpy),
    and every later import of it in this process fails ("Tried to register an operator ... twice") or ends the process
    by SIGSEGV.
    """
    while frame is not None and (outer := frame.f_back) is not None:
        code, name = frame.f_code, frame.f_code.co_filename
        if code.co_name == "<module>" and outer.f_code.co_filename == _IMPORT and file_owner.is_library(name):
            return True
        frame = outer
    return False
