"""Manages the checkpoint's folder: who may write into it, and the one rename that makes a new checkpoint valid.

`torch.distributed.checkpoint` (2.13) overwrites the files of an earlier checkpoint, so an interrupted save destroys
both. Here each save has files of its own; `.metadata`, which names them, is replaced in one step at the end, and only
then the earlier files are removed. Files left by a killed save are removed by the next one.

Each rank writes its share and describes it in a file beside its data; rank 0 reads these files and completes the
checkpoint. Ranks send one another no message for it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import pickle
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from jupyter_distrib.checkpoints import part
from jupyter_distrib.checkpoints.part import Part
from jupyter_distrib.checkpoints.place import METADATA, CheckpointFolder, Identity, make_folder
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.system import outside_text

_DATA = "__*.distcp"
_BESIDE = f"{METADATA}.*"
"""Pattern of the files that a save writes beside the data, and removes at its end."""
_SAVE_ID = re.compile(r"[0-9a-z-]{1,36}")


class Writer(FileSystemWriter):
    """Writes one rank's files beside an earlier checkpoint, until rank 0 replaces that by the new one.

    Args:
        folder: The folder, which rank 0 has prepared.
        save_id: Name of this save, chosen by rank 0, so that nobody else can predict the names of its files.
        rank: This rank.
        is_new: Whether the folder was created for this save, so that it is removed if nothing can be written.
        held: Identity of the prepared folder; None: any. Whoever may rename the folder can put another one, or a link
            to one, in its place.
        notes: What `.metadata` says of the contents, as `contents.notes` returns it.
    """

    def __init__(
        self,
        folder: Path,
        save_id: str,
        rank: int,
        *,
        is_new: bool,
        held: Identity | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        if not _SAVE_ID.fullmatch(str(save_id)):  # heard through torch's store, as the name
            raise DistributedError(f"rank 0 seems to have sent {save_id!r:.100}, which is no name of a save.")
        super().__init__(folder)
        self.folder, self.save_id, self._rank = folder, save_id, rank
        self._place: CheckpointFolder | None = None
        self._is_new, self._is_complete, self._held, self._notes = is_new, False, held, notes

    @property
    def place(self) -> CheckpointFolder:
        """The folder, kept open from its first use."""
        if self._place is None:
            self._place = place = CheckpointFolder(self.folder, follow=not self._is_new)
            if self._held not in (None, place.identity) or (self._is_new and place.other_owner(place.info)):
                self._is_new = False
                raise DistributedError(taken_away(self.folder))
            if self._rank == 0 and self._is_new:
                self._check_new(place)
        return self._place

    def prefixed(self, plan: SavePlan) -> SavePlan:
        """Name the files of this rank after this save."""
        self.fs = self.place
        plan = super().prepare_global_plan([plan])[0]
        prefix = dataclasses.replace(plan.storage_data, prefix=part.mark(self.save_id, self._rank))
        return dataclasses.replace(plan, storage_data=prefix)

    # -------------------------------------------------------------------------------------- parts of the other ranks

    def leave_part(self, plan: SavePlan, results: list[WriteResult]) -> None:
        """Leave the description of this rank's files for rank 0."""
        name = self._part(self._rank)
        with self.place.new(f"{name}.new") as file:
            file.write(part.as_json(plan, results))
        self._rename(f"{name}.new", name)

    def has_part(self, rank: int) -> bool:
        return self.place.has(self._part(rank))

    def part(self, rank: int) -> part.Part:
        """Return the description of another rank's files.

        Raises:
            DistributedError: The file was not written by a rank of this save.
        """
        name, place = self._part(rank), self.place
        try:
            file, _ = place.open_file(name, links=False)
            with file:
                info = os.fstat(file.fileno())
                if owner := place.other_owner(info):
                    raise ValueError(f"it belongs to {owner}")
                if info.st_size > part.MOST_BYTES:
                    raise ValueError(f"it has {info.st_size:,} bytes")
                return part.from_json(file.read(part.MOST_BYTES), save_id=self.save_id, rank=rank)
        except FileNotFoundError:
            raise DistributedError(
                f"{self.folder} does not have the files of rank {rank}: save into a folder that all nodes share."
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DistributedError(
                f"{self.folder}/{name} was not written by rank {rank}: {reason}. None of it was used."
            ) from None

    # -------------------------------------------------------------------------------------------------- the end

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint valid. Called on rank 0, when all ranks have written."""
        metadata.storage_data = {each.index: each.storage_data for part in results for each in part}
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=self.save_id, modules=[*self._notes]
        )
        with self.place.new(self._pending) as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        needed = {each.relative_path for each in metadata.storage_data.values()}
        if not needed <= set(self.place.names()):
            raise DistributedError(self._overtaken())
        self._rename(self._pending, METADATA)
        self.place.sync()
        self._is_complete = True
        for name in self.place.names():
            if name not in needed and name != METADATA and is_of_checkpoint(name):
                self.place.remove(name)

    def _rename(self, old: str, new: str) -> None:
        try:
            self.place.replace(old, new)
        except FileNotFoundError:
            raise DistributedError(self._overtaken()) from None

    def _overtaken(self) -> str:
        return (
            f"{self.folder} was saved into by another process at the same time, which has removed the files of this "
            "save: give each its own folder, or save from one of them."
        )

    def clean_up(self) -> None:
        """Remove the files of a failed save. Called on rank 0, however the save ended."""
        if self._place is None or self._is_complete:
            return
        for name in self._place.names():
            if name.startswith(self._marks):
                self._place.remove(name)
        if self._is_new and not self._place.names():
            with suppress(OSError):  # another folder may be there by now
                self.folder.rmdir()

    def close(self) -> None:
        """Close the folder; called however the save ended."""
        if self._place is not None:
            self._place.close()

    def _check_new(self, place: CheckpointFolder) -> None:
        """Refuse a folder that has replaced the new one, since finishing there would remove its files."""
        if found := [name for name in place.names() if not name.startswith(self._marks)]:
            self._is_new = False
            other = outside_text.shown(min(found))
            raise DistributedError(f"{self.folder} holds {other} and was empty: nothing was written there.")

    @property
    def _marks(self) -> tuple[str, str]:
        return f"__{self.save_id}", f"{METADATA}.{self.save_id}"

    def _part(self, rank: int) -> str:
        return f"{METADATA}.{self.save_id}.part-{rank}"

    @property
    def _pending(self) -> str:
        return f"{METADATA}.{self.save_id}.pending"


def new_save_id() -> str:
    return str(uuid4())


def is_of_checkpoint(name: str) -> bool:
    """Return whether a save writes files with this name."""
    return name == METADATA or fnmatch.fnmatchcase(name, _DATA) or fnmatch.fnmatchcase(name, _BESIDE)


def is_ignored(name: str) -> bool:
    """Return whether this is a file that the system, a desktop or JupyterLab leaves in any folder, such as
    `lost+found`, `.DS_Store` and `.ipynb_checkpoints`."""
    return name == "lost+found" or (name.startswith(".") and not is_of_checkpoint(name))


def is_checkpoint(folder: Path) -> bool:
    return os.path.isfile(folder / METADATA)  # False in a folder that is closed to this user


def make_ready(folder: Path, *, of_series: bool = False) -> Identity:
    """Return a folder that a save may write into, after trying. `of_series`: the folder contains checkpoints, but is
    not one itself.

    A folder of root counts as one of this user. Root may write into any folder that is not open to everybody, as in a
    container, where the host's folders belong to another user. The files in such a folder are read like those of other
    users.

    Raises:
        DistributedError: It cannot be written; the message says why.
    """
    if os.path.isfile(folder):
        raise DistributedError(f"{folder} is a file, and a checkpoint is a folder: choose another name.")
    try:
        if not of_series and folder.is_dir() and not is_checkpoint(folder) and _holds_something_else(folder):
            raise DistributedError(f"{folder} holds other files and is not a checkpoint: choose another folder.")
        with suppress(FileExistsError):
            make_folder(folder)
        place = CheckpointFolder(folder)
        try:
            place.created()  # raises an error if no file may be written
            may_be_of_others = os.geteuid() == 0 and not place.info.st_mode & stat.S_IWOTH
            looked_at = [] if may_be_of_others else [place.info]
            if stat.S_ISLNK((link := folder.lstat()).st_mode):
                looked_at.append(link)
            elif (link.st_dev, link.st_ino) != place.identity:
                raise DistributedError(taken_away(folder))
            owners = [place.other_owner(each) for each in looked_at if each.st_uid != 0]
        finally:
            place.close()
    except OSError as error:
        raise DistributedError(f"{folder} cannot be written: {error.strerror or error}.") from None
    if owner := "".join(owners[:1]) or "".join(owners[1:]):
        raise DistributedError(
            f"{folder} belongs to {owner}, who could replace the files of a checkpoint: choose a folder of "
            "your own, such as a new one in it."
        )
    return place.identity


def taken_away(folder: Path) -> str:
    return f"{folder} was replaced by another folder after the save began: nothing was written there."


def refusal_to_read(folder: Path) -> str | None:
    """Return the reason why there is nothing to load; None if there is a checkpoint."""
    if is_checkpoint(folder):
        return None
    if os.path.isfile(folder):
        return f"{folder} is a file, and a checkpoint is a folder: torch.load() may be able to read it."
    try:
        os.stat(folder / METADATA)
    except PermissionError as error:
        return f"{folder} cannot be read: {error.strerror}."
    except OSError:
        pass
    if not os.path.isdir(folder):  # False for a name that is too long
        parent = folder.absolute().parent
        return f"there is no checkpoint {folder}; in {parent} there is {_listed(parent)}."
    if any(folder.glob(_DATA)):
        return f"{folder} is not a complete checkpoint: the save that wrote it was stopped before its end."
    return f"{folder} is not a checkpoint: it has no {METADATA} file."


def _holds_something_else(folder: Path) -> bool:
    return not all(is_of_checkpoint(each.name) or is_ignored(each.name) for each in folder.iterdir())


def _listed(folder: Path) -> str:
    found: list[str] = []
    with suppress(OSError):  # there is no such folder, or it is closed to this user
        found = [each for each in os.listdir(folder) if is_checkpoint(folder / each)]
    names = sorted(map(outside_text.shown, found))
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def combined(error: CheckpointException, what: str) -> BaseException:
    """Return one error for all the errors that torch has collected."""
    return explained(min(error.failures.items())[1][0], what)


def explained(cause: BaseException, what: str) -> BaseException:
    """Return an error that says what failed, on which rank, and why."""
    if isinstance(cause, (KeyboardInterrupt, DistributedError)):
        return cause
    where = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
    cause = refused_by_system(cause)
    return DistributedError(f"{what}{where}: {type(cause).__name__}: {cause}")


def refused_by_system(error: BaseException) -> BaseException:
    """Return the error of the system that came first, or this error without one: once the disk is full, torch closes
    its file and says only which position in it was unexpected."""
    each: BaseException | None = error
    while each is not None and not isinstance(each, OSError):
        each = each.__context__ if each.__cause__ is None else each.__cause__
    return error if each is None else each


def write_share(writer: Writer, planner: SavePlanner, plan: SavePlan, items: list[WriteItem]) -> Part:
    """Write these items of a rank's plan."""
    writer.set_up_storage_writer(True)  # it makes no difference
    plan = writer.prefixed(dataclasses.replace(plan, items=items))
    return plan, writer.write_data(plan, planner).value()


def complete_checkpoint(writer: Writer, planner: SavePlanner, own: Part, ranks: int) -> None:
    """Make the checkpoint valid. Called on rank 0, when the other ranks have left their parts."""
    parts = [own, *map(writer.part, range(1, ranks))]
    _, metadata = planner.create_global_plan([plan for plan, _ in parts])
    writer.finish(metadata, [results for _, results in parts])
