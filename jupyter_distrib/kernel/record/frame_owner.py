"""Whose code a frame of a traceback is, told by its file name. Kernel side; a pure function.

The file may be on another machine, where Python is in other folders, so names are looked at and not files.
"""

from __future__ import annotations

import re
import sysconfig
from typing import Literal

from jupyter_distrib.system import process_environment

Owner = Literal["cell", "user", "library", "package"]
"""A cell of the notebook, another file of the user's, Python or an installed package, or this package."""

_CELL = "Cell In["
"""The beginning of the names of the notebook's cells."""
_LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib/python3\.\d+/|^<frozen")
_PACKAGE = "/site-packages/jupyter_distrib/"
"""This package, as ranks with a Python of their own have it."""


def owner(filename: str) -> Owner:
    """Tell whose code a file is."""
    if filename.startswith(process_environment.OWN) or _PACKAGE in filename:
        return "package"
    if filename.startswith(_CELL):
        return "cell"
    is_library = _LIBRARY.search(filename) or filename.startswith(sysconfig.get_paths()["stdlib"])
    return "library" if is_library else "user"
