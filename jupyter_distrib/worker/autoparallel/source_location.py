"""The name, for sentences, of the line of the user's code that is being executed."""

from __future__ import annotations

import os
import sys
from types import FrameType

from jupyter_distrib.system import file_owner


def current_line(cell: str) -> str:
    """Return `line 12` for the cell with this file name, or `Cell In[3], line 4`; empty if no line of the user is
    active.

    A line of the cell takes precedence over lines of functions that it calls in other cells or modules of the user.
    """
    elsewhere = ""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        name = frame.f_code.co_filename
        if name == cell:
            return f"line {frame.f_lineno}"
        if not elsewhere and file_owner.is_users(name):
            elsewhere = f"{os.path.basename(name)}, line {frame.f_lineno}"
        frame = frame.f_back
    return elsewhere
