"""The forms of objects of the standard library that pickle refuses, and of objects whose own `__getattr__` would be
asked before they have attributes. Standard library only."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import gc
import io
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

Reduced = tuple[Any, ...]


def _variable(variable: contextvars.ContextVar[Any]) -> Reduced:
    """Return the form of a variable with its default and its present value."""
    values = {}
    with contextlib.suppress(LookupError):
        values["default"] = contextvars.Context().run(variable.get)
    with contextlib.suppress(KeyError):
        values["now"] = contextvars.copy_context()[variable]
    if (place := _place(variable)) is not None:
        return variable_of_module, (*place, values)
    return new_variable, (variable.name, values)


def new_variable(name: str, values: dict[str, Any]) -> Any:
    made: Any = contextvars.ContextVar(name, **{key: values[key] for key in ("default",) if key in values})
    if "now" in values:
        made.set(values["now"])
    return made


def variable_of_module(module: types.ModuleType, name: str, values: dict[str, Any]) -> Any:
    """Return a module's own variable with its present value: functions of the module read no other."""
    found = getattr(module, name)
    if "now" in values:
        found.set(values["now"])
    return found


def _local(local: threading.local) -> Reduced:
    """Return the form of a `threading.local` with what this thread has put there. The `__init__` of a subclass has run
    for this thread."""
    if (place := _place(local)) is not None:
        return getattr, place, vars(local)
    return threading.local.__new__, (type(local),), vars(local)


def _place(obj: object) -> tuple[types.ModuleType, str] | None:
    """Return the module that a rank imports and the name by which it holds an object that has no name of its own."""
    modules: list[Any] = list(sys.modules.values())  # some libraries put other objects there
    for module in modules:
        if isinstance(module, types.ModuleType) and vars(module).get("__spec__") is not None:
            for name, value in list(vars(module).items()):
                if value is obj:
                    return module, name
    return None


def _shared_library(library: ctypes.CDLL) -> Reduced:
    """Return the form of a library of C with the types that functions of it were given."""
    functions, others = {}, {}
    for name, value in vars(library).items():
        if hasattr(value, "argtypes") and not isinstance(value, type):
            functions[name] = value.argtypes, value.restype
        elif name not in _OF_LIBRARY:
            others[name] = value
    return load_library, (type(library), library._name, functions), others  # noqa: SLF001 - it is not public otherwise


_OF_LIBRARY = frozenset(vars(ctypes.CDLL(None)))
"""The attributes of a library that belong to the process."""


def load_library(cls: Any, name: str | None, functions: dict[str, tuple[Any, Any]]) -> Any:
    library = cls.__new__(cls)
    ctypes.CDLL.__init__(library, name)
    for each, (arguments, result) in functions.items():
        function = getattr(library, each)
        function.argtypes, function.restype = arguments, result
    return library


def _lock(lock: Any) -> Reduced:
    """Return the form of a free lock: the threads of each process have one of their own."""
    if not lock.acquire(blocking=False):
        raise pickle.PicklingError("a thread of the notebook holds it: send it when it is free")
    lock.release()
    return (threading.Lock if type(lock) is _LOCK else threading.RLock), ()


def _file(file: io.BufferedReader) -> Reduced:
    """Return the form of a file that is open for reading: a rank opens it again, at the same place."""
    if file.closed:
        raise pickle.PicklingError("the file is closed")
    if isinstance(file.raw, io.BytesIO):
        return open_buffer, (file.raw.getvalue(), file.tell())
    if not isinstance(file.raw, io.FileIO) or not isinstance(file.name, (str, bytes)):
        raise pickle.PicklingError("it does not read a file with a path: read from it in an earlier cell")
    path = os.path.abspath(os.fsdecode(file.name))
    try:
        is_there = os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        is_there = False
    if not is_there or not os.path.isfile(path):
        raise pickle.PicklingError(f"its file is not at {path} any more, where a rank would open it")
    return open_file, (path, file.tell())


def open_file(path: str, position: int) -> io.BufferedReader:
    """Return a file, open for reading at a position."""
    file = open(path, "rb")  # noqa: SIM115 - it belongs to the cell
    file.seek(position)
    return file


def open_buffer(data: bytes, position: int) -> io.BufferedReader:
    """Return a reader of bytes, at a position."""
    inner: Any = io.BytesIO(data)
    file: io.BufferedReader = io.BufferedReader(inner)
    file.seek(position)
    return file


def text_form(file: io.TextIOWrapper) -> Reduced:
    """Return the form of a text file that is open for reading: a rank opens it again, at the same place."""
    if file.closed:
        raise pickle.PicklingError("the file is closed")
    if isinstance(file.buffer, io.BytesIO):
        file.flush()
    elif file.writable():
        _written(file)
    if not file.seekable():
        raise pickle.PicklingError("it does not read a file with a path: read from it in an earlier cell")
    try:
        position = file.tell()
    except OSError:
        raise pickle.PicklingError(
            f"{_name(file)} is read line by line, by `for` or `next`, which hides its place: read it with readline(), "
            "or open it in the cell"
        ) from None
    return open_text, (file.buffer, file.encoding, file.errors, _newline(file, position), position)


def open_text(buffer: Any, encoding: str, errors: str | None, newline: str | None, position: int) -> io.TextIOWrapper:
    """Return a text file over a binary one, at a position."""
    file = io.TextIOWrapper(buffer, encoding, errors, newline)
    file.seek(position)
    return file


def _newline(file: io.TextIOWrapper, position: int) -> str | None:
    """Return the `newline` with which a text file was opened. Python does not tell it, but what the file refers to, in
    this order: its decoder, `newline` if it is not None, and how to treat errors."""
    file.seek(0)  # so that it holds no text that it has read ahead
    held = gc.get_referents(file)
    file.seek(position)
    decoder = next((index for index, each in enumerate(held) if hasattr(each, "decode")), len(held))
    texts = [each for each in held[decoder + 1 :] if isinstance(each, str)]
    return texts[0] if len(texts) > 1 else None


def _written(file: Any) -> Reduced:
    if file.closed:
        raise pickle.PicklingError("the file is closed")
    raise pickle.PicklingError(f"{_name(file)} is open for writing, and belongs to the notebook: open it in the cell")


def _name(file: Any) -> str:
    name = getattr(file, "name", None)
    return os.path.abspath(os.fsdecode(name)) if isinstance(name, (str, bytes)) else "the file"


_WITH_MEMORY = frozenset({"builtins", "array", "numpy"})
"""The modules of classes whose memory a view can have, and that pickle."""


def _view(view: memoryview) -> Reduced:
    """Return the form of a view: over its object if it shows all of that, else over a copy of what it shows."""
    base: Any = view.obj
    if type(base).__module__ not in _WITH_MEMORY or not view.c_contiguous or memoryview(base).nbytes != view.nbytes:
        base = view.tobytes() if view.readonly else bytearray(view.tobytes())
    return view_of, (base, view.format, view.shape, view.readonly)


def view_of(base: Any, kind: str, shape: tuple[int, ...], is_read_only: bool) -> memoryview:
    view = memoryview(base)
    if (view.format, view.shape) != (kind, shape):
        view = view.cast("B").cast(kind, shape)  # type: ignore[call-overload]
    return view.toreadonly() if is_read_only else view


ACCESSORS = property, classmethod, staticmethod
"""Classes that cloudpickle has forms for, but not for classes derived from them: `class classproperty(property)`."""


def accessor(obj: Any, others: Mapping[type, object]) -> Any:
    """Return the form of a decorator in a class body whose class is derived from one of these; for other objects, and
    those of classes that pickle themselves, NotImplemented."""
    cls: Any = type(obj)
    if cls in ACCESSORS or not issubclass(cls, ACCESSORS) or not is_plain(cls, others):
        return NotImplemented
    functions = (obj.fget, obj.fset, obj.fdel, obj.__doc__) if issubclass(cls, property) else (obj.__func__,)
    return new_accessor, (cls, functions), object.__getstate__(obj), None, None, set_attributes


def new_accessor(cls: Any, functions: tuple[Any, ...]) -> Any:
    """Return an accessor of a class with these functions, whatever its own `__new__` and `__init__` want."""
    base: Any = next(each for each in ACCESSORS if issubclass(cls, each))
    made = base.__new__(cls)
    base.__init__(made, *functions)
    return made


_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
BOTH_WAYS: dict[type, Callable[[Any], Any]] = {_LOCK: _lock, _RLOCK: _lock, memoryview: _view}
"""The functions that reduce an object for a rank and for the kernel, by its class."""
FORMS: dict[type, Callable[[Any], Any]] = {
    **BOTH_WAYS,
    io.BufferedReader: _file,
    io.BufferedWriter: _written,
    io.BufferedRandom: _written,
    contextvars.ContextVar: _variable,
    threading.local: _local,
    ctypes.CDLL: _shared_library,
}
"""The functions that reduce an object for a rank, by its class."""
_BASES = threading.local, ctypes.CDLL


def of_base(obj: Any, others: Mapping[type, object]) -> Any:
    """Return the form of an object whose class is derived from one of these; for other objects, and those of classes
    that pickle themselves or are in `others`, NotImplemented."""
    cls = type(obj)
    if not issubclass(cls, _BASES) or not is_plain(cls, others):
        return NotImplemented
    return next(FORMS[base](obj) for base in _BASES if issubclass(cls, base))


def with_getattr(obj: Any, others: Mapping[type, object]) -> Any:
    """Return the form of an object whose class has a `__getattr__`, such as a wrapper around another object; for other
    objects, and those of classes that pickle themselves or are in `others`, NotImplemented.

    To set the state, pickle asks the new object for a `__setstate__`, and such a method looks for it in an attribute
    that is not there yet.
    """
    cls: Any = type(obj)
    if (
        not isinstance(getattr(cls, "__getattr__", None), types.FunctionType)
        or hasattr(cls, "__setstate__")
        or not is_plain(cls, others)
    ):
        return NotImplemented
    reduced: Any = object.__reduce_ex__(obj, pickle.HIGHEST_PROTOCOL)
    make, arguments, state, items, pairs = reduced
    return (make, arguments, state, items, pairs, set_attributes) if state else NotImplemented


def is_plain(cls: Any, others: Mapping[type, object]) -> bool:
    """Return whether objects of a class are pickled as `object` does it; those of `others` are not."""
    return (
        not issubclass(cls, type)
        and cls not in others
        and cls.__reduce__ is object.__reduce__
        and cls.__reduce_ex__ is object.__reduce_ex__
    )


def set_attributes(obj: Any, state: Any) -> None:
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        object.__getattribute__(obj, "__dict__").update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(obj, name, value)
