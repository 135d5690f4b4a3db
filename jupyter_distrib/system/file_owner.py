"""Determines the owner of a source file: this package, Python or an installed package, or the user. On any side; the
kernel asks about files of other machines by `kernel/analysis/traceback_text.py`."""

from __future__ import annotations

import os
import sysconfig
import types
from functools import lru_cache
from pathlib import Path

from jupyter_distrib.system import import_path, process_environment, record_file
from jupyter_distrib.system.record_file import DamagedFile

LIBRARY_FOLDERS = tuple(
    {
        os.path.realpath(folder) + os.sep
        for folder in (*sysconfig.get_paths().values(), *process_environment.OWN)
        if folder
    }
)
"""The interpreter's own folders, and this package's."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Names of the folders of packages in other environments: the user's own (`pip install --user`), or Debian's."""
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
    return is_own(path) or (os.path.isabs(path) and (_is_inside(os.path.realpath(path)) or _is_listed(path)))


def is_library_folder(folder: str) -> bool:
    """Return whether a folder is Python's, or one into which packages are installed, or inside such a folder."""
    return _is_inside(os.path.realpath(folder) + os.sep)


def _is_inside(real: str) -> bool:
    return real.startswith(LIBRARY_FOLDERS) or any(name in real for name in _INSTALLED)


def _is_listed(path: str) -> bool:
    """Return whether pip has installed a file into some folder of the path (`pip install --target`). The name of a link
    counts: uv may link packages to its cache, while a user's link to a checkout is in no list."""
    folders = (os.path.abspath(each) + os.sep for each in import_path.folders() if each)
    return any(
        path.startswith(folder) and path[len(folder) :].partition(os.sep)[0] in _installed(folder) for folder in folders
    )


@lru_cache(maxsize=256)
def _installed(folder: str) -> frozenset[str]:
    """Return the packages and modules that were installed into a folder when it was first looked at."""
    found = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        try:
            lines = record_file.text_of(record, through_links=True).splitlines()
        except (OSError, DamagedFile):
            continue
        found |= {line.partition(",")[0].partition("/")[0] for line in lines}
    return frozenset(found)


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
