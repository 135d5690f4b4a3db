"""The store through which the ranks of one worker group find one another. Runs in the agent's loop."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from jupyter_distrib.agent.rank import Rank
from jupyter_distrib.agent.rank_table import RankTable
from jupyter_distrib.server.pending_cell import Tell
from jupyter_distrib.wire.messages import GroupsReset, OpenWorkerGroup, ResetGroups, UseStore

ATTEMPTS = 20
"""Number of ports to try."""


class GroupStore:
    """The current store of one worker group; rank 0 serves it, on this node or another.

    Args:
        command: The command that asked for the worker group.
        ranks: The ranks of this node.
        tell: Sends an event to the kernel, or to the coordinator.
    """

    def __init__(self, command: OpenWorkerGroup, ranks: RankTable, tell: Tell) -> None:
        self._command, self._ranks, self._tell = command, ranks, tell

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
        with _server(host) as listener:
            port = listener.getsockname()[1]
            for rank in self._ranks:
                self._send(rank, ResetGroups(host=host, port=port), [] if rank.number else [listener.fileno()])
        if self.spans_nodes:
            self._tell(GroupsReset(group=self._command.group, host=host, port=port), ())

    def use(self, command: UseStore) -> None:
        """Use the store of another node."""
        for rank in self._ranks:
            self._send(rank, ResetGroups(host=command.host, port=command.port))

    def _send(self, rank: Rank, command: ResetGroups, fds: Sequence[int] = ()) -> None:
        rank.post(command, fds)
        if rank.has_device and rank.state == "idle":
            rank.state = "starting"  # until it says `DeviceSettled`


def _server(host: str) -> socket.socket:
    """Return a listening socket; the port after its own is free, for programs that a cell starts."""
    for _ in range(ATTEMPTS):
        listener = socket.create_server((host, 0), backlog=1024)
        try:
            socket.create_server((host, listener.getsockname()[1] + 1)).close()
        except (OSError, OverflowError):  # taken, or past the last port
            listener.close()
            continue
        return listener
    return socket.create_server((host, 0), backlog=1024)
