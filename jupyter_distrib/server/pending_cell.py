"""Keeps a cell that has come before its ranks are ready for it. Runs in the loop of the agent, or of the
coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jupyter_distrib.wire import endings
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

Tell = Callable[[m.Event, tuple[int, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCell:
    """A cell that is executed in the end, or cancelled, or fails."""

    command: m.Execute
    descriptors: Descriptors
    tell: Tell

    def cancel(self) -> None:
        """Report that the cell was stopped before it began."""
        self._end(endings.interrupted(self.command.run, self.command.ranks))

    def fail(self, reason: str) -> None:
        """Report why the cell cannot begin."""
        failure = m.Failure(type_name="jupyter_distrib.errors.PoolError", message=reason)
        self._end(endings.failed(self.command.run, self.command.ranks, failure))

    def may_have(self, ranks: int) -> bool:
        """Return whether the cell may go on with so few ranks."""
        return 0 < self.command.min_ranks <= ranks

    def with_fewer(self, ranks: int, cause: str) -> PendingCell:
        """Return the cell for fewer ranks, and report that it goes on with them."""
        command = replace(self.command, ranks=tuple(range(ranks)))
        self.tell(m.RanksReduced(run=command.run, ranks=command.ranks, cause=cause, at_s=time.monotonic()), ())
        return replace(self, command=command)

    def _end(self, events: Sequence[m.RunEvent]) -> None:
        self.descriptors.close()
        for event in events:
            self.tell(event, ())
