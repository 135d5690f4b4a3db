"""Cuts the TCP connections between the ranks of one run. Runs in the agent's loop.

The agent cuts only connections whose two ends both belong to ranks of the worker group. A user's own connection has
another process at its far end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.server.worker_group import Emit
from jupyter_distrib.system import reap
from jupyter_distrib.wire import messages as m


class RankConnections:
    """The connections of a worker group while one run is on.

    Args:
        run: Its id.
        ranks: All ranks of the worker group on this node; a live view.
        spans_nodes: Whether ranks of other nodes belong to it; they are cut by their own agents.
        emit: Reports which connections end on other nodes.
    """

    def __init__(self, run: str, ranks: Mapping[int, Rank], emit: Emit, *, spans_nodes: bool) -> None:
        self._run, self._ranks, self._emit, self.spans_nodes = run, ranks, emit, spans_nodes
        self.cut_any = False
        """Whether any connection was cut."""

    def cut(self, running: Iterable[Rank]) -> None:
        """Cut the connections of these ranks, which are being stopped."""
        inodes, ranks = reap.sockets_between(self._pids), list(running)
        self.cut_any |= bool(ranks)
        if abort := any(rank.has_device for rank in ranks):
            ranks = list(self._ranks.values())  # NCCL is aborted on all ranks or on none
        for rank in ranks:
            rank.post(m.CutSockets(run=self._run, inodes=inodes, abort=abort))
        self._report_far_ends(self._pids)

    def cut_remote(self, command: m.CutRemoteSockets) -> None:
        """Cut the connections of all ranks to ranks of another node where the run is being stopped. That includes ranks
        that have finished the cell, since a rank there may be waiting for them."""
        ranks = self._ranks.values()
        inodes, abort = reap.sockets_towards(self._pids, command.ends), any(rank.has_device for rank in ranks)
        if inodes or abort:
            self.cut_any = True
            for rank in ranks:
                rank.post(m.CutSockets(run=self._run, inodes=inodes, stop=False, abort=abort))

    def hang_up(self, rank: Rank) -> None:
        """Cut all connections of a rank that has left the cell, as if its process had ended."""
        self.cut_any = True
        rank.post(m.CutSockets(run=self._run, inodes=reap.sockets_between(self._pids)))
        self._report_far_ends([rank.pid])

    def _report_far_ends(self, pids: list[int]) -> None:
        if self.spans_nodes:
            self._emit(m.Connected(run=self._run, ends=reap.ends_outside(pids)), ())

    @property
    def _pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks.values() if rank.pid]
