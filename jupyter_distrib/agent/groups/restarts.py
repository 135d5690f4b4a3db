"""Counts the restarts of ranks that die while they start. Runs in the agent's loop; pure."""

from __future__ import annotations

WAITS_S = (0.2, 1.0)
"""Seconds to wait after the first, second ... failure: a GPU or a process may be free by then."""


class Restarts:
    """The failed starts of one worker group's ranks, since each was last ready."""

    def __init__(self) -> None:
        self._failures: dict[int, int] = {}

    def wait_after_failure(self, rank: int) -> float | None:
        """Count a failed start; return the seconds until the next, or None if no more starts are allowed."""
        failures = self._failures[rank] = self._failures.get(rank, 0) + 1
        return WAITS_S[failures - 1] if failures <= len(WAITS_S) else None

    def forget(self, rank: int) -> None:
        """Forget the failures of a rank that is ready."""
        self._failures.pop(rank, None)
