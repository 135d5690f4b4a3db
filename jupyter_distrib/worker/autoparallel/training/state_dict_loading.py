"""The loading of whole state dicts, as a program for one device has saved them, into sharded models and optimizers.

Every rank has read the whole state and takes its part, so nothing is sent. On meshes with several dimensions only plain
shards are taken; for others torch raises its own error.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from jupyter_distrib.worker.autoparallel import ownership

_listening: WeakSet[Optimizer] = WeakSet()


def listen(thing: nn.Module | Optimizer) -> None:
    """Make a model or an optimizer accept whole state dicts from now on."""
    if isinstance(thing, nn.Module):
        thing.register_load_state_dict_pre_hook(_before_module)  # type: ignore[no-untyped-call]
    elif thing not in _listening:
        _listening.add(thing)
        thing.register_load_state_dict_post_hook(_after_optimizer)


def reshard(root: nn.Module) -> None:
    """Put the sharded parameters back into the model."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _before_module(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    reshard(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if prefix + name in state:
            state[prefix + name] = _part(state[prefix + name], parameter)


def _after_optimizer(optimizer: Optimizer) -> None:
    for parameter in ownership.parameters_of(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            optimizer.state[parameter][key] = _part(value, parameter)


def _part(value: Any, like: torch.Tensor) -> Any:
    """Return this rank's part of a whole tensor of the same shape; any other value unchanged."""
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == like.shape
    if not is_whole or not isinstance(like, DTensor) or any(type(p) not in (Shard, Replicate) for p in like.placements):
        return value
    value = value.to(like.to_local().device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
