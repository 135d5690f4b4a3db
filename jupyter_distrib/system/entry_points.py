"""The entry points of installed packages, for which all packages are searched once in the life of a process. Any
thread; standard library only."""

from __future__ import annotations

import importlib.metadata
import sys
from functools import cache


def of_group(group: str) -> importlib.metadata.EntryPoints:
    """Return the entry points of a group as they were at the first call for any group."""
    return _of_all_packages().select(group=group)


@cache
def _of_all_packages() -> importlib.metadata.EntryPoints:
    """Return the entry points of what is installed; not those that lie in the present folder, on which Python's path
    begins in a notebook: a folder from elsewhere would name the code that is loaded."""
    path = [folder for folder in sys.path if folder not in ("", ".")]
    found: dict[str, importlib.metadata.Distribution] = {}
    for each in importlib.metadata.distributions(path=path):
        # `name` would parse the metadata as a mail, and torch's is long.
        found.setdefault(each._normalized_name, each)  # type: ignore[attr-defined]  # noqa: SLF001
    return importlib.metadata.EntryPoints(entry for each in found.values() for entry in each.entry_points)
