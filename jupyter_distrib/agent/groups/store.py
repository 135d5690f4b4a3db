"""The store through which the ranks of one worker group find one another. Runs in the agent's loop."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable
from functools import partial

from jupyter_distrib.agent.groups.rank_table import RankTable
from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.server.worker_group import Emit
from jupyter_distrib.system import network_interfaces
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.wire import messages as m

ATTEMPTS = 20
"""Number of ports to try."""
RESET_LIMIT_S = 20.0
"""Seconds after which a rank that has not finished resetting its groups is killed and replaced. A rank that NCCL does
not release exits by itself sooner."""


class GroupResets:
    """The ranks of one worker group that will say `DeviceSettled`, or hear `KeepGroups`, before they are ready for the
    next cell.

    Args:
        on_begin: Called whenever there is one more.
    """

    def __init__(self, loop: Loop, on_begin: Callable[[], object]) -> None:
        self._loop, self._on_begin = loop, on_begin
        self._timers: dict[Rank, Timer] = {}

    def start_waiting(self, rank: Rank) -> None:
        """Make the next cell wait for a rank, up to a time limit."""
        rank.state = "starting"
        self.stop_waiting(rank)
        self._timers[rank] = self._loop.later(RESET_LIMIT_S, partial(self._end, rank))
        self._on_begin()

    def stop_waiting(self, rank: Rank) -> None:
        """Stop the time limit, because the rank is ready or gone."""
        if (timer := self._timers.pop(rank, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        for rank in list(self._timers):
            self.stop_waiting(rank)

    def _end(self, rank: Rank) -> None:
        self.stop_waiting(rank)
        rank.process.kill()


class GroupStore:
    """The current store of one worker group; rank 0 serves it, on this node or another.

    Args:
        command: The command that asked for the worker group.
        ranks: The ranks of this node.
        emit: Sends an event to the kernel, or to the coordinator.
        on_reset_awaited: Called whenever cells have to wait for a rank that resets its groups.
    """

    def __init__(
        self,
        command: m.OpenWorkerGroup,
        ranks: RankTable,
        *,
        emit: Emit,
        loop: Loop,
        on_reset_awaited: Callable[[], object],
    ) -> None:
        self._command, self._ranks, self._emit = command, ranks, emit
        self.resets = GroupResets(loop, on_reset_awaited)
        self._reserved: socket.socket | None = None
        """Holds the port after the store's."""
        self._unused: m.ResetGroups | None = None
        """A store spanning nodes that no cell has used yet; a rank that replaces a dead one uses it too."""
        self._listener: socket.socket | None = None
        """Socket of that store, so that no connection is refused before rank 0 serves it."""

    @property
    def spans_nodes(self) -> bool:
        """Return whether ranks of other nodes use the store too: the coordinator then decides when a new one is due."""
        return self._command.world_size > self._command.size

    def renew(self) -> None:
        """Make a new store for the process groups that are made from now on; its socket is bound by the agent and
        listens in rank 0. Does nothing if rank 0 is on another node."""
        if self._command.first_rank:
            return
        host = self._command.host
        self.close()
        listener, self._reserved = _server(host)
        with listener:
            port = listener.getsockname()[1]
            if self.spans_nodes:
                self._listener = listener.dup()
            self._give(m.ResetGroups(host=host, port=port), listener)
        if self.spans_nodes:
            self._emit(m.GroupsReset(group=self._command.group, host=host, port=port), ())

    @property
    def next_port(self) -> int:
        """Return the port reserved next to the store's for MASTER_PORT; 0 if none is reserved."""
        return 0 if self._reserved is None else int(self._reserved.getsockname()[1])

    def close(self) -> None:
        """Give the reserved port back."""
        self.begin_use()
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def use(self, command: m.UseStore) -> None:
        """Use the store of another node."""
        self._give(m.ResetGroups(host=command.host, port=command.port), None)
        self._emit(m.GroupsReset(group=command.group, host=command.host, port=command.port), ())

    def begin_use(self) -> None:
        """Record that a cell begins: from now on the store's groups break with any of its ranks."""
        self._unused = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def hand_on(self, ranks: Iterable[Rank]) -> None:
        """Pass the store on to replacement ranks if no cell has used it yet."""
        if self._unused is not None:
            for rank in ranks:
                self._send(rank, self._unused, self._listener)

    def _give(self, command: m.ResetGroups, listener: socket.socket | None) -> None:
        """Tell all ranks of a new store."""
        self._unused = command
        for rank in self._ranks:
            self._send(rank, command, listener)

    def _send(self, rank: Rank, command: m.ResetGroups, listener: socket.socket | None) -> None:
        rank.post(command, [] if rank.number or listener is None else [listener.fileno()])
        if rank.reports_reset and rank.state == "idle":
            self.resets.start_waiting(rank)


def _server(host: str) -> tuple[socket.socket, socket.socket | None]:
    """Return a listening socket, and one that reserves the next port for programs started by a cell."""
    for _ in range(ATTEMPTS):
        listener = network_interfaces.listen(host, backlog=1024)
        reserved = socket.socket(listener.family)
        # Linux: a program that also sets this option, as servers do, can listen there; no program gets the port by
        # chance.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserved.bind((host, listener.getsockname()[1] + 1))
        except (OSError, OverflowError):  # the port is taken, or past the last one
            listener.close()
            reserved.close()
            continue
        if sys.platform != "linux":
            reserved.close()
            return listener, None
        return listener, reserved
    return network_interfaces.listen(host, backlog=1024), None
