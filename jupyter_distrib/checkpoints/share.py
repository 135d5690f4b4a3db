"""The share of a checkpoint that one rank writes, and the end, when rank 0 puts those of all together. There is no
message: each rank leaves what it has written in a file beside its data. In the thread that writes."""

from __future__ import annotations

import dataclasses

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from jupyter_distrib.checkpoints.folder import Writer
from jupyter_distrib.checkpoints.part import Part


def write(writer: Writer, planner: SavePlanner, plan: SavePlan, items: list[WriteItem]) -> Part:
    """Write these items of a rank's plan."""
    writer.set_up_storage_writer(True)  # it makes no difference
    plan = writer.prefixed(dataclasses.replace(plan, items=items))
    return plan, writer.write_data(plan, planner).value()


def finish(writer: Writer, planner: SavePlanner, own: Part, ranks: int) -> None:
    """Make the checkpoint valid. Called on rank 0, when the other ranks have left their parts."""
    parts = [own, *map(writer.part, range(1, ranks))]
    _, metadata = planner.create_global_plan([plan for plan, _ in parts])
    writer.finish(metadata, [results for _, results in parts])
