"""The form of the facts about one library. Every field but one has a default: most libraries need few of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from types import ModuleType
from typing import Any

from jupyter_distrib.system.data_class import data_class


@data_class
class Library:
    """The facts about a library."""

    modules: tuple[str, ...]
    """The top-level modules by which it is imported."""
    extra: str = ""
    """The extra of this package that installs the first of them."""
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    """The variables for the environment of a rank without an accelerator."""
    instead_of_launching: str = ""
    """The advice in place of a call that starts processes as ranks: the end of a sentence that begins with `With`."""
    divides_data: bool = False
    """Whether data loaders and samplers of its classes give each rank its share already."""
    wraps_models: bool = False
    """Whether modules of its classes reduce the gradients of the modules inside."""
    shared_states: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The classes, by module, whose instances use the class's `_shared_state` as `__dict__`; the first one fills it."""
    mend: Mapping[str, Callable[[ModuleType], None]] = field(default_factory=dict)
    """The functions, by module, that replace parts of a module when a rank has imported it."""
    after_cell: Mapping[str, Callable[[ModuleType], None]] = field(default_factory=dict)
    """The functions, by module, that are called with a loaded module after each cell on a rank."""
    repeated_blocks: Callable[[Any], Collection[str]] = lambda model: ()
    """A function that returns the names of the classes that a model of the library declares as its blocks."""
