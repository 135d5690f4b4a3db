"""Tells whether another process of this environment would import a module of this one under the same name. On any
side."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from jupyter_distrib.system import file_owner


def is_only_here(name: str) -> bool:
    """Return whether a loaded module, or its package, exists in this process only: the user has put it into
    `sys.modules`, or has loaded it from a file that is not where an import looks for that name."""
    package, _, _ = name.rpartition(".")
    if package in sys.modules and is_only_here(package):
        return True
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType) or name in ("__main__", "__mp_main__"):
        return False
    names = vars(module)
    file = names.get("__file__")
    if file is None:
        is_plain = not package and names.get("__spec__") is None and names.get("__path__") is None
        return is_plain and _has_python(names) and _found(name, package) is None
    if not isinstance(file, str) or not file_owner.is_users(file) or file.endswith(tuple(EXTENSION_SUFFIXES)):
        return False
    path = getattr(sys.modules.get(package), "__path__", ()) if package else sys.path
    return not _is_found(name, package, file, tuple(map(str, path)))


def _has_python(names: dict[str, Any]) -> bool:
    """Return whether a module without a file has functions of Python; a module that Cython makes has none."""
    own = [
        each for value in list(names.values()) for each in (vars(value).values() if type(value) is type else [value])
    ]
    return any(isinstance(each, FunctionType) and each.__globals__ is names for each in own)


@lru_cache(maxsize=4096)  # each pickle asks for its modules, and a search takes 0.1 ms
def _is_found(name: str, package: str, file: str, _: tuple[str, ...]) -> bool:
    """Return whether an import would load a module from this file; the last argument is where it looks."""
    found = _found(name, package)
    origin = None if found is None else found.origin
    return isinstance(origin, str) and os.path.realpath(origin) == os.path.realpath(file)


def _found(name: str, package: str) -> ModuleSpec | None:
    """Return where an import looks for a module, by the means that every process of this environment has."""
    path = getattr(sys.modules.get(package), "__path__", None)
    if package and path is None:
        return None
    for finder in sys.meta_path:
        if _is_users(getattr(finder, "__module__", "")):
            continue
        search: Any = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None
        with suppress(Exception):  # a finder of some library
            spec = search(name, path)
        if spec is not None:
            return spec
    return None


def _is_users(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (isinstance(file, str) and file_owner.is_users(file))
