"""Keeps the encoded lines of ranks out of the output of a Spark task: pyspark prints all output of torchrun until
its connection to the driver is up, and always if the two ends of that connection have different addresses. On the
driver's machine this is in the notebook.

In the process of a Spark task, which gets the run's token with the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from jupyter_distrib.compat.spark import lines

_tokens: set[str] = set()


class Token(str):
    """The token of a run; a Spark task that receives it prints no lines that begin with it."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return received, (str(self),)


def received(token: str) -> str:
    """Return the token. In the process of a Spark task, keep its lines out of the output from now on."""
    if _in_task():
        _tokens.add(token)
        if not isinstance(sys.stdout, _Without):
            sys.stdout = _Without(sys.stdout)
    return token


def _in_task() -> bool:
    """Return whether this is the process of a Spark task, not one that torchrun has started below it."""
    context = getattr(sys.modules.get("pyspark.taskcontext"), "TaskContext", None)
    return context is not None and context.get() is not None


class _Without:
    """Standard output without the lines of ranks."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if any(lines.is_marked(text, token) for token in _tokens):
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
