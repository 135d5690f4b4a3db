"""Lets the ranks go on alike with what they kept when a stop has ended them at different steps: learning rate schedules
and shuffled loaders. Collective, also on ranks that have none of them; runs in the rank's main thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jupyter_distrib.interfaces import identity
from jupyter_distrib.serialization import payload
from jupyter_distrib.worker.autoparallel import object_collectives, ownership
from jupyter_distrib.worker.autoparallel.data import shard_samplers
from jupyter_distrib.worker.autoparallel.data.shard_samplers import EpochSampler

T = TypeVar("T")


def kept_objects() -> list[Any]:
    """Return the optimizers, schedules, samplers and shuffled data sets within reach."""
    return within_reach([*ownership.alive((Optimizer, LRScheduler, EpochSampler)), *shard_samplers.shuffled()])


def within_reach(things: list[T]) -> list[T]:
    """Return the objects that can be reached from the cell's names and kept values, without leftovers of a failed cell
    in a library."""
    return ownership.within_reach(things, [vars(sys.modules["__main__"]), payload.kept_values])


def continue_schedules_and_passes(kept: Sequence[Any], note: Callable[[str], None]) -> None:
    """Give schedules, with the settings of their optimizers, and shuffled loaders the positions of rank 0."""
    sets = {id(each) for each in shard_samplers.shuffled()}
    shard_samplers.count_passes_as_rank_0(
        [each for each in kept if id(each) in sets], [each for each in kept if issubclass(type(each), EpochSampler)]
    )
    schedules = sorted((each for each in kept if issubclass(type(each), LRScheduler)), key=_name)
    every = object_collectives.gather([(_name(each), _position(each)) for each in schedules])
    if len({tuple(name for name, _ in each) for each in every}) > 1:
        return  # not the same schedules
    for place, schedule in enumerate(schedules):
        if len({each[place][1] for each in every}) > 1:
            note(f"the steps of {type(schedule).__name__} differed between ranks; all continue with rank 0's")
            load_from_rank_0(schedule, note)
            _take_settings_of_rank_0(schedule, note)


def load_from_rank_0(one: Optimizer | LRScheduler, note: Callable[[str], None]) -> None:
    """Give an object the state that it has on rank 0, or add a note if the ranks cannot exchange that."""
    state = _from_rank_0(one, one.state_dict, note)
    if state is None:
        return
    try:
        one.load_state_dict(state)
    except Exception as error:  # noqa: BLE001 - of the user's class, in each cell from now on
        note(
            f"{type(one).__name__} did not load the state of rank 0 ({type(error).__name__}: {error}), and continues "
            "with its own; for exact results, load a checkpoint"
        )


def _name(schedule: LRScheduler) -> str:
    return type(schedule).__qualname__


def _position(schedule: LRScheduler) -> str:
    """Return the position of a schedule."""
    with suppress(Exception):  # the user's own may raise here
        return f"{getattr(schedule, 'last_epoch', None)} {[float(group['lr']) for group in _groups(schedule)]}"
    return ""


def _groups(schedule: LRScheduler) -> list[dict[str, Any]]:
    with suppress(Exception):  # as above; the other ranks wait for this one
        return list(schedule.optimizer.param_groups)
    return []


def _take_settings_of_rank_0(schedule: LRScheduler, note: Callable[[str], None]) -> None:
    groups = _groups(schedule)
    own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    for group, settings in zip(groups, _from_rank_0(schedule, lambda: own, note) or (), strict=False):
        for name, value in settings.items():
            if isinstance(value, torch.Tensor) and isinstance(mine := group.get(name), torch.Tensor):
                mine.copy_(value)  # it may be on a GPU, or part of a compiled step
            else:
                group[name] = value


def _from_rank_0(one: Optimizer | LRScheduler, state: Callable[[], object], note: Callable[[str], None]) -> Any:
    """Return a state of rank 0, or None with a note if it cannot be read there or sent."""
    own: object = None
    if identity.rank() == 0:
        try:
            own = state()
        except Exception as error:  # noqa: BLE001 - as above; the others wait for rank 0
            own = error  # which cannot be sent
    try:
        return object_collectives.from_rank_0(own)
    except TypeError as error:
        note(
            f"the state of {type(one).__name__} holds or raises a {error}, which ranks cannot exchange: each continues "
            "with its own; for exact results, load a checkpoint"
        )
        return None
