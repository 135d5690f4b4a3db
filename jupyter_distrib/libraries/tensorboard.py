"""The facts about TensorBoard: a `SummaryWriter` that every rank of a cell makes for one folder writes on the rank that
logs. TensorBoard would draw the curves of all ranks as one."""

from __future__ import annotations

import os
import re
import socket
from types import ModuleType
from typing import Any

from jupyter_distrib.libraries import tracking
from jupyter_distrib.libraries.library import Library

_OF_A_RANK = r"((?i:rank|worker|gpu|proc\w*|device|cuda|node)[\s_=:-]*|(?<!\d)(?=\d+/)){}(?!\d)"
"""A rank's number in the name of a folder: `rank1`, `gpu_1_of_2`, or at the end of a part, as in `runs/1`."""


class SilentWriter:
    """A `FileWriter` that writes nothing."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def get_logdir(self) -> str:
        return self._folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*_: Any, **__: Any) -> None: ...


def is_of_rank(folder: str, rank: str) -> bool:
    """Return whether a folder is named after a rank, so that the others do not write there."""
    return re.search(_OF_A_RANK.format(rank), f"{folder.replace(socket.gethostname(), '')}/") is not None


def _mended(module: ModuleType) -> None:
    original = module.FileWriter

    def file_writer(log_dir: Any, *arguments: Any, **keywords: Any) -> Any:
        folder = str(log_dir)
        if tracking.is_silent() and not is_of_rank(folder, os.environ.get("RANK", "")):
            return SilentWriter(folder)
        return original(log_dir, *arguments, **keywords)

    module.__dict__["FileWriter"] = file_writer


TENSORBOARD = Library(
    modules=("tensorboard",),
    stays={"torch.utils.tensorboard:SummaryWriter": "it writes from a thread of the notebook: make one in the cell"},
    mend={"torch.utils.tensorboard.writer": _mended},
)
