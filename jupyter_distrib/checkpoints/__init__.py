"""`jupyter_distrib.save`, `load` and `resume`: checkpoints by `torch.distributed.checkpoint` that do not depend
on how many ranks wrote them.

Runs wherever it is called: on every rank of a run, or in a plain notebook or script, where there is no process group.

    save("ckpt", model=model, optimizer=optimizer, epoch=3)     4 ranks, sharded
    load("ckpt", model=model, optimizer=optimizer)  -> {"epoch": 3}     2 ranks, or none

    save("ckpt", every_s=60, keep=3, ...)   in the background, see `periodic.py`
    resume("ckpt", ...)                     `load` of the newest one, or {}

Loading needs no collective: each rank reads its own pieces.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from jupyter_distrib.checkpoints import (
    contents,
    foreground,
    layout,
    meeting,
    optimizers,
    periodic,
    position,
    reader,
    series,
)
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity


def save(
    path: str | os.PathLike[str], /, *, every_s: float | None = None, keep: int | None = None, **objects: Any
) -> None:
    """Write a checkpoint folder; an earlier checkpoint there stays whole until this one takes its place.

    With `every_s` or `keep`, the folder holds several checkpoints, which are written in the background: the call
    returns when the state has been copied.

    In a distributed cell, every rank must call it if anything is sharded, since each rank writes its own shards.
    Everything else is written as rank 0 has it, whether or not the other ranks call it, too.

    Args:
        path: The folder. Relative to the notebook's folder.
        every_s: Seconds from one checkpoint to the next; calls in between return at once. None: every call makes one.
        keep: Number of newest checkpoints to keep. None: 3 with `every_s`; else one, written before the call returns.
        objects: Models, optimizers (with the models they train), objects with a `state_dict()`, data loaders, dicts of
            tensors, and plain values, each under the name to load it by.

    Raises:
        DistributedError: Something cannot be written; the message says what, and why. The earlier checkpoint is as
            it was.
    """
    folder = _folder("save", path)
    _check_callable_here("save", objects)
    if (reporter := identity.cell.reporter) is not None:
        reporter.saves_into(str(folder.absolute()))
    if every_s is not None or keep is not None:
        periodic.check_settings(every_s, keep)
        return periodic.call(
            folder,
            objects,
            lambda: _state(objects),
            every_s=float(every_s or 0.0),
            keep=int(keep or periodic.DEFAULT_KEEP),
        )
    periodic.wait(folder)
    _write_now(folder, _state(objects))
    if reporter is not None and identity.rank() == 0:
        reporter.saved(str(folder.absolute()))


def _write_now(folder: Path, state: dict[str, Any]) -> None:
    """Write one checkpoint, before this returns."""
    board = meeting.run_board()
    if board is None:
        return foreground.write(folder, state, together=dist.is_initialized())
    if meeting.has_shards(state):
        meeting.all_come(board, str(folder))
        return foreground.write(folder, state, together=True)
    meeting.by_rank_0(
        board, meeting.number(board, str(folder)), lambda: foreground.write(folder, state, together=False)
    )


def _state(objects: Mapping[str, Any]) -> dict[str, Any]:
    return contents.SavedState(objects)


def load(path: str | os.PathLike[str], /, **objects: Any) -> dict[str, Any]:
    """Load models, optimizers and anything with a `load_state_dict()` in place, from a checkpoint of any number of
    ranks.

    Values other than tensors are unpickled. If somebody else wrote the checkpoint, no code is run: a value other
    than numbers, strings, lists, dicts and tensors is then an error.

    Args:
        path: The folder that `save` wrote.
        objects: Objects to load into, under the names they were saved by; an optimizer together with the models it
            trains.

    Returns:
        The other entries of the checkpoint, by name, without models and optimizers; without any `objects`,
        everything, on the CPU.

    Raises:
        DistributedError: What does not fit (name, shape), with nothing changed; or what cannot be read.
    """
    _check_handles("load", objects)
    with reader.opened(periodic.newest(_folder("load", path))) as source:
        return _load(source, objects)


def _load(source: reader.CheckpointReader, objects: Mapping[str, Any]) -> dict[str, Any]:
    metadata = source.metadata
    if not objects:
        whole = {name: layout.nested(layout.entries(metadata, name)) for name in layout.names(metadata)}
        return contents.plain(metadata, source.read(whole))
    contents.check(metadata, objects)
    trained = {
        name: optimizers.names_of(name, value, objects)
        for name, value in objects.items()
        if isinstance(value, torch.optim.Optimizer)
    }
    small = source.read({name: optimizers.groups_place(metadata, name) for name in trained})
    places = contents.plain_places(metadata, objects)
    for name, value in objects.items():
        if name in trained:
            groups = small[name]["param_groups"]
            optimizers.check_groups(name, groups, value, trained[name])
            for schedule in (key for key, each in objects.items() if _is_schedule_of(each, value)):
                optimizers.check_order(name, groups, value, trained[name], schedule)
            places[name] = optimizers.state_place(metadata, name, value, trained[name])
        else:
            places[name] = contents.place(metadata, name, value)
    read = source.read(places)
    for name, value in objects.items():
        if name in trained:
            optimizers.give(value, {**small[name], **read.pop(name)}, trained[name])
        else:
            contents.give(value, read.pop(name))
    return contents.plain(metadata, read)


def _is_schedule_of(value: Any, optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(value, torch.optim.lr_scheduler.LRScheduler) and value.optimizer is optimizer


def resume(path: str | os.PathLike[str], /, **objects: Any) -> dict[str, Any]:
    """Load the newest complete checkpoint of a folder, if there is one, so that the same cell both starts and continues
    a training run: `epoch = resume("ckpt", model=model, optimizer=optimizer, loader=loader).get("epoch", 0)`.

    In a cell with a process group every rank calls it, and all load the same checkpoint.

    Args:
        path: The folder that `save` writes into.
        objects: As for `load`; the next pass over a data loader starts at the position in the checkpoint.

    Returns:
        The other entries of the checkpoint, by name, as from `load`; empty if there is no checkpoint.

    Raises:
        DistributedError: What does not fit, with nothing changed; or what cannot be read.
    """
    _check_handles("resume", objects)
    folder = _folder("resume", path)
    if (reporter := identity.cell.reporter) is not None:
        reporter.resumes_from(str(folder.absolute()))
    together = meeting.run_board() is not None or dist.is_initialized()
    rank = identity.rank() if identity.is_rank() else dist.get_rank() if together else 0
    found = meeting.from_rank_0(lambda: _newest(folder), "resume", str(folder), rank) if together else _newest(folder)
    name, refusal = json.loads(found)
    if refusal:  # all ranks raise it
        raise DistributedError(refusal)
    if name:
        series.check_named(folder, name)
    for value in objects.values():
        if isinstance(value, DataLoader) and not callable(getattr(value, "state_dict", None)):
            position.follow(value)
    return load(name, **objects) if name else {}


def _folder(name: str, path: str | os.PathLike[str]) -> Path:
    try:
        folder = Path(path).expanduser()  # as a shell does: a folder named "~" is a trap
    except (TypeError, RuntimeError) as error:  # no path; nobody's home
        raise DistributedError(
            f"jupyter_distrib.{name}() takes the path of a folder, and {path!r:.100} is none: {error}"
        ) from None
    if "\0" in str(folder):
        raise DistributedError(f"jupyter_distrib.{name}(): a path has no character \\0, as {path!r:.100} has.")
    return folder


def _newest(folder: Path) -> str:
    """Return the newest checkpoint of a folder, if any, and the reason why a run cannot begin there, in JSON."""
    periodic.wait(folder)
    found = series.newest(folder)
    return json.dumps((str(found or ""), "" if found else series.refusal_to_resume(folder)))


# ------------------------------------------------------------------------------------------------ who calls


def _check_callable_here(name: str, objects: Mapping[str, Any]) -> None:
    _check_handles(name, objects)
    if not objects:
        raise DistributedError(f"jupyter_distrib.{name}() was given nothing: {name}(path, model=model), for instance.")
    if identity.is_rank() and not dist.is_initialized() and identity.world_size() > 1 and identity.rank() != 0:
        raise DistributedError(
            f"jupyter_distrib.{name}() was called on rank {identity.rank()}, and the ranks have no process group "
            "to write together: add --strategy ddp to the cell, or call it on rank 0 alone."
        )


def _check_handles(name: str, objects: Mapping[str, Any]) -> None:
    if identity.cell.strategy is not None:
        identity.cell.strategy.check_checkpoint("save" if name == "save" else "load", objects)
    # Not loaded on a rank, which has no handles.
    handle = getattr(sys.modules.get("jupyter_distrib.kernel.session.runs.results"), "RankValue", None)
    for key, value in objects.items():
        if isinstance(value, type) and callable(getattr(value, "state_dict", None)):
            raise DistributedError(
                f"jupyter_distrib.{name}(): `{key}` is the class {value.__name__}, and not an object of it."
            )
        if handle is not None and isinstance(value, handle):
            raise DistributedError(
                f"`{key}` lives on the ranks: call jupyter_distrib.{name}() in a %%distributed cell."
            )
