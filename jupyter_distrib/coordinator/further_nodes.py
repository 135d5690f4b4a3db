"""The nodes that a worker group has got in addition to its first ones, for a run that grows: each time by one more
reservation of the same engine, so that nodes it already has are never at risk. Blocks, in the threads of
`Reservation`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from jupyter_distrib.coordinator.engine import Reservation, ReservedNodes
from jupyter_distrib.errors import PoolError


class FurtherNodes:
    """The further reservations of one reservation.

    Args:
        reserve: Makes a reservation for this many ranks, which does not wait for nodes that others have.
    """

    def __init__(self, reserve: Callable[[int], Reservation]) -> None:
        self._reserve = reserve
        self._held: list[Reservation] = []
        self._last: Reservation | None = None
        """The reservation that can still be given back alone."""

    def acquire(self, nodes: ReservedNodes, ranks: int, unit: int) -> ReservedNodes | None:
        """Reserve nodes for up to this many more ranks, a multiple of `unit`: if there are not enough, for half as
        many, and so on. Return all nodes; None if there is nothing more."""
        self._last = None
        size = ranks - ranks % unit
        while size > 0:
            further = self._reserve(size)
            try:
                found = further.acquire({})
            except Exception as error:
                further.release(keep_agents=False)
                if not isinstance(error, PoolError | TimeoutError):
                    raise
                size = size // 2 - size // 2 % unit
                continue
            self._held.append(further)
            self._last = further
            return _together(nodes, found)
        return None

    @property
    def held(self) -> Sequence[Reservation]:
        """The further reservations."""
        return tuple(self._held)

    def drop(self) -> None:
        """Give back the nodes that the last `acquire` got."""
        if (last := self._last) is not None:
            self._last = None
            self._held.remove(last)
            last.release(keep_agents=False)

    def release(self, *, keep_agents: bool) -> None:
        """Give everything back."""
        held, self._held, self._last = self._held, [], None
        for each in held:
            with suppress(Exception):
                each.release(keep_agents=keep_agents)


def _together(nodes: ReservedNodes, found: ReservedNodes) -> ReservedNodes:
    named = bool(nodes.names and found.names)
    ends = [each.ends_at_s for each in (nodes, found) if each.ends_at_s is not None]
    return replace(
        nodes,
        channels=[*nodes.channels, *found.channels],
        addresses=[*nodes.addresses, *found.addresses],
        sizes=[*nodes.sizes, *found.sizes],
        names=[*nodes.names, *found.names] if named else [],
        ends_at_s=min(ends, default=None),
        remark=" ".join(filter(None, (nodes.remark, found.remark))),
    )
