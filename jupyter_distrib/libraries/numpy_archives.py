"""The facts about archives of numpy, `np.load("x.npz")`: the file that one reads is opened again on a rank."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

from jupyter_distrib.libraries.library import Library


def _sent(archive: Any) -> tuple[Any, ...]:
    if archive.zip is None:
        raise pickle.PicklingError("the file is closed")
    return load, (archive.zip.fp, archive.allow_pickle)


def load(file: Any, allow_pickle: bool) -> Any:
    """Return the archive in a file."""
    file.seek(0)
    return importlib.import_module("numpy").load(file, allow_pickle=allow_pickle)


NUMPY = Library(modules=("numpy",), sent={"numpy.lib.npyio:NpzFile": _sent})
