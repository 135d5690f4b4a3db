"""Recurrent layers on tensors without values: cuDNN's kernel in place of the steps, what kernels keep for the backward
pass, and packed sequences, whose lengths are guessed. Process of a dry run.
"""

# ruff: noqa: SLF001 - private names, listed in `system/private_names.py`
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""The numbers of the layers for cuDNN."""
_KEPT_BY_CUDNN = {0: 2, 1: 2, 2: 6, 3: 5}
"""The states of a layer and time step that cuDNN keeps for the backward pass, by these numbers: an estimate, since
torch (2.13) asks cuDNN itself. An LSTM has four gates and two states."""
_KEPT_BY_ONEDNN = 16
"""The same of an LSTM on the CPU, as measured (torch 2.13)."""


def with_reserve(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Return the result of an operation; for a recurrent layer with what its kernel keeps for the backward pass, which
    torch's fake kernels leave out."""
    if func is aten._cudnn_rnn.default:
        x, hidden, mode, width, layers, trains, both = (args[place] for place in (0, 4, 6, 7, 9, 12, 13))
        steps = x.numel() // x.shape[-1] if trains else 0
        count = _KEPT_BY_CUDNN[mode] * steps * layers * (2 if both else 1) * width
        return (*out[:3], hidden.new_empty((count * x.element_size(),), dtype=torch.uint8), *out[4:])
    if func is aten.mkldnn_rnn_layer.default:
        x, width, trains = args[0], args[10], args[15]
        count = _KEPT_BY_ONEDNN * (x.numel() // x.shape[-1]) * width if trains else 0
        return (*out[:3], x.new_empty((count * x.element_size(),), dtype=torch.uint8))
    return out


def gradients(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the gradients of cuDNN's layer, for which torch (2.13) has no fake kernel."""
    x, weights, hidden, cell = args[0], args[1], args[4], args[5]
    cells = torch.empty_like(cell) if cell is not None else hidden.new_empty(0)
    return torch.empty_like(x), torch.empty_like(hidden), cells, [torch.empty_like(each) for each in weights]


def install(guess: Callable[[Any], Any], mode: FakeTensorMode) -> None:
    """Replace torch's functions for recurrent layers and packed sequences; `guess` records that a value was guessed."""
    functions: Any = torch._VF
    for name, number in _MODES.items():
        setattr(functions, name, _layer(getattr(functions, name), number))
    functions._pack_padded_sequence = _packing(functions._pack_padded_sequence, guess, mode)
    functions._pad_packed_sequence = _padding(functions._pad_packed_sequence, mode)


def _layer(original: Callable[..., Any], number: int) -> Callable[..., Any]:
    def layer(x: Any, second: Any, *rest: Any) -> Any:
        packed = isinstance(rest[1], (tuple, list))  # after the sizes of the batches and the states come the weights
        if not isinstance(x, FakeTensor) or not (packed or x.device.type == "cuda"):
            return original(x, second, *rest)
        if packed:
            states, weights, _, layers, dropout, trains, both = rest
            sizes, batch_first = second.tolist(), False
        else:
            states, (weights, _, layers, dropout, trains, both, batch_first) = second, rest
            sizes = []
        hidden, cell = states if number == _MODES["lstm"] else (states, None)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, hidden, weights = x.to(dtype), hidden.to(dtype), [each.to(dtype) for each in weights]
            cell = cell.to(dtype) if cell is not None else None
        width = weights[1].shape[0] // {0: 1, 1: 1, 2: 4, 3: 3}[number]
        projected = hidden.shape[-1] if hidden.shape[-1] != width else 0
        each_layer = len(weights) // (layers * (2 if both else 1))
        settings = (number, width, projected, layers, batch_first, dropout, trains, both, sizes, None)
        with torch.autocast(x.device.type, enabled=False):
            out = torch._cudnn_rnn(x, weights, each_layer, x.new_empty(0), hidden, cell, *settings)
        return out[:3] if cell is not None else out[:2]

    return layer


def _packing(original: Callable[..., Any], guess: Callable[[Any], Any], mode: FakeTensorMode) -> Callable[..., Any]:
    def pack(x: Any, lengths: Any, batch_first: bool) -> Any:
        if not isinstance(x, FakeTensor):
            return original(x, lengths, batch_first)
        steps_first = x.transpose(0, 1) if batch_first else x
        steps, samples = steps_first.shape[:2]
        guess(steps)
        return steps_first.reshape(steps * samples, *x.shape[2:]), _constant([samples] * steps, mode)

    return pack


def _padding(original: Callable[..., Any], mode: FakeTensorMode) -> Callable[..., Any]:
    def pad(data: Any, batch_sizes: Any, batch_first: bool, value: float, length: int) -> Any:
        if not isinstance(data, FakeTensor):
            return original(data, batch_sizes, batch_first, value, length)
        sizes = batch_sizes.tolist()
        out = data.reshape(len(sizes), sizes[0], *data.shape[1:])
        if length > len(sizes):
            out = torch.cat([out, out.new_full((length - len(sizes), *out.shape[1:]), value)])
        return out.transpose(0, 1) if batch_first else out, _constant([len(sizes)] * sizes[0], mode)

    return pad


def _constant(numbers: list[int], mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor with values."""
    with unset_fake_temporarily():
        real = torch.tensor(numbers)
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)
