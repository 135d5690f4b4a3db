"""The kernel's view of a set of warm ranks. Written in the pool's own thread and in the one that runs the cell."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.settings.group_size import GroupSize
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.kernel.session.pools.connection import Connection


@data_class
class GroupRequest:
    """The properties that were requested for ranks."""

    size: GroupSize
    load_env: dict[str, str]
    """The variables, from `--env` and the notebook, that programs read when they load."""
    changed: dict[str, str] = field(default_factory=dict)
    """The GPU libraries' variables that the notebook has set since it reached its pool."""
    packages: m.Packages | None = None
    """The packages that the ranks must have; None if they are not compared."""
    visible: tuple[str, ...] | None = None
    """The kernel's CUDA_VISIBLE_DEVICES at the time of the request, split; None if it was unset."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class WorkerGroup:
    """The ranks that a notebook holds together in one pool."""

    name: str
    connection: Connection
    asked: GroupRequest
    workers: tuple[m.WorkerInfo, ...] = ()
    gpus: bool = False
    """Whether its ranks have GPUs."""
    notes: tuple[str, ...] = ()
    """Sentences on the choice of its GPUs and on variables that are not in force, for the head of its next run."""
    told: set[str] = field(default_factory=set)
    """The sentences on variables that are in `notes` already, or were."""
    state: str = "opening"
    """The state: `opening`, `open`, or `closed`."""
    reason: str = ""
    """The reason why it is closed."""
    starting: m.WorkerGroupStarting | None = None
    """The progress of the start of its ranks, if it takes a while."""
    opened: threading.Event = field(default_factory=threading.Event)
    news: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    """Texts for the thread that waits for `opened`: the reason for the wait, or an empty text once it is over."""
    run: Run | None = None
    """The run that uses the group now, or used it last."""
    taker: threading.Thread | None = None
    """The thread that has chosen the group and is about to send it a cell."""
    taken_beside: bool = False
    """Whether the cell of `taker` is one that the notebook does not wait for."""
    handles: weakref.WeakSet[RankValue] = field(default_factory=weakref.WeakSet)

    @property
    def size(self) -> int:
        """The number of its ranks; 0 until they are up."""
        return len(self.workers)

    @property
    def taken(self) -> bool:
        """Return whether a thread other than this one is about to send the group a cell."""
        return self.taker not in (None, threading.current_thread()) and self.taker.is_alive()

    @property
    def executing(self) -> Run | None:
        """The run that goes on in the group, or None."""
        return None if self.run is None or self.run.done() else self.run

    @property
    def busy_beside(self) -> bool:
        """Return whether a cell that the notebook does not wait for has the group, or is about to have it."""
        return self.executing.beside if self.executing is not None else self.taken and self.taken_beside

    @property
    def busy(self) -> bool:
        return self.taken or self.executing is not None

    @property
    def kept(self) -> list[RankValue]:
        """The handles to values that at least one of its ranks still has."""
        return [handle for handle in self.handles if set(handle.ranks) - handle.lost]

    def lose_values(self, ranks: Collection[int]) -> str:
        """Mark the values that these ranks have kept as lost. Return a sentence that names them; empty if there are
        none."""
        lost = [handle for handle in self.kept if set(ranks) & set(handle.ranks) - handle.lost]
        for handle in lost:
            handle.mark_lost(ranks)
        names = ", ".join(sorted(f"`{handle.name}`" for handle in lost))
        return f"{rank_list(sorted(ranks))} kept {names}, which went with the process that was replaced" if lost else ""

    def close(self, reason: str) -> None:
        """Mark the group as closed, and its kept values as lost."""
        self.state, self.reason = "closed", reason
        for handle in list(self.handles):
            handle.mark_lost(handle.ranks)
        self.settle()

    def settle(self) -> None:
        """Wake the threads that wait for the group, which is open or closed now."""
        self.opened.set()
        self.news.put("")
