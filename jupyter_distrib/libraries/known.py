"""The list of all libraries in this package, and their combined answers to one question."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from jupyter_distrib.libraries.accelerate import ACCELERATE
from jupyter_distrib.libraries.composer import COMPOSER
from jupyter_distrib.libraries.datasets import DATASETS
from jupyter_distrib.libraries.deepspeed import DEEPSPEED
from jupyter_distrib.libraries.keras import KERAS
from jupyter_distrib.libraries.lightning import LIGHTNING
from jupyter_distrib.libraries.mlflow import MLFLOW
from jupyter_distrib.libraries.tensorflow import TENSORFLOW
from jupyter_distrib.libraries.tqdm import TQDM
from jupyter_distrib.libraries.transformers import TRANSFORMERS
from jupyter_distrib.libraries.trl import TRL

LIBRARIES = (ACCELERATE, COMPOSER, DATASETS, DEEPSPEED, KERAS, LIGHTNING, MLFLOW, TENSORFLOW, TQDM, TRANSFORMERS, TRL)

_DIVIDE = {module for library in LIBRARIES if library.divides_data for module in library.modules}
_WRAP = {module for library in LIBRARIES if library.wraps_models for module in library.modules}


def extras() -> dict[str, str]:
    """Return the extra of this package that installs each module, by module."""
    return {library.modules[0]: library.extra for library in LIBRARIES if library.extra}


def cpu_environment() -> dict[str, str]:
    """Return the variables that tell libraries of a rank without an accelerator."""
    return {name: value for library in LIBRARIES for name, value in library.cpu_environment.items()}


def instead_of_launching() -> str:
    """Return advice, for one sentence, in place of the calls by which libraries would start ranks of their own."""
    return ", ".join(library.instead_of_launching for library in LIBRARIES if library.instead_of_launching)


def divides_data(thing: object) -> bool:
    """Return whether `thing` is a data loader or sampler of a library that divides data itself."""
    return _top(thing) in _DIVIDE


def wraps_model(module: object) -> bool:
    """Return whether a module belongs to a library whose modules reduce the gradients of the modules inside."""
    return _top(module) in _WRAP


def shared_states() -> list[tuple[str, str]]:
    """Return modules and their classes whose instances share a state for the life of a program."""
    return [
        (module, name) for library in LIBRARIES for module, names in library.shared_states.items() for name in names
    ]


def mends() -> dict[str, Callable[[ModuleType], None]]:
    """Return the functions that are called with a module after its import, by the module's full name."""
    return {module: mend for library in LIBRARIES for module, mend in library.mend.items()}


def after_cell() -> list[tuple[str, Callable[[ModuleType], None]]]:
    """Return the functions that are called with a loaded module after each cell, each with the module's full name."""
    return [(module, end) for library in LIBRARIES for module, end in library.after_cell.items()]


def repeated_blocks(model: Any) -> set[str]:
    """Return the names of the classes that the model's own library declares as its blocks."""
    return {name for library in LIBRARIES for name in library.repeated_blocks(model)}


def _top(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]
