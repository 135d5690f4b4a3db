"""Lets the ranks go on alike with what they kept when a stop has ended them at different steps: learning rate schedules
and shuffled loaders. Collective, also on ranks that have none of them; runs in the rank's main thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jupyter_distrib.serialization import payload
from jupyter_distrib.worker.autoparallel import object_collectives, ownership
from jupyter_distrib.worker.autoparallel.data import shard_samplers
from jupyter_distrib.worker.autoparallel.data.shard_samplers import EpochSampler

def kept_objects() -> list[Any]:
    """Return the optimizers, schedules, samplers and shuffled data sets to which the cell's names and kept values lead,
    without what a failed cell has left in a library."""
    found = [*ownership.alive((Optimizer, LRScheduler, EpochSampler)), *shard_samplers.shuffled()]
    return ownership.within_reach(found, [vars(sys.modules["__main__"]), payload.kept_values])


def continue_schedules_and_passes(kept: Sequence[Any], note: Callable[[str], None]) -> None:
    """Give schedules, with the settings of their optimizers, and shuffled loaders the positions of rank 0."""
    sets = {id(each) for each in shard_samplers.shuffled()}
    shard_samplers.count_passes_as_rank_0(
        [each for each in kept if id(each) in sets], [each for each in kept if isinstance(each, EpochSampler)]
    )
    schedules = [each for each in kept if isinstance(each, LRScheduler)]
    every = object_collectives.gather([getattr(each, "last_epoch", 0) for each in schedules])
    if len({len(steps) for steps in every}) > 1:
        return  # not the same schedules
    for place, schedule in enumerate(schedules):
        if len({steps[place] for steps in every}) > 1:
            note(f"the steps of {type(schedule).__name__} differed between ranks; all continue with rank 0's")
            load_from_rank_0(schedule, note)
            groups = schedule.optimizer.param_groups
            own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            for group, settings in zip(groups, object_collectives.from_rank_0(own), strict=True):
                group.update(settings)


def load_from_rank_0(one: Optimizer | LRScheduler, note: Callable[[str], None]) -> None:
    """Give it the state that it has on rank 0, with a note if ranks cannot exchange that."""
    try:
        one.load_state_dict(object_collectives.from_rank_0(one.state_dict()))
    except TypeError as error:
        note(
            f"the state of {type(one).__name__} holds a {error}, which ranks cannot exchange: each continues with "
            "its own; for exact results, load a checkpoint"
        )
