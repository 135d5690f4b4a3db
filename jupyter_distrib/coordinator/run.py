"""One run whose ranks are on several nodes. Runs in the coordinator's loop.

This module does for a run what needs the view of all nodes: it stops the other nodes when ranks of one fail, cuts the
far ends of cut connections, reports stalls, and ends the run once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from jupyter_distrib.agent.runs.watch import DEEP_EVERY, TICK_S
from jupyter_distrib.server.diagnose import is_suspicious
from jupyter_distrib.server.group_health import GroupHealth, ProgressReports
from jupyter_distrib.server.stalls import Stalls
from jupyter_distrib.server.time_limit import TimeLimit
from jupyter_distrib.server.worker_group import Emit
from jupyter_distrib.system.event_loop import Loop, Timer, Timers
from jupyter_distrib.wire import endings
from jupyter_distrib.wire import messages as m

FAILURE_GRACE_S = 0.1
"""Seconds for which other nodes may go on after the first exception, so that ranks that fail alike all report their
own."""
LOGS_S = 5.0
"""Seconds to wait for the other nodes and their logs after a node was lost."""
STOP_LIMIT_S = 20.0
"""Seconds after a stop within which every node must end the run; agents kill ranks much sooner."""
LOST_LOGS_S = 1.0
"""Seconds to wait for the logs of the lost node itself, which may have lost only its agent and still answer."""


class NodeHandle(Protocol):
    """The agent of one reachable node. No method blocks."""

    name: str
    """Name of the node in a sentence: `node 10.0.0.7`."""
    short_name: str
    """Name of the node in a table: `10.0.0.7`."""
    host: str
    """Address of the node, by which the others reach it."""
    interface: str

    def send(self, command: m.Command, fds: Sequence[int] = ()) -> None:
        """Deliver commands in order; `fds` stay the caller's."""

    def fetch_logs(self, run: str, directory: Path, done: Callable[[], None]) -> None:
        """Fetch the logs of the node's ranks into this folder, then call `done` in the loop, even if that failed."""


class MultiNodeRun:
    """A run that several nodes execute.

    Args:
        ranks: The ranks that execute it, by node.
        on_gpus: Whether they have GPUs.
        nodes: All nodes of the worker group.
        logs: Folder of the logs of all runs.
        on_over: Called once, when every node has ended it and its logs have arrived.
        lose_node: Called with a node that does not answer, and why it matters.
    """

    def __init__(
        self,
        command: m.Execute,
        emit: Emit,
        *,
        ranks: dict[int, set[int]],
        on_gpus: bool,
        nodes: Sequence[NodeHandle],
        loop: Loop,
        logs: Path,
        on_over: Callable[[MultiNodeRun], None],
        lose_node: Callable[[int, str], None],
    ) -> None:
        self.command, self.emit, self.ranks = command, emit, ranks
        self.started_s = time.monotonic()
        self.health = GroupHealth()
        self.progress_reports = ProgressReports()
        self.logs = LogCollection(command.run, nodes, logs / command.run, self._finish_if_over)
        self._nodes, self._on_over, self.on_gpus = nodes, on_over, on_gpus
        self._going = set(ranks)
        """Nodes that have not reported the end of the run."""
        self._lose_node, self._stopped = lose_node, False
        self._executing = frozenset(ranks)
        """All nodes that execute it or have executed it."""
        self._timers = Timers(loop)
        self._watch = MultiNodeWatch(
            command,
            loop,
            ranks=lambda: {rank for ranks in self.ranks.values() for rank in ranks},
            probe_deeply=self._probe_deeply,
            emit=lambda event: emit(event, ()),
            stop=self.stop,
        )

    def start(self, fds: Sequence[int]) -> None:
        """Hand the cell to the nodes of its ranks."""
        whole = replace(self.command, run_size=len(self.command.ranks), detached=False, notify="", timeout_s=None)
        for node, node_ranks in self.ranks.items():
            part = replace(whole, ranks=tuple(sorted(node_ranks)))
            self._nodes[node].send(part, fds)
        self._time_limit = TimeLimit(self.command.timeout_s, later=self._timers.later, on_over=self._time_out)

    def _time_out(self, limit_s: float) -> None:
        self.emit(m.TimedOut(run=self.command.run, limit_s=limit_s, at_s=time.monotonic()), ())
        self.stop()

    def _probe_deeply(self) -> None:
        for node in self._going:
            self._nodes[node].send(m.Probe(run=self.command.run, deep=True))

    def stop(self, *, force: bool = False, but: int = -1) -> None:
        """Stop its ranks on all nodes, or on all `but` one."""
        self._watch.close()  # the stacks from before the stop are the useful ones
        if not self._stopped:
            self._stopped = True
            self._timers.later(STOP_LIMIT_S, self._lose_silent)
        for node in self._going - {but}:
            self._nodes[node].send(m.Stop(run=self.command.run, force=force))

    def _lose_silent(self) -> None:
        if self._going:
            self._lose_node(min(self._going), f"it did not end the cell within {STOP_LIMIT_S:.0f} s of the stop")

    def ask_stacks(self) -> None:
        """Ask the ranks of all nodes for their Python stacks."""
        for node in self._going:
            self._nodes[node].send(m.AskStacks(run=self.command.run))

    def handle_event(self, node: int, event: m.Event, fds: tuple[int, ...]) -> None:
        """Handle an event of this run from a node."""
        event = _on_our_clock(event)
        match event:
            case m.Connected():
                for other in self._executing - {node}:  # ranks may wait for a rank that has ended the cell
                    self._nodes[other].send(m.CutRemoteSockets(run=event.run, ends=event.ends))
            case m.NodeSawRanks():
                self._watch.handle_event(event)
            case m.Ended():
                self._ended(node, event)
            case m.Returned() | m.Failed() | m.Interrupted() | m.Exited():
                self.ranks[node].discard(event.rank)
                self.emit(event, fds)
                self._follow(node, event)
            case _:
                if isinstance(event, m.DebuggerPrompted | m.DebuggerLeft):
                    self._time_limit.on_debugger_event(event)
                self.emit(event, fds)

    def _follow(self, node: int, event: m.Returned | m.Failed | m.Interrupted | m.Exited) -> None:
        """Stop other nodes if the end of one rank requires it. NCCL does not notice that a rank has left."""
        match event:
            case m.Returned() if event.exited_early and self.on_gpus:
                self._watch.stop_at_a_stall()
            case m.Failed():
                self._timers.later(FAILURE_GRACE_S, lambda: self.stop(but=node))
            case m.Exited():
                self.progress_reports.all_finished = False
                self.stop(but=node)

    def _ended(self, node: int, event: m.Ended) -> None:
        self._going.discard(node)
        self.health.clean &= event.clean
        if self.on_gpus and not event.clean:
            self.progress_reports.expect(node)
        self.health.sequences |= set(event.sequences)
        if event.log_directory:
            self.logs.fetch(node)
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        if not self._going and self.logs.complete:
            self._finish()

    def _finish(self) -> None:
        self.close()
        on_over, self._on_over = self._on_over, lambda run: None
        on_over(self)

    def close(self) -> None:
        """Stop the watch and the timers."""
        self._watch.close()
        self._timers.cancel()

    def lose(self, reason: str, dead: set[int], pids: Mapping[int, int]) -> None:
        """Record that ranks of `dead` nodes are lost, and that the others are killed because of it. Ends the run when
        all logs that can still be fetched have arrived; `pids` are those of all ranks."""
        for node in sorted(dead & self._going):
            self._give_up(node, pids, lost=reason)
            self.logs.fetch(node)
            self._timers.later(LOST_LOGS_S, partial(self.logs.give_up, node))
        self.stop(force=True)
        self._timers.later(LOGS_S, lambda: self.give_up(pids))
        self._finish_if_over()

    def give_up(self, pids: Mapping[int, int], reason: str = "") -> None:
        """End the run now, whatever the ranks are doing; `reason` says why, unless another rank is the cause."""
        for node in sorted(self._going):
            self._give_up(node, pids, stopped=reason)
        self._finish()

    def _give_up(self, node: int, pids: Mapping[int, int], *, lost: str = "", stopped: str = "") -> None:
        self._going.discard(node)
        gone = {rank: pids.get(rank, 0) for rank in sorted(self.ranks[node])}
        code = None if lost else -signal.SIGKILL
        for event in endings.exits(self.command.run, gone, asked=not lost, exit_code=code, lost=lost, reason=stopped):
            self.emit(event, ())
        self.ranks[node].clear()


def _on_our_clock(event: m.Event) -> m.Event:
    """Return an event of a node with the time of its arrival, because the node's clock differs."""
    if (node_s := getattr(event, "at_s", None)) is None:
        return event
    now_s = time.monotonic()
    if isinstance(event, m.Returned) and event.began_at_s is not None:
        return replace(event, at_s=now_s, began_at_s=event.began_at_s + now_s - node_s)
    return cast("m.Event", replace(cast("m.Returned", event), at_s=now_s))


class MultiNodeWatch:
    """The watch over one run.

    Args:
        ranks: Ranks that still execute the cell.
        probe_deeply: Requests a deep probe of all of them.
        emit: Takes the events.
        stop: Stops the run.
    """

    def __init__(
        self,
        command: m.Execute,
        loop: Loop,
        *,
        ranks: Callable[[], set[int]],
        probe_deeply: Callable[[], None],
        emit: Callable[[m.RunEvent], None],
        stop: Callable[[], None],
    ) -> None:
        self._loop, self._ranks, self._probe_deeply = loop, ranks, probe_deeply
        self._stalls = Stalls(command, emit=emit, stop=stop)
        self._looks = {rank: m.RankSighting(rank=rank, state="running") for rank in command.ranks}
        self._ticks = 0
        self._timer: Timer = loop.later(TICK_S, self._tick)

    def close(self) -> None:
        """Stop watching, because the run is over or being stopped."""
        self._timer.cancel()

    def stop_at_a_stall(self) -> None:
        """Stop the run as soon as ranks are found waiting for one that will not come."""
        self._stalls.limit_s = 0.0

    def handle_event(self, event: m.NodeSawRanks) -> None:
        self._looks |= {look.rank: look for look in event.looks}

    def _tick(self) -> None:
        self._timer = self._loop.later(TICK_S, self._tick)
        self._ticks += 1
        ranks = self._ranks()
        looks = [look if rank in ranks else replace(look, state="left") for rank, look in self._looks.items()]
        if self._ticks % DEEP_EVERY == 0 and is_suspicious(looks):
            self._probe_deeply()
        self._stalls.judge(looks)


class LogCollection:
    """The logs of one run.

    Args:
        run: The id of the run.
        nodes: The nodes of the worker group.
        folder: The folder of this run's logs.
        on_fetched: Called when the logs of a node have arrived or will not.
    """

    def __init__(self, run: str, nodes: Sequence[NodeHandle], folder: Path, on_fetched: Callable[[], None]) -> None:
        self._run, self._nodes, self._folder, self._on_fetched = run, nodes, folder, on_fetched
        self._fetching: set[int] = set()
        self._asked = False
        """Whether any node was asked for logs."""

    @property
    def complete(self) -> bool:
        """Return whether no logs are being fetched."""
        return not self._fetching

    @property
    def directory(self) -> str:
        """Return the folder; empty if no rank wrote anything, or none of it could be fetched."""
        return str(self._folder) if self._asked and any(self._folder.glob("rank*.log")) else ""

    def fetch(self, node: int) -> None:
        """Fetch the logs of a node."""
        self._fetching.add(node)
        self._asked = True
        self._nodes[node].fetch_logs(self._run, self._folder, lambda: self.give_up(node))

    def give_up(self, node: int) -> None:
        """Stop waiting for the logs of a node."""
        self._fetching.discard(node)
        self._on_fetched()
