"""Records what a run reveals about the process groups of its ranks. Runs in the loop of an agent, or of the
coordinator.

After a run that did not end well, ranks with devices report to the agent how far they came, and agents to the
coordinator. If the devices of all ranks have finished after equally many collectives, and none was cut, the process
groups stay: NCCL's take seconds to make. Else all ranks abort theirs together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class GroupHealth:
    """The state of some ranks' process groups after a run."""

    clean: bool = True
    """Whether every rank reached the end of the cell without being stopped."""
    sequences: set[int] = field(default_factory=set)
    """The numbers of collectives that ranks have called; different numbers mean that ranks are out of step."""

    @property
    def fit(self) -> bool:
        """Return whether the next run can use the same process groups."""
        return self.clean and len(self.sequences) <= 1


class ProgressReports:
    """The reports of one run."""

    def __init__(self) -> None:
        self.awaited: set[int] = set()
        """Ranks (in an agent) or nodes (in the coordinator) that have not reported yet."""
        self.all_finished = True
        """Whether the devices of all ranks that have reported had finished their work."""
        self.sequences: set[int] = set()

    def expect(self, source: int) -> None:
        """Wait for a report from this rank or node, which has devices and has ended the cell."""
        self.awaited.add(source)

    def record(self, source: int, *, finished: bool, sequences: Collection[int]) -> None:
        self.awaited.discard(source)
        self.all_finished &= finished
        self.sequences.update(sequences)

    def record_silence(self) -> None:
        """Stop waiting; ranks that have not reported count as unfinished."""
        self.all_finished &= not self.awaited
        self.awaited.clear()

    def equal(self, sequences: set[int]) -> bool:
        """Return whether all ranks so far stopped at the same collective, including ranks that returned with these
        sequences."""
        return self.all_finished and len(self.sequences | sequences) <= 1
