"""Sums over tensors by which ranks compare them, in bounded memory and with a single transfer to the host. Runs in a
rank's main thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

PIECE_ELEMENTS = 1 << 22
"""Number of elements to convert at a time: 32 MB as float64."""
_LANE_BYTES = 8


def bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the sum of each tensor's bits in logical order: equal for equal contents on any device and in any layout.
    Tensors without plain memory count as 0."""
    with torch.no_grad():
        return on_host([_bits(each.detach()) for each in tensors])


def magnitudes(tensors: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
    """Return the sum of each tensor, and the sum of its absolute values."""
    with torch.no_grad():
        return [(total, scale) for total, scale in on_host([_magnitude(each.detach()) for each in tensors])]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a block of memory that can be read."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def on_host(values: Sequence[torch.Tensor]) -> list[Any]:
    """Return small tensors of one shape and type as numbers, with one synchronization per device."""
    numbers: dict[int, Any] = {}
    for device in dict.fromkeys(each.device for each in values):
        places = [place for place, each in enumerate(values) if each.device == device]
        rows = torch.stack([values[place] for place in places]).cpu().tolist()
        numbers.update(zip(places, rows, strict=True))
    return [numbers[place] for place in range(len(values))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not is_plain(tensor):
        return torch.zeros((), dtype=torch.int64, device="cpu")
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in _in_order(tensor):
        raw = piece.view(-1).view(torch.uint8)
        lanes = raw.numel() // _LANE_BYTES * _LANE_BYTES
        total += raw[:lanes].view(torch.int64).sum()  # no conversion, so no copy
        total += raw[lanes:].sum(dtype=torch.int64)
    return total


def _in_order(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield parts whose memory is in logical order and aligned to whole lanes at both ends, except at the end of the
    last one."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.is_contiguous():
        yield _aligned(tensor)
    elif tensor.dim():
        row = max(1, tensor.numel() // max(1, len(tensor)))
        rows = max(1, PIECE_ELEMENTS // row // _LANE_BYTES) * _LANE_BYTES
        yield from (_aligned(each.contiguous()) for each in torch.split(tensor, rows))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    starts_at = tensor.storage_offset() * tensor.element_size()
    return tensor.clone() if starts_at % _LANE_BYTES else tensor


def _magnitude(tensor: torch.Tensor) -> torch.Tensor:
    if not is_plain(tensor):
        return torch.zeros(2, dtype=torch.float64, device="cpu")
    total = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for piece in _pieces(torch.view_as_real(tensor) if tensor.is_complex() else tensor):
        exact = piece.to(torch.float64, copy=True)
        total[0] += exact.sum()
        total[1] += exact.abs_().sum()
    return total


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield parts of at most `PIECE_ELEMENTS` elements, in any order."""
    if tensor.numel() <= PIECE_ELEMENTS:
        yield tensor
        return
    strides = tensor.stride()
    dense = tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    if dense.is_contiguous():
        yield from torch.split(dense.view(-1), PIECE_ELEMENTS)
        return
    longest = max(range(tensor.dim()), key=tensor.size)
    for half in tensor.tensor_split(2, longest):
        yield from _pieces(half)
