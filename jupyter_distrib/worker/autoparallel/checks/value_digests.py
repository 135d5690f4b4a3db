"""Digests of the tensors in a kept value, by which the notebook finds where the values of ranks differ. Runs in a
rank's main thread, in a run of its own; what it returns is small, whatever the size of the value.

    summaries(model)                      name of each tensor -> shape, type, norm, digest
    pieces(model, {"0.weight": (0, 512)}) name -> digests of `PIECES` equal pieces of these elements, flattened
    elements(model, {"0.weight": 17})     name -> the element
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from jupyter_distrib.worker.autoparallel import ownership

PIECES = 64
BYTES = 64_000_000
"""Maximum number of bytes of a tensor to copy to the host at a time."""


def summaries(value: object) -> dict[str, dict[str, Any]]:
    """Return a summary of each tensor and number in the value; a shard is only marked as one."""
    return {name: _summary(each) for name, each in leaves(value)}


def pieces(value: object, spans: Mapping[str, tuple[int, int]]) -> dict[str, list[str]]:
    """Return, for each of these tensors, the digests of the pieces of a span of elements."""
    tensors = dict(leaves(value))
    found = {}
    for name, (first, end) in spans.items():
        flat = tensors[name].detach().reshape(-1)
        size = piece_size(first, end)
        found[name] = [_digest(flat[at : min(end, at + size)]) for at in range(first, end, size)]
    return found


def piece_size(first: int, end: int) -> int:
    return max(1, -(-(end - first) // PIECES))


def elements(value: object, places: Mapping[str, int]) -> dict[str, float]:
    """Return one element of each of these tensors."""
    tensors = dict(leaves(value))
    return {name: tensors[name].detach().reshape(-1)[place].item() for name, place in places.items()}


def leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers in a value, each with its name: `layer.weight`, `state.0.step`."""
    inner = getattr(value, "module", None)
    if isinstance(value, torch.nn.parallel.DistributedDataParallel) and inner is not None:
        value = inner
    match value:
        case torch.Tensor() | bool() | int() | float() | str() | None:
            yield name, value
        case torch.nn.Module():
            # Not its state_dict, which FSDP and hooks of libraries change.
            yield from ((_joined(name, key), each) for key, each in value.named_parameters())
            yield from ((_joined(name, key), each) for key, each in value.named_buffers())
        case dict():
            for key, each in value.items():
                yield from leaves(each, _joined(name, str(key)))
        case list() | tuple():
            for place, each in enumerate(value):
                yield from leaves(each, _joined(name, str(place)))
        case torch.optim.Optimizer() | torch.optim.lr_scheduler.LRScheduler():
            yield from leaves(value.state_dict(), name)
        case _:
            yield name, value


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _summary(value: object) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        plain = isinstance(value, (bool, int, float, str, type(None)))
        return {"kind": "value" if plain else "other", "text": repr(value)[:60] if plain else type(value).__name__}
    if ownership.is_sharded(value):
        return {"kind": "sharded"}
    tensor = value.detach()
    form = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_sparse or tensor.is_quantized or tensor.device.type == "meta":
        return {"kind": "other", "text": form}
    norm = tensor.to(torch.float32).norm().item() if tensor.is_floating_point() else None
    return {
        "kind": "tensor",
        "form": form,
        "norm": norm,
        "digest": _digest(tensor.reshape(-1)),
        "count": tensor.numel(),
    }


def _digest(flat: torch.Tensor) -> str:
    """Return a digest of the elements' bytes."""
    digest = hashlib.blake2b(digest_size=8)
    step = max(1, BYTES // max(1, flat.element_size()))
    for at in range(0, flat.numel(), step):
        digest.update(flat[at : at + step].cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
