"""Gives advice on errors that torch raises for sharded parameters, whose messages do not say what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from torch import nn

_MIXED = "got mixed torch.Tensor and DTensor"
_NOTES = {
    "out of bounds for storage of size 0": (
        "parameters of a sharded model were read after FSDP had freed them: it frees them after each pass, so that "
        "gradients cannot be differentiated again; use --strategy ddp"
    ),
    "FSDP does not support deepcopy": (
        "copy a model before its optimizer is built, which shards it, and give the copy to jupyter_distrib.prepare(), "
        "which shards that, too"
    ),
    "Expected out tensor to have dtype": (
        "the type of a sharded model was changed: change it (.half(), .double()) before the optimizer is built, which "
        "shards the model, or compute in bfloat16 by --precision bf16"
    ),
    _MIXED: (
        "the cell computes with parameters of a sharded model and with whole tensors: make gradients with backward() "
        "and not with torch.autograd.grad, copy weights of another model with load_state_dict(), prune before the "
        "optimizer is built, and give a copy of the model, such as a moving average or a target network, to "
        "jupyter_distrib.prepare(), which shards it, too; or use --strategy ddp"
    ),
}
"""Notes by a part of torch's message (2.13)."""
_COPIES = "While copying the parameter"
_COPIED = (
    "load_state_dict() was called with weights of a sharded model for one that is whole: give the whole one, such as "
    "a moving average or a target network, to jupyter_distrib.prepare(), which shards it, too, before that, or use "
    "--strategy ddp"
)
_WITHOUT_RULE = (
    "does not have a sharding strategy registered",
    "Sharding propagation failed",
    "is not supported for tensor subclasses",
)
_WHOLE = (
    "torch has no rule for this operation on a sharded parameter, gradient or state: read the whole one with "
    ".full_tensor() on every rank, change weights before the optimizer is built or with load_state_dict(), or use "
    "--strategy ddp"
)
_PART = (
    "a part or a method of a sharded model was called, and FSDP gathers the parameters when the model itself is "
    "called: call that, or register_fsdp_forward_method(model, name) of torch.distributed.fsdp"
)


def note_on(error: BaseException | None, models: Iterable[nn.Module]) -> str:
    """Return advice on an error that has ended a cell with these sharded models; empty for any other error."""
    text = str(error)
    if _MIXED in text and _COPIES in text:
        return _COPIED
    if _MIXED in text and _is_in(models, error):
        return _PART
    if note := next((note for part, note in _NOTES.items() if part in text), ""):
        return note
    return _WHOLE if any(part in text for part in _WITHOUT_RULE) else ""


def _is_in(models: Iterable[nn.Module], error: BaseException | None) -> bool:
    """Return whether an exception comes from a method of a model, or of a part of it."""
    parts = {id(part) for root in models for part in root.modules()}
    frames = traceback.walk_tb(error.__traceback__) if error is not None else ()
    return any(id(frame.f_locals.get("self")) in parts for frame, _ in frames)
