"""The facts about objects of numpy that pickle refuses: an archive that is read, `np.load("x.npz")`, whose file is
opened again on a rank, and a function of `np.vectorize` that has been called."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

from jupyter_distrib.libraries.library import Library


def _archive(archive: Any) -> tuple[Any, ...]:
    if archive.zip is None:
        raise pickle.PicklingError("the file is closed")
    return load, (archive.zip.fp, archive.allow_pickle)


def load(file: Any, allow_pickle: bool) -> Any:
    """Return the archive in a file."""
    file.seek(0)
    return importlib.import_module("numpy").load(file, allow_pickle=allow_pickle)


def _vectorized(function: Any) -> tuple[Any, ...]:
    """Return the form of a function without the compiled functions that it has made for its calls, and makes again."""
    names = ("pyfunc", "otypes", "__doc__", "excluded", "cache", "signature")
    own = {name: value for name, value in vars(function).items() if name[:1] != "_"}
    return vectorized, (type(function), [getattr(function, name) for name in names]), own


def vectorized(cls: Any, arguments: list[Any]) -> Any:
    """Return a function of a class whose own `__init__` may want something else."""
    made = cls.__new__(cls)
    importlib.import_module("numpy").vectorize.__init__(made, *arguments)
    return made


NUMPY = Library(
    modules=("numpy",),
    sent={"numpy.lib.npyio:NpzFile": _archive, "numpy:vectorize": _vectorized},
)
