"""The facts about Weights & Biases: `wandb.init` in a cell makes one run, from the rank that logs, and the next cell
finds none open. A cell that names a group gets one run for each rank, as intended."""

from __future__ import annotations

import functools
import os
import threading
from types import ModuleType
from typing import Any

from jupyter_distrib.libraries import tracking
from jupyter_distrib.libraries.library import Library

GROUP_VARIABLE = "JUPYTER_DISTRIB_WANDB_GROUP"
"""Environment variable with the group that the tracker has given the ranks, as opposed to a group chosen by the
user."""
FINISH_S = 5.0
"""Maximum seconds to wait for the end of a run that a cell has left open."""


def _mended(module: ModuleType) -> None:
    init = module.init

    @functools.wraps(init)
    def from_one_rank(*arguments: Any, **keywords: Any) -> Any:
        group = keywords.get("group") or os.environ.get("WANDB_RUN_GROUP")
        if tracking.is_silent() and group in (None, "", os.environ.get(GROUP_VARIABLE)):
            keywords["mode"] = "disabled"
        return init(*arguments, **keywords)

    module.__dict__["init"] = from_one_rank


def _finish(module: ModuleType) -> None:
    if getattr(module, "run", None) is None:
        return
    closing = threading.Thread(target=module.finish, name="jupyter_distrib-wandb", daemon=True)
    closing.start()
    closing.join(FINISH_S)


WANDB = Library(
    modules=("wandb",), extra="wandb", mend={"wandb.sdk.wandb_init": _mended}, after_cell={"wandb": _finish}
)
