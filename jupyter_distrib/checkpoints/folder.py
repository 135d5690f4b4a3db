"""Manages the checkpoint's folder: who may write into it, and the one rename that makes a new checkpoint valid.

`torch.distributed.checkpoint` (2.13) writes over the files of an earlier checkpoint, so a save that is stopped half-way
destroys both. Here each save has files of its own; `.metadata`, which names them, is replaced in one step at the end,
and only then the earlier files go. What a killed save has left goes with the next one.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

METADATA = ".metadata"
_DATA = "__*.distcp"


class Writer(FileSystemWriter):
    """A writer that works beside an earlier checkpoint and then takes its place."""

    def __init__(self, folder: Path) -> None:
        self._is_new = not folder.exists()
        self._is_complete = False
        super().__init__(folder)

    @property
    def folder(self) -> Path:
        return Path(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of all ranks after this save. Called on rank 0."""
        return [
            dataclasses.replace(
                plan, storage_data=dataclasses.replace(plan.storage_data, prefix=self._mark + plan.storage_data.prefix)
            )
            for plan in super().prepare_global_plan(plans)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint valid. Called on rank 0, when all ranks have written."""
        metadata.storage_data = {each.index: each.storage_data for part in results for each in part}
        metadata.storage_meta = self.storage_meta()
        with self._pending.open("wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        self._pending.replace(self.folder / METADATA)
        _sync(self.folder)
        self._is_complete = True
        needed = {each.relative_path for each in metadata.storage_data.values()}
        for file_path in [*self.folder.glob(_DATA), *self.folder.glob(f"{METADATA}.*")]:
            if file_path.name not in needed:
                file_path.unlink(missing_ok=True)

    def clean_up(self) -> None:
        """Remove what a failed save has written. Called on rank 0, however the save ended."""
        if self._is_complete or not self.folder.is_dir():
            return
        for file_path in [*self.folder.glob(f"{self._mark}*"), *self.folder.glob(self._pending.name)]:
            file_path.unlink(missing_ok=True)
        if self._is_new and not any(self.folder.iterdir()):
            self.folder.rmdir()

    @property
    def _mark(self) -> str:
        return f"__{self.save_id}"

    @property
    def _pending(self) -> Path:
        return self.folder / f"{METADATA}.{self.save_id}"


def is_checkpoint(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def refusal_to_write(folder: Path, *, of_series: bool = False) -> str | None:
    """Return why the folder cannot be written, after trying; None if it can. `of_series`: it holds checkpoints, and is
    none itself."""
    if folder.is_file():
        return f"{folder} is a file, and a checkpoint is a folder: choose another name."
    try:
        if not of_series and folder.is_dir() and not is_checkpoint(folder) and _holds_something_else(folder):
            return f"{folder} holds other files and is no checkpoint: choose another folder."
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{METADATA}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}."
    return None


def refusal_to_read(folder: Path) -> str | None:
    """Return why there is nothing to load; None if there is a checkpoint."""
    if is_checkpoint(folder):
        return None
    if folder.is_file():
        return f"{folder} is a file, and a checkpoint is a folder: torch.load() may know what to do with it."
    if not folder.is_dir():
        beside = folder.absolute().parent
        return f"there is no checkpoint {folder}; in {beside} there is {_listed(beside)}."
    if any(folder.glob(_DATA)):
        return f"{folder} is no whole checkpoint: the save that wrote it was stopped before its end."
    return f"{folder} is no checkpoint: it has no {METADATA} file."


def _holds_something_else(folder: Path) -> bool:
    return any(not (each.match(_DATA) or each.match(f"{METADATA}.*")) for each in folder.iterdir())


def _listed(folder: Path) -> str:
    names = sorted(each.name for each in folder.iterdir() if is_checkpoint(each)) if folder.is_dir() else []
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
