"""Collects how far the ranks with devices came in a run that did not end well. Runs in the agent's loop; pure.

If the devices of all ranks have finished after equally many collectives, and none was cut, the process groups stay:
NCCL's take seconds to make. Else all ranks abort theirs together.
"""

from __future__ import annotations

from jupyter_distrib.wire.messages import DeviceDrained


class DrainReports:
    """The reports of one run."""

    def __init__(self) -> None:
        self._awaited: set[int] = set()
        self._all_finished = True
        self._sequences: set[int] = set()

    def expect(self, rank: int) -> None:
        """Wait for a report of this rank, which has ended the cell and has a device."""
        self._awaited.add(rank)

    def take(self, report: DeviceDrained) -> None:
        self._awaited.discard(report.rank)
        self._all_finished &= report.finished
        self._sequences.add(report.sequence)

    @property
    def complete(self) -> bool:
        return not self._awaited

    def equal(self, sequences: set[int]) -> bool:
        """Return whether all came to the same point, those that returned with these sequences included."""
        return self._all_finished and len(self._sequences | sequences) == 1
