"""The form of what one file says of one library. Every field has a default: most libraries need few of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The facts about a library."""

    modules: tuple[str, ...]
    """The top-level modules by which it is imported."""
    extra: str = ""
    """The extra of this package that installs the first of them."""
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    """What has to stand in the environment of a rank without an accelerator."""
    instead_of_launching: str = ""
    """What to write where it would start processes that are ranks: the end of a sentence that begins with `With`."""
    divides_data: bool = False
    """Data loaders and samplers of its classes are shares already."""
    wraps_models: bool = False
    """Modules of its classes look after the gradients of what they hold."""
    shared_states: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By module: classes whose instances have the class's `_shared_state` as their `__dict__`; the first fills it."""
    mend: Mapping[str, Callable[[ModuleType], None]] = field(default_factory=dict)
    """By module: a function that replaces parts of it, called when a rank has imported it."""
    repeated_blocks: Callable[[Any], Collection[str]] = lambda model: ()
    """Returns the names of the classes that a model of it declares as its blocks."""
