"""A copy of the state at one moment, and the thread that writes it while the ranks continue.

Each rank copies what it writes, in its main thread; a checkpoint costs the training no more time than that. Rank 0
writes everything that is not sharded, every rank its own shards. There is no collective, which would have to wait for a
rank that has died: the other ranks leave their part of the plan in a file beside their data, and rank 0 makes the
checkpoint valid when all these files are there.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Replicate

from jupyter_distrib.checkpoints import contents, pickled
from jupyter_distrib.checkpoints.folder import (
    Writer,
    complete_checkpoint,
    is_checkpoint,
    refused_by_system,
    write_share,
)
from jupyter_distrib.errors import DistributedError

_LOOK_UP_S = 0.02


class _CopyPlanner(DefaultSavePlanner):
    """Passes copies to the writer in place of the state, by the names of its items."""

    copies: dict[str, torch.Tensor | BytesIO]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        return self.copies[write_item.index.fqn]


class Snapshot:
    """One rank's part of a checkpoint that is being written.

    Args:
        state: The state, which may change once the constructor has returned.
        folder: The folder of this checkpoint only, created by rank 0.
        save_id: The name of this save, equal on all ranks.
        rank: This rank.
        ranks: The number of ranks that write.
        on_whole: Called in the thread, on rank 0, when the checkpoint is valid.
    """

    def __init__(
        self,
        state: dict[str, Any],
        folder: Path,
        *,
        save_id: str,
        rank: int,
        ranks: int,
        on_whole: Callable[[], None],
    ) -> None:
        self.folder = folder
        self.problem = ""
        """The reason why the part was not written; empty if it was."""
        self._rank, self._ranks, self._on_whole = rank, ranks, on_whole
        self._given_up = threading.Event()
        self._writer = Writer(folder, save_id, rank, is_new=True, notes=contents.notes(state))
        self._planner = _CopyPlanner(dedup_save_to_lowest_rank=True)
        self._copy(state)
        self._thread = threading.Thread(target=self._write, name=f"jupyter_distrib: {folder}")
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is valid.

        Raises:
            DistributedError: This rank has not written it; the message says why. Raised once.
        """
        while not self.ended:  # an interrupt is noticed between two waits
            self._thread.join(0.2)
        self.check()
        while self._rank != 0 and not is_checkpoint(self.folder) and not self._given_up.wait(_LOOK_UP_S):
            pass  # if rank 0 fails, this rank is stopped

    def check(self) -> None:
        """Raise the error if it was not written, once."""
        problem, self.problem = self.problem, ""
        if problem:
            self.give_up()
            raise DistributedError(problem)

    def give_up(self) -> None:
        """Stop waiting for other ranks, whose run has failed."""
        self._given_up.set()

    @torch.no_grad()  # with gradients, DTensors would note where their shards went
    def _copy(self, state: dict[str, Any]) -> None:
        """Copy what this rank writes. Its part of a DTensor does not change, so the thread can do the planning."""
        self._planner.set_up_planner(state, None, self._rank == 0)
        held = self._planner.state_dict.items()
        self._planner.copies = {name: _copied(name, value) for name, value in held if self._rank == 0 or _writes(value)}

    def _write(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._write_part()
        except Exception as raised:  # noqa: BLE001 - for the thread that waits
            error = refused_by_system(raised)
            reason = getattr(error, "strerror", None) or str(error)
            problem = f"{self.folder} could not be written: {type(error).__name__}: {reason}."
            self.problem = str(error) if isinstance(error, DistributedError) else problem
        finally:
            self._planner.copies.clear()
            if self._rank == 0:
                self._writer.clean_up()
            self._writer.close()

    @torch.no_grad()
    def _write_part(self) -> None:
        planner, writer = self._planner, self._writer
        plan = planner.create_local_plan()
        planner.state_dict = {}
        own = write_share(writer, planner, plan, [item for item in plan.items if item.index.fqn in planner.copies])
        if self._rank != 0:
            writer.leave_part(*own)
        elif all(map(self._comes, range(1, self._ranks))):
            complete_checkpoint(writer, planner, own, self._ranks)
            self._on_whole()

    def _comes(self, rank: int) -> bool:
        """Wait for another rank's part. Return whether it has arrived."""
        while not self._writer.has_part(rank):
            if self._given_up.wait(_LOOK_UP_S):
                return self._writer.has_part(rank)
        return True


def _writes(value: Any) -> bool:
    """Return whether a rank other than 0 writes its part of this value: it is sharded, and no lower rank has the same
    part."""
    if not isinstance(value, DTensor):
        return False
    place = value.device_mesh.get_coordinate() or ()
    replicas = [index for index, kind in zip(place, value.placements, strict=True) if isinstance(kind, Replicate)]
    return len(replicas) < len(place) and not any(replicas)


def _copied(name: str, value: Any) -> torch.Tensor | BytesIO:
    """Return a copy of this rank's part of a value, in the form that the writer expects."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return value.to("cpu", copy=True)
    return pickled.in_bytes(name, value)
