"""The facts about Triton. A kernel holds a lock and what was compiled for the notebook's GPU, so it is built again on a
rank from its function."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any

from jupyter_distrib.libraries.library import Library


def _sent(kernel: Any) -> tuple[Any, ...]:
    function, cls = kernel.fn, type(kernel)
    module = sys.modules.get(function.__module__)
    if function.__module__ != "__main__" and getattr(module, function.__qualname__, None) is kernel:
        return operator.attrgetter(function.__qualname__), (module,)
    own = vars(kernel)
    names = list(inspect.signature(cls).parameters)[1:]
    # Triton (3.6) keeps `repr` as `_repr`.
    return build, (cls, function, {name: own.get(name, own.get(f"_{name}")) for name in names})


def build(cls: Callable[..., Any], function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Return the kernel of a function."""
    return cls(function, **{name: value for name, value in options.items() if value is not None})


TRITON = Library(modules=("triton",), sent={"triton.runtime.jit:JITFunction": _sent})
