"""Fetches the logs of one run from its nodes. Runs in the coordinator's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class LogSource(Protocol):
    """A node with logs."""

    def fetch_logs(self, run: str, directory: Path, done: Callable[[], None]) -> None:
        """Fetch into this folder what the node's ranks wrote, then call `done` in the loop; also if it fails."""


class LogCollection:
    """The logs of one run.

    Args:
        run: The id of the run.
        nodes: The nodes of the worker group.
        folder: The folder of this run's logs.
        on_fetched: Called when the logs of a node have come, or will not.
    """

    def __init__(self, run: str, nodes: Sequence[LogSource], folder: Path, on_fetched: Callable[[], None]) -> None:
        self._run, self._nodes, self._folder, self._on_fetched = run, nodes, folder, on_fetched
        self._fetching: set[int] = set()
        self._asked = False
        """Whether some node was asked for logs."""

    @property
    def complete(self) -> bool:
        """Return whether no logs are on their way."""
        return not self._fetching

    @property
    def directory(self) -> str:
        """Return the folder; empty if no rank wrote anything, or none of it could be fetched."""
        return str(self._folder) if self._asked and any(self._folder.glob("rank*.log")) else ""

    def fetch(self, node: int) -> None:
        """Fetch the logs of a node."""
        self._fetching.add(node)
        self._asked = True
        self._nodes[node].fetch_logs(self._run, self._folder, lambda: self.give_up(node))

    def give_up(self, node: int) -> None:
        """Stop waiting for the logs of a node."""
        self._fetching.discard(node)
        self._on_fetched()
