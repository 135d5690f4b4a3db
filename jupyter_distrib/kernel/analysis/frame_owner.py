"""The owner of the code of a traceback's frame, by its file name. Kernel side; a pure function.

The file may be on another machine, where Python is in other folders, so only the name counts and no file is read.
"""

from __future__ import annotations

import re
import sysconfig
from typing import Literal

from jupyter_distrib.system import process_environment

Owner = Literal["cell", "user", "library", "package"]
"""The owner: a cell of the notebook, another file of the user, Python or an installed package, or this package."""

_CELL = "Cell In["
"""The prefix of the names of the notebook's cells."""
_LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib/python3\.\d+/|^<frozen")
_PACKAGE = "/site-packages/jupyter_distrib/"
"""The folder of this package on ranks with a Python of their own."""


def owner(filename: str) -> Owner:
    """Return the owner of the code in a file."""
    if filename.startswith(process_environment.OWN) or _PACKAGE in filename:
        return "package"
    if filename.startswith(_CELL):
        return "cell"
    is_library = _LIBRARY.search(filename) or filename.startswith(sysconfig.get_paths()["stdlib"])
    return "library" if is_library else "user"
