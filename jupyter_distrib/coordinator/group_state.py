"""The states of a worker group on several nodes, and the moves between them.

    LOOKING --> STARTING --> READY <--> RUNNING --> ENDING --> ENDED
                             ^ | ^ <--> REPAIRING                |
                             | |                                 |  its run is started again
                             | +--- on more nodes -------------+ |
                             |                                 v v
                             +---- STARTING_AGAIN <----- LOOKING_AGAIN
                                         +--- with fewer ranks --^

A group in any of these states may become `USELESS`, when it cannot go on, or `CLOSED`.
"""

from __future__ import annotations

from enum import Enum, auto


class MultiNodeState(Enum):
    """The states of a worker group on several nodes. A cell begins at once if it is `READY`, and waits otherwise."""

    LOOKING = auto()
    """The group has asked for nodes."""
    STARTING = auto()
    """The group's nodes start their ranks."""
    READY = auto()
    """All ranks are up, and none executes a cell."""
    RUNNING = auto()
    """Ranks execute a cell."""
    REPAIRING = auto()
    """The nodes agree on whether their process groups stay, after a failed run or a lost rank."""
    ENDING = auto()
    """A node was lost during a run, which is being ended on the others."""
    ENDED = auto()
    """The run is over and may be restarted at once; if it is not, the group closes itself."""
    LOOKING_AGAIN = auto()
    """The group has asked for other nodes, for the restarted run."""
    STARTING_AGAIN = auto()
    """The other nodes start their ranks."""
    USELESS = auto()
    """The group cannot go on and is about to be closed; no other worker group can use its nodes."""
    CLOSED = auto()
    """The group's ranks were ended, and its nodes were given back."""


class MultiNodeTrigger(Enum):
    """The triggers of moves between these states."""

    PLACED = auto()
    """The group got its nodes."""
    OPENED = auto()
    """The ranks of all nodes are up."""
    CELL = auto()
    """A cell has arrived."""
    OVER = auto()
    """All nodes have ended the run."""
    REPAIR = auto()
    """The process groups have to be repaired."""
    REPAIRED = auto()
    """The process groups are repaired."""
    LOST = auto()
    """A node was lost."""
    GROW = auto()
    """A run is started again on more nodes."""
    FEWER = auto()
    """There are no nodes for all ranks, and the cell that waits may have fewer."""
    GIVE_UP = auto()
    """The group cannot go on."""
    CLOSE = auto()
    """The kernel, or the coordinator, wants it closed."""


_S, _T = MultiNodeState, MultiNodeTrigger
MOVES: dict[tuple[MultiNodeState, MultiNodeTrigger], MultiNodeState] = {
    (_S.LOOKING, _T.PLACED): _S.STARTING,
    (_S.STARTING, _T.OPENED): _S.READY,
    (_S.READY, _T.CELL): _S.RUNNING,
    (_S.READY, _T.REPAIR): _S.REPAIRING,
    (_S.READY, _T.GROW): _S.LOOKING_AGAIN,
    (_S.RUNNING, _T.OVER): _S.READY,
    (_S.RUNNING, _T.LOST): _S.ENDING,
    (_S.REPAIRING, _T.REPAIRED): _S.READY,
    (_S.ENDING, _T.LOST): _S.ENDING,
    (_S.ENDING, _T.OVER): _S.ENDED,
    (_S.ENDED, _T.CELL): _S.LOOKING_AGAIN,
    (_S.LOOKING_AGAIN, _T.PLACED): _S.STARTING_AGAIN,
    (_S.LOOKING_AGAIN, _T.FEWER): _S.LOOKING_AGAIN,
    (_S.STARTING_AGAIN, _T.FEWER): _S.LOOKING_AGAIN,
    (_S.STARTING_AGAIN, _T.OPENED): _S.READY,
    **{(state, _T.GIVE_UP): _S.USELESS for state in _S if state not in (_S.USELESS, _S.CLOSED)},
    **{(state, _T.CLOSE): _S.CLOSED for state in _S if state is not _S.CLOSED},
}
"""The next state, by state and trigger. Any other trigger leaves the state as it is."""
