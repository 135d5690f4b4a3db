"""The search for other nodes when one of a worker group was lost, for a run that is started again. Runs in the
coordinator's loop; knows no engine."""

from __future__ import annotations

from collections.abc import Callable

from jupyter_distrib.coordinator.node_source import NodeSource
from jupyter_distrib.server.pending_cell import PendingCell


class NodeReplacement:
    """The replacement of a worker group's nodes."""

    def __init__(self) -> None:
        self.find: Callable[[], NodeSource] | None = None
        """Callback that looks for other nodes; None if no run may be started again."""
        self.under_way = False
        self.ranks_left = 0
        """Number of ranks on nodes that were not lost with the last one."""
        self._refusal = ""
        """Reason why there are no nodes for as many ranks as there were."""

    def fewer(self, pending: PendingCell | None, size: int, reason: str) -> int | None:
        """Return the number of ranks to look for, since so many are refused for this reason: as many as were not lost,
        then as few as the cell that waits may have; None if it cannot go on so."""
        if pending is None or self.find is None:
            return None
        sizes = (self.ranks_left, pending.command.min_ranks)
        possible = [each for each in sizes if each < size and pending.may_have(each)]
        if possible:
            self._refusal = self._refusal or reason
        return max(possible, default=None)

    def end(self, pending: PendingCell | None, size: int) -> PendingCell | None:
        """End the search with so many ranks; return the cell that waits, for no more ranks than that."""
        self.under_way, refusal, self._refusal = False, self._refusal, ""
        if pending is not None and size < len(pending.command.ranks):
            return pending.with_fewer(size, refusal)
        return pending
