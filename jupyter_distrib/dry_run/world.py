"""The ranks of a dry run as rank 0 sees them: they do not exist, and would answer as rank 0 does.

Process of a dry run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from jupyter_distrib.worker.autoparallel import object_collectives
from jupyter_distrib.worker.pytorch import private, process_group
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard


class PlayedRanks(object_collectives.OtherRanks):
    """The other ranks, which have the values that rank 0 has."""

    have_values = False

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def gather(self, own_value: Any, group: Any = None) -> list[Any]:
        size = self._world_size if group is None else dist.get_world_size(group)
        return [json.loads(json.dumps(own_value))] * size

    def from_rank_0(self, own_value: Any) -> Any:
        return own_value

    def copy_from_rank_0(self, tensors: list[Any], size_bytes: int) -> None: ...


class PlayedBoard(StoreBoard):
    """The messages between the ranks: rank 0's own messages count for each rank."""

    def __init__(self, world_size: int) -> None:
        self._world_size, self._texts = world_size, dict[str, str]()

    def put(self, key: str, text: str) -> None:
        self._texts[key] = text

    def put_first(self, key: str, text: str) -> str:
        return self._texts.setdefault(key, text)

    def count(self, key: str) -> int:
        return self._world_size

    def has(self, keys: Iterable[str]) -> bool:
        return all(key in self._texts or _of_rank_0(key) in self._texts for key in keys)

    def get(self, key: str) -> str:
        return self._texts[key] if key in self._texts else self._texts[_of_rank_0(key)]

    def wait(self, keys: Iterable[str], timeout_s: float) -> None: ...
    def forget(self, keys: Iterable[str]) -> None: ...

    def wipe(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._texts.pop(key, None)


def _of_rank_0(key: str) -> str:
    """Return the key of rank 0 in place of another rank's key: a key of a rank ends with its number."""
    return f"{key.rpartition('/')[0]}/0"


class PlayedRendezvous(process_group.Rendezvous):
    """The meeting of rank 0 with ranks that do not exist."""

    def environment(self) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

    def begin(self, run: str) -> None:
        self.asked = False
        self._board = PlayedBoard(self.store.world_size)

    def board(self) -> StoreBoard | None:
        return self._board

    def exchange(self, text: str) -> tuple[str, ...]:
        return (text,) * self.store.world_size

    def ensure(self, backend: str) -> bool:
        if not dist.is_initialized():
            begin_group(self.store.rank, self.store.world_size)
        self.automatic = True
        return False

    def hide(self) -> None: ...

    def sequence(self) -> int:
        return 0


_torch_init, _torch_new_group = dist.init_process_group, dist.new_group


def begin_group(rank: int, world_size: int) -> None:
    """Create the default group, whose collectives do nothing."""
    _torch_init("fake", rank=rank, world_size=world_size, store=FakeStore())


def play(world_size: int) -> PlayedRendezvous:
    """Make this process rank 0 of `world_size` ranks. Return its rendezvous."""
    rendezvous = PlayedRendezvous(0, world_size)
    process_group.install(rendezvous)

    def init_process_group(*_: Any, **__: Any) -> None:
        rendezvous.asked = True
        if not dist.is_initialized():
            begin_group(0, world_size)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **keywords: Any) -> Any:
        return _torch_new_group(ranks, timeout, None, *args, **keywords)

    private.replace_entry_points({"init_process_group": init_process_group, "new_group": new_group})
    object_collectives.others = PlayedRanks(world_size)
    return rendezvous
