"""Writes a checkpoint while the ranks wait for it. Entries that several ranks have are written by the lowest of
them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from jupyter_distrib.checkpoints import contents, pickled
from jupyter_distrib.checkpoints.folder import (
    Writer,
    complete_checkpoint,
    explained,
    make_ready,
    new_save_id,
    write_share,
)
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.worker.autoparallel import object_collectives


class _NamingPlanner(DefaultSavePlanner):
    """Names the entry that cannot be pickled."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - as torch names it
        if write_item.type is WriteItemType.BYTE_IO:
            return pickled.in_bytes(write_item.index.fqn, object)
        return super().transform_object(write_item, object)


def write(folder: Path, state: dict[str, Any], *, together: bool) -> None:
    """Write the state of all ranks (`together`, collective) or of this process.

    Raises:
        DistributedError: It was not written; the message says why, on every rank.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    is_new, held, refusal = not os.path.exists(folder), None, ""
    if rank == 0:
        try:
            held = make_ready(folder)
        except DistributedError as error:  # all ranks raise it
            refusal = str(error)
    begin = refusal, new_save_id()
    refusal, save_id = object_collectives.from_rank_0(begin) if together else begin
    if refusal:
        raise DistributedError(refusal)
    writer = Writer(folder, save_id, rank, is_new=is_new, held=held, notes=contents.notes(state))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _write(writer, state, rank, ranks, together=together)
    finally:
        if rank == 0:
            writer.clean_up()
        writer.close()


def _write(writer: Writer, state: dict[str, Any], rank: int, ranks: int, *, together: bool) -> None:
    planner = _NamingPlanner(dedup_save_to_lowest_rank=True)
    planner.set_up_planner(state, None, rank == 0)
    plan = planner.create_local_plan()
    items = _own_items(plan, rank) if together else plan.items
    problem: BaseException | None = None
    own = None
    try:
        own = write_share(writer, planner, plan, items)
        if rank != 0:
            writer.leave_part(*own)
    except BaseException as error:  # noqa: BLE001 - raised when all ranks know of it
        problem = error
    _raise_together(writer, problem, together=together)
    try:
        if own is not None and rank == 0:
            complete_checkpoint(writer, planner, own, ranks)
    except BaseException as error:  # noqa: BLE001 - the same
        problem = error
    _raise_together(writer, problem, together=together)


def _own_items(plan: SavePlan, rank: int) -> list[WriteItem]:
    """Return the items that no lower rank has."""
    keys = [str((item.index.fqn, item.index.offset)) for item in plan.items]
    lower = {key for every in object_collectives.gather(keys)[:rank] for key in every}
    return [item for key, item in zip(keys, plan.items, strict=True) if key not in lower]


def _raise_together(writer: Writer, problem: BaseException | None, *, together: bool) -> None:
    """Raise this rank's problem, or another rank's."""
    what = f"{writer.folder} could not be written"
    own = problem and explained(problem, what)
    every = object_collectives.gather(own and [type(own).__name__, str(own)]) if together else []
    if own is not None:
        raise own from None
    for kind, text in filter(None, every):
        raise KeyboardInterrupt if kind == "KeyboardInterrupt" else DistributedError(text)
