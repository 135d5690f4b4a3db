"""Reserves hosts that must first be requested from an engine: an allocation of Slurm, a Job of Kubernetes.

`acquire` and `release` run in threads of their own."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from jupyter_distrib.coordinator.engine import ReservedNodes, Transfer
from jupyter_distrib.coordinator.further_nodes import FurtherNodes
from jupyter_distrib.coordinator.part_transfer import PartTransfer
from jupyter_distrib.pools.command.reservation import Hosts, HostsReservation
from jupyter_distrib.pools.command.transfer import carrier
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.wire import messages as m

ASK_S = 2.0
"""Seconds between checks whether somebody waits for hosts that are free."""


class RequestedHosts(ABC):
    """The part of a `coordinator.engine.Reservation` that does not depend on how its hosts are requested."""

    engine: str
    address_advice = HostsReservation.address_advice

    def __init__(self, calls: CallSoon, opening: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]) -> None:
        self._calls, self._opening, self._hello, self._say = calls, opening, hello, say
        self._given_up = threading.Event()
        self._nodes: HostsReservation | None = None
        self._reserved: ReservedNodes | None = None
        self._before: ReservedNodes | None = None
        """The hosts before the last `acquire_more`."""
        self._further = FurtherNodes(self._of_ranks)
        self._asked_s = 0.0

    @abstractmethod
    def acquire(self, running: Mapping[str, str]) -> ReservedNodes: ...

    @abstractmethod
    def release(self, *, keep_agents: bool) -> None: ...

    @abstractmethod
    def _of_ranks(self, ranks: int) -> RequestedHosts:
        """Return a reservation of further hosts for this many ranks, which does not wait."""

    @abstractmethod
    def _is_another_waiting(self) -> bool:
        """Return whether another worker group of this user waits for such hosts. Blocks until the engine answers."""

    @abstractmethod
    def end(self) -> str:
        """Return how the engine has ended the hosts; empty if it has not."""

    def _connected(self, hosts: Hosts) -> ReservedNodes:
        """Connect to hosts that were granted. Raises `PoolError`."""
        self._nodes = HostsReservation(hosts, self._opening, self._hello, self._say)
        if self._given_up.is_set():
            self._nodes.give_up()
        return self._nodes.acquire({})

    def acquire_more(self, ranks: int, unit: int) -> ReservedNodes | None:
        """See `Reservation.acquire_more`: by one more request, unless another worker group waits."""
        assert self._reserved is not None
        self._before = self._reserved
        waits = self._is_another_waiting()
        found = None if waits else self._further.acquire(self._reserved, ranks, unit)
        self._reserved = found or self._reserved
        return found

    def drop_more(self) -> None:
        self._reserved = self._before
        self._further.drop()

    def give_up(self) -> None:
        self._given_up.set()
        if self._nodes is not None:
            self._nodes.give_up()

    def is_room_wanted(self) -> bool:
        if time.monotonic() < self._asked_s + ASK_S:
            return False
        self._asked_s = time.monotonic()
        return self._is_another_waiting()

    def transfer(self, run: str, fds: Sequence[int], given_up: threading.Event, folder: str) -> Transfer:
        return PartTransfer(run, fds, self._calls, given_up, carrier(fds, folder))

    def cause(self, error: BaseException) -> str:
        """Describe an exception, starting with how the hosts were ended, if they were."""
        said = str(error) or type(error).__name__
        asked = () if self.was_raised_on_node(error) else (self, *self._further.held)
        ends = (each.end() for each in asked if isinstance(each, RequestedHosts))
        ended = next(filter(None, ends), "")
        return f"{ended}: {said}" if ended else said

    def was_raised_on_node(self, error: BaseException) -> bool:
        return self._nodes is not None and self._nodes.was_raised_on_node(error)
