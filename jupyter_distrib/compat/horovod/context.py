"""The state that `hvd.init()` creates in a rank: the process sets with their groups, until the end of the cell."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from jupyter_distrib import runtime
from jupyter_distrib.compat.horovod.negotiation import Negotiation
from jupyter_distrib.compat.horovod.operations import SetGroup
from jupyter_distrib.compat.horovod.requests import NOT_INITIALIZED
from jupyter_distrib.worker import end_of_cell


class ProcessSet:
    """A subset of the ranks, to which an operation can be limited.

    Args:
        ranks_or_comm: The ranks.
    """

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        if not isinstance(ranks_or_comm, Sequence):
            raise ValueError(f"ProcessSet takes a list of ranks; got {ranks_or_comm!r}")
        self.ranks: list[int] | None = sorted({*ranks_or_comm})
        self.process_set_id: int | None = None
        self.negotiation: Negotiation | None = None
        """None where this rank is not in the set."""

    def size(self) -> int:
        """Return the number of its ranks."""
        return len(self._known_ranks())

    def rank(self) -> int:
        """Return the number of this rank in the set; -1 if it is not in it."""
        ranks = self._known_ranks()
        return ranks.index(rank()) if rank() in ranks else -1

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return rank() in self._known_ranks()

    def _known_ranks(self) -> list[int]:
        if self.ranks is None or self.process_set_id is None:
            raise ValueError(NOT_INITIALIZED if self is global_process_set else f"{self} has not been added")
        return self.ranks

    def negotiating(self) -> Negotiation:
        """Return the negotiation of this rank in the set.

        Raises:
            ValueError: The rank is not in the set.
        """
        self._known_ranks()
        if self.negotiation is None:
            raise ValueError(f"rank {rank()} is not in {self}: let only its ranks call this")
        return self.negotiation

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.ranks = None
_sets: dict[int, ProcessSet] = {}


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Create the groups; a second call does nothing. All ranks must call it.

    Raises:
        ValueError: It is called for a subset of the ranks.
    """
    if is_initialized():
        return
    _init_torch()
    everybody = list(range(dist.get_world_size()))
    if comm is not None and sorted(comm) != everybody:
        raise ValueError(
            "hvd.init takes all ranks: for some of them, give operations process_set=hvd.ProcessSet([0, 1])"
        )
    global_process_set.ranks = everybody
    _add(global_process_set, 0)
    end_of_cell.register(_end)
    for each in process_sets or ():
        add_process_set(each)


def _init_torch() -> None:
    """Create torch's default group, unless a strategy or the cell has. Outside a run there is one rank."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def _end(*, ok: bool) -> None:
    """Finish pending operations at the end of a cell that ended well, and drop the groups, which end with it."""
    try:
        if ok and is_initialized():
            shutdown()
    finally:
        _forget()


def shutdown() -> None:
    """Finish the operations issued by this rank, and drop the process sets."""
    for each in _sets.values():
        if each.negotiation is not None:
            each.negotiation.finish()
    _forget()


def _forget() -> None:
    for each in _sets.values():
        each.process_set_id, each.negotiation = None, None
    _sets.clear()
    global_process_set.ranks = None


def is_initialized() -> bool:
    """Return whether `init` has been called in this cell."""
    return bool(_sets)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. All ranks must call it with the same sets in the same order.

    Raises:
        ValueError: There are no such ranks, or there is already such a set.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= size():
        raise ValueError(f"a process set must contain ranks from 0 to {size() - 1}; got {ranks}")
    if same := next((each for each in _sets.values() if each.ranks == ranks), None):
        raise ValueError(f"there is a process set of the ranks {ranks} already: {same}")
    _add(added, max(_sets) + 1)
    return added


def _add(added: ProcessSet, number: int) -> None:
    assert added.ranks is not None
    data = dist.new_group(added.ranks)
    control = dist.new_group(added.ranks, backend="gloo")
    _sets[number], added.process_set_id = added, number
    own = dist.get_rank()
    if own in added.ranks:
        of = SetGroup(group=data, ranks=tuple(added.ranks), own=added.ranks.index(own))
        added.negotiation = Negotiation(control, of)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Drop a process set; return False if it is not registered, or is the global one."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    del _sets[process_set.process_set_id]
    process_set.process_set_id, process_set.negotiation = None, None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each process set, by its number."""
    return {number: [*(each.ranks or [])] for number, each in _sets.items()}


def size() -> int:
    """Return the number of ranks."""
    return global_process_set.size()


def rank() -> int:
    """Return the number of this rank."""
    _check()
    return dist.get_rank()


def local_rank() -> int:
    """Return the number of this rank among those of its node."""
    _check()
    return runtime.get_local_rank()


def local_size() -> int:
    """Return the number of ranks on this node."""
    _check()
    return runtime.get_local_world_size()


def cross_rank() -> int:
    """Return the number of this node."""
    _check()
    return runtime.get_node_rank()


def cross_size() -> int:
    """Return the number of nodes."""
    _check()
    return runtime.get_num_nodes()


def _check() -> None:
    if not is_initialized():
        raise ValueError(NOT_INITIALIZED)


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    return size() == local_size() * cross_size()
