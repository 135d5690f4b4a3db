"""Reads a checkpoint without running code of anybody other than this user and root.

`.metadata` and every value other than a tensor are pickles. Files of this user are simply loaded. If somebody else
has written a file, or could have, `.metadata` is read by `strict_metadata.py`, and values are limited to what
torch loads with `weights_only`: numbers, strings, lists, dicts, tensors.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from jupyter_distrib.checkpoints import damage, strict_metadata
from jupyter_distrib.checkpoints.damage import DamagedError
from jupyter_distrib.checkpoints.folder import combined, refusal_to_read
from jupyter_distrib.checkpoints.place import METADATA, CheckpointFolder
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.system import outside_text
from jupyter_distrib.worker.pytorch.private import saved_pickle

_MOST_METADATA_BYTES = 1 << 30
_SHOWN_CHARACTERS = 1000
_BEGINS = b"PK\3\4"
"""First bytes of a file of `torch.save`; torch would take a file with other first bytes for one of its earlier
formats."""


@contextmanager
def opened(folder: Path) -> Iterator[CheckpointReader]:
    """Open a checkpoint for the duration of the block.

    Raises:
        DistributedError: There is no checkpoint, or its `.metadata` cannot be read.
    """
    if refusal := refusal_to_read(folder):
        raise DistributedError(refusal)
    try:
        files = _Files(folder)
    except OSError as error:
        raise DistributedError(f"{folder} cannot be read: {error.strerror or error}.") from None
    try:
        try:
            reader = CheckpointReader(folder, files)
        except DamagedError as error:
            raise DistributedError(f"{error}, so {folder} cannot be loaded: load another checkpoint.") from None
        yield reader
    finally:
        files.close()


def damage_of(folder: Path) -> str:
    """Return which file of a checkpoint is missing or cut off; empty if none is, or if that cannot be found out."""
    try:
        files = _Files(folder)
        try:
            CheckpointReader(folder, files)
        finally:
            files.close()
    except DamagedError as error:
        return str(error)
    except (OSError, DistributedError):  # said when it is loaded
        return ""
    return ""


class CheckpointReader(FileSystemReader):
    """Reads one checkpoint."""

    def __init__(self, folder: Path, files: _Files) -> None:
        super().__init__(folder)
        self.fs = self._files = files
        streams: Any = _Streams(files, self.transforms)
        self.transforms = streams
        self.metadata = self._checked_metadata()
        try:
            damage.check_places(files, self.metadata)
            damage.check_files(files, self.metadata.storage_data)
        except (AttributeError, TypeError, ValueError) as error:  # objects that lack something
            raise DamagedError(f"{folder}/{METADATA} is not as it was written ({error})") from None

    def read(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fill the tensors in `state` in place, and replace its None values with the other entries.

        Raises:
            DistributedError: An entry cannot be read, or only by running somebody else's code.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_sharded(state, storage_reader=self, planner=_Planner(self._files), no_dist=True)
        except CheckpointException as error:
            cause, files = combined(error, f"{self._files.path} could not be read"), self._files
            if not isinstance(cause, KeyboardInterrupt) and (files.doubt_of_this or files.doubt_of_all):
                # It contains names chosen by others.
                cause = DistributedError(outside_text.shown(str(cause), _SHOWN_CHARACTERS))
            raise cause from None
        return state

    def read_metadata(self, *args: Any, **keywords: Any) -> Metadata:
        """Return the metadata, which are read only once. Called by torch."""
        return self.metadata

    def _checked_metadata(self) -> Metadata:
        path = f"{self._files.path}/{METADATA}"
        doubt = ""
        try:
            with self._files.create_stream(self._files.path / METADATA, "rb") as file:
                if doubt := self._files.doubt_of_all:
                    found = strict_metadata.metadata_from(file.read(_MOST_METADATA_BYTES))
                else:
                    found = _unpickled(file, path)
                    if not isinstance(found, Metadata):
                        raise TypeError(f"it is a pickle of {type(found).__name__}")
        except DamagedError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            doubts = f" (it {doubt}, so nothing is run that it names)" if doubt else ""
            raise DistributedError(f"{path} cannot be read: {type(error).__name__}: {error}{doubts}") from error
        modules = list(getattr(found.storage_meta, "modules", None) or [])
        found.storage_meta = StorageMeta(load_id=self.load_id, modules=modules)
        return found


def _unpickled(file: IO[bytes], path: str) -> Any:
    try:
        return pickle.load(file)
    except Exception as error:  # a damaged pickle raises anything
        raise DamagedError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class _Files(CheckpointFolder):
    """Opens the files of a checkpoint for torch, one after the other."""

    doubt_of_all = doubt_of_this = ""
    """Reasons why somebody else may have written `.metadata`, and the current file; empty if only this user or root can
    have."""
    present = ""
    """Name of the current file."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file, and record its owner."""
        self.present = self.name_of(path)
        file, self.doubt_of_this = self.open_file(self.present)
        if self.present == METADATA:
            self.doubt_of_all = self.doubt_of_this
        with file:
            yield file


class _Streams:
    """Returns the content of each entry to torch, in place of the extension `given`."""

    def __init__(self, files: _Files, given: Any) -> None:
        self._files, self._given = files, given

    def transform_load_stream(self, read_item: ReadItem, transforms: Sequence[str], stream: IO[bytes]) -> IO[bytes]:
        """Return the content of an entry; if it is somebody else's, only after checking that loading it terminates, and
        takes no more memory than it has bytes."""
        files, stream = self._files, self._given.transform_load_stream(read_item, transforms, stream)
        if not (doubt := files.doubt_of_this or files.doubt_of_all):
            self._check_sums(read_item, stream)
            return stream
        content: bytes = stream.read(-1)  # so that the checked bytes are loaded
        try:
            if not content.startswith(_BEGINS):
                raise ValueError("it is not as torch.save writes it")
            content = damage.rewritten(content)
            strict_metadata.check_extent(saved_pickle(content))
        except Exception as error:  # noqa: BLE001 - anything, since anybody has made it
            raise DistributedError(
                f"{files.path}/{files.present} {doubt}, and `{read_item.dest_index.fqn}` in it is not loaded: "
                f"{outside_text.shown(str(error))}."
            ) from None
        return io.BytesIO(content)

    def _check_sums(self, read_item: ReadItem, stream: IO[bytes]) -> None:
        try:
            damage.check_sums(stream)
        except DamagedError as error:
            name, files = read_item.dest_index.fqn, self._files
            raise DistributedError(
                f"{files.path}/{files.present} is damaged, and `{name}` in it cannot be loaded: {error}. "
                "Load another checkpoint."
            ) from None


class _Planner(DefaultLoadPlanner):
    """Reads another user's values without running code."""

    def __init__(self, files: _Files) -> None:
        super().__init__()
        self._files = files

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value other than a tensor into the state."""
        files = self._files
        name = files.present if files.doubt_of_this else METADATA
        if doubt := files.doubt_of_this or files.doubt_of_all:
            try:
                plain = torch.load(value, map_location="cpu", weights_only=True)
            except Exception:  # noqa: BLE001 - anything, since anybody has made it
                # Not with torch's own message, which quotes names of that file unchanged.
                raise DistributedError(_needs_code(read_item.dest_index.fqn, files.path, name, doubt)) from None
            value = io.BytesIO()
            torch.save(plain, value)
            value.seek(0)
        super().load_bytes(read_item, value)


def _needs_code(entry: str, folder: Path, name: str, doubt: str) -> str:
    return (
        f"{folder}/{name} {doubt}, and `{entry}` in it is more than numbers, strings and tensors, so that it could run "
        "any code here: if you trust its author, copy the folder and load the copy "
        f"(cp -rL {folder} COPY && chmod -R go-w COPY)."
    )
