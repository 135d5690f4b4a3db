"""Reloads the user's local modules when their files have changed. Runs in the rank's main thread, between runs.

Also finds the local modules that an import does not find, since a library of the same name is loaded. A module is local
if its file is outside the interpreter's own folders: next to the notebook, on its `sys.path`, or installed in place.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import Any

from jupyter_distrib.system import file_owner, import_path

_Stamp = tuple[int, int]


class LocalModules:
    """The local modules that a rank has imported, with the state of their files at that time.

    Modules that exist when this object is made are not local. New entries of a dictionary come last: only those are
    read, since reading each of two thousand names would copy the memory that a rank shares with the forkserver.
    """

    def __init__(self) -> None:
        self._baseline = frozenset(sys.modules)
        self._last = next(reversed(sys.modules))
        self._others: set[str] = set()
        self._known: dict[str, tuple[str, _Stamp | None]] = {}
        self._looked_at = _size_and_newest(sys.modules)
        """Key of `sys.modules` when all modules had been read."""
        self._libraries: set[str] = set()
        self._last_library = ""
        self._listed = (0, "")
        """The same for the folders that Python has searched for modules."""
        self._forget_listings()

    def remember(self) -> None:
        """Record the modules that the run has imported. Called before its end is sent: the next cell may write the
        files."""
        now = _size_and_newest(sys.modules)
        if now == self._looked_at:
            return
        self._looked_at = now
        for name in _since(self._last, sys.modules) - self._baseline - self._others - self._known.keys():
            path = getattr(sys.modules[name], "__file__", None)
            if isinstance(path, str) and not file_owner.is_library(path) and not _is_generated(name, path):
                self._known[name] = (path, _stamp(path))
            else:
                self._others.add(name)

    def refresh(self) -> list[str]:
        """Unload all local modules if the file of any has changed. Return the changed files.

        All are unloaded, since a module that imported the changed one holds its old functions.
        """
        changed = sorted({path for path, stamp in self._known.values() if _stamp(path) != stamp})
        if changed:
            self.unload()
        self._forget_listings()
        return changed

    def unload(self) -> None:
        """Unload all local modules."""
        for name in self._known:
            sys.modules.pop(name, None)
        self._known.clear()
        self._looked_at = (0, "")

    def imported(self) -> set[str]:
        """Return the names of modules and packages that the local modules import."""
        return set().union(*(_imported_by(path, stamp) for path, stamp in self._known.values()))

    def _forget_listings(self) -> None:
        """Drop Python's cached listings of local folders: by the clock of the file system, a file written since may
        look no newer than its folder. The listings of libraries stay: they have hundreds of folders, which do not
        change between cells."""
        cache = sys.path_importer_cache
        if _size_and_newest(cache) == self._listed:
            return
        for path in _since(self._last_library, cache) - self._libraries:
            if file_owner.is_library_folder(path):
                self._libraries.add(path)
            else:
                del cache[path]
        self._listed = _size_and_newest(cache)
        self._last_library = self._listed[1]


def hidden(names: Iterable[str], *, by_python: bool) -> dict[str, str]:
    """Return the paths of local modules, by name, that an import does not find: a library of this name was loaded when
    the rank started.

    Args:
        names: The names to look for.
        by_python: Whether to include modules of Python's own, most of which a kernel has loaded as well.
    """
    loaded = {name: _library_file(name) for name in names if by_python or name not in sys.stdlib_module_names}
    found = {name: _local_path(name, other_than=file) for name, file in loaded.items() if file}
    return {name: path for name, path in sorted(found.items()) if path}


def _library_file(name: str) -> str:
    """Return the file of a loaded module that is a library's; empty for others."""
    file = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
    return file if isinstance(file, str) and os.path.isabs(file) and file_owner.is_library(file) else ""


def _local_path(name: str, *, other_than: str) -> str:
    """Return the path of the local module or package of a name; empty if there is none. Never lists a folder, which may
    have 200,000 files."""
    real = os.path.realpath(other_than)
    for folder in _local_folders(import_path.folders()):
        path = os.path.join(folder, name)
        for file, found in ((os.path.join(path, "__init__.py"), path), (f"{path}.py", f"{path}.py")):
            if os.path.isfile(file) and os.path.realpath(file) != real:
                return found
    return ""


@lru_cache(maxsize=4)
def _local_folders(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(each for each in path if os.path.isdir(each) and not file_owner.is_library_folder(each))


_TEXT = re.compile("[#'\"]")
"""The beginning of a comment or string."""
_NAME = r"\w[\w.]*(?:\s+as\s+\w+)?"
_IMPORT = re.compile(
    rf"(?:^|[;:])\s*(?:from\s+(\w+)[\w.]*\s+import\b|import\s+({_NAME}(?:\s*,\s*{_NAME})*)\s*(?=$|[;\\]))"
)
"""An import in a line; a parse would take milliseconds at each cell."""


def imported_in(text: str) -> set[str]:
    """Return the names of modules and packages that a program imports, also in its functions: `os` for `os.path`."""
    statements = (
        each
        for line in text.splitlines()
        if "import" in line
        for each in _IMPORT.finditer(_TEXT.split(line, maxsplit=1)[0])
    )
    return {name.split(".")[0].split()[0] for each in statements for name in (each[1] or each[2]).split(",")}


@lru_cache(maxsize=1 << 14)
def _imported_by(path: str, _: _Stamp | None) -> set[str]:
    """Return what a local module imports; its stamp makes cached results expire."""
    if not path.endswith(".py"):
        return set()
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            return imported_in(file.read())
    except OSError:
        return set()


_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "HF_MODULES_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that name the folders in which libraries keep code that they have downloaded or generated."""
_GENERATED = ("transformers_modules", "datasets_modules", "evaluate_modules", "diffusers_modules")
"""Packages in which Hugging Face's libraries import code from their caches."""


def _is_generated(name: str, path: str) -> bool:
    """Return whether a library has written this module into its cache, where no user will change it."""
    if name.partition(".")[0] in _GENERATED:
        return True
    folders = [os.path.expanduser("~/.cache"), *filter(None, map(os.environ.get, _CACHES))]
    return os.path.realpath(path).startswith(tuple(os.path.realpath(each) + os.sep for each in folders))


def drop_orphans() -> None:
    """Clean up after an import that did not complete: Python has removed the package from `sys.modules` but not its
    submodules, so that the next import finds them and fails (`module 'sympy' has no attribute 'core'`)."""
    for name in sorted(sys.modules):  # a package comes before what is inside it
        package = name.rpartition(".")[0]
        if package and package not in sys.modules:
            del sys.modules[name]


of_forkserver: LocalModules | None = None
"""The local modules of the process that this one was forked from."""


def _since(last: str, entries: dict[str, Any]) -> set[str]:
    """Return the names added after `last`, and possibly some earlier ones; all, if `last` is no longer an entry."""
    count = 64
    while True:
        newest = list(islice(reversed(entries), count))  # in one step: other threads may add entries
        if last in newest or len(newest) < count:
            return set(newest)
        count *= 4


def _size_and_newest(entries: dict[str, Any]) -> tuple[int, str]:
    """Return a key that changes when an entry is added."""
    return len(entries), next(reversed(entries), "")


def _stamp(path: str) -> _Stamp | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size
