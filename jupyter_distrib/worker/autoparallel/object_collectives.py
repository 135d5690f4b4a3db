"""Exchanges values between ranks over the process group, as JSON and tensors: nothing sent by another rank is
unpickled. Collective; runs in the rank's main thread.

JSON has neither tuples nor tensors, so those, and dicts, whose keys may have any type, are marked:

    (1, 2)      {"tuple": [1, 2]}
    {3: "a"}    {"dict": [[3, "a"]]}
    b"\\x00"     {"bytes": "00"}
    a tensor    {"tensor": ["float32", [2, 3]]}     its contents follow in a broadcast of their own
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch
import torch.distributed as dist

from jupyter_distrib.worker.pytorch import private

_PLAIN = frozenset({type(None), bool, int, float, str})


class OtherRanks:
    """The other ranks, which this rank asks. A dry run has none, and `dry_run/world.py` answers in their place."""

    have_values = True
    """Whether tensors have contents, so that they can be compared between ranks."""

    def gather(self, own_value: Any, group: Any = None) -> list[Any]:
        """Return the values of all ranks of a group; see `gather`."""
        data, device = json.dumps(own_value).encode(), _device()
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
        lengths = [int(size) for size in sizes]
        every = [torch.empty(max(lengths), dtype=torch.uint8, device=device) for _ in sizes]
        dist.all_gather(every, _as_tensor(data.ljust(max(lengths))).to(device), group=group)
        return [json.loads(_read(tensor, length)) for tensor, length in zip(every, lengths, strict=True)]

    def from_rank_0(self, own_value: Any) -> Any:
        """Return the value of rank 0; see `from_rank_0`."""
        leads, tensors = dist.get_rank() == 0, list[torch.Tensor]()
        data = _text(own_value, tensors).encode() if leads else b""
        device = _device()
        size = torch.tensor([len(data)], device=device)
        dist.broadcast(size, src=0)
        content = _as_tensor(data).to(device) if leads else torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(content, src=0)
        value = _decoded(json.loads(_read(content, int(size))), tensors if leads else None)
        return own_value if leads else value

    def copy_from_rank_0(self, tensors: list[torch.Tensor], size_bytes: int) -> None:
        """Give every rank the contents that these tensors have on rank 0, in pieces of this size."""
        private.broadcast(tensors, size_bytes)


others = OtherRanks()
"""The other ranks of this process."""


def gather(own_value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks of a group, in rank order.

    Args:
        own_value: A value that JSON can hold; its tuples arrive as lists.
        group: The process group; None: all ranks.
    """
    return others.gather(own_value, group)


def from_rank_0(own_value: Any) -> Any:
    """Return the value of rank 0, with its tensors on the CPU.

    Raises:
        TypeError: The value of rank 0 holds something that cannot be sent; the error names its type, on every rank.
    """
    return others.from_rank_0(own_value)


def _text(value: Any, tensors: list[torch.Tensor]) -> str:
    try:
        return json.dumps(_encoded(value, tensors))
    except Exception as error:  # noqa: BLE001 - of the user's objects, and a value that holds itself; the others wait
        tensors.clear()
        return json.dumps({"error": str(error) if type(error) is TypeError else type(error).__name__})


def _encoded(value: Any, tensors: list[torch.Tensor]) -> Any:
    cls = type(value)
    if cls in _PLAIN:
        return value
    if cls in (list, tuple):
        items = value if set(map(type, value)) <= _PLAIN else [_encoded(item, tensors) for item in value]
        return items if cls is list else {"tuple": list(items)}
    if issubclass(cls, dict):
        return {"dict": [[_encoded(key, tensors), _encoded(item, tensors)] for key, item in value.items()]}
    if cls is bytes:
        return {"bytes": value.hex()}
    if cls in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if cls.__module__ == "numpy" and getattr(value, "shape", None) == () and type(value.item()) in _PLAIN:
        return value.item()
    raise TypeError(f"{cls.__module__}.{cls.__qualname__}")


def _decoded(value: Any, tensors: list[torch.Tensor] | None) -> Any:
    """Return the value that was encoded.

    Args:
        value: The encoded value, from JSON.
        tensors: On rank 0, the tensors that are still to be sent.
    """
    if isinstance(value, list):
        return value if set(map(type, value)) <= _PLAIN else [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tuple":
            return tuple(_decoded(item, tensors) for item in content)
        case "dict":
            return {_decoded(key, tensors): _decoded(item, tensors) for key, item in content}
        case "bytes":
            return bytes.fromhex(content)
        case "tensor":
            return _received(content, tensors)
    raise TypeError(str(content))


def _received(form: list[Any], tensors: list[torch.Tensor] | None) -> torch.Tensor:
    name, shape = form
    if tensors is None:
        tensor = torch.empty(shape, dtype=getattr(torch, name), device="cpu")
    else:
        tensor = tensors.pop(0).detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tensor.numel():
        content = tensor.view(-1).view(torch.uint8).to(_device())  # gloo does not know every type
        dist.broadcast(content, src=0)
        tensor = content.cpu().view(tensor.dtype).view(tensor.shape)
    return tensor


def _device() -> str:
    """Return the device whose tensors the group accepts: the CPU, unless a cell or script created a group for GPUs
    only."""
    backends = private.backends(dist.group.WORLD)
    return backends.partition(":")[0] if backends and "cpu:" not in backends else "cpu"


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read(tensor: torch.Tensor, length: int) -> bytes:
    tensor = tensor.cpu()
    return ctypes.string_at(tensor.data_ptr(), length)
