"""The entry points of installed packages, which are searched once per process. Any thread; standard library only."""

from __future__ import annotations

import importlib.metadata
import os
from contextlib import suppress
from functools import cache

from jupyter_distrib.system import import_path


def of_group(group: str) -> importlib.metadata.EntryPoints:
    """Return the entry points of a group, as they were at the first call for any group."""
    return _of_all_packages().select(group=group)


@cache
def _of_all_packages() -> importlib.metadata.EntryPoints:
    """Return the entry points of installed packages, except those in the current folder: otherwise a downloaded folder
    could decide which code is loaded."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for each in importlib.metadata.distributions(path=_folders()):
        # `name` would parse the metadata as a mail, and torch's is long.
        found.setdefault(each._normalized_name, each)  # type: ignore[attr-defined]  # noqa: SLF001
    return importlib.metadata.EntryPoints(entry for each in found.values() for entry in each.entry_points)


def _folders() -> list[str]:
    """Return the folders that are on Python's path wherever this process was started.

    A notebook's path has the present folder as an empty string. It is there as an absolute path after `python -m`,
    and where PYTHONPATH has an empty or relative part, as from `PYTHONPATH=$PYTHONPATH:/opt/lib`. Then it comes
    before the standard library; folders that `.pth` files name come after that.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    relative = {"", *(each for each in given if not os.path.isabs(each))}
    here = []
    with suppress(OSError):  # the present folder is gone
        here.append(os.getcwd())
    while here and here[-1] != (above := os.path.dirname(here[-1])):
        here.append(above)  # the process may have changed to a folder below it
    of_start = {os.path.abspath(os.path.join(folder, each)) for folder in here for each in relative} - {*given}
    library = os.path.dirname(os.__file__)
    path = import_path.folders()
    front = path.index(library) if library in path else len(path)
    return [
        folder
        for place, folder in enumerate(path)
        if os.path.isabs(folder) and (place > front or folder not in of_start)
    ]
