"""Functions and classes that exist in two processes: where each came from, and each process's own object for it.

A notebook's function or class travels to a rank by value, under a key. When the rank returns it, or an instance of it,
only the key travels, so the notebook gets its own object back and nothing in it is touched. cloudpickle alone would
send its definition again and set the attributes of the notebook's class anew: methods would get the rank's globals.

    kernel                          rank                            kernel
    sent_form(Net)  --by value-->   keeps the key     --key-->      `resolve` gives Net
                                    a class of the cell --value-->  made once, however many ranks return it
    share(Net)                      share(Net)                      each stands for the other (`%%distributed_setup`)

Only this file uses private names of cloudpickle; `system/private_names.py` lists them. All state is weak and per
process; callers use one thread at a time.

Raises `PayloadError` when it is imported with a cloudpickle that lacks one of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import sys
import types
import typing
import uuid
import weakref
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from cloudpickle import cloudpickle

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.system import annotation_texts, private_names

Reduced = tuple[Any, ...]
"""The result of a reducer: `(callable, arguments, state, None, None, state_setter)` for a function or class by
value."""

_by_key: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_sent: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Objects sent by this process (a kernel), with their keys."""
_received: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Objects that this process (a rank) received from a kernel, with their keys."""
_named_in_main: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Functions and classes of the notebook that this process (a rank) has received, by name: the newest of each name."""
_unfinished: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that were created but have no attributes yet."""
_bare_names: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()
"""The names in the `__dict__` of a received class before its own attributes were set."""
_named: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of this rank that already have an identity common to all ranks."""
_namesakes: tuple[str, Counter[str]] = ("", Counter())
"""The newest run, and the number of its named classes by definition."""


try:
    private_names.check(private_names.CLOUDPICKLE)
except private_names.MissingNameError as missing:
    raise PayloadError(str(missing)) from None


def is_by_value(reduced: object) -> bool:
    """Return whether cloudpickle's reducer chose to send a function or class by value."""
    if not isinstance(reduced, tuple) or len(reduced) != 6:
        return False
    setters = (cloudpickle._class_setstate, cloudpickle._function_setstate)  # noqa: SLF001
    return any(reduced[5] is setter for setter in setters)


def is_importable(cls: type) -> bool:
    """Return whether a class is pickled by module and name."""
    found: bool = cloudpickle._should_pickle_by_reference(cls)  # noqa: SLF001
    return found


def module_of_globals(function: types.FunctionType) -> types.ModuleType | None:
    """Return the module that a rank imports and whose names a function has as its globals; None if it is another."""
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    if not isinstance(module, types.ModuleType) or vars(module) is not function.__globals__:
        return None
    is_imported: bool = cloudpickle._should_pickle_by_reference(module)  # noqa: SLF001
    return module if is_imported and module.__name__ not in ("__main__", "__mp_main__") else None


# ---------------------------------------------------------------------------------------- the code of functions


def code_form(code: types.CodeType) -> Reduced:
    """Return cloudpickle's form of a code object, with its file name, which tracebacks and `inspect` need to find the
    source; cloudpickle leaves it out since 3.1.3."""
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)[:2]
    return make_code, (code.co_filename, make, arguments)


def make_code(filename: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    code = make(*arguments)
    return code if code.co_filename == filename else code.replace(co_filename=filename)


def cell_form(cell: types.CellType, sent: Callable[[Any], object] = lambda value: value) -> Reduced:
    """Return the form of a variable that inner functions share: made empty, since its value may be such a function.
    `sent` returns what to send for the value."""
    try:
        value = (sent(cell.cell_contents),)
    except ValueError:
        return empty_cell, ()
    return empty_cell, (), value, None, None, fill_cell


def empty_cell() -> types.CellType:
    return types.CellType()


def fill_cell(cell: types.CellType, value: tuple[object]) -> None:
    cell.cell_contents = value[0]


def with_own_cells(obj: Any, reduced: Reduced) -> Reduced:
    """Return the form of a function with its own cells, so that functions share them afterwards as well; cloudpickle
    gives each function new ones. Other objects keep their form."""
    if not isinstance(obj, types.FunctionType) or not obj.__closure__:
        return reduced
    make, arguments, *rest = reduced
    return make, (*arguments[:-1], obj.__closure__), *rest


def cached_property_form(property_: Any) -> Reduced:
    """Return the form of a `functools.cached_property`, which has a lock before Python 3.12."""
    return make_cached_property, (property_.func, property_.attrname)


def make_cached_property(function: Callable[..., Any], name: str | None) -> Any:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def new_type_form(new_type: Any) -> Reduced | str:
    """Return the form of a `typing.NewType`: its name, as it pickles itself, or its value if it is the notebook's."""
    if new_type.__module__ != "__main__":
        return str(new_type.__reduce__())
    return typing.NewType, (new_type.__name__, new_type.__supertype__)


def parameter_form(parameter: Any) -> Reduced | str:
    """Return the form of a `ParamSpec` or `TypeVarTuple`, for which the same holds."""
    if parameter.__module__ != "__main__":
        return str(parameter.__reduce__())
    return type(parameter), (parameter.__name__,)


def with_own_bases(obj: Any, reduced: Reduced) -> Reduced:
    """Return the form of a class with the bases from which it can be made: a `TypedDict` is given `dict` by its
    metaclass, which refuses it from others. Other objects keep their form."""
    if not isinstance(obj, type) or "__total__" not in vars(obj) or obj.__bases__ != (dict,):
        return reduced
    make, (metaclass, name, _, *others), *rest = reduced
    return make, (metaclass, name, (), *others), *rest


DISPATCH_TABLE = ChainMap(
    {
        types.CodeType: code_form,
        types.CellType: cell_form,
        functools.cached_property: cached_property_form,
        typing.NewType: new_type_form,
        typing.ParamSpec: parameter_form,
        typing.TypeVarTuple: parameter_form,
    },
    cloudpickle.Pickler.dispatch_table,
)
"""Dispatch table for pickling functions and classes by value: cloudpickle's, and what it lacks."""


# ---------------------------------------------------------------------------------------- kernel to rank, by value


def sent_form(obj: Any, reduced: Reduced, namespace: dict[str, object], live: dict[str, object]) -> Reduced:
    """Return the form in which the kernel sends its function or class: cloudpickle's, with a key to identify it, and
    with the names of the notebook in its string annotations.

    Args:
        obj: The function or class.
        reduced: cloudpickle's form.
        namespace: The names of the notebook.
        live: The stand-in for the run's namespace in the pickle.
    """
    key = _key_of_sent(obj)
    make, arguments, state = reduced[:3]
    if names := _in_annotations(obj, namespace):
        if isinstance(obj, type):
            state = state[0], {**state[1], _ANNOTATED: (live, names)}
        elif obj.__globals__ is namespace:
            state[1]["__globals__"] = {**names, **state[1]["__globals__"]}
    if isinstance(obj, type):
        return find_or_make_class, (key, obj.__qualname__, make, arguments), state, None, None, _finish_received_class
    return make, arguments, (key, state), None, None, _finish_received_function


_ANNOTATED = "__annotated__"
"""The key in the state of a class for the names that its annotations read."""
_PLAIN = (type, types.ModuleType, types.FunctionType, bool, int, float, str, type(None))


def _in_annotations(obj: Any, namespace: dict[str, object]) -> dict[str, object]:
    """Return the notebook's types, modules, functions and plain values that string annotations of a function or
    class name."""
    names = annotation_texts.names_of(obj)
    return {name: namespace[name] for name in sorted(names & namespace.keys()) if _is_of_types(namespace[name])}


def _is_of_types(value: object) -> bool:
    cls = type(value)
    return issubclass(cls, _PLAIN) or cls.__module__ in ("typing", "types", "typing_extensions")


def _key_of_sent(obj: Any) -> str:
    key = _sent.get(obj)
    if key is None:
        key = tracker_id(obj) if isinstance(obj, type) else uuid.uuid4().hex
        _sent[obj] = key
        _by_key[key] = obj
    return key


def tracker_id(cls: type) -> str:
    found: str = cloudpickle._get_or_create_tracker_id(cls)  # noqa: SLF001
    return found


def find_or_make_class(key: str, name: str, make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Return this process's class for the key, else a new one without attributes.

    cloudpickle's own makers build a class before they look, which calls `__init_subclass__` of the user's bases again,
    and they forget the outer part of a nested class's `__qualname__`.
    """
    known: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(key)  # noqa: SLF001
    if known is not None:
        return known
    with _keywords_not_needed(arguments):
        cls = make(*arguments)
    type.__setattr__(cls, "__qualname__", name)
    _unfinished.add(cls)
    return cls


@contextlib.contextmanager
def _keywords_not_needed(arguments: tuple[Any, ...]) -> Iterator[None]:
    """Replace the methods of the user's metaclass and bases that take keywords of a `class` statement, which are not
    known here. What they have done to the class comes with its attributes."""
    hidden: list[tuple[type, str, object]] = []
    if isinstance(arguments[0], type):
        metaclass, _, bases, *_ = arguments
        known = [(metaclass, name) for name in ("__prepare__", "__new__", "__init__")]
    else:  # an `Enum`, which has no other metaclass
        bases, known = arguments[0], []
    known += [(base, "__init_subclass__") for base in types.resolve_bases(bases)]
    try:
        for origin, name in known:
            for cls in origin.__mro__:
                method = vars(cls).get(name)
                if _takes_keywords(method, _POSITIONAL[name]) and not is_importable(cls):
                    hidden.append((cls, name, method))
                    type.__setattr__(cls, name, _without_keywords(cls, name))
        yield
    finally:
        for cls, name, method in hidden:
            type.__setattr__(cls, name, method)


_POSITIONAL = {"__prepare__": 3, "__new__": 4, "__init__": 4, "__init_subclass__": 1}
"""The number of arguments that Python itself gives to these methods."""


def _takes_keywords(method: object, positional: int) -> bool:
    function = getattr(method, "__func__", method)
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    return code.co_argcount > positional or code.co_kwonlyargcount > 0


def _without_keywords(owner: type, name: str) -> object:
    """Return a method in place of one that takes keywords: the next one in line, without them."""

    def call(cls: Any, *arguments: Any, **_: Any) -> Any:
        following = getattr(super(owner, cls), name)
        return following(cls, *arguments) if name == "__new__" else following(*arguments)

    if name == "__init__":
        return call
    return staticmethod(call) if name == "__new__" else classmethod(call)


def _finish_received_class(cls: type, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Set the attributes of a received class; a class from an earlier run gets exactly the kernel's present
    attributes."""
    if cls in _sent:  # kernel and rank are one process (the pool for tests): this is the notebook's own class
        return
    live, names = state[1].pop(_ANNOTATED, ({}, {}))
    live.update(names)
    if cls in _unfinished:
        _unfinished.discard(cls)
        _bare_names[cls] = frozenset(vars(cls))
    elif cls in _bare_names:
        for name in vars(cls).keys() - _bare_names[cls] - state[0].keys():
            delattr(cls, name)
    cloudpickle._class_setstate(cls, state)  # noqa: SLF001
    key = tracker_id(cls)
    _received[cls] = key
    _by_key.setdefault(key, cls)
    _find_by_name(cls)


def _finish_received_function(function: types.FunctionType, state: tuple[str, Any]) -> None:
    key, own_state = state
    cloudpickle._function_setstate(function, own_state)  # noqa: SLF001
    _received[function] = key
    _by_key.setdefault(key, function)
    _find_by_name(function)


def _find_by_name(obj: Any) -> None:
    if obj.__module__ == "__main__" and obj.__qualname__.isidentifier():
        _named_in_main[obj.__qualname__] = obj


def received_by_name() -> Mapping[str, Any]:
    """Return the functions and classes of the notebook that have come with this cell's values, by name. The cell itself
    may not name them: `torch.save(model)` looks for the model's class."""
    return _named_in_main


def forget_names() -> None:
    """Forget what has come with earlier cells; the notebook may have defined it anew."""
    _named_in_main.clear()


def cached_form(function: Any, *, sent: bool) -> Reduced | str:
    """Return the form of a function with `functools.lru_cache`: its name or, which cloudpickle lacks, its value."""
    name: str = function.__reduce__()
    module = sys.modules.get(function.__module__)
    if function.__module__ != "__main__" and getattr(module, name, None) is function:
        return name
    key = _key_of_sent(function) if sent else None
    return make_cached, (key, function.__wrapped__, function.cache_parameters())


def make_cached(key: str | None, function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    made = functools.lru_cache(**parameters)(function)
    if key is not None:
        _received[made] = key
        _by_key.setdefault(key, made)
    return made


_DISPATCH = functools.singledispatch(lambda x: None).__code__  # type: ignore[attr-defined]  # typeshed has no function
"""Code object shared by all `functools.singledispatch` functions."""


def dispatches(obj: object) -> bool:
    """Return whether an object is a function with `functools.singledispatch`, which cloudpickle cannot send."""
    return isinstance(obj, types.FunctionType) and obj.__code__ is _DISPATCH


def dispatch_form(function: Any, *, sent: bool) -> Reduced | None:
    """Return the form of a function with `functools.singledispatch` by value; None if it travels by its name."""
    if _is_importable_function(function):
        return None
    key = _key_of_sent(function) if sent else None
    default = function.registry[object]
    others = {cls: each for cls, each in function.registry.items() if cls is not object}
    return make_dispatching, (key, default), others, None, None, _register


def _is_importable_function(function: types.FunctionType) -> bool:
    """Return whether a function is pickled by module and name."""
    found: bool = cloudpickle._should_pickle_by_reference(function)  # noqa: SLF001
    return found


def make_dispatching(key: str | None, default: Callable[..., Any]) -> Any:
    made = functools.singledispatch(default)
    if key is not None:
        _received[made] = key
        _by_key.setdefault(key, made)
    return made


def _register(function: Any, others: dict[type, Callable[..., Any]]) -> None:
    for cls, each in others.items():
        function.register(cls, each)


# ---------------------------------------------------------------------------------------- defined on both sides


def share(names: Iterable[str], namespace: Mapping[str, Any], prefix: str, *, sent: bool) -> None:
    """Give the functions and classes that the same source has defined in the kernel and on a rank the same keys, so
    that each counts as the other's counterpart.

    Args:
        names: The names that the source binds.
        namespace: The names of this process.
        prefix: A text that stands for the source.
        sent: Whether this process is the kernel.
    """
    known = _sent if sent else _received
    _namespaces[prefix] = namespace
    for path, obj in _defined(names, namespace):
        if obj in known:
            continue  # the name was not defined by this source
        key = f"{prefix}/{path}"
        known[obj] = key
        _by_key[key] = obj
        if isinstance(obj, type):
            cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.pop(key, None)  # noqa: SLF001 - the class of an earlier execution
            cloudpickle._lookup_class_or_track(key, obj)  # noqa: SLF001


_namespaces: dict[str, Mapping[str, Any]] = {}
"""The names that shared sources have bound in this process, by their prefixes."""


def forget_shared(prefix: str) -> None:
    """Free the values that a shared source has bound in this process, which will not be asked for again."""
    _namespaces.pop(prefix, None)


def shared_value(prefix: str, name: str) -> Any:
    """Return the value that a shared source has bound to this name in this process. Raises `PayloadError` if it has
    not run."""
    if prefix not in _namespaces or name not in _namespaces[prefix]:
        raise PayloadError(f"`{name}` comes from a set-up that has not run on this rank")
    return _namespaces[prefix][name]


def _defined(names: Iterable[str], namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield functions and classes of `__main__`, also classes within classes, with their paths."""
    for name in names:
        obj = namespace.get(name)
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            yield name, obj
        if isinstance(obj, type) and obj.__module__ == "__main__":
            inner = {
                each: value
                for each, value in vars(obj).items()
                if isinstance(value, type) and value.__qualname__ == f"{obj.__qualname__}.{each}"
            }
            yield from ((f"{name}.{path}", value) for path, value in _defined(inner, inner))


# ---------------------------------------------------------------------------------------- rank to kernel


def key_of_received(obj: Any) -> str | None:
    return _received.get(obj)


def reference(obj: Any, key: str, by_value: bytes | None) -> Reduced:
    """Return the form in which a rank returns an object of the kernel."""
    return resolve, (key, obj.__qualname__, by_value)


def resolve(key: str, name: str, by_value: bytes | None) -> Any:
    """Return this process's object for a key.

    Args:
        key: The key that the kernel gave to the object when it sent it.
        name: The name of the object in the notebook.
        by_value: A pickle of it, used only if the key is unknown because another kernel reads a detached run.

    Raises:
        PayloadError: The key is unknown and there is no pickle.
    """
    found = _by_key.get(key)
    if found is None and by_value is not None:
        found = _by_key[key] = pickle.loads(by_value)
    if found is None:
        raise PayloadError(f"it belongs to `{name}` of the notebook, which was deleted or defined anew since")
    return found


def name_class(cls: type, run: str) -> None:
    """Give a class of the cell the same identity on every rank of the run.

    The identity consists of the run and the definition, since ranks may define different classes under one name.
    """
    global _namesakes
    if cls in _named:
        return
    if _namesakes[0] != run:
        _namesakes = (run, Counter())
    definition = _digest(cls)
    _namesakes[1][definition] += 1
    key = f"{run}/{definition}/{_namesakes[1][definition]}"
    cloudpickle._lookup_class_or_track(key, cls)  # noqa: SLF001
    _named.add(cls)


def _digest(cls: type) -> str:
    parts = [cls.__qualname__, *(f"{name}={_outline(cls.__dict__[name])}" for name in sorted(cls.__dict__))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _outline(value: object, depth: int = 6) -> str:
    """Return a text that differs between two definitions of a class attribute and is the same in every process."""
    if depth == 0:
        return type(value).__qualname__
    inner = functools.partial(_outline, depth=depth - 1)
    match value:
        case bool() | int() | float() | str() | bytes() | None:
            return repr(value)
        case types.FunctionType():
            return f"{inner(value.__code__)}{_cells(value)}"
        case types.CodeType():
            constants = "".join(map(inner, value.co_consts))
            return f"{value.co_firstlineno}{value.co_code.hex()}{value.co_names}{constants}"
        case classmethod() | staticmethod():
            return inner(value.__func__)
        case property():
            return "".join(map(inner, (value.fget, value.fset, value.fdel)))
        case dict():
            return ",".join(f"{key!s}:{inner(item)}" for key, item in islice(value.items(), 100))
        case tuple() | list():
            return ",".join(map(inner, islice(value, 100)))
        case type():
            return value.__qualname__
        case _:
            return type(value).__qualname__


def _cells(function: types.FunctionType) -> str:
    outlines = []
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue  # empty: a name that is assigned later
        if isinstance(content, (bool, int, float, str, bytes)):
            outlines.append(repr(content))
    return ",".join(outlines)


def new_form(cls: type, reduced: Reduced) -> Reduced:
    """Return the form in which a rank returns a class of the cell: its definition, which the kernel instantiates
    once."""
    make, arguments, state = reduced[:3]
    identity = tracker_id(cls), cls.__qualname__
    return find_or_make_class, (*identity, make, arguments), state, None, None, _finish_new_class


def _finish_new_class(cls: type, state: Any) -> None:
    if cls in _unfinished:
        _unfinished.discard(cls)
        cloudpickle._class_setstate(cls, state)  # noqa: SLF001
