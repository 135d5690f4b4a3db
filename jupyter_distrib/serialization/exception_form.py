"""The form in which exceptions are pickled if their class has an `__init__` of its own, whose arguments are not known
any more. Any thread."""

from __future__ import annotations

from typing import Any


def sent_form(error: BaseException) -> tuple[Any, ...] | None:
    """Return the reducer's tuple of an exception that Python would rebuild by its class's own `__init__`, with `args`;
    None for any other, also one that says itself how it is pickled."""
    cls: Any = type(error)
    own = [name for each in cls.__mro__ if each.__module__ != "builtins" for name in vars(each)]
    if "__init__" not in own or not {"__reduce__", "__reduce_ex__", "__setstate__", "__slots__"}.isdisjoint(own):
        return None
    return rebuild_exception, (cls, builtin_arguments(error), {}), vars(error)


def _builtin_base(cls: type) -> Any:
    """Return the builtin exception class that has the memory layout and the `__reduce__` of this one."""
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")


def builtin_arguments(error: BaseException) -> tuple[Any, ...]:
    """Return the arguments as the builtin base reports them, since `OSError` has a file name that is not in `args`."""
    args: tuple[Any, ...] = _builtin_base(type(error)).__reduce__(error)[1]
    return args


def rebuild_exception(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Make an exception without its own `__init__`. Pickles name this function."""
    base = _builtin_base(cls)
    error: BaseException = base.__new__(cls, *args)  # without the class's own `__new__`
    base.__init__(error, *args)
    vars(error).update(state)
    return error
