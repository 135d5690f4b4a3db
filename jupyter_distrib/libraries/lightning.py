"""The facts about Lightning. It starts its own ranks unless `TORCHELASTIC_RUN_ID` is set. It ignores SIGINT while it
shuts down, and leaves it ignored: `worker/environment/cell_environment.py` puts every handler back.

Code for Spark has `Trainer(devices=1, num_nodes=8)`, since each task of Spark is a node with one process. Eight ranks
of one node are `devices=8, num_nodes=1`: Lightning (2.6) looks for the device of a rank by its local rank.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

from jupyter_distrib.libraries import torchmetrics
from jupyter_distrib.libraries.library import Library

_BEGINS = {"Trainer": "fit", "Fabric": "launch"}
"""The method with which a training begins, by class."""


def fitting(devices: object, num_nodes: object) -> tuple[object, object]:
    """Return the ranks' devices per node and number of nodes if the arguments ask for that many ranks in all; else the
    arguments."""
    local, world = (int(os.environ.get(name, "0")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in (devices, num_nodes))
    if not whole or not local or world % local or devices * num_nodes != world:  # type: ignore[operator]
        return devices, num_nodes
    return local, world // local


def _fit_to_ranks(name: str, module: Any) -> None:
    made = getattr(module, name)
    original = made.__init__

    @functools.wraps(original)
    def initialize(self: Any, *arguments: Any, **keywords: Any) -> None:
        if "devices" in keywords and "num_nodes" in keywords:
            keywords["devices"], keywords["num_nodes"] = fitting(keywords["devices"], keywords["num_nodes"])
        original(self, *arguments, **keywords)

    made.__init__ = initialize
    begin = getattr(made, _BEGINS[name])

    @functools.wraps(begin)
    def begin_or_warn(self: Any, *arguments: Any, **keywords: Any) -> Any:
        ranks = os.environ.get("WORLD_SIZE", "1")
        if self.world_size == 1 and ranks != "1" and not torchmetrics.is_followed():
            warnings.warn(
                f"this {name} counts one process, so each of the {ranks} ranks trains alone, with all data: make it in "
                f'the cell, with {name}(strategy="ddp", devices=world_size)',
                stacklevel=2,
            )
        return begin(self, *arguments, **keywords)

    setattr(made, _BEGINS[name], begin_or_warn)


LIGHTNING = Library(
    modules=("lightning", "pytorch_lightning"),
    extra="lightning",
    instead_of_launching="with Lightning use strategy='ddp' instead of 'ddp_notebook' or 'ddp_spawn'",
    divides_data=True,
    mend={
        f"{package}.{module}": functools.partial(_fit_to_ranks, name)
        for name, packages, module in (
            ("Trainer", ("lightning.pytorch", "pytorch_lightning"), "trainer.trainer"),
            ("Fabric", ("lightning.fabric", "lightning_fabric"), "fabric"),
        )
        for package in packages
    },
)
