"""The facts about pydantic. A function with `validate_call` keeps the namespace in which its annotations were read: all
of the notebook. It was read when the function was made, so an empty one takes its place."""

from __future__ import annotations

from typing import Any

from jupyter_distrib.libraries.library import Library


def _sent(resolver: Any) -> tuple[Any, ...]:
    return type(resolver), ()


PYDANTIC = Library(modules=("pydantic",), sent={"pydantic._internal._namespace_utils:NsResolver": _sent})
