"""The facts about one library. All fields but one have a default, since most libraries need few of them."""

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
    """Its top-level modules."""
    extra: str = ""
    """The extra of this package that installs the first of them."""
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for a rank without an accelerator."""
    instead_of_launching: str = ""
    """Advice on what to call instead of the library's launcher: part of a sentence, such as `with X call ...`."""
    divides_data: bool = False
    """Whether its data loaders, data sets and samplers already give each rank its share."""
    adds_up_metrics: bool = False
    """Whether its metrics always add up over the ranks, so that each should evaluate a share."""
    comes_before: str = ""
    """The libraries that it patches and must be imported before, in words."""
    wraps_models: bool = False
    """Whether its wrapper modules reduce the gradients of the modules inside."""
    shared_states: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The classes, by module, whose instances use the class's `_shared_state` as `__dict__`; the first one fills it. It
    describes the process, so instances are not sent."""
    prepares_loaders: str = ""
    """The class (`module:name`) in `shared_states` whose state is set while the library itself shards data loaders, as
    Accelerate does once there is an `Accelerator`."""
    sent: Mapping[str, Callable[[Any], tuple[Any, ...]]] = field(default_factory=dict)
    """Functions, by class as `module:name`, that reduce an instance for a rank, as `__reduce_ex__` does."""
    stays: Mapping[str, str] = field(default_factory=dict)
    """Classes, as `module:name`, whose instances stay in the notebook, each with the reason and what to do."""
    mend: Mapping[str, Callable[[ModuleType], None]] = field(default_factory=dict)
    """Functions, by module, that patch a module when a rank has imported it."""
    after_cell: Mapping[str, Callable[[ModuleType], None]] = field(default_factory=dict)
    """Functions, by module, that are called with a loaded module after each cell on a rank."""
    repeated_blocks: Callable[[Any], Collection[str]] = lambda model: ()
    """Returns the class names that a model of the library declares as its blocks."""
