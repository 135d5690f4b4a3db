"""What a rank refuses, since it would go wrong without a word. Installed once, when the process becomes a rank.

- Starting processes that want to be ranks: they would wait for ever for one another (seen with Lightning's
  `ddp_notebook`), as each of the ranks that are there starts its own.
- `torch.save` of what a strategy has sharded: it would write the shards of one rank as if they were the whole.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from jupyter_distrib import payload
from jupyter_distrib.errors import DistributedError

_LAUNCHED = (
    "torch.multiprocessing.{name}() on a rank of a distributed cell: the ranks are there already, as many as --ranks "
    "or --gpus says. Call the function itself. With Lightning take strategy='ddp' instead of 'ddp_notebook' or "
    "'ddp_spawn', with Accelerate call the training function instead of notebook_launcher()."
)
_SAVED = (
    "torch.save() would write this rank's shards only, since this model is sharded over the ranks: call "
    "jupyter_distrib.save(path, model=model) on every rank, or end the cell with `model.state_dict()`, which comes "
    "back whole."
)


def install() -> None:
    """Replace the functions of torch."""
    spawning: Any = sys.modules["torch.multiprocessing.spawn"]  # the name in the package is that of a function
    package: Any = torch.multiprocessing
    for name in ("start_processes", "spawn"):
        refused = _refusing(getattr(package, name))
        setattr(spawning, name, refused)
        setattr(package, name, refused)
    torch.save = _saving(torch.save)


def _refusing(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*_: object, **__: object) -> None:
        raise DistributedError(_LAUNCHED.format(name=original.__name__))

    return refuse


def _saving(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(obj: object, *args: Any, **keywords: Any) -> None:
        if _is_ours(obj):
            raise DistributedError(_SAVED)
        original(obj, *args, **keywords)

    return save


def _is_ours(value: object) -> bool:
    """Whether anything in it is sharded over a mesh that a strategy has made; the cell's own meshes are its own
    matter."""
    meshes = sys.modules.get("jupyter_distrib.worker.meshes")
    return meshes is not None and meshes.ours_among(lambda: payload.sharded_in(value))
