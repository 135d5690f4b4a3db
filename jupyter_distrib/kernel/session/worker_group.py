"""A set of warm ranks, as the notebook knows it. Written in the pool's own thread and in the one that runs the cell."""

from __future__ import annotations

import queue
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_distrib.kernel.session.results import RankValue
from jupyter_distrib.kernel.session.run import Run
from jupyter_distrib.kernel.settings.group_size import GroupSize
from jupyter_distrib.wire.messages import WorkerInfo

if TYPE_CHECKING:
    from jupyter_distrib.kernel.session.connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """The properties that ranks were asked for with."""

    size: GroupSize
    load_env: dict[str, str]
    """Variables that are read when a program loads, of `--env` and of the notebook."""
    changed: dict[str, str] = field(default_factory=dict)
    """Those among them that the notebook has set since its pool was reached."""
    visible: tuple[str, ...] | None = None
    """The kernel's CUDA_VISIBLE_DEVICES at that moment, split; None if it was unset."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class WorkerGroup:
    """The ranks that a notebook holds together in one pool."""

    name: str
    connection: Connection
    asked: GroupRequest
    workers: tuple[WorkerInfo, ...] = ()
    gpus: bool = False
    """Whether its ranks have GPUs."""
    notes: tuple[str, ...] = ()
    """Sentences on the choice of its GPUs, for the head of its first run."""
    told: set[str] = field(default_factory=set)
    """Sentences on variables that have been told."""
    state: str = "opening"
    """`opening`, `open`, or `closed`."""
    reason: str = ""
    """Why it is closed."""
    opened: threading.Event = field(default_factory=threading.Event)
    news: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    """For the thread that waits for `opened`: what the worker group waits for; an empty text when it is settled."""
    run: Run | None = None
    """The run that has it now, or had it last."""
    taker: threading.Thread | None = None
    """The thread that has chosen it, and is about to send it a cell."""
    handles: weakref.WeakSet[RankValue] = field(default_factory=weakref.WeakSet)

    @property
    def size(self) -> int:
        """The number of its ranks; 0 until they are up."""
        return len(self.workers)

    @property
    def taken(self) -> bool:
        """Whether another thread than this one is about to send it a cell."""
        return self.taker not in (None, threading.current_thread()) and self.taker.is_alive()

    @property
    def executing(self) -> Run | None:
        """The run that goes on in it."""
        return None if self.run is None or self.run.done() else self.run

    @property
    def busy(self) -> bool:
        return self.taken or self.executing is not None

    @property
    def kept(self) -> list[RankValue]:
        """Handles to values that at least one of its ranks still has."""
        return [handle for handle in self.handles if set(handle.ranks) - handle.lost]

    def close(self, reason: str) -> None:
        """Mark it closed, and what it kept as lost."""
        self.state, self.reason = "closed", reason
        for handle in list(self.handles):
            handle.mark_lost(handle.ranks)
        self.settle()

    def settle(self) -> None:
        """Wake the threads that wait for it: it is open or closed now."""
        self.opened.set()
        self.news.put("")
