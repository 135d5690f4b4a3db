"""Where ranks come from. A pool places processes and gives a link to whoever looks after them; it does not know cells.

A package adds a kind by an entry point of the group `jupyter_distrib.pools`: the kind's name, and a class whose
instances are pools, called with the options that were given (docs/writing-a-pool.md).

`kernel/session/session.py` calls `connect` once per pool and kernel, from the thread that runs the cell, and talks to
the node in the commands and events of `wire/messages/`."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from jupyter_distrib.errors import PoolError
from jupyter_distrib.options import Declared
from jupyter_distrib.wire.messages import Command, Event, Hello

Sink = Callable[[Event, Sequence[int]], None]
"""Takes every event of a node, in order, in the node's own thread; the descriptors are the sink's to close."""
Lost = Callable[[str], None]
"""Called once, with a sentence, when the node cannot be reached any more."""

GROUP = "jupyter_distrib.pools"
_BUILT_IN = {
    "local": "jupyter_distrib.pools.local:LocalPool",
    "inline": "jupyter_distrib.pools.inline.pool:InlinePool",
    "ray": "jupyter_distrib.pools.ray.pool:RayPool",
}
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
        """Give up the link; the agent ends this kernel's worker groups."""


class Pool(Protocol):
    """A place where ranks can be had."""

    kind: str
    """A pool may also have `meaningless`: options of a cell that change nothing there, by name, and why; and `early`:
    it can begin with the content of a cell before all of it is there (`shared_memory.Content.early`)."""

    def connect(self, hello: Hello, sink: Sink, lost: Lost) -> Node:
        """Reach the pool's agent, starting it if need be. Raises `PoolError`."""


def kinds(own: Declared) -> Declared:
    """Our own kinds, and those that installed packages bring, by name, with the options of each."""
    return {**own, **{name: tuple(getattr(cls, "options", ())) for name, cls in _brought().items() if name not in own}}


def open_pool(kind: str, options: Mapping[str, str]) -> Pool:
    """A pool of this kind, not yet connected; `options` are those that the kind declares, as far as given."""
    if kind in _BUILT_IN:
        module, _, name = _BUILT_IN[kind].partition(":")
        built_in: Pool = getattr(importlib.import_module(module), name)(**options)
        return built_in
    if (cls := _brought().get(kind)) is not None:
        pool: Pool = cls(**options)
        return pool
    raise PoolError(f"there is no pool of the kind {kind!r}.")


@cache
def _brought() -> dict[str, Any]:
    found = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            found[entry.name] = entry.load()
        except Exception as error:  # noqa: BLE001 - foreign code; the other pools must stay usable
            warnings.warn(f"the pool kind {entry.name} ({entry.value}) cannot be loaded: {error}", stacklevel=2)
    return found
