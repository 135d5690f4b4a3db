"""The definition of a named pool, by a file or by `%distributed_pool add`: its possible options and names. Kernel
side, no state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings.cell_options import OPTIONS, Options
from jupyter_distrib.kernel.settings.settings import NOTEBOOK, NamedPool, Settings
from jupyter_distrib.options import Declared, Option
from jupyter_distrib.pools.base import capabilities_of

_OF_SIZE = ("gpus", "ranks", "gpu_type")
_DEFAULTS = ("strategy", "wait_s", "max_capture", "cache")
"""Options of a cell, besides the size, for which a pool may give a default."""


def add(settings: Settings, name: str, kind: str, values: Mapping[str, Any]) -> NamedPool:
    """Return a pool for this notebook alone, from the options of `%distributed_pool add`. Raises `OptionsError`."""
    check_name(name, kind, settings.kinds)
    own = {option.name for option in settings.kinds[kind]}
    return NamedPool(
        name=name,
        kind=kind,
        options={key: value for key, value in values.items() if key in own},
        **for_cells({"wait_s" if key == "wait" else key: value for key, value in values.items() if key not in own}),
        origin=NOTEBOOK,
    )


def of_kinds(kinds: Declared, strategies: Declared) -> Declared:
    """Return the options that can be set for a pool, for each kind whose pools can be named."""
    return {kind: options_of(kind, kinds, strategies) for kind in nameable(kinds)}


def options_of(kind: str, kinds: Declared, strategies: Declared) -> tuple[Option, ...]:
    """Return the options that can be set for a pool of this kind."""
    common = [replace(option, keyword="") if option.name == "wait_s" else option for option in OPTIONS]
    chosen = [option for option in common if field_of(option) in (*_OF_SIZE, *_DEFAULTS)]
    choices = {"strategy": tuple(strategies)}
    return (*(replace(option, choices=choices.get(option.name, ())) for option in chosen), *kinds[kind])


def field_of(option: Option) -> str:
    """Return the field of `Options` for an option in a file, where `wait` is spelt like the flag."""
    return "wait_s" if option.name == "wait" else option.name


def for_cells(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `NamedPool` for the values of cells that omit these options."""
    size = Options(**{key: values[key] for key in _OF_SIZE if key in values}).size
    return {"size": size, "defaults": {key: values[key] for key in _DEFAULTS if key in values}}


def nameable(kinds: Declared) -> list[str]:
    return [kind for kind in kinds if capabilities_of(kind).nameable]


def check_name(name: str, kind: str, kinds: Declared) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
        raise OptionsError(f"{name!r} cannot name a pool: use letters, digits, _, . and -, a letter first")
    if name in kinds and not capabilities_of(name).nameable:
        raise OptionsError(f"{name} is a kind of pool without options: choose another name for this pool")
    if name in kinds and kind and name != kind:
        raise OptionsError(f"{name} is itself a kind of pool: choose another name for a pool of the kind {kind}")
