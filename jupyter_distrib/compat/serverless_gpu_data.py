"""The stand-in for `serverless_gpu.data` and `databricks.air.data`, made from their public documentation alone: the
files of a folder divided among the ranks, and torch's checkpoints in a folder. Ranks, and a notebook; loads torch.

A volume is a folder here: one that every rank reads and writes at its path. Files are read where they are, without a
copy on a local disk.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.utils.data
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.utils.data import IterableDataset, get_worker_info

from jupyter_distrib import runtime

__all__ = ["DataLoader", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter"]


class UCVolumeDataset(IterableDataset[str]):
    """The paths of all files below a folder, sorted, each on one rank and in one worker of a data loader. All ranks
    must have equally many workers.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def __iter__(self) -> Iterator[str]:
        """Yield this rank's, or this worker's, files.

        Raises:
            FileNotFoundError: There is no such folder.
        """
        if not Path(self.path).is_dir():
            raise FileNotFoundError(
                f"UCVolumeDataset reads a folder, and {self.path} is none on this machine: give the path at which the "
                "data lies here."
            )
        worker = get_worker_info()
        first, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        place = runtime.get_global_rank() * workers + first
        return iter(_files(self.path)[place :: runtime.get_world_size() * workers])


def _files(folder: str) -> list[str]:
    return sorted(
        str(Path(where) / name) for where, _, names in os.walk(folder) for name in names if not name.startswith(".")
    )


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Torch's data loader with other defaults: six workers, which read four batches ahead and stay between epochs."""

    def __init__(self, dataset: Any, *args: Any, **settings: Any) -> None:
        chosen = inspect.signature(torch.utils.data.DataLoader).bind(dataset, *args, **settings).arguments
        chosen.setdefault("num_workers", 6)
        if chosen["num_workers"]:
            chosen = {"prefetch_factor": 4, "persistent_workers": True, **chosen}
        super().__init__(**chosen)


class UCVolumeWriter(FileSystemWriter):
    """A folder into which `torch.distributed.checkpoint.save` and `async_save` write a checkpoint. Its file `.metadata`
    comes last, so a checkpoint that has it is complete.

    Args:
        path: The folder, which is made if it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)


class UCVolumeReader(FileSystemReader):
    """A folder from which `torch.distributed.checkpoint.load` reads a checkpoint. As always with torch's reader, its
    `.metadata` is a pickle: load only what is yours.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
