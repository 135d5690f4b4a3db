"""The facts about compressed files of the standard library. One that is open for reading is opened again on a rank, at
the same place, which decompresses what is before it."""

from __future__ import annotations

import importlib
import os
import pickle
from typing import Any

from jupyter_distrib.libraries.library import Library

_MODULES = "gzip", "bz2", "lzma"


def _sent(file: Any) -> tuple[Any, ...]:
    if file.closed:
        raise pickle.PicklingError("the file is closed")
    inner = file.fileobj if hasattr(file, "fileobj") else file._fp  # noqa: SLF001 - of bz2 and lzma, in all versions
    if file.writable():
        name = getattr(inner, "name", None)
        path = os.path.abspath(os.fsdecode(name)) if isinstance(name, (str, bytes)) else "the file"
        raise pickle.PicklingError(f"{path} is open for writing, and belongs to the notebook: open it in the cell")
    cls = type(file)
    if cls.__module__ not in _MODULES:
        base = next(each for each in cls.__mro__ if each.__module__ in _MODULES)
        raise pickle.PicklingError(f"a rank opens files of {base.__module__}.{base.__qualname__} itself only")
    return open_compressed, (cls.__module__, inner, file.tell())


def open_compressed(module: str, inner: Any, position: int) -> Any:
    """Return the compressed file in another file, open for reading at a position."""
    inner.seek(0)
    file = importlib.import_module(module).open(inner, "rb")
    file.seek(position)
    return file


GZIP = Library(modules=("gzip",), sent={"gzip:GzipFile": _sent})
BZ2 = Library(modules=("bz2",), sent={"bz2:BZ2File": _sent})
LZMA = Library(modules=("lzma",), sent={"lzma:LZMAFile": _sent})
