"""The facts about LMDB. An environment that is open for reading is opened again on a rank, once for all that hold it: a
process may not open one twice. What the rank no longer uses is closed, so that a cell can open it itself."""

from __future__ import annotations

import importlib
import os
import pickle
import weakref
from typing import Any

from jupyter_distrib.libraries.library import Library

_MOST_DATABASES = 64
"""The maximum number of named databases; LMDB does not tell how many the notebook's environment allows."""
_opened: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
"""The environments that this rank has opened in place of the notebook's, by device and inode: a new file may have the
same name by now."""


def _sent(environment: Any) -> tuple[Any, ...]:
    flags, info = environment.flags(), environment.info()
    if not flags["readonly"]:
        raise pickle.PicklingError("it is open for writing: open it with readonly=True, or in the cell")
    options = {name: flags[name] for name in ("subdir", "lock", "readahead")}
    options |= {name: info[name] for name in ("map_size", "max_readers")}
    return open_environment, (os.path.abspath(environment.path()), options)


def open_environment(path: str, options: dict[str, Any]) -> Any:
    """Return the environment, open for reading."""
    lmdb: Any = importlib.import_module("lmdb")
    file = os.stat(os.path.join(path, "data.mdb") if options["subdir"] else path)
    key = file.st_dev, file.st_ino
    environment: Any = _opened.get(key)
    try:
        environment.flags()
    except (AttributeError, lmdb.Error):  # not yet, or the cell has closed it
        environment = _opened[key] = lmdb.open(path, readonly=True, max_dbs=_MOST_DATABASES, **options)
    return environment


LMDB = Library(modules=("lmdb",), sent={"lmdb:Environment": _sent})
