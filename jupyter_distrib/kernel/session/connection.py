"""One pool that a kernel has reached: its worker groups, the runs on them, and who gets which event.

`take` is called in the pool's own thread, everything else in the thread that runs the cell.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.results import RankValue
from jupyter_distrib.kernel.session.run import Run
from jupyter_distrib.pools.base import Node, capabilities_of, open_pool
from jupyter_distrib.system import interrupts
from jupyter_distrib.wire import endings, versions
from jupyter_distrib.wire.messages import (
    Answered,
    Ask,
    Attach,
    Attached,
    Ended,
    Event,
    Hello,
    Leaving,
    NotAttached,
    RunEvent,
    Welcomed,
    WorkerGroupChanged,
    WorkerGroupClosed,
    WorkerGroupOpened,
    WorkerGroupQueued,
    WorkerGroupRefused,
    WorkerInfo,
)

ANSWER_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class WorkerGroup:
    """A set of warm ranks, as the notebook knows it."""

    name: str
    connection: Connection
    load_env: dict[str, str]
    asked_size: int
    """0: as many as there are GPUs."""
    asked_gpus: bool
    gpu_type: str = ""
    visible: tuple[str, ...] | None = None
    """The kernel's CUDA_VISIBLE_DEVICES when it was asked for, split; None if that was unset."""
    size: int = 0
    gpus: bool = False
    workers: tuple[WorkerInfo, ...] = ()
    state: str = "opening"
    """`opening`, `open`, or `closed`."""
    reason: str = ""
    """Why it is closed."""
    opened: threading.Event = field(default_factory=threading.Event)
    news: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    """For whoever waits for `opened`: what the worker group waits for, and an empty text when it is settled."""
    run: Run | None = None
    """The run that has it now, or had it last."""
    taker: threading.Thread | None = None
    """Has chosen it, and is about to send it a cell."""
    handles: weakref.WeakSet[RankValue] = field(default_factory=weakref.WeakSet)

    @property
    def taken(self) -> bool:
        """Another thread than this one is about to send it a cell."""
        return self.taker not in (None, threading.current_thread()) and self.taker.is_alive()

    @property
    def executing(self) -> Run | None:
        """The run that it is at."""
        return None if self.run is None or self.run.done() else self.run

    @property
    def busy(self) -> bool:
        return self.taken or self.executing is not None

    @property
    def kept(self) -> list[RankValue]:
        return [handle for handle in self.handles if set(handle.ranks) - handle.lost]

    def close(self, reason: str) -> None:
        self.state, self.reason = "closed", reason
        for handle in list(self.handles):
            handle.mark_lost(handle.ranks)
        self.settle()

    def settle(self) -> None:
        """It is open or closed now: wake whoever waits."""
        self.opened.set()
        self.news.put("")


class Connection:
    """One pool that this kernel has reached."""

    def __init__(
        self,
        pool: str,
        hello: Hello,
        on_lost: Callable[[Connection], object],
        *,
        kind: str,
        options: Mapping[str, str],
    ) -> None:
        self.pool, self.kind, self.options = pool, kind, dict(options)
        self._hello = hello
        self.refusal = ""
        """Why kernel and ranks must not exchange values; known before any worker group is open."""
        self.remark = ""
        """Return what differs between kernel and ranks all the same."""
        self.groups: dict[str, WorkerGroup] = {}
        self.runs: dict[str, Run] = {}
        self.has_gpus: bool | None = None
        """Whether the ranks have GPUs; None while no ranks are up yet."""
        self.visible: tuple[str, ...] | None = None
        """The kernel's CUDA_VISIBLE_DEVICES, split; None if that is unset."""
        self.lost = ""
        self.on_change: Callable[[], object] = lambda: None
        """Called when a worker group has come, changed or gone."""
        self._leaving = False
        self._on_lost = on_lost
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._attachments: queue.SimpleQueue[Run | NotAttached] = queue.SimpleQueue()
        self._questions = itertools.count(1)
        self._attaching: Callable[[Attached], Run] | None = None
        self.capabilities = capabilities_of(kind)
        self.node: Node = open_pool(kind, options).connect(hello, self.take, self._lose)

    def look_through(self, visible: tuple[str, ...] | None) -> None:
        """The kernel's CUDA_VISIBLE_DEVICES is this now."""
        if visible != self.visible:
            self.visible, self.has_gpus = visible, None

    @property
    def elsewhere(self) -> bool:
        """Its ranks run under another interpreter than the kernel, or may do so."""
        return self.remote or bool(self.options.get("python"))

    @property
    def remote(self) -> bool:
        """Its ranks may be on other machines."""
        return self.capabilities.remote

    def take(self, event: Event, fds: Sequence[int]) -> None:
        """Sort an event to whom it concerns; in the node's thread."""
        match event:
            case (
                WorkerGroupOpened()
                | WorkerGroupRefused()
                | WorkerGroupClosed()
                | WorkerGroupChanged()
                | WorkerGroupQueued()
            ):
                self._group_event(event)
                self.on_change()
            case Answered():
                if (box := self._answers.pop(event.question, None)) is not None:
                    box.put(event.answer)
            case Attached():
                if self._attaching is not None:
                    run = self.runs[event.run] = self._attaching(event)
                    self._attachments.put(run)
            case NotAttached():
                self._attachments.put(event)
            case Leaving():
                self._on_lost(self)  # the next cell makes a new connection; what is on its way here is answered
            case Welcomed():
                self.refusal = versions.refusal(self._hello, event, self.pool)
                self.remark = versions.remark(self._hello, event)
            case _:
                self._run_event(event, fds)  # type: ignore[arg-type]

    def _group_event(
        self, event: WorkerGroupOpened | WorkerGroupRefused | WorkerGroupClosed | WorkerGroupChanged | WorkerGroupQueued
    ) -> None:
        group = self.groups.get(event.group)
        if group is None:
            return
        match event:
            case WorkerGroupOpened():
                group.workers, group.gpus, group.size = event.workers, event.gpus, len(event.workers)
                self.has_gpus = event.gpus or event.node_has_gpus
                group.state = "open"
                group.settle()
            case WorkerGroupQueued():
                group.news.put(event.reason)
            case WorkerGroupChanged():
                group.workers = event.workers
                for handle in list(group.handles):
                    handle.mark_lost(event.lost)
            case WorkerGroupRefused() | WorkerGroupClosed():
                self.groups.pop(event.group, None)
                group.close(event.reason)

    def _run_event(self, event: RunEvent, fds: Sequence[int]) -> None:
        run = self.runs.get(event.run)
        if run is None:
            for fd in fds:
                os.close(fd)
            return
        if isinstance(event, Ended):
            self.runs.pop(event.run, None)
        run.deliver(event, fds)
        if self._leaving and not self.runs:
            self.node.close()

    def _lose(self, reason: str) -> None:
        """The agent is gone, and every rank with it."""
        self.lost = reason
        self._on_lost(self)
        for group in list(self.groups.values()):
            group.close(reason)
        self.groups.clear()
        for run in list(self.runs.values()):
            self._give_up(run)

    def begin(self, run: Run) -> None:
        """Have its events sorted to this run. It ends at once if the agent was lost a moment ago."""
        self.runs[run.id] = run
        if self.lost:
            self._give_up(run)

    def _give_up(self, run: Run) -> None:
        pids = {rank.rank: rank.pid for rank in run.record.ranks.values() if not rank.finished}
        for event in endings.lost(run.id, pids, self.lost, log_directory=run.record.log_directory):
            self._run_event(event, ())

    def leave(self) -> None:
        """Have this kernel's ranks end, and follow runs that go on without it to their end."""
        self._leaving = True
        if not self.runs:
            self.node.close()

    def ask(self) -> dict[str, Any]:
        question = next(self._questions)
        box = self._answers[question] = queue.SimpleQueue()
        self.node.send(Ask(question=question))
        try:
            return interrupts.take(box, ANSWER_S)
        except queue.Empty:
            raise PoolError(f"the {self.pool} pool has not answered within {ANSWER_S:g} s.") from None

    def attach(self, run: str, make: Callable[[Attached], Run]) -> Run | NotAttached:
        self._attaching = make
        self.node.send(Attach(run=run))
        try:
            return interrupts.take(self._attachments, ANSWER_S)
        except queue.Empty:
            raise PoolError(f"the {self.pool} pool has not answered within {ANSWER_S:g} s.") from None
