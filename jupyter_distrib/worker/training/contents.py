"""Whether the ranks hold the same data, or have divided it by hand before a data loader was made. Rank's main thread.

Each rank leaves in the store what its data look like, a few samples of them, and reads what the others have left. Only
a cell whose code asks how many ranks there are can have divided anything on purpose: there the ranks wait for one
another before a loader is divided, though not for long, since one of them may read a loader that the others do not.
In any other cell nobody waits, and what differs (a random split without a seed, say) is only said.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from jupyter_distrib.worker import group, identity

WAIT_S = 10.0
_LOOK_UP_S = 0.02
_SAMPLES = 16
_ELEMENTS = 1024
"""Of each sample."""
_DEPTH = 4
_SIZE_NAMES = {"world_size", "get_world_size", "num_replicas", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_RANK_NAMES = {"rank", "get_rank", "local_rank", "RANK", "LOCAL_RANK"}


class Contents:
    """What the ranks have told one another of their data in one run.

    Args:
        cell: The cell's file name.
    """

    def __init__(self, cell: str) -> None:
        self._cell = cell
        self._reads_size: bool | None = None
        self._count: Counter[str] = Counter()
        self._open: dict[str, str] = {}
        """Places by the key under which the ranks leave what they hold there, until all have."""

    def divided_by_hand(self, loader: DataLoader[Any], place: str) -> str:
        """Says that the ranks hold different data on purpose; empty if they do not, as far as can be known now."""
        board = group.current.board()
        if board is None:
            return ""
        key = f"data/{place}/{self._count[place]}"
        self._count[place] += 1
        board.set(f"{key}/{identity.rank()}", json.dumps(_described(loader)))
        if self._reads_size is None:
            self._reads_size = _reads_size(self._cell)
        if not self._reads_size:
            self._open[key] = place
            return ""
        every = _wait_for_all(board, key)
        differ = len({data for *_, data in every}) > 1
        # The first who knows decides for all: another may have given up waiting a moment ago.
        if board.compare_set(f"{key}/verdict", "", "differ" if differ else "same") != b"differ":
            return ""
        lengths = [length for length, *_ in every]
        unequal = f", with {', '.join(map(str, lengths))} batches" if len(set(lengths)) > 1 else ""
        return (
            f"the data loader read on {place} holds other samples on each rank{unequal}: the cell has divided them by "
            "hand, so it is read as it is"
        )

    def news(self) -> Iterator[str]:
        """What was divided among the ranks although they hold different data, each once; waits for nobody."""
        board = group.current.board()
        for key, place in list(self._open.items()):
            if board is None or not board.check(_keys(key)):
                continue
            del self._open[key]
            if len({data for _, data, _ in _read(board, key)}) > 1:
                yield (
                    f"the data loader read on {place} holds other samples on one rank than on another, and each rank "
                    "has read a share of its own: if the cell has divided them by hand, leave that out; if they are "
                    "drawn at random, fix the seed"
                )


def _wait_for_all(board: Any, key: str) -> list[tuple[Any, str, str]]:
    """What every rank has left; nothing if one of them has not come."""
    until_s = time.monotonic() + WAIT_S
    while not (there := board.check(_keys(key))) and time.monotonic() < until_s:
        time.sleep(_LOOK_UP_S)  # not `wait`, which prints a warning when its time is over
    return _read(board, key) if there else []


def _read(board: Any, key: str) -> list[tuple[Any, str, str]]:
    return [json.loads(board.get(each)) for each in _keys(key)]


def _keys(key: str) -> list[str]:
    return [f"{key}/{rank}" for rank in range(identity.world_size())]


# ------------------------------------------------------------------------------------------------------- code


def reads_ranks(thing: object) -> bool:
    """Whether a data set's code asks which rank it is on."""
    cls = type(thing)
    methods = [vars(cls).get(name) for name in ("__iter__", "__getitem__", "__len__", "__getitems__")]
    if not cls.__module__.startswith(("torch.", "jupyter_distrib.")):
        return any(isinstance(each, FunctionType) and _RANK_NAMES & _names(each.__code__) for each in methods)
    return False


def _reads_size(cell: str) -> bool:
    """Whether the cell that is being executed, or a function of the notebook, asks how many ranks there are."""
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
    return any(_SIZE_NAMES & _names(code) for code in codes)


def _names(code: CodeType) -> set[str]:
    texts = {each for each in code.co_consts if isinstance(each, str)}
    nested = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return texts.union(code.co_names, code.co_freevars, *nested)


# ------------------------------------------------------------------------------------------------------- data


def _described(loader: DataLoader[Any]) -> tuple[int | None, str, str]:
    """How many batches there are, the data set's print, and that of the data set with its sampler."""
    sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
    data = list(_print(loader.dataset, _DEPTH))
    batches = _length(loader.batch_sampler) if loader.batch_size is not None else _length(sampler)
    return batches, _digest(data), _digest([*data, *_print(sampler, _DEPTH)])


def _digest(parts: list[bytes]) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def _print(thing: Any, depth: int) -> Iterator[bytes]:
    """What can be told of data without changing anything: no sample is made, since that may draw random numbers."""
    if _is_array(thing):
        yield from _print_of_array(thing)
    elif isinstance(thing, (int, float, str, bytes)):
        yield repr(thing).encode()
    elif depth == 0:
        return
    elif isinstance(thing, dict):
        for key in itertools.islice(thing, _SAMPLES):
            yield from _print(key, depth - 1)
            yield from _print(thing[key], depth - 1)
    elif isinstance(thing, (list, tuple, range)):
        yield str(len(thing)).encode()
        for place in _places(len(thing)):
            yield from _print(thing[place], depth - 1)
    elif hasattr(thing, "iloc"):  # of pandas
        yield from _print(thing.iloc[list(_places(len(thing)))].values.tolist(), depth - 1)
    else:
        yield from _print_of_object(thing, depth)


def _is_array(thing: Any) -> bool:
    if isinstance(thing, torch.Tensor):
        return thing.layout is torch.strided and not thing.is_meta
    return type(thing).__module__.partition(".")[0] == "numpy" and hasattr(thing, "dtype") and thing.dtype.kind != "O"


def _print_of_array(array: Any) -> Iterator[bytes]:
    yield f"{tuple(array.shape)} {array.dtype}".encode()
    for place in _places(len(array)) if array.shape else ():
        yield repr(array[place].reshape(-1)[:_ELEMENTS].tolist()).encode()


def _print_of_object(thing: Any, depth: int) -> Iterator[bytes]:
    """Its data, not its numbers and texts: a seed of its own says nothing of the samples."""
    if isinstance(thing, Dataset) or depth == _DEPTH:
        yield str(_length(thing)).encode()
    fingerprint = getattr(thing, "_fingerprint", None)  # of `datasets`, whose tables are not looked into
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


def _places(length: int) -> Iterator[int]:
    """The first, the last and some between."""
    step = max(1, (length - 1) // (_SAMPLES - 1))
    yield from range(0, length, step)
