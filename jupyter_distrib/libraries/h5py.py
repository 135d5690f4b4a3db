"""The facts about h5py. A file that is open for reading is opened again on a rank, which reads it as it is then. So a
dataset class that opens its file at the first item can be used in the notebook before."""

from __future__ import annotations

import importlib
import os
import pickle
from typing import Any

from jupyter_distrib.libraries.library import Library


def _file(file: Any) -> tuple[Any, ...]:
    if not file:
        raise pickle.PicklingError("the file is closed")
    if file.mode != "r":
        raise pickle.PicklingError("the file is open for writing: open it with mode 'r', or in the cell")
    return open_file, (os.path.abspath(file.filename), file.swmr_mode)


def open_file(path: str, swmr: bool) -> Any:
    """Return a file of h5py, open for reading."""
    h5py: Any = importlib.import_module("h5py")
    return h5py.File(path, "r", swmr=swmr)


def _part(part: Any) -> tuple[Any, ...]:
    if not part:
        raise pickle.PicklingError("the file is closed")
    return part_of, (part.file, part.name)


def part_of(file: Any, name: str) -> Any:
    """Return a group or dataset of a file."""
    return file[name]


H5PY = Library(modules=("h5py",), sent={"h5py:File": _file, "h5py:Group": _part, "h5py:Dataset": _part})
