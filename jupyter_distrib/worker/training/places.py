"""Which line of the user's code is being executed, as sentences name it."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platlib", "purelib")})


def here(cell: str) -> str:
    """`line 12` of the cell with this file name, or `Cell In[3], line 4`; empty if no line of the user's is active.

    A line of the cell goes before the lines of the functions that it calls in other cells or modules of the user.
    """
    theirs = ""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        name = frame.f_code.co_filename
        if name == cell:
            return f"line {frame.f_lineno}"
        if not theirs and _is_users(name):
            theirs = f"{os.path.basename(name)}, line {frame.f_lineno}"
        frame = frame.f_back
    return theirs


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    return not os.path.realpath(filename).startswith((_PACKAGE, *_LIBRARIES))
