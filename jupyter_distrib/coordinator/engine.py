"""What the coordinator asks of an engine: to reserve nodes, and to call methods of the relay on each of them.

    Reservation.acquire() -> ReservedNodes: one Channel for each node -> Channel.order("send", frame), .ask("receive"),
    ...

An engine starts `relay.Relay` on each node that it reserves, in a process of its own there. It may raise anything: an
exception that is no `PoolError` is put into words by `Reservation.cause`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jupyter_distrib.wire.messages import Hello, OpenWorkerGroup


class Channel(Protocol):
    """The relay on one node, out of reach of the coordinator's own process. Nothing here blocks."""

    def order(self, method: str, *arguments: Any) -> Any:
        """Have a method called, in the order of the calls, whatever comes of it.

        Returns what `Transfer` needs to know when it has been done; None if the engine is gone.
        """

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Have a method called, likewise. What it returns or raises, and what the engine raises, is in the future."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedNodes:
    """Nodes that were reserved for a worker group."""

    channels: Sequence[Channel]
    addresses: Sequence[str]
    """The address of each node, by which the others reach it."""
    sizes: Sequence[int]
    """How many ranks each node is for."""
    gpus: bool
    """Each of these ranks has a GPU."""
    engine_has_gpus: bool
    """Some node has GPUs, if not for these ranks."""


class ContentPart(NamedTuple):
    """One part of the large values of a cell, on its way to the nodes."""

    reference: Any
    """What the engine delivers as bytes, if a channel is given it as an argument."""
    start: int
    """Where in the content it begins."""
    size_bytes: int
    """The size of the whole content."""
    last: bool

    @property
    def arguments(self) -> tuple[Any, int, int]:
        """The arguments of `Relay.take`."""
        return self.reference, self.start, self.size_bytes


Receive = Callable[[ContentPart | Exception], Any]
"""What a node does with a part, or with the reason why there will be no more. Called in the loop. Returns what
`Channel.order` gave when the node was told to take it; None if the node does not want it, or it was the last part."""


class Transfer(Protocol):
    """The content of one run on its way to all of its nodes, through the engine."""

    run: str

    def add(self, receive: Receive) -> None:
        """Send it to a further node; only in the turn of the loop in which the transfer began."""


class Reservation(Protocol):
    """The nodes of one worker group, from when they are looked for until they are released. Used by one `Placement`.

    `acquire` and `release` block, and are called in threads of their own.
    """

    engine: str
    """The engine's name, for people."""
    address_advice: str
    """What gives a node an address that the others reach: `start X there with --host ADDRESS`."""

    def acquire(self) -> ReservedNodes:
        """Wait for nodes, as long as the command allows, and start a relay on each.

        Raises:
            PoolError: There is no room, or it was given up; says why.
            TimeoutError: The engine does not answer.
        """

    def give_up(self) -> None:
        """Have `acquire` end soon; in any thread."""

    def release(self) -> None:
        """End the relays and give the nodes back. Raises nothing."""

    def is_room_wanted(self) -> bool:
        """Tell whether anybody in the cluster waits for nodes. Blocks for as long as the engine takes to say."""

    def transfer(self, run: str, fds: Sequence[int], given_up: threading.Event) -> Transfer:
        """Begin to bring a content (`shared_memory.Arriving`) to the nodes; given up when the event is set."""

    def cause(self, error: BaseException) -> str:
        """Say in a sentence what an exception of the engine, or of a method that it called, is about."""

    def was_raised_on_node(self, error: BaseException) -> bool:
        """Tell whether the method itself raised it: the node is within reach then."""


Reserve = Callable[[OpenWorkerGroup, Hello, Callable[[str], None]], Reservation]
"""Makes the reservation for a worker group of a kernel; the last argument tells the kernel what is waited for."""
