"""Pickles exceptions raised by cells, so that the notebook raises them in their own type. Any thread, but not two at
once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jupyter_distrib.serialization.exception_form import builtin_arguments, rebuild_exception
from jupyter_distrib.serialization.payload import Packed, pack_result, reason_of, short_repr, unpack_value


def pack_exception(error: BaseException, *, by_value: bool, run: str) -> Packed | None:
    """Pickle an exception in a form that unpickles as its own type; None if no form does.

    Traceback, cause and context are left out. The forms are, in turn: unchanged; rebuilt without its `__init__`, whose
    arguments may not be `args`; and the same with only the arguments and attributes that can be pickled.
    """
    forms: tuple[Callable[[], object], ...] = (
        lambda: error,
        lambda: _Rebuilt(error, strict=True),
        lambda: _Rebuilt(error, strict=False),
    )
    for is_last, form in zip((False, False, True), forms, strict=True):
        try:
            packed = pack_result(form(), by_value, run)
            copy = unpack_value(packed.data, packed.buffers)
        except Exception:  # noqa: BLE001, S112 - foreign code; the next form may work
            continue
        if type(copy) is type(error) and (reason_of(copy) == reason_of(error) or (is_last and _has_text(copy, error))):
            return packed
    return None


def _has_text(copy: BaseException, error: BaseException) -> bool:
    """Return whether the copy can be shown, or the original cannot either: its `__str__` may need what is left out."""
    return not _fails_in_str(copy) or _fails_in_str(error)


def _fails_in_str(error: BaseException) -> bool:
    try:
        str(error)
    except Exception:  # noqa: BLE001 - the user's `__str__`
        return True
    return False


class _Rebuilt:
    """A wrapper that pickles as the exception, without its class's `__init__`."""

    def __init__(self, error: BaseException, *, strict: bool) -> None:
        args, state = builtin_arguments(error), vars(error)
        if not strict:
            args = _picklable_arguments(error, args)
            state = {name: value for name, value in state.items() if _is_picklable(value)}
        self._parts = type(error), args, state

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_exception, self._parts


def _picklable_arguments(error: BaseException, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments, with a text in place of each that cannot be pickled; of a group, each part by itself."""
    if isinstance(error, BaseExceptionGroup):
        return error.message, [
            each if _is_picklable(each) else _Rebuilt(each, strict=False) for each in error.exceptions
        ]
    return tuple(arg if _is_picklable(arg) else short_repr(arg) for arg in args)


def _is_picklable(value: object) -> bool:
    try:
        pack_result(value, False, "")
    except Exception:  # noqa: BLE001 - foreign code
        return False
    return True


def unpack_exception(data: bytes | memoryview, buffers: Sequence[memoryview]) -> BaseException | None:
    """Unpickle an exception and return it; None if it cannot be rebuilt in this process."""
    found = unpack_value(data, buffers)
    return found if isinstance(found, BaseException) else None
