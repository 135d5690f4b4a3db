"""The source of the nodes of one worker group, as the worker group sees it, and their shares of its ranks. In the
coordinator's loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from jupyter_distrib.coordinator.run import SpreadNode
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.coordinator.worker_group import SpreadWorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One node's part of a worker group."""

    node: SpreadNode
    size: int
    gpus: bool


class NodeSource(Protocol):
    """The source of the nodes of one worker group."""

    def start(self, command: m.OpenWorkerGroup, group: SpreadWorkerGroup) -> None:
        """Find nodes; calls `group.placed`, `group.queued` or `group.refuse` in the loop, and later
        `group.handle_event` and `group.lost`."""

    def give_back(self, *, useless: bool, killed: bool) -> None:
        """Let the nodes go, even during the search for them.

        Args:
            useless: Whether another worker group cannot use them either.
            killed: Whether the ranks were killed; else they were told to leave.
        """
