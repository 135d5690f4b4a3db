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
    make, arguments, state, *rest = (*function.__reduce_ex__(4), None)[:5]
    if isinstance(state, tuple):  # of a class with `__slots__`
        state = tuple(_without_compiled(each) for each in state)
    return make, arguments, _without_compiled(state), *rest


def _without_compiled(state: Any) -> Any:
    """Return the attributes with the caches of numpy empty: what a new function has as private dictionaries."""
    if not isinstance(state, dict):
        return state
    new = vars(importlib.import_module("numpy").vectorize(len))
    caches: dict[str, Any] = {
        name: {} for name, value in new.items() if name.startswith("_") and isinstance(value, dict)
    }
    return {name: caches.get(name, value) for name, value in state.items()}


NUMPY = Library(
    modules=("numpy",),
    sent={"numpy.lib.npyio:NpzFile": _archive, "numpy:vectorize": _vectorized},
)
