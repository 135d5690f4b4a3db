"""Lists the files of folders, and lists a folder anew only when it has changed. Runs in the coordinator's loop.

A folder's time of change tells of files that came and went, not of what was written into them: whoever wants to know
that looks at each file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})
_ENVIRONMENT = "pyvenv.cfg"
"""Name of the file that every virtual environment has."""
_COARSE_NS = 2_000_000_000
"""Age below which a time of change does not tell: file systems may count in whole seconds, and the clock of a server
may differ a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """The entries of one folder, sorted."""

    mtime_ns: int
    """Time of change that the folder had before it was listed; -1 if that was too close to the listing to tell."""
    files: Sequence[tuple[str, str]]
    """Name and path of each file."""
    folders: Sequence[tuple[str, str]]
    """Name and path of each folder."""
    is_environment: bool


_NOTHING = _Listing(mtime_ns=-1, files=(), folders=(), is_environment=False)


class FolderListings:
    """The listings of all folders that were looked through."""

    def __init__(self) -> None:
        self._known: dict[str, _Listing] = {}

    def walk(self, folder: str, inside: str = "") -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
        """Yield each folder in it by its name there (`""`, `deep/`), with the name and path of each of its files.
        Leaves out hidden files, what Python or npm made, and environments."""
        listing = self._listing(folder)
        if inside and listing.is_environment:
            return
        yield inside, listing.files
        for name, path in listing.folders:
            yield from self.walk(path, f"{inside}{name}/")

    def _listing(self, folder: str) -> _Listing:
        known = self._known.get(folder, _NOTHING)
        try:
            mtime_ns = os.stat(folder).st_mtime_ns
            if mtime_ns != known.mtime_ns:
                self._known[folder] = known = _listed(folder, mtime_ns)
        except OSError:  # gone or not readable: there is nothing to take from it
            self._known.pop(folder, None)
            return _NOTHING
        return known


def _listed(folder: str, mtime_ns: int) -> _Listing:
    age_ns = time.time_ns() - mtime_ns
    files, folders, is_environment = [], [], False
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            name = entry.name
            is_environment |= name == _ENVIRONMENT
            if name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                if name not in _LEFT_OUT:
                    folders.append((name, entry.path))
            elif not name.endswith((".ipynb", ".pyc")) and not entry.is_dir():
                files.append((name, entry.path))
    known_ns = mtime_ns if age_ns > _COARSE_NS else -1
    return _Listing(mtime_ns=known_ns, files=files, folders=folders, is_environment=is_environment)
