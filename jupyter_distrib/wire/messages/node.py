"""Messages between the coordinator and the agents of a worker group that spans several nodes."""

from __future__ import annotations

from jupyter_distrib.wire.messages.shared import Command, Event, message, part
from jupyter_distrib.wire.messages.worker import ProbeAnswer


@message
class MakeStore(Command):
    """Make a new store; sent to the node of rank 0 of a worker group that spans nodes. Answered by `GroupsReset`."""

    group: str


@message
class UseStore(Command):
    """Use the store at this address; sent to the other nodes of such a worker group. Answered by `GroupsReset`."""

    group: str
    host: str
    port: int


@message
class KeepNodeGroups(Command):
    """Keep the process groups, although this run on GPUs failed; sent to all nodes of such a worker group."""

    group: str
    run: str


@message
class CutRemoteSockets(Command):
    """Cut the connections with these far ends, and abort GPU process groups; sent to the other nodes of such a
    worker group, including nodes that have ended the run."""

    run: str
    ends: tuple[tuple[str, str], ...]
    """Addresses as in `Connected`."""


@part
class RankSighting:
    """The agent's view of one rank during a cell."""

    rank: int
    state: str
    """`running`, `stopped` by SIGSTOP, `traced` by a debugger, `silent` (C code does not let it answer), `starved` (the
    machine does not), or `left`."""
    pid: int = 0
    seen: ProbeAnswer | None = None
    """The rank's last answer to a probe."""
    line: int | None = None
    """Current line of a silent rank."""
    silent_s: float = 0.0
    """Seconds for which a rank has been silent and idle; 0 if it computes."""


@message
class NodeSawRanks(Event):
    """Agent to coordinator, once a second: its view of its own ranks in a run that may span other nodes."""

    run: str
    looks: tuple[RankSighting, ...]


@message
class NodeProgress(Event):
    """Agent to coordinator, after a run on GPUs that failed on its node: how far its ranks got. `KeepNodeGroups` or a
    new store follows."""

    group: str
    run: str
    finished: bool
    """Whether the devices of all ranks have finished all work of the cell, and no connection was cut."""
    sequences: tuple[int, ...]
    """Numbers of collectives, as in `Ended`."""


@message
class RanksLeft(Event):
    """Agent to coordinator, after `CloseWorkerGroup`: no process of the worker group's ranks is left."""

    group: str


@message
class GroupsReset(Event):
    """The new store of a worker group that spans nodes is ready (sent by the node of rank 0), or in use (sent by the
    others)."""

    group: str
    host: str
    port: int


@message
class Connected(Event):
    """The run's ranks on one node of several are being stopped, or one has left; `ends` are their connections whose far
    ends belong to processes of other agents."""

    run: str
    ends: tuple[tuple[str, str], ...]
    """Local and remote address of each, as in /proc/net/tcp."""
