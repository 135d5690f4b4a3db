"""Where ranks come from. A pool places processes and gives a link to whoever looks after them; it does not know cells.

`session.py` calls `connect` once per pool and kernel, from the thread that runs the cell, and talks to the node in the
commands and events of `events.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jupyter_distrib.errors import PoolError
from jupyter_distrib.events import Command, Event, Hello

Sink = Callable[[Event, Sequence[int]], None]
"""Takes every event of a node, in order, in the node's own thread; the descriptors are the sink's to close."""
Lost = Callable[[str], None]
"""Called once, with a sentence, when the node cannot be reached any more."""

KINDS = ("local", "inline")
ECHOING = frozenset({"inline"})
"""Kinds whose ranks print straight into the notebook: there is nothing left for a live view to draw."""


class Node(Protocol):
    """One machine's agent, reachable."""

    def send(self, command: Command, fds: Sequence[int] = ()) -> None:
        """Deliver a command, from any thread, without blocking on the peer; takes the descriptors over.

        The inline pool is an exception: there `Execute` blocks until the run has ended, and raises `PoolError` for what
        it cannot do.
        """

    def close(self) -> None:
        """Give up the link; the agent ends this kernel's crews."""


class Pool(Protocol):
    """A place where ranks can be had."""

    kind: str

    def connect(self, hello: Hello, sink: Sink, lost: Lost) -> Node:
        """Reach the pool's agent, starting it if need be. Raises `PoolError`."""


def open_pool(kind: str) -> Pool:
    """A pool of this kind, not yet connected."""
    match kind:
        case "local":
            from jupyter_distrib.pools.local import LocalPool

            return LocalPool()
        case "inline":
            from jupyter_distrib.pools.inline import InlinePool

            return InlinePool()
    raise PoolError(f"there is no pool of the kind {kind!r}; there are: {', '.join(KINDS)}.")
