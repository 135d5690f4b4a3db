"""Notices that packages have been installed, upgraded or removed since a process began. Standard library only.

The kernel asks for every cell, so the folders are listed only when the modification time of one has changed.
"""

from __future__ import annotations

import itertools
import os
import site
from collections.abc import Iterable, Iterator
from functools import lru_cache

from jupyter_distrib.system import import_path

_RECORDS = (".dist-info", ".egg-info", ".egg-link", ".pth")
"""Suffixes of the files and folders that an installer writes into a folder of packages."""
SHOWN = 4
"""Number of packages that a sentence names."""


def on_path() -> tuple[str, ...]:
    """Return the folders of packages on this process's path."""
    return tuple(
        each for each in dict.fromkeys(import_path.folders()) if each.endswith("-packages") and os.path.isdir(each)
    )


def added_first() -> tuple[str, ...]:
    """Return the folders of packages that this process has put on its path before those of its interpreter."""
    return _added_first(import_path.folders())


@lru_cache(maxsize=8)
def _added_first(path: tuple[str, ...]) -> tuple[str, ...]:
    own = _of_interpreter()
    before = itertools.takewhile(lambda folder: folder not in own, path)
    return tuple(each for each in before if _has_packages(each))


@lru_cache(maxsize=1)
def _of_interpreter() -> frozenset[str]:
    return frozenset([*site.getsitepackages(), site.getusersitepackages()])


@lru_cache(maxsize=256)
def _has_packages(folder: str) -> bool:
    """Return whether packages have been installed into a folder when it was first seen."""
    try:
        return any(each.endswith(".dist-info") for each in os.listdir(folder)) if folder else False
    except OSError:
        return False


class PackageFolders:
    """The packages in some folders, as they were when this object was made."""

    def __init__(self, folders: Iterable[str] = ()) -> None:
        self._folders = tuple(folders)
        self._times = tuple(_times(self._folders))
        self._records = frozenset(_records(self._folders))
        self._changed = ""

    @property
    def changes(self) -> str:
        """The packages that have changed, such as `numpy 2.3 and nose (removed)`; empty if none have."""
        times = tuple(_times(self._folders))
        if times != self._times:
            self._times = times
            self._changed = _summary(self._records, frozenset(_records(self._folders)))
        return self._changed


def _times(folders: Iterable[str]) -> Iterator[int]:
    """Yield the time at which each folder was last changed; an installer adds, renames or removes files there."""
    for folder in folders:
        try:
            yield os.stat(folder).st_mtime_ns
        except OSError:
            yield 0


def _records(folders: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Yield each record of a package: folder, name and time."""
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith(_RECORDS):
                        yield folder, entry.name, entry.stat(follow_symlinks=False).st_mtime_ns
        except OSError:
            continue


def _summary(before: frozenset[tuple[str, str, int]], now: frozenset[tuple[str, str, int]]) -> str:
    """Return the packages that differ."""
    there, gone = (dict(_named(name) for _, name, _ in each) for each in (now - before, before - now))
    left = {_named(name)[0] for _, name, _ in now}
    named = [f"{name} {version}".rstrip() for name, version in sorted(there.items())]
    named += [f"{name} (removed)" for name in sorted(gone.keys() - left)]
    if len(named) > SHOWN:
        named[SHOWN - 1 :] = [f"{len(named) - SHOWN + 1} others"]
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))


def _named(record: str) -> tuple[str, str]:
    """Return the package's name and version from the name of its record."""
    name, _, version = os.path.splitext(record)[0].partition("-")
    return name, version.partition("-")[0]
