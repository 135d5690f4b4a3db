"""Shards a module by torch's `fully_shard`: either refuses before anything has changed, or shards all of it. A sharded
model and its optimizer load whole state dicts, of which each rank takes its part. Collective; rank's main thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.system import private_torch
from jupyter_distrib.worker.autoparallel import ownership, traced
from jupyter_distrib.worker.autoparallel.training import weight_sync
from jupyter_distrib.worker.autoparallel.training.units import has_forward
from jupyter_distrib.worker.pytorch import private, randomness


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """A plan for sharding a model, by the options."""

    data: DeviceMesh | None
    """Mesh dimension of the ranks that see different data, over which parameters are sharded; None: all ranks see the
    same data."""
    model: bool = False
    """Whether the user shards parameters over other dimensions of the mesh."""
    unit: str = ""
    compute: torch.dtype | None = None
    """Data type for computing; None: that of the weights."""
    offload: bool = False


New = dict[int, tuple[Any, Any]]
"""Old and new parameter, by the `id` of the old one."""


def callable_parts(module: nn.Module) -> list[nn.Module]:
    """Return the module, or the parts of a container that has no `forward`, since FSDP acts when a module is called."""
    if scripted := next((part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)), None):
        raise DistributedError(
            f"{scripted.original_name} is compiled by torch.jit, and FSDP shards modules of Python only: "
            "call torch.jit.script after the training, or use --strategy ddp."
        )
    if has_forward(module):
        return [module]
    if own := next(module.parameters(recurse=False), None):
        raise DistributedError(
            f"{type(module).__name__} has no forward(), but a parameter of its own, of shape {tuple(own.shape)}: "
            "nobody calls the module, so the parameter cannot be gathered. Put it into a module that is called."
        )
    return [
        part for child in module.children() if any(True for _ in child.parameters()) for part in callable_parts(child)
    ]


def check(root: nn.Module) -> None:
    """Raise `DistributedError` for models that `fully_shard` would refuse only after sharding half of them."""
    name = type(root).__name__
    if part := next((part for part in root.modules() if isinstance(part, FSDPModule)), None):
        raise DistributedError(
            f"{name} has a part that is sharded already ({ownership.named_plainly([part])}): shard all of it "
            "yourself, or "
            "nothing, and build a model around one that --strategy fsdp has sharded before its first optimizer."
        )
    for key, part in root.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise DistributedError(
                f"{f'{name}.{key}' if key else name} has sparse gradients, which FSDP cannot divide: make it with "
                "sparse=False, or use --strategy ddp."
            )
    for key, parameter in root.named_parameters():
        if parameter.dim() == 0:
            raise DistributedError(
                f"{name}.{key} is a single number without a dimension, which cannot be sharded: give it the shape "
                "(1,), or use --strategy ddp."
            )
        if not parameter.is_contiguous() and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.contiguous()


def refuse_gradient_hooks(root: nn.Module) -> None:
    """Raise `DistributedError` for hooks that change or read a parameter's gradient, which FSDP (2.13) never calls."""
    for name, parameter in root.named_parameters():
        if private_torch.has_gradient_hook(parameter):
            raise DistributedError(
                f"`{name}` is a parameter of {ownership.named_plainly([root])} with a hook for its gradient "
                "(register_hook), which is not called if the model is sharded: change its .grad after backward(), or "
                "use --strategy ddp."
            )


def synchronize_weights(root: nn.Module, data: DeviceMesh | None) -> None:
    """Give every rank the weights of rank 0; weights that are sharded over other dimensions of the mesh come from the
    first rank along `data`."""
    tensors = [each for each in ownership.tensors_of([root], []) if not isinstance(each, DTensor) and not each.is_meta]
    every = weight_sync.fingerprints_of_all(tensors)
    if not weight_sync.same_form(every):
        raise DistributedError(
            f"{type(root).__name__} has different parameters on different ranks: build it identically on all of them."
            + randomness.why_apart()
        )
    if any(each != every[0] for each in every):
        weight_sync.copy_from_rank_0(tensors)
    for each in root.parameters():
        if data is not None and isinstance(each, DTensor):
            dist.broadcast(each.to_local().detach(), group=data.get_group(), group_src=0)


def shard(root: nn.Module, units: Sequence[nn.Module], plan: ShardingPlan) -> New:
    """Shard a module in place. Return the new parameter for each old one."""
    before = [
        (module, name, parameter)
        for module in root.modules()
        for name, parameter in private.own_parameters(module).items()
        if parameter is not None
    ]
    grads = {id(parameter): parameter.grad for _, _, parameter in before}
    hooks = {id(parameter): private_torch.hooks_of(parameter) for _, _, parameter in before}
    normalizing = _in_full_precision(root) if plan.compute else []
    for module in normalizing:
        for name, buffer in module.named_buffers(recurse=False):
            private.set_buffer(module, name, buffer.float() if buffer.is_floating_point() else buffer)
    for module in (*normalizing, *units, root):
        if not isinstance(module, FSDPModule):
            policy = MixedPrecisionPolicy() if plan.compute is None else _precision(module, root, plan.compute)
            fully_shard(module, mesh=plan.data, mp_policy=policy, offload_policy=_offload(plan))
    root.register_forward_hook(traced.reshard_after_evaluation)
    for module in (*units, root):
        accept_whole_state_dicts(module)
    new_of: New = {id(old): (old, private.own_parameters(module)[name]) for module, name, old in before}
    for old, new in new_of.values():
        if (grad := grads[id(old)]) is not None:
            new.grad = _sharded_like(grad, new)
        for attribute, own in hooks[id(old)].items():
            setattr(new, attribute, own)  # the same dict, which handles remove their hook from
    return new_of


def _in_full_precision(root: nn.Module) -> list[nn.Module]:
    """Return the batch normalizations, which sum over a batch and so need full precision, as in torch's autocast."""
    return [module for module in root.modules() if isinstance(module, private.BatchNorm) and module is not root]


def _precision(module: nn.Module, root: nn.Module, compute: torch.dtype) -> MixedPrecisionPolicy:
    if isinstance(module, private.BatchNorm):
        return MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=compute)
    output = torch.float32 if module is root else None
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, output_dtype=output)


def place(root: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Move a sharded model to the rank's device; with `offload`, only its buffers, since FSDP then requires the shards
    on the CPU."""
    if not offload:
        if any(each.device != device for each in (*root.parameters(), *root.buffers())):
            root.to(device)
        return
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            private.set_buffer(module, name, buffer.to(device))


def _offload(plan: ShardingPlan) -> OffloadPolicy:
    return CPUOffloadPolicy() if offloads(plan) else OffloadPolicy()


def offloads(plan: ShardingPlan) -> bool:
    return plan.offload and plan.data is not None and plan.data.device_type != "cpu"


def shard_state(optimizer: Optimizer, new_of: New) -> None:
    """Shard an optimizer's state in the same way as its parameters."""
    for _, new in new_of.values():
        for key, value in optimizer.state.get(new, {}).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == new.shape:
                optimizer.state[new][key] = _sharded_like(value, new)


def _sharded_like(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    local = like.to_local()
    return distribute_tensor(value.to(local.device), like.device_mesh, like.placements)


_listening: WeakSet[Optimizer] = WeakSet()


def accept_whole_state_dicts(thing: nn.Module | Optimizer) -> None:
    """Make a model or an optimizer accept whole state dicts from now on."""
    if isinstance(thing, nn.Module):
        thing.register_load_state_dict_pre_hook(_before_loading_module)  # type: ignore[no-untyped-call]
    elif thing not in _listening:
        _listening.add(thing)
        thing.register_load_state_dict_post_hook(_after_loading_optimizer)


def reshard(root: nn.Module) -> None:
    """Put the sharded parameters back into the model."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _before_loading_module(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    reshard(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if prefix + name in state:
            state[prefix + name] = _own_part(state[prefix + name], parameter)


def _after_loading_optimizer(optimizer: Optimizer) -> None:
    for parameter in ownership.parameters_of(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            optimizer.state[parameter][key] = _own_part(value, parameter)


def _own_part(value: Any, like: torch.Tensor) -> Any:
    """Return this rank's part of a whole tensor of the same shape; any other value unchanged."""
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == like.shape
    if not is_whole or not isinstance(like, DTensor) or any(type(p) not in (Shard, Replicate) for p in like.placements):
        return value
    value = value.to(like.to_local().device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
