"""The guard against processes that a rank would start as further ranks. Installed once, before ranks are
forked.

They would wait for one another for ever (seen with Lightning's `ddp_notebook`), as each existing rank starts its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.libraries import known
from jupyter_distrib.worker.pytorch import private

_LAUNCHED = (
    "torch.multiprocessing.{name}() on a rank of a distributed cell: the ranks are there already, as many as --ranks "
    "or --gpus says. Call the function itself; {advice}."
)


def install() -> None:
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
