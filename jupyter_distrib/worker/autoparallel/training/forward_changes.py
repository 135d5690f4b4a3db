"""Refuses parameters that the code of a sharded model replaces, or changes in `forward()`: FSDP puts back the sharded
ones behind it, so the change would be lost, as is one by `parameter.data = value`. Rank's main thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.worker.autoparallel import object_collectives, ownership
from jupyter_distrib.worker.autoparallel.checks import tensor_sums
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.pytorch import private

_gathered: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
"""Sums of the bits of a module's parameters when its first forward pass in training began; empty before that."""


def refuse_replacing(models: Callable[[], Iterable[nn.Module]]) -> Callable[[], None]:
    """Refuse from now on to replace a parameter of a sharded model; return the function that ends this.

    Args:
        models: Returns the sharded models.
    """

    def registering(module: nn.Module, name: str, new: Any) -> None:
        old = private.own_parameters(module).get(name)
        if old is None or old is new or isinstance(new, DTensor):  # a whole state dict comes with the latter
            return
        if _is_by_fsdp():
            return
        for root in models():
            for prefix, part in root.named_modules():
                if part is module:
                    raise _lost(root, f"{prefix}.{name}" if prefix else name, "replaced")

    return register_module_parameter_registration_hook(registering).remove


def refuse_setting_data(patches: Patches, models: Callable[[], Iterable[nn.Module]]) -> None:
    """Refuse from now on `parameter.data = value` for parameters of sharded models: torch (2.13) changes nothing then,
    since a `DTensor` goes on with the shard that it had.

    Args:
        patches: Replaces attributes for the time of the cell.
        models: Returns the sharded models.
    """
    data: Any = torch.Tensor.data

    def set_data(tensor: Any, value: torch.Tensor) -> None:
        for root in models():
            for name, each in root.named_parameters():
                if each is tensor and not _is_same_shard(tensor, value):
                    raise DistributedError(
                        f"`{name}` is a parameter of {ownership.named_plainly([root])}, which is sharded, and `.data = "
                        "...` would not change its shard: write parameter.data.copy_(value), and clone() what is to "
                        "come back later, or use --strategy ddp."
                    )
        data.__set__(tensor, value)

    patches.put(DTensor, "data", property(data.__get__, set_data))


def _is_same_shard(tensor: Any, value: torch.Tensor) -> bool:
    with torch.no_grad():
        return isinstance(value, DTensor) and value.to_local().data_ptr() == tensor.to_local().data_ptr()


def _is_by_fsdp() -> bool:
    """Return whether FSDP itself replaces a parameter: in modules with a `__setattr__` of their own, such as `nn.LSTM`,
    it does so as the user's code would."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    while frame is not None and (_module(frame).startswith("torch.nn.") or frame.f_code.co_name == "__setattr__"):
        frame = frame.f_back
    return frame is not None and _module(frame).startswith("torch.distributed.fsdp.")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def refuse_other_tensors(modules: Iterable[nn.Module]) -> None:
    """Refuse from now on a forward pass with other tensors in place of the parameters that FSDP gathers for it, as by
    `torch.func.functional_call`, or by a parameter that is tied to another one later: it would compute with its own.

    Args:
        modules: The modules that FSDP gathers.
    """
    for module in modules:
        module.register_forward_pre_hook(_refuse_others, prepend=True)  # before that of FSDP


def _refuse_others(module: nn.Module, *_: object) -> None:
    if torch.compiler.is_compiling() or (found := private.replaced_parameter(module)) is None:
        return
    part, last = found
    prefix = next((prefix for prefix, each in module.named_modules() if each is part), "")
    raise DistributedError(
        f"`{f'{prefix}.{last}' if prefix else last}` is a parameter of {ownership.named_plainly([module])}, which is "
        "sharded, and the cell has put another tensor in its place (as torch.func.functional_call does): FSDP would "
        "compute with its own parameter instead. Tie weights before the optimizer is built, copy other weights into "
        "the model with load_state_dict(), or use --strategy ddp."
    )


def watch_first_pass(modules: Iterable[nn.Module]) -> None:
    """Compare the parameters of modules that FSDP gathers, before and after their first forward pass in training."""
    if not object_collectives.others.have_values:
        return
    for module in modules:
        _gathered[module] = {}
        module.register_forward_pre_hook(_before_forward)
        module.register_forward_hook(_after_forward, prepend=True)  # before that of FSDP


def _before_forward(module: nn.Module, *_: object) -> None:
    if module in _gathered and module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _gathered[module] = _bits(module)


def _after_forward(module: nn.Module, *_: object) -> None:
    if not _gathered.get(module) or torch.compiler.is_compiling():
        return
    before, after = _gathered.pop(module), _bits(module)
    for name, bits in before.items():
        if after.get(name, bits) != bits:
            raise _lost(module, name, "changed")


def _bits(module: nn.Module) -> dict[str, int]:
    """Return the sums of the bits of the parameters that are gathered with the module."""
    names = {
        f"{prefix}.{name}" if prefix else name: each
        for prefix, part in module.named_modules()
        if not getattr(part, "max_norm", None)  # an embedding that is normalized again wherever it is read
        for name, each in private.own_parameters(part).items()
        if each is not None and not isinstance(each, DTensor)
    }
    return dict(zip(names, tensor_sums.bits(list(names.values())), strict=True))


def _lost(model: nn.Module, name: str, what: str) -> DistributedError:
    return DistributedError(
        f"`{name}` is a parameter of {ownership.named_plainly([model])}, which is sharded, and is {what} by the code "
        "itself: FSDP puts the sharded parameter back, so this would be lost. Make it a buffer (register_buffer), or "
        "use --strategy ddp; what happens only in the first call can happen in one before the optimizer is built."
    )
