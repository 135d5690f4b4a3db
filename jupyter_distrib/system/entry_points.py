"""The entry points of installed packages, for which all packages are searched once in the life of a process. Any
thread; standard library only."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Any


def of_group(group: str) -> importlib.metadata.EntryPoints:
    """Return the entry points of a group as they were at the first call for any group."""
    found: importlib.metadata.EntryPoints = _of_all_packages().select(group=group)
    return found


@cache
def _of_all_packages() -> Any:  # its class differs between versions of Python
    return importlib.metadata.entry_points()
