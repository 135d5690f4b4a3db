"""`save(..., every_s=60, keep=3)`: checkpoints at intervals, written in the background.

nothing is sharded    rank 0 decides by its clock, copies and writes alone; calls of other ranks return at once
shards                every rank writes its own, so all save at the same call

Ranks that write together agree on that call without a message in most of them: the calls of all ranks are counted
alike, and only at some of them, the meetings, rank 0 decides by its clock whether to save, and at which call the ranks
meet next. Each meeting lies halfway to the expected time of the checkpoint, so an interval of a thousand calls has
about ten.

Rank's main thread, or a plain program's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from jupyter_distrib.checkpoints import agreement, meeting, series
from jupyter_distrib.checkpoints.folder import make_ready, new_save_id
from jupyter_distrib.checkpoints.place import Identity
from jupyter_distrib.checkpoints.snapshot import Snapshot
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker import end_of_cell
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

DEFAULT_KEEP = 3

State = Callable[[], dict[str, Any]]


class Periodic:
    """The checkpoints of one folder in one run.

    Args:
        folder: The folder that holds them.
        given: The folder as the user has named it, equally on all ranks.
        every_s: Seconds from one to the next; 0: each call makes one.
    """

    def __init__(self, folder: Path, given: str, every_s: float) -> None:
        self._folder, self._given = folder, given
        self._names: set[str] = set()
        self._sharded = False
        """Whether any object that was given under these names is sharded, so that each rank writes its own shards."""
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._schedule = Schedule(every_s, time.monotonic())
        self._to_meeting = 1
        """Number of calls until the ranks' next meeting."""
        self._snapshot: Snapshot | None = None
        self.calls = self.number = 0
        """Number of calls, and this folder's among those with shards, which all ranks save into in the same order."""
        self._held: Identity | None = None
        """The folder prepared by rank 0; None before its first checkpoint."""
        self._board: StoreBoard | None = None
        """The board on which rank 0 tells the other ranks of its checkpoints; None if there are none."""
        self._reporter: agreement.CollectiveReporter | None = None

    def call(self, objects: Mapping[str, Any], state: State, *, every_s: float, keep: int) -> None:
        """Save if a checkpoint is due; `state` returns the state."""
        self.calls += 1
        if self.calls == 1 and self._rank == 0:
            self._announce()
        new = objects.keys() - self._names
        self._names |= new
        self._sharded = self._sharded or (self._ranks > 1 and any(_is_sharded(objects[name]) for name in new))
        self._schedule.every_s = every_s
        self._schedule.count()
        if self._snapshot is not None and self._snapshot.ended:
            self._snapshot.check()
        if self._sharded:
            self._to_meeting -= 1
            if not self._to_meeting:
                self._meet(state, keep)
        elif self._rank == 0:
            if self.calls == 1 and (board := meeting.run_board()) is not None:
                meeting.name_folder(board, self._given)
            if self._due():
                self._save(self._following(), new_save_id(), state, keep)

    def _announce(self) -> None:
        """Tell the other ranks that rank 0 saves into this folder, so that they load what it is still writing."""
        if self._ranks > 1 and (board := meeting.run_board()) is not None:
            self._board, self._reporter = board, agreement.CollectiveReporter(board)
            agreement.announce_save(board, str(self._folder))

    def finish(self, *, ok: bool) -> None:
        """Wait for the last checkpoint at the end of a cell; if the cell has failed, not for other ranks."""
        if self._reporter is not None:
            self._reporter.close()
        if (snapshot := self._snapshot) is not None:
            snapshot.wait() if ok else snapshot.give_up()
        elif ok and self._rank != 0 and not self._sharded and (board := meeting.run_board()) is not None:
            meeting.check_named(board, self._given)

    def wait(self) -> None:
        """Wait for the last checkpoint."""
        if self._snapshot is not None:
            self._snapshot.wait()

    def _due(self) -> bool:
        """Return whether to save now: not while a checkpoint is being written, unless every call makes one."""
        writing = self._snapshot is not None and not self._snapshot.ended
        return not (writing and self._schedule.every_s) and self._schedule.due(time.monotonic())

    def _meet(self, state: State, keep: int) -> None:
        """Carry out the decision of rank 0, on all ranks at the same call."""
        self.number = self.number or 1 + max(each.number for each in _running.values())
        name, save_id, refusal, self._to_meeting, given = json.loads(
            meeting.from_rank_0(self._decision, "save", f"series {self.number}", self._rank)
        )
        meeting.check_same({0: given, self._rank: self._given})
        if refusal:
            raise DistributedError(refusal)
        if name:
            self._save(series.member(self._folder, name), save_id, state, keep)

    def _decision(self) -> str:
        due, name = self._due(), ""
        if due:
            try:
                name = self._following().name
            except DistributedError as error:  # all ranks raise it
                return json.dumps(("", "", str(error), 1, self._given))
        # An interval begins with the checkpoint, and its first call tells how long a call takes.
        calls = 1 if due else self._schedule.calls_to_meeting(time.monotonic())
        return json.dumps((name, new_save_id(), "", calls, self._given))

    def _following(self) -> Path:
        """Create the folder of the next checkpoint, on rank 0. Raises `DistributedError`."""
        if self._held is None:
            if refusal := series.refusal_to_extend(self._folder):
                raise DistributedError(refusal)
            self._held = make_ready(self._folder, of_series=True)
        self.wait()  # the next checkpoint is numbered after it
        return series.make_following(self._folder, self._held)

    def _save(self, folder: Path, save_id: str, state: State, keep: int) -> None:
        if self._rank != 0:
            self.wait()
        elif self._board is not None:
            agreement.announce_save(self._board, str(self._folder), folder.name)
        try:
            self._copy(folder, save_id, state(), keep)
        except BaseException:
            if self._rank == 0:
                with suppress(OSError):  # another rank has begun to write there
                    folder.rmdir()
            raise
        self._schedule.saved(time.monotonic())

    def _copy(self, folder: Path, save_id: str, content: dict[str, Any], keep: int) -> None:
        late = (
            [] if self._sharded or self._ranks == 1 else [name for name in content if meeting.has_shards(content[name])]
        )
        if late:
            raise DistributedError(
                f"`{late[0]}` has sharded tensors now, and had none at its first jupyter_distrib.save() of the cell, "
                "so the other ranks would not write theirs: call that once it is sharded."
            )
        self._snapshot = Snapshot(
            content,
            folder,
            save_id=save_id,
            rank=self._rank,
            ranks=self._ranks if self._sharded else 1,
            on_whole=lambda: self._saved(keep),
        )

    def _saved(self, keep: int) -> None:
        """Remove old checkpoints, and report the new complete one; on rank 0, in the thread that writes."""
        series.prune(self._folder, keep, self._held)
        if (reporter := identity.cell.reporter) is not None:
            reporter.saved(str(self._folder))


_running: dict[Path, Periodic] = {}
"""Checkpoints of the current cell, or of a plain program, by folder."""


def call(folder: Path, objects: Mapping[str, Any], state: State, *, every_s: float, keep: int) -> None:
    """Save if a checkpoint is due.

    Raises:
        DistributedError: This checkpoint, or the previous one in the background, cannot be written; the message says
            why.
    """
    place = folder.absolute()
    if place not in _running:
        if not _running:
            end_of_cell.register(_finish)
        _running[place] = Periodic(place, str(folder), every_s)
    _running[place].call(objects, state, every_s=every_s, keep=keep)


def wait(folder: Path) -> None:
    """Wait for a checkpoint in this folder that this process is writing."""
    if (running := _running.get(folder.absolute())) is not None:
        running.wait()


def newest(folder: Path) -> Path:
    """Return the newest complete checkpoint of a folder, or the folder itself if there is none, once this process has
    written its own; the same on all ranks that call this together."""
    place = folder.absolute()
    if (running := _running.get(place)) is not None:
        running.wait()
    board = meeting.run_board()
    if board is None or identity.world_size() == 1:
        return series.newest(folder) or folder

    def find() -> str:
        found = series.newest(folder)
        return "" if found is None or found == folder else found.name

    saves = running.calls if running is not None else 0
    name = agreement.agreed(board, str(place), find, saves=saves, rank=identity.rank())
    return series.member(folder, name) if name else folder


def check_settings(every_s: object, keep: object) -> None:
    """Refuse settings that make no sense."""
    if every_s is not None and not (isinstance(every_s, Real) and float(every_s) >= 0):
        raise DistributedError(f"jupyter_distrib.save(): every_s is a number of seconds, not {every_s!r}.")
    if keep is not None and not (isinstance(keep, Integral) and int(keep) >= 1):
        raise DistributedError(f"jupyter_distrib.save(): keep is a number of checkpoints, at least 1, not {keep!r}.")


def _finish(*, ok: bool) -> None:
    ended = [*_running.values()]
    _running.clear()
    for each in ended:
        each.finish(ok=ok)


def _is_sharded(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        if any(isinstance(part, FSDPModule) for part in value.modules()):
            return True  # also between a forward and a backward pass, when it has whole parameters
        return meeting.has_shards([*value.parameters(), *value.buffers()])
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, torch.optim.Optimizer):
        value = value.state_dict()  # an average of the weights, for instance; an optimizer is given with its model
    return meeting.has_shards(value)


class Schedule:
    """Decides when the next checkpoint is due, on rank 0.

    Args:
        every_s: Seconds from one checkpoint to the next; 0: every call is one.
        now_s: The present time.
    """

    def __init__(self, every_s: float, now_s: float) -> None:
        self.every_s = every_s
        self._since_s, self._calls = now_s, 0

    def count(self) -> None:
        """Count a call of `save`."""
        self._calls += 1

    def due(self, now_s: float) -> bool:
        """Return whether to save now, at the call nearest to the due time if calls are regular."""
        left_s = self.every_s - (now_s - self._since_s)
        return left_s <= self._call_s(now_s) / 2

    def saved(self, now_s: float) -> None:
        """Start a new interval."""
        self._since_s, self._calls = now_s, 0

    def calls_to_meeting(self, now_s: float) -> int:
        """Return the number of calls until the ranks meet again, at most as many as so far, since the first calls may
        have been slow."""
        if not self._calls:
            return 1
        left_s = self.every_s - (now_s - self._since_s)
        half = left_s / 2 / max(self._call_s(now_s), 1e-9)  # infinite if `every_s` is
        return int(max(1, min(half, self._calls)))

    def _call_s(self, now_s: float) -> float:
        return (now_s - self._since_s) / self._calls if self._calls else 0.0
