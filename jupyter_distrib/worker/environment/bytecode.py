"""Keeps ranks and dry runs from importing bytecode that is older than its source.

Python takes a compiled file for current if the source has the size, and the second of the modification, that it had
when it was compiled. A notebook that writes a module and runs it can do both twice within a second, and a file that is
copied to a host keeps its time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from typing import Any

from jupyter_distrib.system import file_owner

_path_stats = SourceFileLoader.path_stats


def distrust_old() -> None:
    """Make this process and its forks compile a user's module again if its file was changed after the last time."""
    SourceFileLoader.path_stats = _path_stats_after_check  # type: ignore[method-assign]


def _path_stats_after_check(self: SourceFileLoader, path: str) -> Any:
    if not path.startswith(file_owner.LIBRARY_FOLDERS):  # thousands of files
        _remove_old(path)
    return _path_stats(self, path)


def _remove_old(path: str) -> None:
    """Remove the bytecode of a user's module if it was written before the file's last change, whatever the time of the
    file says. If it cannot be removed, raise `OSError`, with which Python reads the source and no bytecode."""
    try:
        compiled = cache_from_source(path)
        is_old = os.stat(compiled).st_mtime_ns <= os.stat(path).st_ctime_ns
    except (OSError, NotImplementedError):
        return
    if is_old and not file_owner.is_library(path):
        with suppress(FileNotFoundError):  # another rank was faster
            os.unlink(compiled)
