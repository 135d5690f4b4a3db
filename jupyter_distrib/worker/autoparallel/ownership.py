"""Finds the owners of an optimizer's parameters among the modules alive in this rank, through the garbage collector.

Objects that the forkserver has imported are frozen (`gc.freeze`) and not searched. Objects that the rank has
imported since are searched, which takes some 10 ms with a collection of garbage.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from jupyter_distrib.system import file_owner, private_torch

T = TypeVar("T")

REACH = 200_000
holders: WeakSet[nn.Module] = WeakSet()
"""The modules that this package has wrapped around the user's, to average gradients. They own nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The modules and tensors that hold an optimizer's parameters."""

    roots: tuple[nn.Module, ...]
    """Outermost modules that own any of the parameters, in the order of the parameters."""
    loose: tuple[torch.Tensor, ...]
    """Parameters that no module owns."""


def alive(kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Return the live objects of this kind, or these kinds, after collecting garbage in reference cycles."""
    gc.collect()
    return present(kind)


def present(kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Return the objects of this kind, or these kinds, including garbage that has not been collected."""
    # Not isinstance(): it reads the `__class__` of the object, which may run any code of a proxy.
    things = gc.get_objects()
    return list(compress(things, map(issubclass, map(type, things), repeat(kind))))


def within_reach(things: Sequence[T], start: object) -> list[T]:
    """Return which of the things can be reached from `start`, such as the cell's variables.

    Gives up on a heap of more than `REACH` objects, and then returns all of the things.
    """
    if not things:
        return []  # in a new rank, the rest takes 0.1 s
    wanted, reached = {id(thing) for thing in things}, set[int]()
    # A function's globals lead to its whole library, which may hold things of earlier cells, on some of the ranks.
    loaded = [vars(each) for each in list(sys.modules.values()) if issubclass(type(each), ModuleType)]
    libraries = {id(names) for names in loaded if file_owner.is_library(str(names.get("__file__")))}
    seen, edge = libraries | {id(start)}, [start]
    most = len(seen) + REACH
    while edge and len(reached) < len(wanted):
        following = [
            each
            for each in gc.get_referents(*edge)
            if id(each) not in seen and gc.is_tracked(each) and not issubclass(type(each), (type, ModuleType))
        ]
        edge = list({id(each): each for each in following}.values())
        seen |= {id(each) for each in edge}
        reached = wanted & seen
        if len(seen) > most:
            return list(things)
    return [thing for thing in things if id(thing) in reached]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def owners_of(parameters: Sequence[torch.Tensor], modules: Iterable[nn.Module] | None = None) -> Owners:
    """Return the outermost modules that own these parameters, and the parameters that no module owns.

    Args:
        parameters: The parameters.
        modules: All live modules, if already known.
    """
    wanted = {id(parameter) for parameter in parameters}
    modules = alive(nn.Module) if modules is None else modules
    owning = [
        module
        for module in modules
        if any(id(each) in wanted for each in own_parameters(module)) and module not in holders
    ]
    inside = {id(child) for module in owning for child in module.modules() if child is not module}
    roots = [unwrapped(module) for module in owning if id(module) not in inside]
    first = {id(each): place for place, each in reversed(list(enumerate(parameters)))}
    roots.sort(key=lambda module: min(first[id(each)] for each in module.parameters() if id(each) in first))
    owned = {id(each) for module in roots for each in module.parameters()}
    return Owners(
        roots=tuple({id(module): module for module in roots}.values()),
        loose=tuple(each for each in parameters if id(each) not in owned),
    )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module behind a `torch.compile` wrapper; any other module unchanged."""
    found: nn.Module = private_torch.unwrapped(module)
    return found


def compiled(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return which of these modules `torch.compile` has compiled as a whole."""
    if private_torch.COMPILER not in sys.modules:
        return []
    if all(unwrapped(each) is each for each in present(nn.Module)):
        originals = set[int]()  # a collection of garbage takes longer
    else:
        originals = {id(unwrapped(each)) for each in alive(nn.Module) if unwrapped(each) is not each}
    return [each for each in modules if id(each) in originals or private_torch.is_compiled_in_place(each)]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is sharded, by `fully_shard` or by a plan for tensor parallelism."""
    loaded = sys.modules.get("torch.distributed.tensor")  # its import takes a second, if it is not loaded yet
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def without_shape(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any of these has no shape yet, because its module (`LazyLinear`) was never called."""
    return any(map(is_lazy, parameters))


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    try:
        yield from module.parameters()
    except AttributeError:  # its __init__ has not called nn.Module's yet
        return


def named(modules: Iterable[nn.Module]) -> str:
    """Return the names of the modules' classes, for messages: `Net` or `Generator, Critic`."""
    return ", ".join(dict.fromkeys(type(module).__name__ for module in modules))


def named_plainly(modules: Iterable[nn.Module]) -> str:
    """Return the names of the modules' classes without the prefix that `fully_shard` adds."""
    return ", ".join(dict.fromkeys(plain_class(type(module)).__name__ for module in modules))


def plain_class(cls: type) -> type:
    """Return the user's class, from which `fully_shard` (2.13) derives one: `FSDPNet(FSDPModule, Net)`."""
    is_sharded = len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule"
    return cls.__bases__[1] if is_sharded else cls


def tensors_of(modules: Iterable[nn.Module], loose: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters and buffers of the modules, and the loose tensors, each once."""
    tensors: list[Any] = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return list({id(tensor): tensor for tensor in (*tensors, *loose)}.values())
