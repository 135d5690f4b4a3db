"""Tells how far the start of a worker group on several nodes is, and what it waits for. In the coordinator's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m

STARTING_EVERY_S = 0.4


class StartProgress:
    """The progress of one worker group."""

    def __init__(self, group: str, loop: Loop, tell: Callable[[m.WorkerGroupStarting], object]) -> None:
        self._group, self._loop, self._tell = group, loop, tell
        self._size = 0
        self._nodes: list[str] = []
        """The names of the nodes, once there are some."""
        self._up: dict[int, int] = {}
        """The number of ranks that are up, by the number of the node, once it has reported."""
        self._over = False

    def looks_for_nodes(self, size: int) -> None:
        """Report that nodes are waited for, if it takes a while."""
        self._size = size
        self._loop.later(STARTING_EVERY_S, lambda: None if self._nodes else self._report("a free node"))

    def found(self, nodes: Sequence[str], size: int) -> None:
        """Report which nodes are waited for, if it takes a while."""
        self._nodes, self._size = list(nodes), size
        self._loop.later(STARTING_EVERY_S, self._report_silent)

    def up(self, node: int, up: int, waits_for: str = "") -> None:
        """Take how many ranks of a node are up; report it, with what they wait for."""
        self._up[node] = up
        where = f"{self._nodes[node]}: " if len(self._nodes) > 1 and waits_for else ""
        self._report(where + waits_for)

    def opened(self, node: int, size: int) -> None:
        """Take that all ranks of a node are up."""
        self._up[node] = size
        self._over = self._over or (len(self._up) == len(self._nodes) and sum(self._up.values()) >= self._size)

    def end(self) -> None:
        """Report nothing any more."""
        self._over = True

    def _report_silent(self) -> None:
        silent = [name for number, name in enumerate(self._nodes) if number not in self._up]
        if silent:
            self._report(f"the node{'s' * (len(silent) > 1)} {', '.join(silent)}")

    def _report(self, waits_for: str) -> None:
        if not self._over:
            up = sum(self._up.values())
            self._tell(m.WorkerGroupStarting(group=self._group, up=up, size=self._size, waits_for=waits_for))
