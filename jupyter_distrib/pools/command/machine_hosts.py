"""Reserves hosts that one command starts first (`up`), and another command ends (`pools/machines/`).

`acquire` and `release` run in threads of their own; the rest in the coordinator's loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jupyter_distrib.coordinator.engine import ReservedNodes, Transfer
from jupyter_distrib.coordinator.node_report import NodeReport, NodeReporter, OnReport
from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.pools.command.channel import PipeChannel
from jupyter_distrib.pools.command.command import HostCommand
from jupyter_distrib.pools.command.reservation import HostOptions, Hosts, HostsReservation, NoHostReached, report
from jupyter_distrib.pools.machines import commands, summary
from jupyter_distrib.pools.machines.machine import Machine
from jupyter_distrib.pools.machines.record import UP, Record, Use
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m

WATCH_S = 0.5
"""Seconds between checks that the machines are still there."""
READY_S = 120.0
"""Seconds after `up` in which machines may not answer yet."""
AGAIN_S = 2.0
SAY_S = 5.0
"""Seconds between two lines of `up` that a cell shows."""
STATUS_S = 60.0


class MachineHosts:
    """The hosts of one coordinator, which are started on demand. `options` are the pool's."""

    def __init__(
        self, command: HostCommand, options: Mapping[str, str], loop: Loop, calls: CallSoon, archive: Future[bytes]
    ) -> None:
        self.command, self.options = command, options
        self.loop, self.calls, self.archive = loop, calls, archive
        self.machine = Machine(options)
        self._use = Use(self.machine.place)
        self._lock = threading.Lock()
        self._needed_by: set[object] = set()
        """Reservations that wait for machines, and the word `cells` while a cell or a kept value needs them."""
        self.reservations: list[MachineReservation] = []
        """Reservations with ranks on the machines."""
        self.reached = ""
        """The life of machines of which one has answered."""
        self.facts: dict[str, Mapping[str, Any]] = {}
        self.channels: dict[str, PipeChannel] = {}
        self.ask = NodeReporter(loop, calls, self._query_nodes).ask
        """See `Coordinator.ask_nodes`."""
        loop.later(WATCH_S, self._watch)

    def reserve(self, opening: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]) -> MachineReservation:
        """See `coordinator.engine.Reserve`."""
        return MachineReservation(self, opening, hello, say)

    def hosts(self, record: Record) -> Hosts:
        """Return the machines as hosts. Raises `OptionsError` if `hosts_from` has printed something else."""
        own = HostOptions.of({**self.options, "hosts": record.hosts})
        found = Hosts(self.command, own, self.loop, self.calls, self.archive)
        found.facts, found.channels = self.facts, self.channels
        return found

    def need(self, who: object) -> None:
        """Keep the machines from being ended, until `leave`; from any thread."""
        with self._lock:
            if not self._needed_by:
                self._use.begin()
            self._needed_by.add(who)

    def leave(self, who: object) -> None:
        """Let the machines be ended, unless others need them; from any thread."""
        with self._lock:
            if who in self._needed_by:
                self._needed_by.discard(who)
                if not self._needed_by:
                    self._use.end()

    def set_busy(self, busy: bool) -> None:
        """Record whether a cell runs on some ranks, or values are kept there."""
        if busy:
            self.need("cells")
            self._check()
        else:
            self.leave("cells")

    def _watch(self) -> None:
        self._check()
        self.loop.later(WATCH_S, self._watch)

    def _check(self) -> None:
        """Lose the ranks of machines that are about to end; replace a keeper that was killed."""
        if not self.reservations:
            return
        record = self.machine.record()
        for each in list(self.reservations):
            if record is None or record.life != each.life or record.state != UP:
                self.reservations.remove(each)
                each.lose(summary.end_of(record, each.life))
        if record is not None and record.alive and not self.machine.place.is_held():
            self.machine.start_keeper(record.life)

    def _query_nodes(self, on_report: OnReport) -> NodeReport:
        """Report the machines that are up; starts none."""
        record = self.machine.record()
        hosts = None
        if record is not None and record.state == UP:
            with suppress(OptionsError):
                hosts = HostOptions.of({**self.options, "hosts": record.hosts}).hosts
        next_rank = summary.next_rank(record)
        if hosts is None:
            return NodeReport(nodes=(), next_rank=next_rank)
        found = report(hosts, dict(self.facts), dict(self.channels))
        return replace(found, next_rank=found.next_rank and next_rank)


class MachineReservation:
    """See `coordinator.engine.Reservation`."""

    address_advice = HostsReservation.address_advice

    def __init__(
        self, of: MachineHosts, opening: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]
    ) -> None:
        self._of, self._opening, self._hello, self._say = of, opening, hello, say
        self.engine = of.command.engine
        self._given_up = threading.Event()
        self._nodes: HostsReservation | None = None
        self.life = ""
        """The life of the machines that it has ranks on."""
        self._end = ""
        """The way in which they have ended, if they have."""
        self._said_s, self._said = 0.0, ""
        self._ends_at_s: float | None = None

    def acquire(self, running: Mapping[str, str]) -> ReservedNodes:
        self._of.need(self)
        try:
            while True:
                record = self._of.machine.obtain(self._news, self._given_up)
                nodes = self._on(record)
                if nodes is not None:
                    break
        finally:
            self._of.leave(self)
        self.life = self._of.reached = record.life
        self._of.reservations.append(self)
        if record.ends_at_s:
            self._ends_at_s = time.monotonic() + record.ends_at_s - time.time()
        return replace(nodes, ends_at_s=self._ends_at_s)

    def acquire_more(self, ranks: int, unit: int) -> ReservedNodes | None:
        more = self._nodes.acquire_more(ranks, unit) if self._nodes is not None else None
        return more and replace(more, ends_at_s=self._ends_at_s)

    def drop_more(self) -> None:
        if self._nodes is not None:
            self._nodes.drop_more()

    def _on(self, record: Record) -> ReservedNodes | None:
        """Return nodes on these machines; None if they should be asked for again."""
        try:
            self._nodes = nodes = HostsReservation(self._of.hosts(record), self._opening, self._hello, self._say)
        except OptionsError as error:
            self._of.machine.place.ask_for_end("`hosts_from` has not printed hosts")
            raise PoolError(f"{str(error).replace('hosts', 'what hosts_from prints', 1)}.") from None
        if self._given_up.is_set():
            nodes.give_up()
        try:
            return nodes.acquire({})
        except NoHostReached as error:
            if self._given_up.is_set():
                raise
            self._wait_or_replace(record, str(error))
            return None

    def _wait_or_replace(self, record: Record, why: str) -> None:
        """Wait for machines that do not answer yet, or have missing machines replaced. Raises `PoolError`."""
        if record.life != self._of.reached and time.time() < record.up_at_s + READY_S:
            if why != self._said:
                self._said = why
                self._say(f"the machines are up, but do not answer yet: {why}")
            self._given_up.wait(AGAIN_S)
            return
        if "status" not in record.plan:
            raise PoolError(f"{why} If the machines are gone, run %distributed_pool down, and then this cell again.")
        if self._is_up(record):
            raise PoolError(why)
        self._of.machine.place.ask_for_end("`status` says that it is not up")
        while (now := self._of.machine.record()) and now.life == record.life and now.state == UP:
            if self._given_up.wait(WATCH_S):
                return

    def _is_up(self, record: Record) -> bool:
        """Return whether the machines are up, as far as `status` tells."""
        self._say("no machine answers: asking `status`.")
        with commands.Command("status", record.plan["status"], self._of.machine.place, record.path) as status:
            until_s = time.monotonic() + STATUS_S
            while not status.wait(WATCH_S):
                if time.monotonic() > until_s or self._given_up.is_set():
                    return True
            return status.status == 0

    def _news(self, text: str) -> None:
        """Say what the cell waits for, with lines of `up` at intervals."""
        now_s = time.monotonic()
        if now_s > self._said_s + SAY_S:
            self._said_s = now_s
            self._say(text)

    def lose(self, reason: str) -> None:
        """Treat the machines as lost; from any thread."""
        self._end = reason
        if self._nodes is not None:
            self._nodes.lose(reason)

    def give_up(self) -> None:
        self._given_up.set()
        if self._nodes is not None:
            self._nodes.give_up()

    def release(self, *, keep_agents: bool) -> None:
        self.give_up()
        self._of.calls.put(lambda: self._of.reservations.remove(self) if self in self._of.reservations else None)
        if self._nodes is not None:
            self._nodes.release(keep_agents=keep_agents)

    def is_room_wanted(self) -> bool:
        return False

    def transfer(self, run: str, fds: Sequence[int], given_up: threading.Event, folder: str) -> Transfer:
        assert self._nodes is not None
        return self._nodes.transfer(run, fds, given_up, folder)

    def cause(self, error: BaseException) -> str:
        """Describe an exception, beginning with the end of the machines, if they were ended."""
        if self.was_raised_on_node(error) or not self.life:
            return str(error) or type(error).__name__
        record = self._of.machine.record()
        if self._end or record is None or record.life != self.life or record.state != UP:
            return self._end or summary.end_of(record, self.life)
        return str(error) or type(error).__name__

    def was_raised_on_node(self, error: BaseException) -> bool:
        return self._nodes is not None and self._nodes.was_raised_on_node(error)
