"""An optimizer's state by the names of its parameters, which do not depend on how these are sharded or numbered.

The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, which is not used because
(torch 2.13) it takes a step with an optimizer that has no state yet, and fails if a parameter never had a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from jupyter_distrib.checkpoints import layout, pickled
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.system.private_torch import WRAPPERS

Names = dict[Any, str]
"""Names by parameter (hashed by identity)."""

_OF_THE_MACHINE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options about how to compute, not what, so that each process keeps its own."""


def names_of(name: str, optimizer: Optimizer, objects: Mapping[str, Any]) -> Names:
    """Name the optimizer's parameters by the models given with it: `layer.weight`, or `generator.layer.weight` if it
    trains several.

    Raises:
        DistributedError: A parameter belongs to none of the models.
    """
    parameters = _parameters(optimizer)
    models = {key: _names(key, value) for key, value in objects.items() if isinstance(value, Module)}
    used = {key: found for key, found in models.items() if any(parameter in found for parameter in parameters)}
    names = {
        parameter: inner if len(used) == 1 else f"{key}.{inner}"
        for key, found in used.items()
        for parameter, inner in found.items()
    }
    if missing := [parameter for parameter in parameters if parameter not in names]:
        lack = f"belongs to none of {', '.join(models)}" if models else "has no name without its model"
        raise DistributedError(
            f"`{name}` trains a parameter of shape {tuple(missing[0].shape)} that {lack}: "
            "give an optimizer together with the models it trains."
        )
    return {parameter: names[parameter] for parameter in parameters}


def _parameters(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(key: str, model: Module) -> Names:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise DistributedError(
            f"`{key}` is sharded by FullyShardedDataParallel, whose optimizers cannot be saved here: shard it with "
            "torch.distributed.fsdp.fully_shard."
        )
    names: Names = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, _as_in_state(model, f"{prefix}.{name}" if prefix else name))
    return names


def _as_in_state(model: Module, name: str) -> str:
    """Return a parameter's name without the parts added by DDP, compile and activation checkpointing."""
    parts, inner = [], model
    for part in name.split("."):
        is_wrapper = part in WRAPPERS or (part == "module" and isinstance(inner, DistributedDataParallel))
        if not is_wrapper:
            parts.append(part)
        inner = getattr(inner, part)
    return ".".join(parts)


# ------------------------------------------------------------------------------------------------ to be written


def state_of(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    return {
        "state": {
            names[parameter]: {
                key: pickled.wrapped(names[parameter], value) if _is_container(value) else value
                for key, value in state.items()
            }
            for parameter, state in optimizer.state.items()
            if state
        },
        "param_groups": [
            {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
        ],
    }


def _is_container(value: Any) -> bool:
    """Return whether a value is a list, as LBFGS keeps some, or a dict."""
    return isinstance(value, (list, tuple, Mapping))


# ------------------------------------------------------------------------------------------------ to be read


def groups_place(metadata: Metadata, name: str) -> dict[str, Any]:
    """Return the entries to read first, to check whether the checkpoint fits: the groups and the names in them."""
    if not (found := layout.entries(metadata, name, "param_groups")):
        layout.refuse(f"`{name}` of the checkpoint is not the state of an optimizer")
    return {"param_groups": layout.nested(found)}


def state_place(metadata: Metadata, name: str, optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Return tensors into which to read the state: a value with the shape of its parameter is sharded like it.

    Raises:
        DistributedError: The state cannot be sharded as needed.
    """
    parameter_of = {inner: parameter for parameter, inner in names.items()}
    out: dict[str, dict[str, Any]] = {}
    for path, entry in layout.entries(metadata, name, "state").items():
        inner, key = str(path[0]), path[-1]
        if len(path) != 2 or inner not in parameter_of:
            layout.refuse(f"`{name}` of the checkpoint has state of `{inner}` that the optimizer has no place for")
        parameter = parameter_of[inner]
        place = _place(entry, parameter, optimizer.state.get(parameter, {}).get(key))
        if layout.is_tensor(entry) and place is None:
            layout.refuse(
                f"`{name}` has `{key}` of shape {layout.size(entry)} for the sharded `{inner}`, and only a step shows "
                "how that is divided (make one step before you load)"
            )
        out.setdefault(inner, {})[str(key)] = place
    return {"state": out} if out else {}


def _place(entry: layout.Entry, parameter: Parameter, now: Any) -> torch.Tensor | None:
    if not layout.is_tensor(entry):
        return None
    for like in (parameter, now):
        if isinstance(like, torch.Tensor) and layout.size(entry) == tuple(like.shape):
            return torch.empty_like(like.detach(), dtype=entry.properties.dtype)
    if isinstance(parameter, DTensor) and entry.size.numel() > 1:
        return None
    return layout.empty(entry)


def check_groups(name: str, saved: list[dict[str, Any]], optimizer: Optimizer, names: Names) -> None:
    """Refuse an optimizer whose parameters differ from the checkpoint's, or are grouped differently."""
    group_of = {inner: index for index, group in enumerate(saved) for inner in group["params"]}
    own = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    trained = [inner for group in own for inner in group]
    layout.refuse_if_any(
        f"`{name}` trains `{inner}`, which the `{name}` of the checkpoint did not"
        for inner in trained
        if inner not in group_of
    )
    layout.refuse_if_any(
        f"`{name}` does not train `{inner}`, which the `{name}` of the checkpoint did"
        for inner in group_of
        if inner not in trained
    )
    for group in own:
        if len({group_of[inner] for inner in group}) > 1:
            layout.refuse(
                f"`{name}` has `{group[0]}` and others in one parameter group, and the checkpoint has them in several"
            )


def check_order(name: str, saved: list[dict[str, Any]], optimizer: Optimizer, names: Names, schedule: str) -> None:
    """Refuse an optimizer with other parameter groups than the checkpoint's, or in another order: they are loaded by
    the names in them, but its schedule numbers them."""
    own = [{names[parameter] for parameter in group["params"]} for group in optimizer.param_groups]
    if own != [{*group["params"]} for group in saved]:
        layout.refuse(
            f"`{name}` has other parameter groups than in the checkpoint, or has them in another order, and "
            f"`{schedule}` numbers them: build them as before, or leave `{schedule}` out"
        )


def give(optimizer: Optimizer, saved: Mapping[str, Any], names: Names) -> None:
    """Load the state into the optimizer through its own `load_state_dict`, which identifies parameters by number."""
    number_of = {names[parameter]: number for number, parameter in enumerate(_parameters(optimizer))}
    options_of = {inner: group for group in saved["param_groups"] for inner in group["params"]}
    groups = []
    for group in optimizer.param_groups:
        inner = [names[parameter] for parameter in group["params"]]
        options = {**group, **options_of[inner[0]]} if inner else dict(group)
        kept = {key: group[key] for key in _OF_THE_MACHINE & group.keys()}
        groups.append({**options, **kept, "params": [number_of[each] for each in inner]})
    state = {
        number_of[inner]: {key: pickled.unwrapped(value) for key, value in values.items()}
        for inner, values in saved.get("state", {}).items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})
