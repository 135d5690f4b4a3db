"""Checks whether the ranks hold the same data, or have divided it themselves before a data loader was created. Rank's
main thread.

Each rank writes a fingerprint of a few samples of its data to the store, and reads those of the others. Only a cell
whose code reads the number of ranks can have divided data on purpose: in such a cell the ranks wait for one another
before a loader is divided (`consensus.py`). In any other cell no rank waits, and a difference (a random split
without a seed, say) is only noted.
"""

from __future__ import annotations

import ctypes
import dis
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from jupyter_distrib.interfaces import identity
from jupyter_distrib.libraries.known import dataset_fingerprint
from jupyter_distrib.system.nested_code import codes_in
from jupyter_distrib.worker.autoparallel import object_collectives
from jupyter_distrib.worker.autoparallel.data.consensus import DataConsensus

_PRIME = 1_000_003
_SAMPLES = 16
_ELEMENTS = 1024
"""Number of elements to read of each sample."""
_DEPTH = 4
_SIZE_NAMES = {"world_size", "get_world_size", "num_replicas", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_RANK_CALLS = {"get_rank", "get_node_local_rank", "get_global_rank", "get_local_rank"}
_RANK_VARIABLES = {"RANK", "LOCAL_RANK"}
_RANK_NAMES = {"rank", "local_rank"}
_NOT_THEIRS = ("torch.", "jupyter_distrib.")
_STAND_INS = "jupyter_distrib.compat."
"""Data sets of other platforms, whose users know that they divide themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result for one data loader, and the message about it."""

    on_purpose: bool
    """Whether the ranks hold different data on purpose."""
    note: str = ""


class DataFingerprints:
    """Compares fingerprints of the ranks' data in one run.

    Args:
        cell: The cell's file name.
        ordered: See `DataConsensus`.
    """

    def __init__(self, cell: str, *, ordered: bool) -> None:
        self._cell = cell
        self._asks_size: bool | None = None
        self._consensus = DataConsensus(ordered=ordered)

    def compared(self, loader: DataLoader[Any], place: str) -> Compared:
        """Return whether the cell has divided this loader's data among the ranks, as far as is known by now."""
        length, data, order = _described(loader)
        if not self.inspect_code():
            mine = [data, _indices(loader), str(loader.batch_size)]
            first = self._consensus.first(place, " ".join(mine)).split(" ")
            return Compared(on_purpose=False, note=_note_on(place, mine, first))
        verdict, every = self._consensus.decide(place, json.dumps([length, order]), _verdict)
        if verdict != _DIFFERENT:
            return Compared(on_purpose=False)
        lengths = [json.loads(each)[0] for each in every]
        unequal = f", with {', '.join(map(str, lengths))} batches" if len(set(lengths)) > 1 else ""
        return Compared(on_purpose=True, note=_DIVIDED.format(place, unequal))

    def inspect_code(self) -> bool:
        """Return whether the cell's code reads the number of ranks; first called while the cell is being executed."""
        if self._asks_size is None:
            self._asks_size = _asks_size(self._cell)
        return self._asks_size

    def on_collective(self) -> None:
        """Record that a collective of all ranks begins; in any thread."""
        self._consensus.on_collective(to_others=bool(self._asks_size))

    def end(self) -> None:
        """End the comparison, because the cell has ended."""
        self._consensus.end()


_DIFFERENT = "different"
_DIVIDED = (
    "the data loader read on {} holds different samples on each rank{}, divided by the cell or drawn at random, so "
    "each rank reads all of its own"
)
_DIFFERS = (
    "the data loader read on {} holds different samples on different ranks, and each rank has read a share of its own "
    "data: if the cell divides the data itself, remove that; if they are drawn at random, fix the seed; if each rank "
    "has chosen them by its own results, take those of rank 0 by torch.distributed.broadcast_object_list()"
)
_OTHER_BATCHES = (
    "the data loader read on {} has batches of {} samples on one rank and of {} on another, so that they make "
    "different numbers of steps, and may wait for one another: draw the size from a generator with a fixed seed, such "
    "as random.Random(0), or choose it before the optimizer is made"
)
_OTHER_INDICES = (
    "the sampler of the data loader read on {} has different indices on different ranks, and all ranks have read those "
    "of rank 0: samples that another rank holds back for a validation may have been trained on. Choose the indices "
    "before the optimizer is made, or fix the seed"
)


def _note_on(place: str, mine: list[str], first: list[str]) -> str:
    """Return a note on how the data of this rank differ from those of the one that came first; empty if they do not."""
    if mine[0] != first[0]:
        return _DIFFERS.format(place)
    if mine[1] != first[1]:
        return _OTHER_INDICES.format(place)
    return _OTHER_BATCHES.format(place, first[2], mine[2]) if mine[2] != first[2] else ""


def _verdict(every: list[str]) -> str:
    return _DIFFERENT if len({json.loads(each)[1] for each in every}) > 1 else "same"


# ------------------------------------------------------------------------------------------------------- code


def reads_ranks(thing: object) -> bool:
    """Return whether a data set's code reads its rank, or that of a stream inside it. A column or a method named `rank`
    does not count."""
    return _reads_itself(thing) or any(_reads_itself(each) for each in _streams_in(thing, {id(thing)}))


def _reads_itself(thing: object) -> bool:
    cls = type(thing)
    methods = [vars(cls).get(name) for name in ("__iter__", "__getitem__", "__len__", "__getitems__")]
    if not cls.__module__.startswith(_NOT_THEIRS) or cls.__module__.startswith(_STAND_INS):
        codes = [each.__code__ for each in methods if isinstance(each, FunctionType)]
        return any(map(_asks_rank, codes)) or any(_is_rank(thing, name) for code in codes for name in code.co_names)
    return False


def _streams_in(stream: object, seen: set[int]) -> Iterator[object]:
    """Yield the streams that a stream holds: it usually passes their samples on."""
    for value in getattr(stream, "__dict__", {}).values() if isinstance(stream, IterableDataset) else ():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, IterableDataset) and id(each) not in seen:
                seen.add(id(each))
                yield each
                yield from _streams_in(each, seen)


def _is_rank(thing: object, name: str) -> bool:
    """Return whether this attribute may hold a rank."""
    value = getattr(thing, "__dict__", {}).get(name) if name in _RANK_NAMES else None
    return type(value) is int and 0 <= value < identity.world_size()


def _asks_rank(code: CodeType) -> bool:
    return any(map(_asks_rank_itself, codes_in(code)))


def _asks_rank_itself(code: CodeType) -> bool:
    variables = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    by_variable = bool(_RANK_VARIABLES & set(code.co_consts)) and bool({"environ", "getenv"} & set(code.co_names))
    return by_variable or bool(_RANK_NAMES & variables) or bool(_RANK_CALLS & set(code.co_names))


def _asks_size(cell: str) -> bool:
    """Return whether the cell that is being executed, or a function of the notebook, reads the number of ranks."""
    codes = [
        each.__code__
        for value in list(vars(sys.modules["__main__"]).values())
        for each in (vars(value).values() if isinstance(value, type) and value.__module__ == "__main__" else (value,))
        if isinstance(each, FunctionType)
    ]
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_filename == cell:
            codes.append(frame.f_code)
        frame = frame.f_back
    return any(_SIZE_NAMES & _mentioned(each) for code in codes for each in codes_in(code))


def _mentioned(code: CodeType) -> set[str]:
    texts = {each for each in code.co_consts if isinstance(each, str)}
    return texts.union(code.co_names, code.co_freevars)


# ------------------------------------------------------------------------------------------------------- data


def _described(loader: DataLoader[Any]) -> tuple[int | None, str, str]:
    """Return the number of batches, the data set's fingerprint, and the fingerprint of data set and sampler."""
    sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
    data = list(_print(loader.dataset, _DEPTH))
    batches = _length(loader.batch_sampler) if loader.batch_size is not None else _length(sampler)
    return batches, _digest(data), _digest([*data, *_print(sampler, _DEPTH)])


def _indices(loader: DataLoader[Any]) -> str:
    """Return a fingerprint of the samples that the loader's sampler chooses from, in any order; "-" without one."""
    for part in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        indices = getattr(part, "indices", None)
        with suppress(TypeError, ValueError, RuntimeError):  # they may be names, for instance
            if indices is not None and len(indices):
                numbers = torch.as_tensor(indices, dtype=torch.int64)
                return f"{len(numbers)},{numbers.sum()},{(numbers * numbers % _PRIME).sum()}"
    return "-"


def _digest(parts: list[bytes]) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def _print(thing: Any, depth: int) -> Iterator[bytes]:
    """Yield parts of the data for a fingerprint, without side effects: no sample is generated, since that may draw
    random numbers."""
    if _is_array(thing):
        yield from _print_of_array(thing)
    elif isinstance(thing, (int, float, str, bytes)):
        yield repr(thing).encode()
    elif depth == 0:
        return
    elif isinstance(thing, dict):
        for key in itertools.islice(thing, _SAMPLES):
            if type(key) is str and key == "seed":  # it does not determine the samples
                continue
            yield from _print(key, depth - 1)
            yield from _print(thing[key], depth - 1)
    elif isinstance(thing, (list, tuple, range)):
        yield str(len(thing)).encode()
        for place in _places(len(thing)):
            yield from _print(thing[place], depth - 1)
    elif hasattr(type(thing), "iloc"):  # of pandas; `thing` may answer in any way
        yield from _print(thing.iloc[list(_places(len(thing)))].values.tolist(), depth - 1)
    else:
        yield from _print_of_object(thing, depth)


def _is_array(thing: Any) -> bool:
    if isinstance(thing, torch.Tensor):
        return thing.layout is torch.strided and not thing.is_meta
    return type(thing).__module__.partition(".")[0] == "numpy" and hasattr(thing, "dtype") and thing.dtype.kind != "O"


def _print_of_array(array: Any) -> Iterator[bytes]:
    yield f"{tuple(array.shape)} {array.dtype}".encode()
    if not array.shape or 0 in array.shape:
        return
    places = _places(len(array))
    some = array[:: places.step].reshape(len(places), -1)[:, :_ELEMENTS]
    yield _bytes(some) if isinstance(some, torch.Tensor) else some.tobytes()


def _bytes(tensor: torch.Tensor) -> bytes:
    if not object_collectives.others.have_values:
        return b""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())  # numpy may be missing


def _print_of_object(thing: Any, depth: int) -> Iterator[bytes]:
    """Yield parts of an object's data, except its numbers and strings, which seldom determine the samples."""
    if isinstance(thing, Dataset) or depth == _DEPTH:
        yield str(_length(thing)).encode()
    fingerprint = dataset_fingerprint(thing)
    if isinstance(fingerprint, str):
        yield fingerprint.encode()
        return
    for _, value in sorted(getattr(thing, "__dict__", {}).items()):
        if not isinstance(value, (int, float, str, bytes, type)):
            yield from _print(value, depth - 1)


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _places(length: int) -> range:
    """Return the first index, the last index or one near it, and some in between."""
    return range(0, length, max(1, (length - 1) // (_SAMPLES - 1)))
