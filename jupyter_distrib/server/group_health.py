"""Records what a run shows of the process groups of its ranks. Runs in the loop of an agent, or of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class GroupHealth:
    """The state of some ranks' process groups after a run."""

    clean: bool = True
    """Whether every rank came to the end by itself."""
    sequences: set[int] = field(default_factory=set)
    """Counts of collectives by the ranks: more than one if they are out of step."""

    @property
    def fit(self) -> bool:
        """Return whether the next run can use the same process groups."""
        return self.clean and len(self.sequences) <= 1
