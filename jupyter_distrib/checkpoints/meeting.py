"""Decides which ranks write a checkpoint, and lets the others know when it is complete. Rank's main thread. Uses the
store instead of collectives, in which a missing rank would block the others for ever.

nothing is sharded rank 0 writes, no matter which ranks call; the others wait until it has
shards                every rank writes its own: all have to come, and one that has ended its cell does not
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.strategy import TrainingStrategy
from jupyter_distrib.worker.autoparallel import object_collectives
from jupyter_distrib.worker.pytorch import process_group
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

_LOOK_UP_S = 0.02
_WAIT_S = 1.0
"""Seconds of one wait; interrupts are noticed in between."""
_saves: WeakKeyDictionary[StoreBoard, Counter[str]] = WeakKeyDictionary()
"""Number of saves to each folder in a run; every rank counts its own calls."""


def run_board() -> StoreBoard | None:
    """Return the board for messages between the ranks of this run; None without a training strategy, which would report
    that a rank has ended."""
    trains = isinstance(identity.cell.strategy, TrainingStrategy)
    return process_group.current.board() if trains and dist.is_initialized() else None


def has_shards(value: Any) -> bool:
    """Return whether this state contains anything of which a rank holds only a part."""
    if isinstance(value, dict):
        return any(map(has_shards, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_shards, value))
    return isinstance(value, DTensor)


def number(board: StoreBoard, folder: str) -> str:
    """Return the key of a new save to this folder."""
    counts = _saves.setdefault(board, Counter())
    counts[folder] += 1
    return f"save/{folder}/{counts[folder]}"


def by_rank_0(board: StoreBoard, key: str, write: Callable[[], None]) -> None:
    """Write on rank 0, while every other rank that calls waits for it.

    Raises:
        DistributedError: It was not written; the message says why, on every rank that calls.
    """
    if identity.rank() != 0:
        if refusal := _heard(board, key):
            raise DistributedError(refusal)
        return
    said = "rank 0 was stopped while writing the checkpoint."
    try:
        write()
        said = ""
    except DistributedError as error:
        said = str(error)
        raise
    finally:
        board.put(key, said or _WRITTEN)


_WRITTEN = "written"


def _heard(board: StoreBoard, key: str) -> str:
    """Return why rank 0 has not written the checkpoint; empty if it has."""
    if not _comes(board, key):
        return (
            f"jupyter_distrib.save() was called on rank {identity.rank()}, and rank 0, which writes, has ended its "
            "cell without a call: call it on every rank, or on rank 0."
        )
    said = board.get(key)
    return "" if said == _WRITTEN else said


def _comes(board: StoreBoard, key: str) -> bool:
    """Wait for a message of rank 0. Return whether it has arrived; False if rank 0 has ended its cell without one."""
    while not board.has([key]):
        if is_over(board, 0):
            return board.has([key])  # again: rank 0 may have left its message and ended since the check above
        with suppress(RuntimeError):  # no message yet; a store that is gone raises in `has`
            board.wait([key], _WAIT_S)
    return True


def from_rank_0(make: Callable[[], str], name: str, folder: str, rank: int) -> str:
    """Return a text made by rank 0, on every rank that calls the function of this name for this folder.

    Raises:
        DistributedError: Rank 0 has ended its cell without a call.
    """
    board = run_board()
    if board is None:
        said = make() if rank == 0 else ""
        return str(object_collectives.from_rank_0(said)) if dist.is_initialized() else said
    key = f"{name} {number(board, f'{name} {folder}')}"
    if rank == 0:
        text = make()
        board.put(key, text)
        return text
    if not _comes(board, key):
        raise _uncalled(name, rank)
    return board.get(key)


def _uncalled(name: str, rank: int) -> DistributedError:
    return DistributedError(
        f"jupyter_distrib.{name}() was called on rank {rank}, and rank 0, which decides, has ended its cell "
        "without a call: call it on every rank."
    )


def name_folder(board: StoreBoard, folder: str) -> None:
    """Tell the other ranks that rank 0 saves into a folder."""
    board.put(f"into/{folder}", "")


def check_named(board: StoreBoard, folder: str) -> None:
    """Wait until rank 0 has saved into this folder, too.

    Raises:
        DistributedError: It has ended its cell without.
    """
    if not _comes(board, f"into/{folder}"):
        raise DistributedError(
            f"jupyter_distrib.save({folder!r}) was called on rank {identity.rank()}, and not on rank 0, which writes "
            "what is not sharded: nothing was saved there. Call it on every rank with the same folder, or on rank 0."
        )


def all_come(board: StoreBoard, folder: str) -> None:
    """Wait for every rank to save its shards into this folder.

    Raises:
        DistributedError: A rank has ended its cell without arriving, or saves into another folder.
    """
    key = number(board, "")  # no folder has this name
    board.put(f"{key}/{identity.rank()}", folder)
    while missing := [rank for rank in range(identity.world_size()) if not board.has([f"{key}/{rank}"])]:
        gone = [rank for rank in missing if is_over(board, rank)]
        # Again: the rank may have come and ended since the check above.
        if gone and not board.has([f"{key}/{gone[0]}"]):
            raise DistributedError(
                f"jupyter_distrib.save() was called on rank {identity.rank()}, and not on rank {gone[0]}, which has "
                "come to the end of its cell: every rank writes its own shards, so call it on all of them, and not "
                "under `if rank == 0`."
            )
        time.sleep(_LOOK_UP_S)
    check_same({rank: board.get(f"{key}/{rank}") for rank in range(identity.world_size())})


def check_same(folders: Mapping[int, str]) -> None:
    """Refuse a folder, by rank, that differs from the one of rank 0."""
    for rank, folder in folders.items():
        if folder != folders[0]:
            raise DistributedError(
                f"jupyter_distrib.save() was called for {folders[0]!r} on rank 0 and for {folder!r} on rank {rank}, "
                "and all ranks write their shards into the same folder: give them one name."
            )


def is_over(board: StoreBoard, rank: int) -> bool:
    """Return whether a rank has come to the end of its cell."""
    return board.has([_ended(rank)]) or board.has([_returns(rank)])


def _ended(rank: int) -> str:
    """Return the key that a training strategy leaves at the end of a cell (`autoparallel/data/consensus.py`)."""
    return f"ended/{rank}"


def _returns(rank: int) -> str:
    """Return the key that a rank leaves before its value is gathered (`autoparallel/training/gather_shards.py`)."""
    return f"whole/{rank}"
