"""The interface of an engine to the coordinator: it reserves nodes, and calls methods of the relay on each of them.

    Reservation.acquire() -> ReservedNodes: one Channel for each node -> Channel.order("send", frame), .ask("receive"),
    ...

An engine starts `relay.Relay` on each node that it reserves, in a process of its own. It may raise anything:
`Reservation.cause` puts exceptions other than `PoolError` into words.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jupyter_distrib.wire import messages as m


class Channel(Protocol):
    """The relay on one node, outside the coordinator's own process. Nothing in it blocks."""

    def order(self, method: str, *arguments: Any) -> Any:
        """Call a method, in order, without waiting for the result.

        Returns a reference by which `Transfer` waits for its end; None if the engine is gone.
        """

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method, in the same order; the returned future gets its result or exception, or the engine's
        exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedNodes:
    """Nodes that were reserved for a worker group."""

    channels: Sequence[Channel]
    addresses: Sequence[str]
    """The address of each node, as reached by the others."""
    sizes: Sequence[int]
    """Number of ranks of each node."""
    gpus: bool
    """Whether each of these ranks has a GPU."""
    engine_has_gpus: bool
    """Whether some node has GPUs, even if these ranks have none."""
    names: Sequence[str] = ()
    """The name of each node, for people; empty: its address."""
    ends_at_s: float | None = None
    """Time at which the engine takes the nodes away (`time.monotonic`); None for no limit."""
    remark: str = ""
    """A remark on these nodes, which the kernel gets with its first cell."""


class ContentPart(NamedTuple):
    """One part of the large values of a cell, on its way to the nodes."""

    reference: Any
    """Reference that the engine delivers as bytes if it is an argument of a channel's call."""
    start: int
    """Offset of the part in the content."""
    size_bytes: int
    """The size of the whole content."""
    last: bool

    @property
    def arguments(self) -> tuple[Any, int, int]:
        """The arguments of `Relay.add_part`."""
        return self.reference, self.start, self.size_bytes


Receive = Callable[[ContentPart | Exception], Any]
"""Callback that gives a node a part, or the reason why no more parts will come. Called in the loop. Returns the result
of the `Channel.order` that sent the part; None if the node does not want it, or it was the last part."""


class Transfer(Protocol):
    """The content of one run on its way to all of its nodes, through the engine."""

    run: str

    def add(self, receive: Receive) -> None:
        """Add a node to the transfer; only in the loop iteration in which the transfer began."""


class Reservation(Protocol):
    """The nodes of one worker group, from the search for them until their release. Used by one `Placement`.

    `acquire` and `release` block, and are called in threads of their own.
    """

    engine: str
    """The engine's name, for people."""
    address_advice: str
    """Advice on how to give a node an address that the others can reach: `start X there with --host ADDRESS`."""

    def acquire(self, running: Mapping[str, str]) -> ReservedNodes:
        """Wait for nodes, as long as the command allows, and start a relay on each.

        Args:
            running: The folders of agents that the notebook has on nodes of this engine already, by the address of
                their node. A relay may use the agent of its node, see `relay.Relay`, if the engine does not end that
                agent with the worker group that it was started for.

        Raises:
            PoolError: There is no room, or the search was given up; the error says why.
            TimeoutError: The engine does not answer.
        """

    def acquire_more(self, ranks: int, unit: int) -> ReservedNodes | None:
        """Get room for up to this many more ranks, for a run that grows: free now, and wanted by nobody else.
        Blocks, and keeps everything that was reserved before.

        Args:
            ranks: Maximum number of further ranks.
            unit: Number of which the number of further ranks is a multiple.

        Returns:
            All nodes, beginning with the previous ones in their order; None if there is nothing more, which is the
            default.
        """
        return None

    def drop_more(self) -> None:
        """Give back the room that the last `acquire_more` got. Blocks; never raises."""

    def give_up(self) -> None:
        """Make `acquire` end soon; can be called in any thread."""

    def release(self, *, keep_agents: bool) -> None:
        """End the relays and give the nodes back. Never raises.

        Args:
            keep_agents: The notebook is about to have other nodes, see `acquire`: agents that it may use again stay for
                a moment.
        """

    def is_room_wanted(self) -> bool:
        """Return whether anyone in the cluster is waiting for nodes. Blocks until the engine answers."""

    def transfer(self, run: str, fds: Sequence[int], given_up: threading.Event, folder: str) -> Transfer:
        """Start the transfer of a content (`shared_memory.Arriving`) to the nodes; it is given up when the event is
        set. `folder` is the notebook's, if all nodes share it, else empty."""

    def cause(self, error: BaseException) -> str:
        """Return a sentence that describes an exception of the engine or of a method that it called."""

    def was_raised_on_node(self, error: BaseException) -> bool:
        """Return whether the method itself raised the exception: then the node is within reach."""


Reserve = Callable[[m.OpenWorkerGroup, m.Hello, Callable[[str], None]], Reservation]
"""Makes the reservation for a kernel's worker group; its last argument reports to the kernel what the reservation is
waiting for."""
