"""The functions of torch that a rank replaces. Installed once, before ranks are forked.

`torch.multiprocessing.spawn`   refused: the processes that it starts as further ranks would wait for one another for
                                ever (seen with Lightning's `ddp_notebook`), as each existing rank starts its own
`torch.set_num_interop_threads` accepted again with the same number: torch allows one call in the life of a program, and
                                a rank runs many
`torch.save`                    on a cell that was written for one device every rank saves, and to the same path: each
                                writes a file of its own and moves it to the path when it is complete, so that no reader
                                finds half of a file, or a mixture. Refused for a value that a strategy has sharded: it
                                would write the shards of one rank as if they were the whole
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity
from jupyter_distrib.libraries import known
from jupyter_distrib.serialization import payload
from jupyter_distrib.worker.pytorch import private

_LAUNCHED = (
    "torch.multiprocessing.{name}() on a rank of a distributed cell: the ranks are there already, as many as --ranks "
    "or --gpus says. Call the function directly; {advice}."
)


def refuse_launching() -> None:
    """Replace torch's functions that start processes."""
    spawning: Any = private.spawn_module()
    package: Any = torch.multiprocessing
    for name in ("start_processes", "spawn"):
        refused = _refusing(getattr(package, name))
        setattr(spawning, name, refused)
        setattr(package, name, refused)


def _refusing(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*_: object, **__: object) -> None:
        raise DistributedError(_LAUNCHED.format(name=original.__name__, advice=known.instead_of_launching()))

    return refuse


def allow_same_interop_threads() -> None:
    """Replace `torch.set_num_interop_threads`."""
    torch.set_num_interop_threads = _unless_set(torch.set_num_interop_threads)


def _unless_set(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_num_interop_threads(count: int) -> None:
        if count != torch.get_num_interop_threads():
            original(count)

    return set_num_interop_threads


_SAVED = (
    "torch.save() would write this rank's shards only, since this model is sharded over the ranks: call "
    "jupyter_distrib.save(path, model=model) on every rank, or end the cell with `model.state_dict()`, which comes "
    "back whole."
)


def replace_save() -> None:
    """Replace `torch.save`."""
    torch.save = _saving(torch.save)


def _saving(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **keywords: Any) -> None:
        if _is_ours(obj):
            raise DistributedError(_SAVED)
        path = Path(os.path.realpath(f)) if isinstance(f, (str, os.PathLike)) else None
        if path is None or not os.access(path.parent, os.W_OK) or (path.exists() and not path.is_file()):
            original(obj, f, *args, **keywords)
            return
        own_path = path.with_name(f".{path.name}.{identity.rank()}.{os.getpid()}")
        try:
            original(obj, own_path, *args, **keywords)
            own_path.replace(path)
        finally:
            with suppress(FileNotFoundError):
                own_path.unlink()

    return save


def _is_ours(value: object) -> bool:
    """Return whether a value contains anything sharded over a strategy's mesh; shards of the cell's own meshes may be
    saved."""
    meshes = sys.modules.get("jupyter_distrib.worker.autoparallel.training.meshes")
    return meshes is not None and meshes.ours_among(lambda: payload.sharded_in(value))
