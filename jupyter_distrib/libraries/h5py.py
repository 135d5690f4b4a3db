"""The facts about h5py. A file that is open for reading is opened again on a rank, which reads it as it is then. So a
dataset class that opens its file at the first item can be used in the notebook before. One in a Python file, such as
an `io.BytesIO`, comes with its content."""

from __future__ import annotations

import importlib
import io
import os
import pickle
from typing import Any

from jupyter_distrib.libraries.library import Library


def _file(file: Any) -> tuple[Any, ...]:
    if not file:
        raise pickle.PicklingError("the file is closed")
    if file.mode != "r":
        raise pickle.PicklingError(f"{file.filename} is open for writing: open it with mode 'r', or in the cell")
    if file.driver == "fileobj":
        return open_image, (file.id.get_file_image(),)
    return open_file, (os.path.abspath(file.filename), file.swmr_mode)


def open_file(path: str, swmr: bool) -> Any:
    """Return a file of h5py, open for reading."""
    h5py: Any = importlib.import_module("h5py")
    return h5py.File(path, "r", swmr=swmr)


def open_image(data: bytes) -> Any:
    """Return the file of h5py with this content, open for reading."""
    return importlib.import_module("h5py").File(io.BytesIO(data), "r")


def _part(part: Any) -> tuple[Any, ...]:
    if not part:
        raise pickle.PicklingError("the file is closed")
    return part_of, (part.file, part.name)


def part_of(file: Any, name: str) -> Any:
    """Return a group or dataset of a file."""
    return file[name]


H5PY = Library(
    modules=("h5py",),
    sent={"h5py:File": _file, "h5py:Group": _part, "h5py:Dataset": _part},
    stays={
        "h5py:AttributeManager": "it belongs to an open file: send the file, or take dict(x.attrs) in a cell before"
    },
)
