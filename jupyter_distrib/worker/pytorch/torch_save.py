"""The `torch.save` of a rank. Installed once, before ranks are forked.

- A cell that was written for one device saves on every rank, and to the same path: each rank writes a file of its own
  and moves it to the path when it is complete, so that no reader finds half of a file, or a mixture.
- Of a value that a strategy has sharded it would write the shards of one rank as if they were the whole: refused.
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
from jupyter_distrib.serialization import payload

_SAVED = (
    "torch.save() would write this rank's shards only, since this model is sharded over the ranks: call "
    "jupyter_distrib.save(path, model=model) on every rank, or end the cell with `model.state_dict()`, which comes "
    "back whole."
)


def install() -> None:
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
    """Return whether anything in a value is sharded over a mesh of a strategy; a cell may save from its own meshes."""
    meshes = sys.modules.get("jupyter_distrib.worker.autoparallel.training.meshes")
    return meshes is not None and meshes.ours_among(lambda: payload.sharded_in(value))
