"""Exceptions that stand in for those of a rank which the kernel cannot have, or must not raise. Kernel side."""

from __future__ import annotations

import asyncio
import bdb
import builtins
from functools import lru_cache
from typing import Any

from jupyter_distrib.errors import RemoteError

SHOWN_ANOTHER_WAY = (
    SyntaxError, BaseExceptionGroup, SystemExit, GeneratorExit, asyncio.CancelledError, bdb.BdbQuit
)  # fmt: skip
"""Types that IPython or ipykernel treat specially, without a call of `_render_traceback_`: they would print our frames
or nothing, end the kernel, or count as cancelled. A `RemoteError` of the same name takes their place and has them as
`original`."""


def remote_error(type_name: str, message: str) -> RemoteError:
    """Return a `RemoteError` that pickles, whose class has the name of the exception that it replaces.

    In place of a builtin exception, it is also caught as that type: `except KeyError` works.
    """
    return _remote_type(type_name)(message)


class _StandIn(RemoteError):
    type_name = ""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)  # not super(): a builtin beside this class may require other arguments

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return remote_error, (self.type_name, self.args[0]), dict(self.__dict__)


@lru_cache(maxsize=256)
def _remote_type(type_name: str) -> type[_StandIn]:
    module, _, name = type_name.rpartition(".")
    bases: tuple[type[_StandIn], ...] | tuple[type[_StandIn], type[Exception]] = (_StandIn,)
    builtin = getattr(builtins, type_name, None)
    if isinstance(builtin, type) and issubclass(builtin, Exception) and not issubclass(builtin, SHOWN_ANOTHER_WAY):
        bases = (_StandIn, builtin)

    namespace = {"__module__": module or RemoteError.__module__, "type_name": type_name}
    return type(name or "RemoteError", bases, namespace)
