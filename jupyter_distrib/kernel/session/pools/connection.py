"""One pool that a kernel has reached, the worker groups in it, the runs on them, and the routing of events to both.

    PoolAddress, ConnectionFacts    properties that stay while the kernel has the pool
    Connection                      the link; passes each event to its run and worker group
    WorkerGroup                     ranks of this notebook in the pool
    Requests                        questions of this kernel that await an answer of the pool's process

The states of a connection:

    REACHED -> LEAVING    this kernel has another pool now, and runs go on here
    REACHED -> CLOSED     the same, without runs
    LEAVING -> CLOSED     the last of these runs has ended
    any     -> LOST       the pool's process is gone, or does not answer

and of a worker group:

    OPENING -> OPEN       its ranks are up
    any     -> CLOSED     it was refused, closed, or lost with its connection

`Connection.handle_event` is called in the pool's own thread, everything else in the thread that runs the cell. Both
change the worker groups.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.pools.gpu_variables import GpuVariables, GpuVisibility
from jupyter_distrib.kernel.session.pools.kernel_identity import VersionCheck
from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.settings.cell_options import GroupSize
from jupyter_distrib.pools.base import Capabilities, Node, Pool, capabilities_of, open_pool, packages_wanted
from jupyter_distrib.system import confinement, interrupts, package_folders, process
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.system.package_folders import PackageFolders
from jupyter_distrib.wire import endings
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors

GONE_S = 2.0
"""Maximum seconds between the end of an agent and the end of this notebook's worker groups and runs on it."""
GroupEvent = (
    m.WorkerGroupOpened
    | m.WorkerGroupRefused
    | m.WorkerGroupClosed
    | m.WorkerGroupChanged
    | m.WorkerGroupQueued
    | m.WorkerGroupStarting
)
ANSWER_S = 5.0


class ConnectionState(Enum):
    """State of the connection to a pool."""

    REACHED = auto()
    """Cells run in the pool."""
    LEAVING = auto()
    """Runs go on in the pool; new cells go elsewhere."""
    CLOSED = auto()
    """The kernel has left the pool, and its ranks there have ended."""
    LOST = auto()
    """The pool's process is gone, or does not answer, and all runs there have ended with it."""


class GroupState(Enum):
    """State of a worker group, as the kernel knows it; the values are those of the sidebar."""

    OPENING = "opening"
    """Its ranks are starting, or wait for nodes."""
    OPEN = "open"
    """Its ranks are up."""
    CLOSED = "closed"
    """It has no ranks any more, or never had any."""


@data_class
class PoolAddress:
    """The name and the options under which a pool was reached."""

    name: str
    kind: str
    options: dict[str, str]


@data_class
class ConnectionFacts:
    """The unchanging properties of a pool that this kernel has reached."""

    pool: str
    """The name under which it was reached."""
    kind: str
    options: Mapping[str, str]
    """The options of its kind with which it was reached."""
    capabilities: Capabilities
    remote: bool
    """Whether its ranks may be on other machines."""
    elsewhere: bool
    """Whether its ranks run, or may run, under another interpreter than the kernel."""
    packages_mode: str
    """The policy for packages that its ranks lack; `off` if packages are not compared or none can be missing."""
    packages_limit_bytes: int

    @classmethod
    def of(cls, address: PoolAddress) -> ConnectionFacts:
        capabilities = capabilities_of(address.kind)
        elsewhere = capabilities.remote or bool(address.options.get("python"))
        mode, limit_bytes = packages_wanted(address.options) if elsewhere else ("off", 0)
        return cls(
            pool=address.name,
            kind=address.kind,
            options=address.options,
            capabilities=capabilities,
            remote=capabilities.remote,
            elsewhere=elsewhere,
            packages_mode=mode,
            packages_limit_bytes=limit_bytes,
        )


@data_class
class GroupRequest:
    """The properties of the requested ranks."""

    size: GroupSize
    load_env: dict[str, str]
    """The variables, from `--env` and the notebook, that programs read when they load."""
    changed: dict[str, str] = field(default_factory=dict)
    """Variables of GPU libraries that the notebook has set since it reached its pool."""
    packages: m.Packages | None = None
    """Packages that the ranks must have; None if packages are not compared."""
    visible: tuple[str, ...] | None = None
    """The kernel's CUDA_VISIBLE_DEVICES at the time of the request, split; None if it was unset."""


def _stopped(pid: int) -> str:
    """Return advice on a process of this machine that is suspended; empty for any other process."""
    if not pid or not process.is_stopped(pid):
        return ""
    return f": process {pid} is stopped (SIGSTOP), `kill -CONT {pid}` lets it go on, `kill -KILL {pid}` ends it"


def _whole(node: Any, kind: str) -> Node:
    """Return a pool's node. Raises `PoolError` if it lacks a method, which would be noticed only after a failure."""
    if isinstance(node, Node):
        return node
    node.close()
    raise PoolError(f"the {kind} pool cannot be used: its {type(node).__name__} is not a jupyter_distrib.extend.Node.")


class Connection:
    """One pool that this kernel has reached.

    Args:
        address: The pool.
        hello: The identity of the kernel.
        opened: The pool itself, if it is not one that `address` describes.
        on_lost: Called when the pool can no longer be reached.
        on_change: Called when a worker group has come, changed or gone.
    """

    def __init__(
        self,
        address: PoolAddress,
        hello: m.Hello,
        *,
        opened: Pool | None = None,
        on_lost: Callable[[Connection], object],
        on_change: Callable[[], object],
    ) -> None:
        self.facts = ConnectionFacts.of(address)
        self.versions = VersionCheck(hello, address.name)
        self.gpus = GpuVisibility()
        self.gpu_variables = GpuVariables()
        self.groups: dict[str, WorkerGroup] = {}
        self.runs: dict[str, Run] = {}
        self.pid = 0
        """Id of the process at the other end, once it has answered; 0 if it is not visible from here."""
        self.process = ("", 0)
        """Id of the process in its own namespace, with the namespace."""
        self.state = ConnectionState.REACHED
        self._loss = ""
        """The reason why the pool was lost."""
        self._variables = self._read_variables()
        self._added_packages = package_folders.added_first()
        """The folders of packages that the pool's process has before those of the interpreter, if it is the
        kernel's."""
        self._companion: confinement.Companion | None = None
        """The process at the other end, if it is at the same place as the ranks."""
        self._known_lost = threading.Event()
        self._on_lost, self._on_change = on_lost, on_change
        self._requests = Requests(address.name)
        opened = opened or open_pool(address.kind, address.options)
        self.node = _whole(opened.connect(hello, self.handle_event, self._lose), address.kind)

    def _read_variables(self) -> dict[str, str | None]:
        """Return the values of the variables that locate the pool where no option does."""
        return {
            name: os.environ.get(name)
            for option, name in self.facts.capabilities.read_variables.items()
            if self.facts.options.get(option, "auto") == "auto"
        }

    def is_current(self, *, surely: bool = False) -> bool:
        """Return whether the pool is still where the notebook's folder and environment say."""
        if self._variables and self._variables != self._read_variables():
            return False
        if self._companion is None:
            return True
        same = self.facts.elsewhere or self._added_packages == package_folders.added_first()
        return same and self._companion.is_here(surely=surely)

    def packages(self) -> m.Packages | None:
        """Return the packages that its ranks must have; only for a pool that compares packages."""
        facts = self.facts
        from jupyter_distrib.kernel.session.pools import notebook_packages

        return notebook_packages.of_notebook(facts.packages_mode, facts.packages_limit_bytes)

    def source_folders(self) -> tuple[str, ...]:
        """Return the source folders that its ranks need besides those on the notebook's path."""
        if self.facts.packages_mode == "off":
            return ()
        from jupyter_distrib.kernel.session.pools import notebook_packages

        return notebook_packages.source_folders()

    def handle_event(self, event: m.Event, descriptors: Descriptors) -> None:
        """Pass an event on to its worker group, run or request; in the node's thread."""
        match event:
            case (
                m.WorkerGroupOpened()
                | m.WorkerGroupRefused()
                | m.WorkerGroupClosed()
                | m.WorkerGroupChanged()
                | m.WorkerGroupQueued()
                | m.WorkerGroupStarting()
            ):
                self._group_event(event)
                self._on_change()
            case m.Answered():
                self._requests.answered(event)
            case m.Attached():
                if (run := self._requests.attached(event)) is not None:
                    self.runs[event.run] = run
            case m.NotAttached():
                self._requests.not_attached(event)
            case m.Leaving():
                # The next cell makes a new connection; requests that are on their way over this one are still answered.
                self._on_lost(self)
            case m.Welcomed():
                self.process = event.pid_namespace, event.pid
                self.pid = event.pid if event.pid_namespace in ("", confinement.pid_namespace()) else 0
                self._companion = confinement.Companion(self.pid) if self.pid and not self.facts.remote else None
                self.versions.compare(event)
            case _:
                self._run_event(event, descriptors)  # type: ignore[arg-type]

    def _group_event(self, event: GroupEvent) -> None:
        group = self.groups.get(event.group)
        if group is None:
            return
        match event:
            case m.WorkerGroupOpened():
                group.workers, group.gpus, group.notes = event.workers, event.gpus, event.notes
                self.gpus.learn(event)
                if not self.facts.remote:
                    group.packages = PackageFolders(event.package_folders)
                group.state = GroupState.OPEN
                group.wake_waiting()
            case m.WorkerGroupQueued():
                group.news.put(event.reason)
            case m.WorkerGroupStarting():
                group.starting = event
            case m.WorkerGroupChanged():
                group.workers = event.workers
                text, run = group.lose_values(event.lost), group.executing
                if text and run is not None:  # it is started again on the new ranks
                    run.note(text)
            case m.WorkerGroupRefused() | m.WorkerGroupClosed():
                self.groups.pop(event.group, None)
                group.close(event.reason)

    def _run_event(self, event: m.RunEvent, descriptors: Descriptors = NO_DESCRIPTORS) -> None:
        run = self.runs.get(event.run)
        if run is None:
            return descriptors.close()
        if isinstance(event, m.Ended):
            self.runs.pop(event.run, None)
        elif isinstance(event, m.Failed) and self.facts.elsewhere:
            event = self._explained(event, run)
        run.deliver(event, descriptors)
        self._close_if_left()
        return None

    def _explained(self, event: m.Failed, run: Run) -> m.Failed:
        """Return the event with notes on the modules that its rank lacks."""
        from jupyter_distrib.kernel.session.pools import notebook_packages

        workers = next((group.workers for group in self.groups.values() if group.run is run), ())
        node = next((each.node for each in workers if each.rank == event.rank), "")
        python = self.facts.options.get("python", "")
        return replace(event, failure=notebook_packages.explain_missing_modules(event.failure, python, node))

    def abandon(self) -> None:
        """Give up a process that does not answer: end all requests, worker groups and runs of this notebook on it."""
        pids = [worker.pid for group in list(self.groups.values()) for worker in group.workers]
        self.node.give_up(pids)
        self._lose(f"the process that looks after the ranks does not answer{_stopped(self.pid)}")

    def wait_lost(self) -> None:
        """Wait, for a bounded time, until this connection has noticed that the process at the other end has ended."""
        interrupts.wait(self._known_lost, GONE_S)

    def _lose(self, reason: str) -> None:
        """End all requests, worker groups and runs: the agent is gone, and every rank with it."""
        self.state, self._loss = ConnectionState.LOST, reason
        try:
            self._end_all(reason)
        finally:
            self._known_lost.set()

    def _end_all(self, reason: str) -> None:
        self._requests.give_up(reason)
        self._on_lost(self)
        for group in list(self.groups.values()):
            group.close(reason)
        self.groups.clear()
        for run in list(self.runs.values()):
            self._give_up(run)

    def add_run(self, run: Run) -> None:
        """Pass the events of this run on to it from now on. The run ends at once if the agent has just been lost."""
        self.runs[run.record.run] = run
        if self.state is ConnectionState.LOST:
            self._give_up(run)

    @contextmanager
    def routing_to(self, run: Run) -> Iterator[None]:
        """Within the block, pass on events to this run, which has already ended."""
        self.runs[run.id] = run
        try:
            yield
        finally:
            self.runs.pop(run.id, None)

    def _give_up(self, run: Run) -> None:
        pids = {rank.rank: rank.pid for rank in run.record.ranks.values() if not rank.finished}
        for event in endings.lost(run.id, pids, self._loss, log_directory=run.record.log_directory):
            self._run_event(event)

    def leave(self) -> None:
        """Close the connection, which ends this kernel's ranks; while runs go on, follow them to their end first."""
        if self.state is ConnectionState.LOST:
            return self.node.close()
        self.state = ConnectionState.LEAVING
        self._close_if_left()

    def _close_if_left(self) -> None:
        if self.state is ConnectionState.LEAVING and not self.runs:
            self.state = ConnectionState.CLOSED
            self.node.close()

    def ask(self) -> m.ServerStatus:
        """Return the status reported by the pool's process. Raises `PoolError`."""
        return self._requests.ask(self.node)

    def attach(self, run: str, make: Callable[[m.Attached], Run]) -> Run | m.NotAttached:
        """Return the detached run with this id, made from the agent's answer; the newest one for an empty id."""
        return self._requests.attach(self.node, run, make)


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class WorkerGroup:
    """Ranks that a notebook holds together in one pool."""

    name: str
    connection: Connection
    asked: GroupRequest
    workers: tuple[m.WorkerInfo, ...] = ()
    gpus: bool = False
    """Whether its ranks have GPUs."""
    notes: tuple[str, ...] = ()
    """Sentences for the head of its next run: on the choice of GPUs, and on variables that are not in force."""
    announced: set[str] = field(default_factory=set)
    """Sentences on variables, packages and settings that a run of it has told before."""
    packages: PackageFolders = field(default_factory=PackageFolders)
    """The packages from which its ranks import, as they were when the ranks started; none if they are elsewhere."""
    state: GroupState = GroupState.OPENING
    reason: str = ""
    """The reason why it was closed."""
    segments: frozenset[str] = frozenset()
    """The ids of the segments of shared memory that were sent to it and are kept; see `ValueCache`."""
    starting: m.WorkerGroupStarting | None = None
    """The progress of the start of its ranks, if it takes a while."""
    opened: threading.Event = field(default_factory=threading.Event)
    news: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    """Texts for the thread that waits for `opened`: the reason for the wait, or an empty text once it is over."""
    run: Run | None = None
    """The run that uses the group now, or used it last."""
    claimed_by: threading.Thread | None = None
    """The thread that has chosen the group and is about to send a cell to it."""
    claimed_concurrently: bool = False
    """Whether the cell of `claimed_by` is one that the notebook does not wait for."""
    handles: weakref.WeakSet[RankValue] = field(default_factory=weakref.WeakSet)

    @property
    def size(self) -> int:
        """The number of its ranks; 0 until they are up."""
        return len(self.workers)

    @property
    def claimed(self) -> bool:
        """Return whether another thread is about to send a cell to the group."""
        return self.claimed_by not in (None, threading.current_thread()) and self.claimed_by.is_alive()

    @property
    def executing(self) -> Run | None:
        """The run in progress in the group, or None."""
        return None if self.run is None or self.run.clock.ended.is_set() else self.run

    @property
    def busy_concurrently(self) -> bool:
        """Return whether a cell that the notebook does not wait for uses the group, or is about to."""
        return self.executing.concurrent if self.executing is not None else self.claimed and self.claimed_concurrently

    @property
    def busy(self) -> bool:
        return self.claimed or self.executing is not None

    @property
    def kept(self) -> list[RankValue]:
        """The handles to values that are still on at least one of its ranks."""
        return [handle for handle in self.handles if set(handle.ranks) - handle.lost]

    def lose_values(self, ranks: Collection[int]) -> str:
        """Mark the values kept on these ranks as lost. Return a sentence that names them; empty if there are none."""
        lost = [handle for handle in self.kept if set(ranks) & set(handle.ranks) - handle.lost]
        for handle in lost:
            handle.mark_lost(ranks)
        names = ", ".join(sorted(f"`{handle.name}`" for handle in lost))
        return (
            f"{rank_list(sorted(ranks))} kept {names}, which were lost with the process that was replaced"
            if lost
            else ""
        )

    def close(self, reason: str) -> None:
        """Mark the group as closed, and its kept values as lost."""
        self.state, self.reason = GroupState.CLOSED, reason
        for handle in list(self.handles):
            handle.mark_lost(handle.ranks)
        self.wake_waiting()

    def wake_waiting(self) -> None:
        """Wake the threads that wait until the group is open or closed."""
        self.opened.set()
        self.news.put("")


class Requests:
    """The requests that are waiting for an agent's answer."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._answers: dict[int, queue.SimpleQueue[m.ServerStatus | PoolError]] = {}
        self._numbers = itertools.count(1)
        self._attachments: queue.SimpleQueue[Run | m.NotAttached | PoolError] = queue.SimpleQueue()
        self._make: Callable[[m.Attached], Run] | None = None

    def ask(self, node: Node) -> m.ServerStatus:
        """Return the status reported by the pool's process. Raises `PoolError`."""
        number = next(self._numbers)
        answers = self._answers[number] = queue.SimpleQueue()
        node.send(m.Ask(question=number))
        status: m.ServerStatus = self._within(answers)
        return status

    def attach(self, node: Node, run: str, make: Callable[[m.Attached], Run]) -> Run | m.NotAttached:
        """Request the events of a detached run from its beginning, and return the run. Raises `PoolError`."""
        self._make = make
        node.send(m.Attach(run=run))
        answer: Run | m.NotAttached = self._within(self._attachments)
        return answer

    def _within(self, box: queue.SimpleQueue[Any]) -> Any:
        try:
            answer = interrupts.get(box, ANSWER_S)
        except queue.Empty:
            raise PoolError(f"the {self._pool} pool has not answered within {ANSWER_S:g} s.") from None
        if isinstance(answer, PoolError):
            raise answer
        return answer

    def give_up(self, reason: str) -> None:
        """Make the waiting threads raise an error, since no answer will come."""
        refusal = PoolError(f"the {self._pool} pool cannot answer: {reason}.")
        for box in list(self._answers.values()):
            box.put(refusal)
        self._attachments.put(refusal)

    def answered(self, event: m.Answered) -> None:
        if (box := self._answers.pop(event.question, None)) is not None:
            box.put(event.status)

    def attached(self, event: m.Attached) -> Run | None:
        """Return the run for the pending `attach`; None if there was no such request."""
        if self._make is None:
            return None
        run = self._make(event)
        self._attachments.put(run)
        return run

    def not_attached(self, event: m.NotAttached) -> None:
        self._attachments.put(event)
