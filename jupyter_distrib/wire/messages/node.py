"""Messages between the coordinator and the agents of a worker group that spans several nodes."""

from __future__ import annotations

from jupyter_distrib.wire.messages.shared import message
from jupyter_distrib.wire.messages.worker import ProbeAnswer


@message
class MakeStore:
    """To the node of rank 0 of a worker group that spans nodes: make a new store. Answered by `GroupsReset`."""

    group: str


@message
class UseStore:
    """To the other nodes of such a worker group: where its store is now."""

    group: str
    host: str
    port: int


@message
class CutRemoteSockets:
    """To the other nodes of such a worker group: shut the connections whose far ends these are."""

    run: str
    ends: tuple[tuple[str, str], ...]
    """Addresses as in `Connected`."""


@message
class RankSighting:
    """The agent's knowledge of one rank that executes a cell."""

    rank: int
    state: str
    """`running`, `stopped` by SIGSTOP, `traced` by a debugger, `silent` (C code does not let it answer), or `left`."""
    pid: int = 0
    seen: ProbeAnswer | None = None
    """The rank's last answer to a probe."""
    line: int | None = None
    """The line where a silent rank is now."""
    silent_s: float = 0.0
    """Seconds that a rank has been silent and has done nothing; 0 for one that computes."""


@message
class NodeSawRanks:
    """Agent to coordinator, once a second: what it knows of its ranks of a run that may have others elsewhere."""

    run: str
    looks: tuple[RankSighting, ...]


@message
class GroupsReset:
    """Rank 0's node of a worker group that spans nodes has a new store."""

    group: str
    host: str
    port: int


@message
class Connected:
    """The run's ranks on one node of several are being stopped, or one has left; these are their connections whose far
    ends belong to processes of other agents."""

    run: str
    ends: tuple[tuple[str, str], ...]
    """Local and remote address of each, as /proc/net/tcp has them."""
