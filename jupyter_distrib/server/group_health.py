"""What a run tells of the process groups of its ranks. In the loop of an agent, or of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class GroupHealth:
    """Whether the process groups of some ranks have come through a run."""

    clean: bool = True
    """Whether every rank came to the end by itself."""
    sequences: set[int] = field(default_factory=set)
    """The numbers of collectives that the ranks have counted: more than one if they are out of step."""

    @property
    def fit(self) -> bool:
        """Whether the next run can use the same process groups."""
        return self.clean and len(self.sequences) <= 1
