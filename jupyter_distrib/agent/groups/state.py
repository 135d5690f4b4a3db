"""The states of a node's worker group, and the moves between them.

    STARTING --> READY <--> RUNNING
                   ^ <--> REPAIRING

A group in any of these states may become `USELESS`, when it cannot go on, or `CLOSED`.
"""

from __future__ import annotations

from enum import Enum, auto


class NodeGroupState(Enum):
    """The states of a node's worker group. A cell begins at once if it is `READY`, and waits otherwise."""

    STARTING = auto()
    """Not all of the group's first ranks are up."""
    READY = auto()
    """All ranks are up, and none executes a cell."""
    RUNNING = auto()
    """Ranks execute a cell; others may have ended it, or be gone."""
    REPAIRING = auto()
    """Ranks are being replaced, or reset their process groups."""
    USELESS = auto()
    """The group cannot go on and is about to be closed."""
    CLOSED = auto()
    """The group's ranks were dismissed or killed."""


class NodeGroupTrigger(Enum):
    """The triggers of moves between these states."""

    UP = auto()
    """All ranks are up."""
    CELL = auto()
    """A cell has arrived."""
    OVER = auto()
    """All ranks have come to the end of the cell, or are gone."""
    REPAIR = auto()
    """Ranks have to be replaced, or to reset their process groups."""
    GIVE_UP = auto()
    """The group cannot go on."""
    CLOSE = auto()
    """The kernel, or the agent, wants it closed."""


_S, _T = NodeGroupState, NodeGroupTrigger
MOVES: dict[tuple[NodeGroupState, NodeGroupTrigger], NodeGroupState] = {
    (_S.STARTING, _T.UP): _S.READY,
    (_S.READY, _T.CELL): _S.RUNNING,
    (_S.READY, _T.REPAIR): _S.REPAIRING,
    (_S.RUNNING, _T.OVER): _S.READY,
    (_S.REPAIRING, _T.UP): _S.READY,
    **{(state, _T.GIVE_UP): _S.USELESS for state in _S if state not in (_S.USELESS, _S.CLOSED)},
    **{(state, _T.CLOSE): _S.CLOSED for state in _S if state is not _S.CLOSED},
}
"""The next state, by state and trigger. Any other trigger leaves the state as it is."""
