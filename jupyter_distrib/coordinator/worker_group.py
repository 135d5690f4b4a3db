"""One worker group whose ranks are on several nodes, each with an agent. Runs in the coordinator's loop.

    SpreadWorkerGroup --OpenWorkerGroup, Execute, UseStore, ...--> node 0: agent, ranks 0, 1   (and the store)
               <--WorkerGroupOpened, Wrote, Ended, ...------- node 1: agent, ranks 2, 3

To the coordinator's clients it is what `agent/groups/worker_group.py` is to an agent's: one worker group, one stream of
events, one end of each run. What needs the view of all nodes is done by this module, and for one run by
`coordinator/run.py`: a new store is made when the group of any node is not fit any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jupyter_distrib.coordinator.allocation_end import AllocationEnd
from jupyter_distrib.coordinator.group_repair import SpreadGroupRepair
from jupyter_distrib.coordinator.node_replacement import NodeReplacement
from jupyter_distrib.coordinator.node_source import NodeSource, Share
from jupyter_distrib.coordinator.run import SpreadRun
from jupyter_distrib.coordinator.start_progress import StartProgress
from jupyter_distrib.server.pending_cell import PendingCell, Tell
from jupyter_distrib.server.worker_group import WorkerGroupState
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors


class SpreadWorkerGroup(WorkerGroupState[SpreadRun]):
    """The workers that one `OpenWorkerGroup` asked for, on as many nodes as it takes."""

    def __init__(self, command: m.OpenWorkerGroup, *, loop: Loop, place: NodeSource, logs: Path, tell: Tell) -> None:
        super().__init__(command, tell)
        self.on_closed: Callable[[str], None] = lambda reason: None
        self.place = place
        """The source of the present nodes; what others report is of nodes that were given back."""
        self.replacement = NodeReplacement()
        self.waits_for = ""
        """Sentence on what it waits for, if it has no nodes yet."""
        self._loop, self._logs = loop, logs
        self._shares: list[Share] = []
        self._infos: dict[int, tuple[m.WorkerInfo, ...]] = {}
        self._group_repair = SpreadGroupRepair(
            self.name,
            loop=loop,
            nodes=lambda: [share.node for share in self._shares],
            lose=self.lost,
            on_ready=self._execute_pending,
        )
        self._ending = ""
        """Reason why the worker group closes as soon as its run is over."""
        self._useless = False
        """Whether its nodes and agents are useless to another worker group."""
        self._place_has_gpus = False
        self._allocation_end = AllocationEnd(loop, self._tell_run)
        self._starting = StartProgress(self.name, loop, lambda event: self.tell(event, ()))
        self._starting.looks_for_nodes(command.size)
        self._notes: list[str] = []
        """Notes of the nodes on the choice of their GPUs."""

    def infos(self) -> tuple[m.WorkerInfo, ...]:
        running = self.run.ranks if self.run else {}
        return tuple(
            replace(
                info,
                state="running" if info.rank in running.get(node, ()) else info.state,
                node=self._shares[node].node.short_name,
            )
            for node in sorted(self._infos)
            for info in self._infos[node]
        )

    # ------------------------------------------------------------------------------------------------ starting

    def open(self) -> None:
        self.place.start(self.command, self)

    def queued(self, reason: str) -> None:
        if not self.closed:
            self.waits_for = reason
            self.tell(m.WorkerGroupQueued(group=self.name, reason=reason), ())

    def placed(self, shares: Sequence[Share], *, has_gpus: bool = False, ends_at_s: float | None = None) -> None:
        """Start ranks on each node.

        Args:
            shares: The nodes.
            has_gpus: Whether the place has GPUs, even if these ranks have none.
            ends_at_s: Time at which the engine takes the nodes away, by `time.monotonic`.
        """
        if self.closed:
            return
        self.waits_for = ""
        self._allocation_end.start(ends_at_s)
        self._shares, self._place_has_gpus = list(shares), has_gpus
        size, first = sum(share.size for share in shares), self.command.first_rank
        world_size = self.command.world_size or size
        self.command = replace(self.command, size=size, gpus=any(share.gpus for share in shares))
        self._starting.found([share.node.name for share in shares], size)
        for number, share in enumerate(shares):
            command = replace(
                self.command,
                size=share.size,
                gpus=share.gpus,
                first_rank=first,
                world_size=world_size,
                node_rank=number,
                host=share.node.host,
                interface=share.node.interface,
                wait_s=0.0,
            )
            share.node.send(command)
            first += share.size

    def refuse(self, reason: str) -> None:
        if self.closed:
            return
        if self.replacement.under_way and self._look_for_fewer(reason):
            return
        self._useless = True
        if (pending := self.take_pending()) is not None:
            pending.fail(f"the run cannot go on: {reason}")
        self.on_closed(reason)
        cls = m.WorkerGroupClosed if self.replacement.under_way else m.WorkerGroupRefused
        self.tell(cls(group=self.name, reason=reason), ())

    def _replace_nodes(self, find: Callable[[], NodeSource]) -> None:
        """Look for other nodes, since one was lost; the run that is started again waits for their ranks."""
        self.place.give_back(useless=True, killed=True)
        self._group_repair.cancel()
        self._shares, self._infos, self._ending, self.replacement.under_way = [], {}, "", True
        self.kept.clear()
        self._find(find, self.command.size)

    def _find(self, find: Callable[[], NodeSource], size: int) -> None:
        self.command = replace(self.command, size=size)
        self.place = find()
        self.place.start(self.command, self)

    def _look_for_fewer(self, reason: str) -> bool:
        """Look for nodes for fewer ranks, if the cell that waits may go on so."""
        size, find = self.replacement.fewer(self.pending, self.command.size, reason), self.replacement.find
        if size is None or find is None:
            return False
        self.place.give_back(useless=True, killed=True)
        self._shares, self._infos = [], {}
        self._find(find, size)
        return True

    def handle_event(self, node: int, event: m.Event, fds: tuple[int, ...] = ()) -> None:
        """Handle an event of a node, perhaps of a worker group that had it before; `fds` stay the caller's."""
        if self.closed or getattr(event, "group", self.name) != self.name:
            return
        match event:
            case m.WorkerGroupOpened():
                self._opened(node, event)
            case m.WorkerGroupQueued():
                self.queued(self._on_node(node, event.reason))
            case m.WorkerGroupStarting():
                self._starting.up(node, event.up, event.waits_for)
            case m.WorkerGroupRefused():
                self.refuse(self._on_node(node, event.reason))
            case m.WorkerGroupClosed():
                self.lost(node, event.reason or "its ranks were taken away")
            case m.WorkerGroupChanged() if not self._ending:
                self._infos[node] = event.workers
                self.tell(m.WorkerGroupChanged(group=self.name, workers=self.infos(), lost=event.lost), ())
                self._ranks_changed()
            case m.NodeDrained():
                self._group_repair.take_report(node, event, self.run)
            case m.GroupsReset():
                self._group_repair.take_store(node, event)
            case m.DebuggerPrompted() | m.DebuggerLeft() if self.run is None:
                self.tell(event, ())  # of the failure of a run that has ended
            case _:
                self._run_event(node, event, fds)

    def _on_node(self, node: int, reason: str) -> str:
        return reason if len(self._shares) == 1 else f"{self._shares[node].node.name}: {reason}"

    def _opened(self, node: int, event: m.WorkerGroupOpened) -> None:
        self._infos[node] = event.workers
        self._starting.opened(node, len(event.workers))
        self._notes += (self._on_node(node, note) for note in event.notes)
        if len(self._infos) < len(self._shares):
            return
        if self.replacement.under_way:
            self.pending = self.replacement.end(self.pending, self.command.size)
            lost = tuple(info.rank for info in self.infos())
            self.tell(m.WorkerGroupChanged(group=self.name, workers=self.infos(), lost=lost), ())
            self._execute_pending()
        else:
            opened = m.WorkerGroupOpened(
                group=self.name,
                workers=self.infos(),
                gpus=self.command.gpus,
                node_has_gpus=self._place_has_gpus,
                notes=tuple(self._notes),
            )
            self.tell(opened, ())

    def _ranks_changed(self) -> None:
        """Make a new store, because ranks were replaced; when the run is over, since its ranks still use the store."""
        if self.run is not None:
            self.run.health.clean = self.run.drains.all_finished = False
        else:
            self._group_repair.make_store()

    # ------------------------------------------------------------------------------------------------ running

    def _execute_pending(self) -> None:
        if (pending := self.take_pending()) is not None:
            self.execute(pending.command, pending.descriptors, pending.tell)

    def execute(self, command: m.Execute, descriptors: Descriptors, tell: Tell, frame: bytes = b"") -> None:
        """Hand the cell to the nodes of its ranks."""
        if self._group_repair.under_way or self.replacement.under_way or self._ending:
            self.pending = PendingCell(command=command, descriptors=Descriptors(descriptors.take()), tell=tell)
            if self._ending and self.replacement.find is not None:
                self._replace_nodes(self.replacement.find)
            return
        ranks = {
            node: mine
            for node, infos in self._infos.items()
            if (mine := set(command.ranks) & {info.rank for info in infos})
        }
        self.run = SpreadRun(
            command,
            tell,
            ranks=ranks,
            on_gpus=self.command.gpus,
            nodes=[share.node for share in self._shares],
            loop=self._loop,
            logs=self._logs,
            on_over=self._over,
            lose_node=self.lost,
        )
        with descriptors:
            self.run.start(tuple(descriptors))
        self._tell_run(self._allocation_end.warning)

    def _tell_run(self, text: str) -> None:
        if self.run is not None and text:
            self.tell(m.Noted(run=self.run.command.run, rank=None, text=text), ())

    def stop(self, *, force: bool = False) -> None:
        if (pending := self.take_pending()) is not None:
            return pending.cancel()
        if self.run is not None:
            self.run.stop(force=force)

    def ask_stacks(self) -> None:
        if self.run is not None:
            self.run.ask_stacks()

    def debug(self, command: m.Debug) -> None:
        for node, infos in self._infos.items():
            if any(info.rank == command.rank for info in infos):
                self._shares[node].node.send(command)

    def _run_event(self, node: int, event: m.Event, fds: tuple[int, ...]) -> None:
        run = self.run
        if run is None or getattr(event, "run", "") != run.command.run:
            return
        if isinstance(event, m.Returned):
            self.kept |= {f"{event.run}/{name}": time.time() for name in event.kept}
        run.handle_event(node, event, fds)

    def _over(self, run: SpreadRun) -> None:
        self.run = None
        self.ran_s += time.monotonic() - run.started_s
        if not self._ending and not run.health.fit:
            on_all = len(run.command.ranks) == sum(len(infos) for infos in self._infos.values())
            self._group_repair.begin(run, on_all=on_all)
        run.tell(m.Ended(run=run.command.run, at_s=time.monotonic(), log_directory=run.logs.directory), ())
        self.on_ended(run)
        if run.command.max_restarts:
            self._loop.soon(self._close_if_ending)  # when the run has been started again, if it is
        else:
            self._close_if_ending()

    def _close_if_ending(self) -> None:
        if self._ending and self.idle and not self.closed:
            self._close()

    # ------------------------------------------------------------------------------------------------ ending

    def lost(self, node: int, reason: str) -> None:
        """End the worker group, because a node cannot be reached any more: a world of ranks is whole or not at all."""
        if self.closed:
            return
        name = self._shares[node].node.name if self._shares else "the cluster"
        self.end(f"{name} was lost: {reason}", {node})

    def lose(self, reason: str) -> None:
        """End the worker group, because no node can be reached any more."""
        self.end(reason, set(range(len(self._shares))))

    def end(self, reason: str, dead: set[int]) -> None:
        """Give the worker group up; ranks of `dead` nodes are lost, those of the others are stopped because of it."""
        if not self._infos or len(self._infos) < len(self._shares):
            return self.refuse(reason)
        self._ending = self._ending or reason
        self.replacement.ranks_left = sum(len(infos) for node, infos in self._infos.items() if node not in dead)
        if (pending := self.take_pending()) is not None:
            pending.fail(f"the cell has not begun, because {reason}. Run it again: it will have other ranks.")
        if self.run is None:
            return self._close()
        self.run.lose(reason, dead, self._pids())

    def _close(self) -> None:
        self._useless = True
        self.on_closed(self._ending)
        self.tell(m.WorkerGroupClosed(group=self.name, reason=self._ending), ())

    def _pids(self) -> dict[int, int]:
        """Return the process ids of all ranks."""
        return {info.rank: info.pid for infos in self._infos.values() for info in infos}

    def forget(self, command: m.Forget) -> None:
        for key in command.keys:
            self.kept.pop(key, None)
        for share in self._shares:
            share.node.send(command)

    def close(self, *, force: bool, reason: str = "") -> None:
        self.closed = True
        self._starting.end()
        self._ending = self._ending or reason or "its ranks were stopped"
        if self.pending is not None:
            self.pending.cancel()
        if self.run is not None:
            self.run.give_up(self._pids(), self._ending)
        self._allocation_end.cancel()
        self._group_repair.cancel()
        if not self._useless:
            for share in self._shares:
                share.node.send(m.CloseWorkerGroup(group=self.name, force=force))
        self.place.give_back(useless=self._useless, killed=force)
