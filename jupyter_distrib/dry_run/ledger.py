"""Keeps the books of a dry run: the memory of the device, allocation by allocation, with the line of the user's code
and the purpose of the memory; and the values that were guessed. Process of a dry run, main thread and autograd's
threads.

It is a dispatch mode above the one that makes tensors fake, so it sees every operation of torch with its results.
"""

# ruff: noqa: SLF001 - private names, listed in `system/private_names.py`
from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from jupyter_distrib.dry_run import recurrent

aten = torch.ops.aten
BLOCK_BYTES = {"cuda": 512, "cpu": 64}
"""The allocator's rounding."""

Place = tuple[str, int]
"""File and line of the user's code."""
NOWHERE: Place = ("", 0)

PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS = "parameters", "gradients", "optimizer state", "buffers"
ACTIVATIONS, BATCH, TEMPORARY, STEP = "activations", "batches", "temporary", "temporary in optimizer steps"
GATHERED, BUCKETS, OTHER = "gathered parameters", "gradient buckets", "other"

_SAME_TYPES = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
}
"""Operations whose fake versions take tensors of two types, which the real ones refuse."""
_DRAWN = (
    aten.randperm.default,
    aten.randperm.generator,
    aten.randint.default,
    aten.randint.generator,
    aten.randint.low,
    aten.randint.low_generator,
)
_MOST_DRAWN = 1 << 16
_NUMBERS = (aten._local_scalar_dense.default, aten.item.default)
_SPLITS = (aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
_EQUALITIES = {
    aten.eq.Tensor: True,
    aten.eq.Scalar: True,
    aten.ne.Tensor: False,
    aten.ne.Scalar: False,
}
_NEGATIONS = {aten.logical_not.default, aten.bitwise_not.default}
_KEEP_TRUTH = {
    *_NEGATIONS,
    aten.mul.Tensor,
    aten.logical_and.default,
    aten.bitwise_and.Tensor,
    aten.all.default,
    aten.any.default,
    aten.detach.default,
    aten._to_copy.default,
}
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
"""The parts of sparse tensors, which have no storage of their own."""
_SUBCLASSES = ("DTensor", "AsyncCollectiveTensor")
"""Tensors that consist of others, whose operations are seen one level below."""


_HIGHER_ORDER = ("flex_attention", "flex_attention_backward")
"""The higher-order operators that compute as they are; others call the user's functions."""


def _of_higher_order(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the operation that a higher-order operator stands for, and its arguments.

    Raises:
        NotImplementedError: It is another one; worded as torch (2.13) does.
    """
    if func.__name__ == "run_dtensor_rng_op":  # draws into a shard, with the generator put forward
        _, _, func, *rest = args
        return func, tuple(rest)
    if func.__name__ not in _HIGHER_ORDER:
        raise NotImplementedError(f"There was no rule registered for HigherOrderOperator {func.__name__}")
    return func, args


class Finished(BaseException):
    """Ends the cell once it has shown everything that a dry run can see."""


@dataclass(slots=True)
class Allocation:
    kind: str
    place: Place
    size_bytes: int
    storage: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    size_bytes: int
    by_kind: dict[str, int]
    by_place: dict[Place, int]
    """Memory that each line holds in activations, batches and temporary tensors."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The books of one dry run.

    Args:
        device: The type of the device whose memory is counted.
        is_users: Returns whether a file holds code of the user.
        mode: The mode that makes tensors fake.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str, is_users: Callable[[str], bool], mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self.is_users, self._mode = device, is_users, mode
        self._block_bytes = BLOCK_BYTES[device]
        self._events: list[tuple[Allocation, int]] = []
        self._alive: dict[int, Allocation] = {}
        self.current_bytes = self.peak_bytes = 0
        self.passes_peak_bytes = 0
        """The peak outside of optimizer steps, which grows with the batch."""
        self.phase = OTHER
        """The purpose of new memory, unless its place says more: activations in a forward pass."""
        self.place = NOWHERE
        """The line of the user's code that ran last; the backward pass belongs to the line that began it."""
        self.guessed_lines: Counter[Place] = Counter()
        self.operations = 0
        self.finished = False
        self.counts = True
        """Whether a real rank would have the new memory: not that of whole tensors of which it has a shard."""
        self._source: torch.Tensor | None = None

    # ------------------------------------------------------------------------------------------------ operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if any(each.__name__ in _SUBCLASSES for each in types):
            return NotImplemented
        if self.finished:
            raise Finished
        if not hasattr(func, "_schema"):
            func, args = _of_higher_order(func, args)
        self.operations += 1
        answered, answer, args = self._answered(func, args, keywords)
        if answered:
            for each in tensors_in(answer):
                self._allocated(each, func)
            return answer
        self._check_types(func, args)
        self._source = next((each for each in args if isinstance(each, torch.Tensor)), None)
        out = recurrent.with_reserve(func, args, func(*args, **keywords))
        for each in tensors_in(out):
            self._allocated(each, func)
        source, self._source = self._source, None  # autograd copies a gradient that someone else holds
        if isinstance(out, FakeTensor):
            likely = likely_truth(func, args) if out.dtype is torch.bool else likely_number(func, source)
            if likely is not None:
                out.likely = likely  # type: ignore[attr-defined]
            elif hasattr(func, "_schema") and func._schema.is_mutable:
                vars(out).pop("likely", None)
        return out

    def _answered(
        self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[bool, Any, tuple[Any, ...]]:
        """Return whether an operation that needs values was answered by a guess, the answer, and otherwise its
        arguments."""
        first = args[0] if args else None
        if func in _DRAWN:
            return self._drawn(func, args, keywords)
        if func is aten.record_stream.default:
            return True, None, args
        if not isinstance(first, FakeTensor):
            return False, None, args
        if func is aten._cudnn_rnn_backward.default:
            return True, recurrent.gradients(args), args
        if func in _SPLITS and self.guessed_lines and set(args[1]) == {1}:
            return False, None, (first, _even_shares(first, *args[1:]), *args[2:])
        if func in _NUMBERS:
            if first.constant is not None:
                return False, None, args
            usual = False if first.dtype is torch.bool else 1.0 if is_real(first) else 1
            return True, self.guess(getattr(first, "likely", usual)), args
        if func is aten.equal.default:
            return True, self.guess(True), args
        if func is aten.is_nonzero.default:
            return True, self.guess(getattr(first, "likely", False)), args
        if func is aten._unique2.default:
            count = (first.numel(),)
            unique = [
                self._new(first, shape, kind) for shape, kind in ((count, first.dtype), (first.shape, torch.int64))
            ]
            return True, self.guess((*unique, self._new(first, count, torch.int64))), args
        if func is aten.nonzero.default:
            return True, self._new(self.guess(first), (first.numel(), first.dim()), torch.int64), args
        if func is aten.bincount.default and (count := (*args[2:], keywords.get("minlength", 0))[0]):
            weights = (*args[1:], keywords.get("weights"))[0]
            return True, self._new(self.guess(first), (count,), torch.int64 if weights is None else torch.float64), args
        if func is aten.masked_select.default:
            return True, self._new(self.guess(first), (first.numel(),), first.dtype), args
        if func is aten.index.Tensor and any(each is not None and each.dtype is torch.bool for each in args[1]):
            return False, None, (self.guess(first), self._without_masks(args[1]), *args[2:])
        return False, None, args

    def _drawn(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[bool, Any, tuple[Any, ...]]:
        """Return real random integers on the CPU, which choose samples."""
        size = math.prod(next((each for each in args if isinstance(each, (list, tuple))), [1]))
        if str(keywords.get("device") or "cpu") != "cpu" or size > _MOST_DRAWN:
            return False, None, args
        with unset_fake_temporarily():
            real = func(*args, **keywords)
        with suppress(Exception):  # a number that torch does not keep as a constant
            return True, self._mode.fake_tensor_converter.from_real_tensor(self._mode, real, make_constant=True), args
        return False, None, args

    def _new(self, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        out = like.new_empty(shape, dtype=dtype)
        self._allocated(out, None)
        return out

    def _without_masks(self, indices: Any) -> list[Any]:
        """Return the indices, with all positions in place of a mask: the maximum that it can choose."""
        out: list[Any] = []
        for each in indices:
            if each is None or each.dtype is not torch.bool:
                out.append(each)
            else:
                out += [each.new_empty((each.numel(),), dtype=torch.int64)] * each.dim()
        return out

    def _check_types(self, func: Any, args: tuple[Any, ...]) -> None:
        if func not in _SAME_TYPES or torch._C._is_any_autocast_enabled():
            return
        types = {each.dtype for each in args[:3] if isinstance(each, torch.Tensor)}
        if len(types) > 1:
            raise RuntimeError(f"expected tensors of the same dtype, but got {' and '.join(sorted(map(str, types)))}")

    def guess(self, answer: Any) -> Any:
        """Return the answer, and record the user's line that asked for a value."""
        place, _, asked_by_us = self._where()
        if not asked_by_us:
            self.guessed_lines[place] += 1
        return answer

    # ------------------------------------------------------------------------------------------------ memory

    def _allocated(self, tensor: torch.Tensor, func: Any) -> None:
        for each in plain_parts(tensor):
            if each.device.type != self._device:
                continue
            if each.device.index:
                raise RuntimeError(f"CUDA error: invalid device ordinal: {each.device} on a rank, which has one GPU")
            storage = each.untyped_storage()
            key = id(storage)
            if key in self._alive:
                continue
            place, tag, _ = self._where()
            if tag == "ignored":
                continue
            kind = tag or self.phase
            if func is aten._to_copy.default and self._is_batch():
                kind = BATCH
            size_bytes = self._rounded(storage.nbytes()) if self.counts else 0
            made = Allocation(kind, place, size_bytes, None)
            made.storage = weakref.ref(storage, partial(self._freed, key, made))
            self._alive[key] = made
            self._count(made, size_bytes)

    def adopt(self, tensor: torch.Tensor) -> None:
        """Record a tensor that no operation has made."""
        self._allocated(tensor, None)

    def _is_batch(self) -> bool:
        source = self._source
        return source is not None and source.device.type == "cpu" and not isinstance(source, torch.nn.Parameter)

    def _freed(self, key: int, made: Allocation, _: object) -> None:
        if self._alive.get(key) is made:
            del self._alive[key]
            self._count(made, -made.size_bytes)

    def resized(self, storage: Any) -> None:
        """Record the new size of a storage."""
        if (made := self._alive.get(id(storage))) is not None:
            grown_bytes = self._rounded(storage.nbytes()) - made.size_bytes
            made.size_bytes += grown_bytes
            self._count(made, grown_bytes)

    def _count(self, made: Allocation, size_bytes: int) -> None:
        self._events.append((made, size_bytes))
        self.current_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        if self.phase != STEP:
            self.passes_peak_bytes = max(self.passes_peak_bytes, self.current_bytes)

    def _rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes

    def mark(self, tensor: torch.Tensor | None, kind: str) -> None:
        """Record the purpose of a tensor."""
        for each in plain_parts(tensor) if tensor is not None else ():
            if each.device.type == self._device and (made := self._alive.get(id(each.untyped_storage()))):
                made.kind = kind

    def mark_modules(self) -> None:
        """Record the parameters and buffers of all existing modules."""
        for each in gc.get_objects():
            if issubclass(type(each), torch.nn.Module):  # `isinstance` would run code of proxies
                for kind, found in ((BUFFERS, vars(each).get("_buffers")), (PARAMETERS, vars(each).get("_parameters"))):
                    for tensor in (found or {}).values():
                        if tensor is not None:
                            self.mark(tensor, kind)

    def peak(self) -> Peak:
        """Return the purposes of the memory at its peak."""
        total = most = end = 0
        for index, (_, size_bytes) in enumerate(self._events, 1):
            total += size_bytes
            if total > most:
                most, end = total, index
        held: dict[int, int] = {}
        made = {id(each): each for each, _ in self._events[:end]}
        for each, size_bytes in self._events[:end]:
            held[id(each)] = held.get(id(each), 0) + size_bytes
        kinds: Counter[str] = Counter()
        places: Counter[Place] = Counter()
        for key, size_bytes in held.items():
            kinds[made[key].kind] += size_bytes
            if made[key].kind in (ACTIVATIONS, TEMPORARY, BATCH, OTHER):
                places[made[key].place] += size_bytes
        return Peak(size_bytes=most, by_kind=dict(+kinds), by_place=dict(+places))

    # ------------------------------------------------------------------------------------------------ where

    def _where(self) -> tuple[Place, str, bool]:
        """Return the running line of the user, the purpose of memory there, if that is known, and whether code of
        this package runs in between."""
        frame: FrameType | None = sys._getframe(2)
        tag, called, ours = "", False, False
        while frame is not None:
            file = frame.f_code.co_filename
            if not tag and not called:
                tag, called = _tag_of(file, frame.f_code.co_name)
            if self.is_users(file):
                place = (file, frame.f_lineno)
                if self.phase != TEMPORARY:
                    self.place = place
                return place, tag, ours
            ours = ours or "/jupyter_distrib/worker/" in file
            frame = frame.f_back
        return self.place, tag, ours

    def begin_backward(self) -> str:
        """Record the beginning of a backward pass. Return the phase before."""
        self._where()
        before, self.phase = self.phase, TEMPORARY
        return before


def _even_shares(tensor: torch.Tensor, sizes: list[int], dim: int = 0) -> list[int]:
    """Return sizes of equal parts in place of guessed ones."""
    length, count = tensor.shape[dim], len(sizes)
    return [length * (place + 1) // count - length * place // count for place in range(count)]


def _tag_of(file: str, function: str) -> tuple[str, bool]:
    """Return the purpose of memory that is allocated in this function, and whether the function calls a module, to
    which the memory then belongs."""
    if file.endswith("nn/modules/module.py") and function == "_call_impl":
        return "", True
    if "_sharding_prop" in file or ("distributed/tensor" in file and "/_ops/" in file):
        return "ignored", False  # shapes of whole tensors, which are never allocated
    if "/_fully_shard/" in file:
        return (BUCKETS if function.startswith(("foreach_reduce", "post_backward")) else GATHERED), False
    if file.endswith(("nn/parallel/distributed.py", "training/gradient_reducer.py")):
        return BUCKETS, False
    return "", False


def likely_truth(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Return the likely truth of a result, such as a check that numbers are finite: they are; None for other
    results."""
    first, *rest = args
    second = rest[0] if rest else None
    if func in _EQUALITIES:
        if first is second or (isinstance(second, float) and second == math.inf):
            return _EQUALITIES[func] == (first is second)
        return None
    truths = [getattr(each, "likely", None) for each in (first, second) if isinstance(each, torch.Tensor)]
    if func not in _KEEP_TRUTH or None in truths:
        return None
    return not truths[0] if func in _NEGATIONS else all(truths)


def likely_number(func: Any, source: torch.Tensor | None) -> float | None:
    """Return the number in a copy of a tensor that the code has made of one number; None for others."""
    constant = getattr(source, "constant", None)
    if func is not aten._to_copy.default or constant is None or constant.numel() != 1:
        return None
    with unset_fake_temporarily():
        return constant.item()  # type: ignore[no-any-return]


def is_real(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point


def plain_parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the memory of this one."""
    if not is_traceable_wrapper_subclass(tensor):
        parts = _PARTS.get(tensor.layout)
        yield from (getattr(tensor, part)() for part in parts) if parts else (tensor,)
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), torch.Tensor):
            yield from plain_parts(part)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the result of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
