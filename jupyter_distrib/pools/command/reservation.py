"""Reserves hosts for one worker group: one connection to each, and through it a relay.

`HostsReservation.acquire` and `release` run in threads of their own; channels belong to the coordinator's loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from jupyter_distrib.coordinator.engine import ReservedNodes, Transfer
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command.channel import PipeChannel, RaisedOnHost
from jupyter_distrib.pools.command.command import HostCommand
from jupyter_distrib.pools.command.connect import HostConnection, connect
from jupyter_distrib.pools.command.hosts import MAX_RANKS, Host, Room, plan
from jupyter_distrib.pools.command.transfer import PipeTransfer
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire.messages import DEFAULT_CPU_RANKS, Hello, NodeStatus, OpenWorkerGroup

CONNECTING = 64
"""Number of hosts that are connected to at a time."""
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """The options of a pool of hosts."""

    hosts: tuple[Host, ...]
    nodes: int = 0
    """Number of hosts that a worker group uses; 0: as few as can be."""
    interface: str = ""
    """Network interface by which hosts reach one another; empty: the one that the connection came by."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the ranks."""


class Hosts:
    """The hosts of one coordinator.

    Args:
        archive: This package as a file, for the hosts.
    """

    def __init__(
        self, command: HostCommand, options: HostOptions, loop: Loop, calls: CallSoon, archive: Future[bytes]
    ) -> None:
        self.command, self.options, self.loop, self.calls, self.archive = command, options, loop, calls, archive
        self.facts: dict[str, Facts] = {}
        """Facts that hosts have reported of themselves, by name."""

    def reserve(self, command: OpenWorkerGroup, hello: Hello, say: Callable[[str], None]) -> HostsReservation:
        """See `coordinator.engine.Reserve`."""
        return HostsReservation(self, command, hello)

    def ask(self, tell: Callable[[tuple[NodeStatus, ...] | None], None]) -> None:
        """Report the hosts that have been connected to; see `Coordinator.ask_nodes`."""
        tell(tuple(_status(name, facts) for name, facts in self.facts.items()))


class HostsReservation:
    """See `coordinator.engine.Reservation`."""

    address_advice = "name the network interface that leads to them by --interface (interface = ...)"

    def __init__(self, of: Hosts, command: OpenWorkerGroup, hello: Hello) -> None:
        self._of, self._command, self._hello = of, command, hello
        self.engine = of.command.engine
        self._given_up = threading.Event()
        self._channels: list[PipeChannel] = []

    def acquire(self) -> ReservedNodes:
        wanted = self._first_choice()
        found, failures = self._connect(wanted)
        if failures:
            more, further = self._connect([host for host in self._of.options.hosts if host not in wanted])
            found, failures = {**found, **more}, {**failures, **further}
        hosts = [host for host in self._of.options.hosts if host.name in found]
        try:
            if not hosts:
                raise PoolError(_none_left(list(failures.values())))
            gpus, shape = self._shape(hosts, [found[host.name].facts for host in hosts], failures)
        except PoolError:
            _end_all(list(found.values()))
            raise
        _end_all([found[host.name] for host, size in zip(hosts, shape, strict=True) if not size])
        chosen = [(host, found[host.name], size) for host, size in zip(hosts, shape, strict=True) if size]
        self._channels = [PipeChannel(each, self._of.loop, self._of.calls) for _, each, _ in chosen]
        for channel in self._channels:
            self._of.calls.put(channel.open)
        addresses = _addresses([each.facts for _, each, _ in chosen])
        for channel, address in zip(self._channels, addresses, strict=True):
            channel.order("use_address", address)
        return ReservedNodes(
            channels=self._channels,
            addresses=addresses,
            sizes=[size for _, _, size in chosen],
            gpus=gpus,
            engine_has_gpus=any(each.facts["gpus"] for each in found.values()),
            names=[host.name for host, _, _ in chosen],
            remark=" ".join(failures.values()),
        )

    def give_up(self) -> None:
        self._given_up.set()

    def release(self) -> None:
        self._given_up.set()
        for channel in self._channels:
            channel.order("end")
            channel.close()
        _end_all([channel.connection for channel in self._channels])

    def is_room_wanted(self) -> bool:
        return False  # hosts are not reserved for anybody

    def transfer(self, run: str, fds: Sequence[int], given_up: threading.Event) -> Transfer:
        return PipeTransfer(run, fds, self._of.calls, given_up)

    def cause(self, error: BaseException) -> str:
        return str(error) or type(error).__name__

    def was_raised_on_node(self, error: BaseException) -> bool:
        return isinstance(error, RaisedOnHost)

    # ------------------------------------------------------------------------------------------------ connecting

    def _first_choice(self) -> list[Host]:
        """Return the hosts to connect to: all of them, unless their slots already tell which are enough."""
        hosts = list(self._of.options.hosts)
        size = self._command.size or (0 if self._command.gpus else DEFAULT_CPU_RANKS)
        if not size or self._command.gpus or any(host.slots is None for host in hosts):
            return hosts
        try:
            shape = plan(size, [Room(host=host.name, ranks=host.slots or 0) for host in hosts], self._of.options.nodes)
        except PoolError:
            return hosts
        return [host for host, ranks in zip(hosts, shape, strict=True) if ranks]

    def _connect(self, hosts: Sequence[Host]) -> tuple[dict[str, HostConnection], dict[str, str]]:
        """Connect to hosts side by side; return the connections and the reasons for hosts that have none, by name.

        Raises:
            PoolError: It was given up.
        """
        if not hosts:
            return {}, {}
        archive = self._of.archive.result()
        with ThreadPoolExecutor(min(CONNECTING, len(hosts)), thread_name_prefix="jupyter_distrib-connect") as threads:
            futures = {host.name: threads.submit(self._connect_to, host.name, archive) for host in hosts}
        found = {name: future.result() for name, future in futures.items() if future.exception() is None}
        failures = {name: str(error) for name, future in futures.items() if (error := future.exception()) is not None}
        if self._given_up.is_set():
            _end_all(list(found.values()))
            raise PoolError("the ranks were given up while they were waited for.")
        for name, connection in found.items():
            self._of.facts[name] = connection.facts
        return found, failures

    def _connect_to(self, host: str, archive: bytes) -> HostConnection:
        start = {
            "label": self._hello.label,
            "session": self._hello.session,
            "interface": self._of.options.interface,
            "env": dict(self._of.options.env),
            "count_gpus": self._command.gpus,
        }
        return connect(self._of.command, host, archive, start, self._given_up)

    # ------------------------------------------------------------------------------------------------ planning

    def _shape(
        self, hosts: Sequence[Host], facts: Sequence[Facts], failures: Mapping[str, str]
    ) -> tuple[bool, list[int]]:
        """Return whether the ranks have GPUs, and the number of ranks of each host."""
        gpus = self._command.gpus and any(each["gpus"] for each in facts)
        rooms = [_room(host, each, gpus=gpus) for host, each in zip(hosts, facts, strict=True)]
        size = self._command.size or (sum(room.ranks for room in rooms) if gpus else DEFAULT_CPU_RANKS)
        try:
            return gpus, plan(size, rooms, self._of.options.nodes)
        except PoolError as error:
            raise PoolError(" ".join((str(error), *failures.values()))) from None


def _room(host: Host, facts: Facts, *, gpus: bool) -> Room:
    there = len(facts["gpus"]) if gpus else int(facts["cpus"])
    if host.slots is None:
        return Room(host=host.name, ranks=max(1, min(there, MAX_RANKS)) if not gpus else there, elastic=not gpus)
    return Room(host=host.name, ranks=min(host.slots, there) if gpus else host.slots)


def _addresses(facts: Sequence[Facts]) -> list[str]:
    """Return the address of each host: the one it was reached by, unless that leads nowhere from the others."""
    one_machine = len({each["machine"] for each in facts}) == 1
    return [
        str(each["address"] if one_machine or not _is_loopback(each["address"]) else each["outer"]) for each in facts
    ]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _none_left(failures: Sequence[str]) -> str:
    others = len(failures) - 1
    more = f" Nor can {others} other host{'s' * (others > 1)} be used." if others > 0 else ""
    return f"{failures[0]}{more}" if failures else "the pool has no hosts."


def _end_all(connections: Sequence[HostConnection]) -> None:
    """End connections side by side."""
    threads = [threading.Thread(target=each.end, name="jupyter_distrib-end") for each in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _status(name: str, facts: Facts) -> NodeStatus:
    return NodeStatus(
        name=name,
        cpus=float(facts["cpus"]),
        memory_bytes=int(facts["memory_bytes"]),
        gpus=len(facts["gpus"]),
        gpu_type=", ".join(dict.fromkeys(facts["gpus"])),
    )
