"""One worker group whose ranks are on several nodes, each with an agent. Runs in the coordinator's loop.

    MultiNodeWorkerGroup --OpenWorkerGroup, Execute, UseStore, ...--> node 0: agent, ranks 0, 1   (and the store)
                         <--WorkerGroupOpened, Wrote, Ended, ...----- node 1: agent, ranks 2, 3

To the coordinator's clients it is what `agent/groups/worker_group.py` is to an agent's: one worker group, one stream of
events, one end of each run. This module does what needs the view of all nodes, and `coordinator/run.py` does so for one
run: a new store is made when the groups of any node are broken. `coordinator/group_state.py` has the states of the
worker group, and the moves between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from jupyter_distrib.coordinator.group_repair import MultiNodeGroupRepair
from jupyter_distrib.coordinator.group_state import MOVES
from jupyter_distrib.coordinator.group_state import MultiNodeState as State
from jupyter_distrib.coordinator.group_state import MultiNodeTrigger as Trigger
from jupyter_distrib.coordinator.run import MultiNodeRun, NodeHandle
from jupyter_distrib.server.worker_group import Emit, PendingCell, StateMachine, WorkerGroupState
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.system.formatting import duration
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

STARTING_EVERY_S = 0.4
NO_MORE = "there is no room for more now"
"""The reason why a run begins with fewer ranks if nothing was refused: there was no room for more."""
WARNING_S = 300.0
"""Seconds before the end at which the warning is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One node's part of a worker group."""

    node: NodeHandle
    size: int
    gpus: bool


class NodeSource(Protocol):
    """The source of the nodes of one worker group."""

    def start(self, command: m.OpenWorkerGroup, group: MultiNodeWorkerGroup) -> None:
        """Find nodes; calls `group.on_placed`, `group.on_queued` or `group.refuse` in the loop, and later
        `group.handle_event` and `group.on_node_lost`."""

    def find_room(self, ranks: int, unit: int, then: Callable[[int], None]) -> None:
        """Get room for up to this many more ranks, a multiple of `unit`; then call `then` with their number, in the
        loop."""

    def drop_room(self) -> None:
        """Give the room back."""

    def nodes(self) -> int:
        """Return the number of nodes, with those of the room."""

    def use_room(self) -> None:
        """Call `group.on_placed` with all nodes, old and new."""

    def give_back(self, *, useless: bool, killed: bool) -> None:
        """Let the nodes go, even during the search for them.

        Args:
            useless: Whether another worker group cannot use them either.
            killed: Whether the ranks were killed; else they were asked to leave.
        """


class MultiNodeWorkerGroup(WorkerGroupState[MultiNodeRun]):
    """The workers that one `OpenWorkerGroup` asked for, on any number of nodes.

    Args:
        find_nodes: Returns a source of nodes for a command: at first, and when the nodes have to be replaced.
        logs: Folder of the logs of all runs.
    """

    def __init__(
        self,
        command: m.OpenWorkerGroup,
        *,
        loop: Loop,
        find_nodes: Callable[[m.OpenWorkerGroup], NodeSource],
        logs: Path,
        emit: Emit,
    ) -> None:
        super().__init__(command, emit)
        self.on_closed: Callable[[str], None] = lambda reason: None
        self._find_nodes = find_nodes
        self.place = find_nodes(command)
        """The source of the present nodes; events from other sources concern nodes that were given back."""
        self.waits_for = ""
        """Sentence on what the group waits for, if it has no nodes yet."""
        self._states = StateMachine(State.LOOKING, MOVES)
        self._loop, self._logs = loop, logs
        self._shares: list[Share] = []
        self._infos: dict[int, tuple[m.WorkerInfo, ...]] = {}
        """The ranks of each node, once all of the node's are up."""
        self._group_repair = MultiNodeGroupRepair(
            self.name,
            loop=loop,
            nodes=lambda: [share.node for share in self._shares],
            lose=self.on_node_lost,
            on_ready=self._repaired,
        )
        self._reason = ""
        """Reason why the worker group ends; empty while it goes on."""
        self._ranks_left = 0
        """Number of ranks on the surviving nodes after the last loss."""
        self._shortage = ""
        """Reason why there are no nodes for the previous number of ranks."""
        self._room = 0
        """Number of further ranks that there is room for, in a run that grows."""
        self._place_has_gpus = False
        self._allocation_end = AllocationEnd(loop, self._send_run_note)
        self._starting = StartProgress(self.name, loop, lambda event: self.emit(event, ()))
        self._starting.on_search(command.size)
        self._notes: list[str] = []
        """Notes of the nodes on the choice of their GPUs."""

    @property
    def state(self) -> State:
        return self._states.state

    @property
    def closed(self) -> bool:
        return self.state is State.CLOSED

    @property
    def in_use(self) -> bool:
        """Return whether it starts, executes or repairs something, or keeps values."""
        return self.state is not State.READY or self.pending is not None or bool(self.kept)

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

    def on_queued(self, reason: str) -> None:
        """Tell the kernel what the ranks wait for, or add a note on its nodes to the run."""
        if self.state not in (State.LOOKING, State.STARTING, State.LOOKING_AGAIN, State.STARTING_AGAIN):
            self._send_run_note(reason)
        else:
            self.waits_for = reason
            self.emit(m.WorkerGroupQueued(group=self.name, reason=reason), ())

    def on_placed(self, shares: Sequence[Share], *, has_gpus: bool = False, ends_at_s: float | None = None) -> None:
        """Start ranks on each node.

        Args:
            shares: The nodes.
            has_gpus: Whether the place has GPUs, even if these ranks have none.
            ends_at_s: Time at which the engine takes the nodes away, by `time.monotonic`.
        """
        if not self._states.move(Trigger.PLACED):
            return
        self.waits_for = ""
        self._allocation_end.start(ends_at_s)
        self._shares, self._place_has_gpus = list(shares), has_gpus
        size, first = sum(share.size for share in shares), self.command.first_rank
        world_size = self.command.world_size or size
        self.command = replace(self.command, size=size, gpus=any(share.gpus for share in shares))
        self._starting.on_placed([share.node.name for share in shares], size)
        for number, share in enumerate(shares):
            command = replace(
                self.command,
                size=share.size,
                least=0,
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
        """Look for nodes for fewer ranks if the waiting cell allows that; else give the worker group up."""
        size = self._fewer()
        if size is not None and self._states.move(Trigger.FEWER):
            self._shortage = self._shortage or reason
            self._replace_nodes(size)
        else:
            self._give_up(reason)

    def _fewer(self) -> int | None:
        """Return the next smaller group size to try after a refusal: first the surviving ranks, then `--min-ranks`;
        None if the waiting cell needs more."""
        if self.pending is None:
            return None
        sizes = map(self.pending.fewer, (self._ranks_left, self.pending.command.min_ranks))
        return max((each for each in sizes if 0 < each < self.command.size), default=None)

    def _replace_nodes(self, size: int) -> None:
        """Give the nodes back and look for others; the restarted run waits for their ranks."""
        self.place.give_back(useless=True, killed=True)
        self._group_repair.cancel()
        self._shares, self._infos, self._reason = [], {}, ""
        self.kept.clear()
        self.command = replace(self.command, size=size)
        self.place = self._find_nodes(self.command)
        self.place.start(self.command, self)

    def find_room(self, size: int, unit: int, then: Callable[[int], None]) -> None:
        place, had = self.place, self.command.size

        def found(ranks: int) -> None:
            self._room = ranks if self.place is place else 0
            then(had + self._room)

        if self.kept:
            return then(0)  # the room would be lost
        place.find_room(size - had, unit, found)

    def drop_room(self) -> None:
        if self._room:
            self._room = 0
            self.place.drop_room()
            if self.state is State.READY:
                self._group_repair.make_store()
                self._wait_for_repair()

    def nodes(self) -> int:
        return self.place.nodes()

    def _use_room(self) -> None:
        """Start the ranks anew, on the previous nodes and on the new ones."""
        self._room, self._ranks_left, self._infos = 0, self.command.size, {}
        self._group_repair.cancel()
        self.kept.clear()
        self.place.use_room()

    def handle_event(self, node: int, event: m.Event, fds: tuple[int, ...] = ()) -> None:
        """Handle an event of a node, which may concern a previous worker group; `fds` stay the caller's."""
        if self.closed or getattr(event, "group", self.name) != self.name:
            return
        match event:
            case m.WorkerGroupOpened():
                self._opened(node, event)
            case m.WorkerGroupQueued():
                self.on_queued(self._on_node(node, event.reason))
            case m.WorkerGroupStarting():
                self._starting.on_progress(node, event.up, event.waits_for)
            case m.WorkerGroupRefused():
                self.refuse(self._on_node(node, event.reason))
            case m.WorkerGroupClosed():
                self.on_node_lost(node, event.reason or "its ranks were taken away")
            case m.WorkerGroupChanged():
                self._changed(node, event)
            case m.NodeProgress():
                self._group_repair.on_report(node, event, self.run)
            case m.GroupsReset():
                self._group_repair.on_groups_reset(node, event)
            case m.DebuggerPrompted() | m.DebuggerLeft() if self.run is None:
                self.emit(event, ())  # from the debugging of a run that has failed
            case _:
                self._run_event(node, event, fds)

    def _on_node(self, node: int, reason: str) -> str:
        return reason if len(self._shares) == 1 else f"{self._shares[node].node.name}: {reason}"

    def _opened(self, node: int, event: m.WorkerGroupOpened) -> None:
        self._infos[node] = event.workers
        self._starting.on_opened(node, len(event.workers))
        self._notes += (self._on_node(node, note) for note in event.notes)
        again = self.state is State.STARTING_AGAIN
        if len(self._infos) < len(self._shares) or not self._states.move(Trigger.OPENED):
            return
        self._wait_for_repair()
        if again:
            self._reduce_pending()
            lost = tuple(info.rank for info in self.infos())
            self.emit(m.WorkerGroupChanged(group=self.name, workers=self.infos(), lost=lost), ())
        else:
            opened = m.WorkerGroupOpened(
                group=self.name,
                workers=self.infos(),
                gpus=self.command.gpus,
                node_has_gpus=self._place_has_gpus,
                notes=tuple(self._notes),
            )
            self.emit(opened, ())
        self._begin_pending()

    def _reduce_pending(self) -> None:
        """Reduce the waiting cell to fewer ranks if there were no nodes for all."""
        shortage, self._shortage = self._shortage, ""
        if self.pending is not None and self.command.size < len(self.pending.command.ranks):
            self.pending = self.pending.with_fewer(self.command.size, shortage or NO_MORE, self.nodes())

    def _changed(self, node: int, event: m.WorkerGroupChanged) -> None:
        """Handle the loss of ranks that their node replaces."""
        if self.state in (State.ENDING, State.ENDED, State.STARTING_AGAIN):
            return  # about ranks that are, or will be, replaced
        if node in self._infos:  # else its `WorkerGroupOpened` is still to come
            self._infos[node] = event.workers
            self.emit(m.WorkerGroupChanged(group=self.name, workers=self.infos(), lost=event.lost), ())
        if self.run is not None:  # its ranks still use the store
            self.run.health.clean = self.run.progress_reports.all_finished = False
        else:
            self._group_repair.make_store()
            self._wait_for_repair()

    def _wait_for_repair(self) -> None:
        if self._group_repair.under_way:
            self._states.move(Trigger.REPAIR)

    def _repaired(self) -> None:
        self._states.move(Trigger.REPAIRED)
        self._begin_pending()

    # ------------------------------------------------------------------------------------------------ running

    def _begin_pending(self) -> None:
        """Execute the cell that waits, if the ranks are ready for it."""
        if self.state is State.READY and (pending := self.pop_pending()) is not None:
            self.execute(pending.command, pending.descriptors, pending.emit)

    def execute(self, command: m.Execute, descriptors: Descriptors, emit: Emit, frame: bytes = b"") -> None:
        """Hand the cell to the nodes of its ranks."""
        if self.state is not State.READY:
            self.pending = PendingCell(command=command, descriptors=Descriptors(descriptors.take()), emit=emit)
            if self._states.move(Trigger.CELL):
                self._replace_nodes(self.command.size)
            return
        if len(command.ranks) > self.command.size and self._states.move(Trigger.GROW):
            self.pending = PendingCell(command=command, descriptors=Descriptors(descriptors.take()), emit=emit)
            return self._use_room()
        self._states.move(Trigger.CELL)
        ranks = {
            node: mine
            for node, infos in self._infos.items()
            if (mine := set(command.ranks) & {info.rank for info in infos})
        }
        self.run = MultiNodeRun(
            command,
            emit,
            ranks=ranks,
            on_gpus=self.command.gpus,
            nodes=[share.node for share in self._shares],
            loop=self._loop,
            logs=self._logs,
            on_over=self._over,
            lose_node=self.on_node_lost,
        )
        with descriptors:
            self.run.start(tuple(descriptors))
        self._send_run_note(self._allocation_end.warning)

    def _send_run_note(self, text: str) -> None:
        if self.run is not None and text:
            self.emit(m.Noted(run=self.run.command.run, rank=None, text=text), ())

    def stop(self, *, force: bool = False) -> None:
        if (pending := self.pop_pending()) is not None:
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
        if isinstance(event, m.Returned | m.Interrupted) and event.kept:
            self.kept |= {f"{event.run}/{name}": time.time() for name in event.kept.types}
        run.handle_event(node, event, fds)

    def _over(self, run: MultiNodeRun) -> None:
        self.run = None
        self.ran_s += time.monotonic() - run.started_s
        self._states.move(Trigger.OVER)
        if self.state is State.READY and not run.health.fit and not self._room:
            on_all = len(run.command.ranks) == sum(len(infos) for infos in self._infos.values())
            self._group_repair.start(run, on_all=on_all)
            self._wait_for_repair()
        run.emit(m.Ended(run=run.command.run, at_s=time.monotonic(), log_directory=run.logs.directory), ())
        self.on_ended(run)
        if run.command.max_restarts:
            self._loop.soon(self._give_up_ended)  # once the run has been started again, if it is
        else:
            self._give_up_ended()

    def _give_up_ended(self) -> None:
        if self.state is State.ENDED:
            self._give_up(self._reason)

    # ------------------------------------------------------------------------------------------------ ending

    def on_node_lost(self, node: int, reason: str) -> None:
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
        if self.state in (State.LOOKING, State.STARTING, State.LOOKING_AGAIN, State.STARTING_AGAIN):
            return self.refuse(reason)
        self._reason = self._reason or reason
        self._ranks_left = sum(len(infos) for node, infos in self._infos.items() if node not in dead)
        if (pending := self.pop_pending()) is not None:
            pending.fail(f"the cell has not begun, because {reason}. Run it again: it will have other ranks.")
        if self.run is not None and self._states.move(Trigger.LOST):
            self.run.lose(reason, dead, self._pids())
        else:
            self._give_up(self._reason)

    def _give_up(self, reason: str) -> None:
        """Close the unusable worker group, and report why to the kernel and to the waiting cell. Takes effect once."""
        cls = m.WorkerGroupRefused if self.state in (State.LOOKING, State.STARTING) else m.WorkerGroupClosed
        if not self._states.move(Trigger.GIVE_UP):
            return
        if (pending := self.pop_pending()) is not None:
            pending.fail(f"the run cannot go on: {reason}")
        self.on_closed(reason)
        self.emit(cls(group=self.name, reason=reason), ())

    def _pids(self) -> dict[int, int]:
        """Return the process ids of all ranks."""
        return {info.rank: info.pid for infos in self._infos.values() for info in infos}

    def forget(self, command: m.Forget) -> None:
        for key in command.keys:
            self.kept.pop(key, None)
        for share in self._shares:
            share.node.send(command)

    def close(self, *, force: bool, reason: str = "") -> None:
        useless = self.state is State.USELESS
        self._states.move(Trigger.CLOSE)
        self._starting.end()
        self._reason = self._reason or reason or "its ranks were stopped"
        if (pending := self.pop_pending()) is not None:
            pending.cancel()
        if self.run is not None:
            self.run.give_up(self._pids(), self._reason)
        self._allocation_end.cancel()
        self._group_repair.cancel()
        if not useless:
            for share in self._shares:
                share.node.send(m.CloseWorkerGroup(group=self.name, force=force))
        self.place.give_back(useless=useless, killed=force)


class StartProgress:
    """The progress of one worker group."""

    def __init__(self, group: str, loop: Loop, emit: Callable[[m.WorkerGroupStarting], object]) -> None:
        self._group, self._loop, self._emit = group, loop, emit
        self._size = 0
        self._nodes: list[str] = []
        """The names of the nodes, once there are some."""
        self._up: dict[int, int] = {}
        """Number of ranks that are up on each node that has reported."""
        self._over = False

    def on_search(self, size: int) -> None:
        """Report after a while that the worker group is waiting for nodes."""
        self._size = size
        self._loop.later(STARTING_EVERY_S, lambda: None if self._nodes else self._report("a free node"))

    def on_placed(self, nodes: Sequence[str], size: int) -> None:
        """Report after a while which nodes have not answered."""
        self._nodes, self._size = list(nodes), size
        self._loop.later(STARTING_EVERY_S, self._report_silent)

    def on_progress(self, node: int, up: int, waits_for: str = "") -> None:
        """Record and report how many ranks of a node are up, and what the others wait for."""
        self._up[node] = up
        where = f"{self._nodes[node]}: " if len(self._nodes) > 1 and waits_for else ""
        self._report(where + waits_for)

    def on_opened(self, node: int, size: int) -> None:
        """Record that all ranks of a node are up."""
        self._up[node] = size
        self._over = self._over or (len(self._up) == len(self._nodes) and sum(self._up.values()) >= self._size)

    def end(self) -> None:
        """Stop reporting."""
        self._over = True

    def _report_silent(self) -> None:
        silent = [name for number, name in enumerate(self._nodes) if number not in self._up]
        if silent:
            self._report(f"the node{'s' * (len(silent) > 1)} {', '.join(silent)}")

    def _report(self, waits_for: str) -> None:
        if not self._over:
            up = sum(self._up.values())
            self._emit(m.WorkerGroupStarting(group=self._group, up=up, size=self._size, waits_for=waits_for))


class AllocationEnd:
    """The time at which the engine takes the nodes of a worker group away.

    Args:
        warn: Sends the warning to the current run, if there is one.
    """

    def __init__(self, loop: Loop, warn: Callable[[str], None]) -> None:
        self._loop, self._warn = loop, warn
        self._ends_at_s: float | None = None
        self._timer: Timer | None = None

    def start(self, ends_at_s: float | None) -> None:
        """Set the end of the allocation (`time.monotonic`); None for no limit."""
        self.cancel()
        self._ends_at_s = ends_at_s
        if ends_at_s is not None and (left_s := ends_at_s - time.monotonic()) > WARNING_S:
            self._timer = self._loop.later(left_s - WARNING_S, lambda: self._warn(self.warning))

    @property
    def warning(self) -> str:
        """A sentence for the user if the end is near; else empty."""
        if self._ends_at_s is None or (left_s := self._ends_at_s - time.monotonic()) > WARNING_S:
            return ""
        return f"these ranks reach the time limit in {duration(max(0.0, left_s))}: save your work."

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
