"""Chooses the parts of a model that are gathered and freed together (groups, in the terms of `fully_shard`).

Without units, the whole model is in memory while it computes. Each unit costs two all-gathers and a reduce-scatter for
each step, so small ones are not worth it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.libraries import known
from jupyter_distrib.system import private_torch
from jupyter_distrib.worker.autoparallel import ownership

LEAST_PARAMETERS = 1_000_000
"""Minimum number of parameters of a unit that the user has not requested by name."""


def units_of(root: nn.Module, asked: str = "", *, least: int = LEAST_PARAMETERS) -> list[nn.Module]:
    """Return the modules inside `root` that become units, inner ones before outer ones.

    Args:
        root: The model.
        asked: Names of classes, joined by commas. Empty: the blocks that the model repeats (the class that a model of
            `transformers` declares, else equal items of a `ModuleList` or `Sequential`), if they are large enough.
        least: Minimum number of parameters of such a block.

    Raises:
        DistributedError: No module inside has a requested class, nor has a module of another model.
    """
    inside = [module for module in root.modules() if module is not root]
    if asked:
        found = [module for name in asked.split(",") for module in _named(name.strip(), inside, root)]
    else:
        found = [module for module in _repeated(root) if _count(module) >= least]
    chosen = {id(module) for module in found if _can_be_one(module) and not _shares(module, root)}
    return [module for module in reversed(inside) if id(module) in chosen]


def _named(name: str, inside: list[nn.Module], root: nn.Module) -> list[nn.Module]:
    found = [module for module in inside if type(module).__name__ == name]
    if not found and not any(type(module).__name__ == name for module in ownership.alive(nn.Module)):
        names = list(dict.fromkeys(type(module).__name__ for module in inside))
        near = difflib.get_close_matches(name, names, 1)
        raise DistributedError(
            f"--fsdp-unit {name}: no part of {type(root).__name__} has this class; "
            + (f"did you mean {near[0]}?" if near else f"it has {', '.join(names[:10]) or 'no parts'}.")
        )
    return found


def _repeated(root: nn.Module) -> Iterator[nn.Module]:
    declared = known.repeated_blocks(root)
    if declared:
        yield from (module for module in root.modules() if type(module).__name__ in declared and module is not root)
        return
    yield from _repeated_below(root)


def _repeated_below(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and _equals(child, module.children()) > 1:
            yield child  # the outermost: blocks that it repeats itself stay inside
        else:
            yield from _repeated_below(child)


def _equals(child: nn.Module, siblings: Iterable[nn.Module]) -> int:
    return Counter(map(type, siblings))[type(child)]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _can_be_one(module: nn.Module) -> bool:
    return has_forward(module) and any(True for _ in module.parameters())


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, unlike `ModuleList` and other containers."""
    return private_torch.has_forward(type(module))


def _shares(module: nn.Module, root: nn.Module) -> bool:
    """Return whether a module shares a parameter with the rest of the model, as tied embeddings do, and so must be
    gathered with it."""
    inside = {id(part) for part in module.modules()}
    own = {id(parameter) for parameter in module.parameters()}
    others = (part for part in root.modules() if id(part) not in inside)
    return any(id(parameter) in own for part in others for parameter in part.parameters(recurse=False))
