"""The line of a program that a cell runs as `__main__`, by `%run` or runpy. Any thread of a rank; only reads frames."""

from __future__ import annotations

import os
from types import FrameType

from jupyter_distrib.system import file_owner


def line(frame: FrameType | None, cell: str) -> str:
    """Return the innermost line of the running program in this frame and its callers, such as `train.py, line 12`;
    empty if the cell runs none.

    Args:
        frame: The innermost frame.
        cell: The cell's file name.
    """
    lines: dict[str, int] = {}
    while frame is not None and (name := frame.f_code.co_filename) != cell:
        lines.setdefault(name, frame.f_lineno)
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return "" if file_owner.is_own(name) else f"{os.path.basename(name)}, line {lines[name]}"
        frame = frame.f_back
    return ""
