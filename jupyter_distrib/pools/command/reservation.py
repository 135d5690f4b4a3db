"""Reserves hosts for one worker group: one connection to each, and through it a relay.

`HostsReservation.acquire` and `release` run in threads of their own; channels belong to the coordinator's loop.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from jupyter_distrib.agent.gpus.choice import asked
from jupyter_distrib.coordinator.engine import Reservation, ReservedNodes, Transfer
from jupyter_distrib.coordinator.node_count import NodeCount
from jupyter_distrib.coordinator.node_report import NodeReport, NodeReporter, OnReport
from jupyter_distrib.coordinator.part_transfer import PartTransfer
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command import takeover
from jupyter_distrib.pools.command.channel import PipeChannel, RaisedOnHost
from jupyter_distrib.pools.command.command import HostCommand
from jupyter_distrib.pools.command.connect import Reconnection, connect
from jupyter_distrib.pools.command.hosts import (
    MAX_RANKS,
    RECONNECT_S,
    Host,
    Room,
    plan,
    read_hosts,
    reconnect_s,
)
from jupyter_distrib.pools.command.piped_relay import HostGpus
from jupyter_distrib.pools.command.transfer import carrier
from jupyter_distrib.system import log_folder
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m

CONNECTING = 64
"""Number of hosts connected to at the same time."""
LEAVING_S = 3.0
"""Seconds to wait for GPUs even without `--wait`: a worker group that was just closed may still hold them."""
AGAIN_S = 0.5
DRIVER_S = 15.0
"""Seconds for which a host waits for its GPU driver."""
GPUS_S = 2 * DRIVER_S
"""Seconds to wait for a host to tell its GPUs."""
_GIVEN_UP = "the request was cancelled before the ranks started."
Facts = Mapping[str, Any]
REPORT_S = 1.5
"""Seconds to wait for the hosts to answer."""
NOT_REACHED = "not reached yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """The options of a pool of hosts."""

    hosts: tuple[Host, ...]
    nodes: NodeCount = field(default_factory=NodeCount)
    """Number of hosts that a worker group uses."""
    interface: str = ""
    """Network interface by which hosts reach one another; empty: that of the connection."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the ranks."""
    reconnect_s: float = RECONNECT_S
    """Seconds in which a broken connection is taken up again; 0: the host is lost at once."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> HostOptions:
        """Return the options that are given as texts."""
        hosts = read_hosts("hosts", given["hosts"])
        return cls(
            hosts=hosts,
            nodes=NodeCount.of(given),
            interface=given.get("interface", ""),
            reconnect_s=reconnect_s(given),
        )


class NoHostReached(PoolError):
    """An error for a pool none of whose hosts can be used."""


class Engine(Protocol):
    """Reserves hosts for worker groups, and reports them."""

    def reserve(self, command: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None], /) -> Reservation:
        """See `coordinator.engine.Reserve`."""

    def ask(self, on_report: OnReport, /) -> None:
        """See `Coordinator.ask_nodes`."""


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
        """Facts reported by hosts, by name."""
        self.channels: dict[str, PipeChannel] = {}
        """The hosts of worker groups, by name."""
        self.ask = NodeReporter(loop, calls, self._query_nodes).ask
        """See `Coordinator.ask_nodes`."""

    def reserve(self, command: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]) -> HostsReservation:
        """See `coordinator.engine.Reserve`."""
        return HostsReservation(self, command, hello, say)

    def _query_nodes(self, on_report: OnReport) -> NodeReport:
        return report(self.options.hosts, dict(self.facts), dict(self.channels))


class HostsReservation:
    """See `coordinator.engine.Reservation`."""

    address_advice = "name the network interface that leads to them with --interface (interface = ...)"

    def __init__(self, of: Hosts, command: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]) -> None:
        self._of, self._command, self._hello, self._say = of, command, hello, say
        self.engine = of.command.engine
        self._wanted = of.options.nodes.for_ranks(command.size, command.unit)
        """Number of hosts; 0: as few as possible."""
        self._given_up = threading.Event()
        self._channels: list[PipeChannel] = []
        self._sizes: list[int] = []
        """Number of ranks of each."""
        self._more: list[PipeChannel] = []
        """The hosts that the last `acquire_more` has added, and the numbers of ranks before."""
        self._sizes_before: list[int] = []
        self._reserved_with: dict[str, Any] = {}
        self._on_gpus = False
        self._gpus: dict[str, tuple[str, ...]] = {}
        """Names of the GPUs of each host."""
        self._said = ""

    def acquire(self, running: Mapping[str, str]) -> ReservedNodes:
        wanted = self._first_choice()
        found, failures = self._connect(wanted)
        if failures:
            more, further = self._connect([host for host in self._of.options.hosts if host not in wanted])
            found, failures = {**found, **more}, {**failures, **further}
        candidates = [
            _Candidate(host=host, channel=found[host.name]) for host in self._of.options.hosts if host.name in found
        ]
        try:
            if not candidates:
                raise NoHostReached(_none_left(list(failures.values())))
            gpus, shape, troubles = self._shape(candidates, failures)
        except Exception:
            _end_all(list(found.values()))
            raise
        _end_all([each.channel for each, size in zip(candidates, shape, strict=True) if not size])
        return self._reserved(
            [(each, size) for each, size in zip(candidates, shape, strict=True) if size],
            gpus=gpus,
            engine_has_gpus=any(self._gpus.values()),
            remark=" ".join((*failures.values(), *troubles)),
        )

    def _reserved(self, chosen: Sequence[tuple[_Candidate, int]], **more: Any) -> ReservedNodes:
        self._channels, self._sizes = [each.channel for each, _ in chosen], [size for _, size in chosen]
        self._reserved_with, self._on_gpus = more, bool(more["gpus"])
        self._of.channels.update((each.host.name, each.channel) for each, _ in chosen)
        addresses = _addresses([channel.connection.facts for channel in self._channels])
        for channel, address in zip(self._channels, addresses, strict=True):
            channel.order("use_address", address)
        return ReservedNodes(
            channels=self._channels,
            addresses=addresses,
            sizes=[size for _, size in chosen],
            names=[each.host.name for each, _ in chosen],
            **more,
        )

    def acquire_more(self, ranks: int, unit: int) -> ReservedNodes | None:
        self._more, self._sizes_before = [], self._sizes
        held = dict(zip(self._channels, self._sizes, strict=True))
        by_name = {name: channel for name, channel in self._of.channels.items() if channel in held}
        hosts = self._of.options.hosts
        on_each = self._of.options.nodes.on_each(unit)
        may_have = on_each or not self._wanted or len(held) < self._wanted
        found, _ = self._connect([host for host in hosts if host.name not in by_name] if may_have else [])
        by_name |= found
        candidates = {
            by_name[host.name]: _Candidate(host=host, channel=by_name[host.name])
            for host in hosts
            if host.name in by_name
        }
        order = [*held, *found.values()]
        looked = self._gpus_of([candidates[channel] for channel in order])
        rooms = [
            candidates[channel].free(has, gpus=self._on_gpus, held=held.get(channel, 0), on_each=on_each)
            for channel, has in zip(order, looked, strict=True)
        ]
        more = shared_out(ranks, unit, rooms)
        self._more = [channel for channel, size in zip(order, more, strict=True) if size and channel not in held]
        _end_all([channel for channel in found.values() if channel not in self._more])
        if not any(more):
            return None
        chosen = [
            (candidates[channel], held.get(channel, 0) + size)
            for channel, size in zip(order, more, strict=True)
            if size or channel in held
        ]
        return self._reserved(chosen, **self._reserved_with)

    def drop_more(self) -> None:
        more, self._more = self._more, []
        self._channels = [channel for channel in self._channels if channel not in more]
        self._sizes = self._sizes_before
        self._forget(more)
        _end_all(more)

    def give_up(self) -> None:
        self._given_up.set()

    def release(self, *, keep_agents: bool) -> None:
        self._given_up.set()
        self._forget(self._channels)
        _end_all(self._channels)

    def lose(self, reason: str) -> None:
        """Treat all hosts as lost; from any thread."""
        for channel in self._channels:
            self._of.calls.put(partial(channel.lose, reason))

    def _forget(self, channels: Sequence[PipeChannel]) -> None:
        for name, channel in [*self._of.channels.items()]:
            if channel in channels:
                del self._of.channels[name]

    def is_room_wanted(self) -> bool:
        return False  # hosts are not reserved for anybody

    def transfer(self, run: str, fds: Sequence[int], given_up: threading.Event, folder: str) -> Transfer:
        return PartTransfer(run, fds, self._of.calls, given_up, carrier(fds, folder))

    def cause(self, error: BaseException) -> str:
        return str(error) or type(error).__name__

    def was_raised_on_node(self, error: BaseException) -> bool:
        return isinstance(error, RaisedOnHost)

    # ------------------------------------------------------------------------------------------------ connecting

    def _first_choice(self) -> list[Host]:
        """Return the hosts to connect to: all of them, unless their slots already show which ones suffice."""
        hosts = list(self._of.options.hosts)
        size = self._command.ranks()
        if not size or self._command.gpus or any(host.slots is None for host in hosts):
            return hosts
        try:
            shape = plan(size, [Room(host=host.name, ranks=host.slots or 0) for host in hosts], self._wanted)
        except PoolError:
            return hosts
        return [host for host, ranks in zip(hosts, shape, strict=True) if ranks]

    def _connect(self, hosts: Sequence[Host]) -> tuple[dict[str, PipeChannel], dict[str, str]]:
        """Connect to hosts in parallel; return the channels, and the reasons for failures, by host name.

        Raises:
            PoolError: The search was given up.
        """
        if not hosts:
            return {}, {}
        with ThreadPoolExecutor(min(CONNECTING, len(hosts)), thread_name_prefix="jupyter_distrib-connect") as threads:
            futures = {host.name: threads.submit(self._connect_to, host.name) for host in hosts}
        found = {name: future.result() for name, future in futures.items() if future.exception() is None}
        failures = {name: str(error) for name, future in futures.items() if (error := future.exception()) is not None}
        if self._given_up.is_set():
            _end_all(list(found.values()))
            raise PoolError(_GIVEN_UP)
        return found, failures

    def _connect_to(self, host: str) -> PipeChannel:
        limit_s, command = self._of.options.reconnect_s, self._of.command
        secret = secrets.token_hex(32)
        takeover_of = {
            "secret": secret,
            "limit_s": limit_s,
            "holder": takeover.identity(),
            "input_shows_the_end": command.shows_its_end,
        }
        start = {
            "label": self._hello.label,
            "session": self._hello.session,
            "interface": self._of.options.interface,
            "env": {**log_folder.limits(), **self._of.options.env},
            "takeover": takeover_of if limit_s else None,
        }
        connection = connect(command, host, self._of.archive, start, self._given_up)
        reconnection = Reconnection(command=command, secret=secret, limit_s=limit_s, given_up=threading.Event())
        channel = PipeChannel(connection, self._of.loop, self._of.calls, reconnection, self._say)
        self._of.calls.put(channel.open)  # now, since the relay would take silence for the end of this process
        return channel

    # ------------------------------------------------------------------------------------------------ planning

    def _shape(
        self, candidates: Sequence[_Candidate], failures: Mapping[str, str]
    ) -> tuple[bool, list[int], list[str]]:
        """Return whether the ranks have GPUs, the number of ranks of each host, and why hosts' GPUs cannot be used;
        waits for GPUs that are busy."""
        until_s = time.monotonic() + max(self._command.wait_s, LEAVING_S)
        while True:
            found = self._gpus_of(candidates)
            gpus = any(each.names for each in found)
            troubles = self._troubles(candidates, found, refused=not gpus)
            try:
                return gpus, self._plan(candidates, found, gpus=gpus, free=True), troubles
            except PoolError as error:
                reason = self._shortage(candidates, found, error, gpus=gpus)
                if reason is None or time.monotonic() > until_s:
                    raise PoolError(" ".join((reason or str(error), *failures.values()))) from None
            if self._command.wait_s and reason != self._said:
                self._said = reason
                self._say(reason)
            if self._given_up.wait(AGAIN_S):
                raise PoolError(_GIVEN_UP)

    def _gpus_of(self, candidates: Sequence[_Candidate]) -> list[HostGpus]:
        """Return the GPUs of the hosts, if the ranks may have some."""
        gpu_type = self._command.gpu_type or ""
        answers = [each.channel.ask("gpus", gpu_type, DRIVER_S) for each in candidates if self._command.gpus]
        found = [HostGpus(**answer.result(GPUS_S)) for answer in answers] or [HostGpus()] * len(candidates)
        self._gpus = {each.host.name: gpus.names for each, gpus in zip(candidates, found, strict=True)}
        for each in candidates:
            facts = each.channel.connection.facts
            self._of.facts[each.host.name] = {**facts, "gpus": self._gpus[each.host.name]}
        return found

    def _troubles(self, candidates: Sequence[_Candidate], found: Sequence[HostGpus], *, refused: bool) -> list[str]:
        """Describe why GPUs of hosts cannot be used. Raises `PoolError` with `refused`, if the cell has asked for
        GPUs."""
        hosts: dict[str, list[str]] = {}
        for each, gpus in zip(candidates, found, strict=True):
            hosts.setdefault(gpus.problem, []).append(each.host.name)
        reasons = [
            f"on host{'s' * (len(names) > 1)} {', '.join(names)} {text}" for text, names in hosts.items() if text
        ]
        if refused and reasons and (self._command.size or self._command.gpu_type):
            raise PoolError(f"{asked(self._command)}, but {' And '.join(reasons)}")
        return reasons

    def _plan(
        self, candidates: Sequence[_Candidate], found: Sequence[HostGpus], *, gpus: bool, free: bool
    ) -> list[int]:
        rooms = [each.room(has, gpus=gpus, free=free) for each, has in zip(candidates, found, strict=True)]
        size = self._command.ranks(max(1, sum(room.ranks for room in rooms)) if gpus else 0)
        return plan(size, rooms, self._wanted)

    def _shortage(
        self, candidates: Sequence[_Candidate], found: Sequence[HostGpus], error: PoolError, *, gpus: bool
    ) -> str | None:
        """Describe who holds the missing GPUs; None if the hosts do not have enough GPUs at all."""
        if not gpus:
            return None
        kind = self._command.gpu_type
        if kind and not any(each.holders for each in found):
            there = ", ".join(dict.fromkeys(name for each in found for name in each.names))
            raise PoolError(f"--gpu-type {kind}, but the hosts have {there}; leave it out, or use another pool.")
        try:
            self._plan(candidates, found, gpus=True, free=False)
        except PoolError:
            return None
        held = [
            f"{each.host.name}: {holder}"
            for each, has in zip(candidates, found, strict=True)
            for holder in dict.fromkeys(filter(None, has.holders))
        ]
        return f"{error} Others have GPUs there ({'; '.join(held)}): wait for them with --wait S."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A host that is within reach."""

    host: Host
    channel: PipeChannel

    def room(self, found: HostGpus, *, gpus: bool, free: bool) -> Room:
        """Return how many ranks fit there: without GPUs, one for each core unless slots are given."""
        slots, name = self.host.slots, self.host.name
        if gpus:
            count = found.free if free else len(found.holders)
            return Room(host=name, ranks=count if slots is None else min(slots, count))
        if slots is not None:
            return Room(host=name, ranks=slots)
        return Room(host=name, ranks=min(MAX_RANKS, max(1, int(self.channel.connection.facts["cpus"]))), elastic=True)

    def free(self, found: HostGpus, *, gpus: bool, held: int, on_each: int = 0) -> int:
        """Return how many more ranks fit there, in addition to the worker group's present ones. With `on_each`, the
        host gets that many ranks or none."""
        if on_each:
            room = self.room(found, gpus=gpus, free=True)
            return 0 if held else on_each * (room.elastic or room.ranks >= on_each)
        if not gpus:
            return max(0, self.room(found, gpus=False, free=True).ranks - held)
        slots = self.host.slots
        return found.free if slots is None else max(0, min(found.free, slots - held))


def shared_out(ranks: int, unit: int, rooms: Sequence[int]) -> list[int]:
    """Return the number of ranks for each host: up to this many in all, a multiple of `unit`, in the hosts' order."""
    left = min(ranks, sum(rooms))
    left -= left % unit
    shares = []
    for room in rooms:
        shares.append(min(room, left))
        left -= shares[-1]
    return shares


def _addresses(facts: Sequence[Facts]) -> list[str]:
    """Return the address of each host: the one used to reach it, unless the others cannot reach it there."""
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


def _end_all(channels: Sequence[PipeChannel]) -> None:
    """End relays and connections in parallel."""
    threads = [threading.Thread(target=_end, args=(each,), name="jupyter_distrib-end") for each in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end(channel: PipeChannel) -> None:
    channel.order("end")
    channel.close()
    channel.connection.end()


def report(
    hosts: Sequence[Host], facts: Mapping[str, Mapping[str, Any]], channels: Mapping[str, PipeChannel]
) -> NodeReport:
    """Return the report.

    Args:
        hosts: The hosts of the pool.
        facts: Facts reported by hosts, by name.
        channels: The hosts that are connected, by name.
    """
    asked = {name: channel.ask("gpus", "", REPORT_S) for name, channel in channels.items()}
    wait(asked.values(), REPORT_S)
    nodes = [_node_status(host, facts.get(host.name), _answer(asked.get(host.name))) for host in hosts]
    unknown = all(node.state == NOT_REACHED for node in nodes)
    return NodeReport(nodes=tuple(nodes), next_rank="the next cell connects to the hosts" if unknown else "")


def _answer(asked: Future[Any] | None) -> HostGpus | None:
    if asked is not None and asked.done():
        with suppress(Exception):  # the host is lost, as its cell will report
            return HostGpus(**asked.result())
    return None


def _node_status(host: Host, facts: Mapping[str, Any] | None, gpus: HostGpus | None) -> m.NodeStatus:
    if facts is None:
        return m.NodeStatus(name=host.name, cpus=0.0, memory_bytes=0, state=NOT_REACHED)
    names = gpus.names if gpus else facts.get("gpus", ())
    held = Counter(filter(None, gpus.holders)) if gpus else {}
    return m.NodeStatus(
        name=host.name,
        cpus=float(facts["cpus"]),
        memory_bytes=int(facts["memory_bytes"]),
        gpus=len(names),
        free_gpus=gpus.free if gpus else None,
        gpu_type=", ".join(dict.fromkeys(names)),
        holders=tuple(f"{holder}, {count} GPU{'s' * (count > 1)}" for holder, count in held.items()),
    )
