"""Reserves nodes of Slurm for one worker group: in the notebook's own allocation, or in a new one, which is given back
with the nodes. `pools/command/reservation.py` does the rest.

`acquire` and `release` run in threads of their own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from jupyter_distrib.coordinator.engine import ReservedNodes, Transfer
from jupyter_distrib.coordinator.further_nodes import FurtherNodes
from jupyter_distrib.coordinator.node_report import NodeReporter
from jupyter_distrib.coordinator.part_transfer import PartTransfer
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command.hosts import Host, reconnect_s
from jupyter_distrib.pools.command.reservation import HostOptions, Hosts, HostsReservation
from jupyter_distrib.pools.command.transfer import carrier
from jupyter_distrib.pools.slurm import allocation, command, report
from jupyter_distrib.pools.slurm.allocation import Allocation, end_of, notebooks_job, seconds_left
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m

ASK_S = 2.0
"""Seconds between questions whether somebody waits for nodes that are free."""


class SlurmCluster:
    """Slurm, for one coordinator; `options` are the pool's, and `job` the notebook's own allocation, if any."""

    def __init__(self, options: Mapping[str, str], loop: Loop, calls: CallSoon, archive: Future[bytes]) -> None:
        self.options, self.loop, self.calls, self.archive = options, loop, calls, archive
        self.facts: dict[str, Mapping[str, Any]] = {}
        self.ask = NodeReporter(loop, calls, partial(report.look, options), fresh_s=report.FRESH_S).ask
        """See `Coordinator.ask_nodes`."""
        threading.Thread(target=allocation.cancel_left, name="jupyter_distrib-cancel", daemon=True).start()

    def reserve(self, opening: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]) -> SlurmReservation:
        """See `coordinator.engine.Reserve`."""
        return SlurmReservation(self, opening, hello, say)

    def hosts(self, job: command.Job, hosts: tuple[Host, ...], *, gpus: bool) -> Hosts:
        """Return the nodes of an allocation."""
        nodes = int(self.options.get("nodes", "0")) if self.options.get("job") else 0  # else salloc has seen to it
        own = HostOptions(
            hosts=hosts,
            nodes=nodes,
            interface=self.options.get("interface", ""),
            reconnect_s=reconnect_s(self.options),
        )
        found = Hosts(
            command.Srun(job=job.id, python=self.options["python"], gpus=job.gpus if gpus else {}),
            own,
            self.loop,
            self.calls,
            self.archive,
        )
        found.facts = self.facts
        return found


class SlurmReservation:
    """See `coordinator.engine.Reservation`."""

    engine = "Slurm"
    address_advice = HostsReservation.address_advice

    def __init__(
        self, of: SlurmCluster, opening: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]
    ) -> None:
        self._of, self._opening, self._hello, self._say = of, opening, hello, say
        self._given_up = threading.Event()
        self._allocation = Allocation(of.options, say, self._given_up)
        self._nodes: HostsReservation | None = None
        self._before: ReservedNodes | None = None
        """The nodes before the last `acquire_more`."""
        self._job = ""
        self._asked_s = 0.0
        self._reserved: ReservedNodes | None = None
        self._further = FurtherNodes(self._reservation_of)

    def acquire(self, running: Mapping[str, str]) -> ReservedNodes:
        job, hosts = self._found()
        of_job = self._of.hosts(job, hosts, gpus=self._opening.gpus)
        self._nodes = HostsReservation(of_job, self._opening, self._hello, self._say)
        if self._given_up.is_set():
            self._nodes.give_up()
        try:
            nodes = self._nodes.acquire({})
        except BaseException:
            self._allocation.release()
            raise
        self._job = job.id
        left_s = seconds_left(job.id)
        self._reserved = nodes if left_s is None else replace(nodes, ends_at_s=time.monotonic() + left_s)
        return self._reserved

    def acquire_more(self, ranks: int, unit: int) -> ReservedNodes | None:
        """See `Reservation.acquire_more`: in the notebook's own job what is free there, else by one more job, unless a
        job of this user waits."""
        assert self._reserved is not None
        self._before = self._reserved
        assert self._nodes is not None
        if self._of.options.get("job"):
            found = self._nodes.acquire_more(ranks, unit)
        else:
            found = None if allocation.is_another_queued() else self._further.acquire(self._reserved, ranks, unit)
        self._reserved = found or self._reserved
        return found

    def _reservation_of(self, ranks: int) -> SlurmReservation:
        return SlurmReservation(
            self._of, replace(self._opening, size=ranks, wait_s=0.0), self._hello, lambda text: None
        )

    def drop_more(self) -> None:
        self._reserved = self._before
        self._further.drop()
        if self._of.options.get("job") and self._nodes is not None:
            self._nodes.drop_more()

    def _found(self) -> tuple[command.Job, tuple[Host, ...]]:
        """Return the job and the nodes for these ranks."""
        if number := self._of.options.get("job", ""):
            job = notebooks_job(number)
            return job, command.hosts(list(job.nodes), [])
        size = self._opening.ranks()
        if not 0 < size < 100_000:
            raise PoolError(f"Slurm needs a number of ranks, not {size}: say --gpus N or --ranks N.")
        title = f"jupyter_distrib {os.path.basename(self._hello.notebook) or self._hello.label}"
        try:
            return self._allocation.obtain(size, gpus=self._opening.gpus, wait_s=self._opening.wait_s, title=title)
        except BaseException:
            self._allocation.release()
            raise

    def give_up(self) -> None:
        self._given_up.set()
        if self._nodes is not None:
            self._nodes.give_up()

    def release(self, *, keep_agents: bool) -> None:
        self.give_up()
        self._further.release(keep_agents=keep_agents)
        if self._nodes is not None:
            self._nodes.release(keep_agents=keep_agents)
        self._allocation.release()

    def is_room_wanted(self) -> bool:
        """Return whether another job of this user waits for nodes; those of others wait all the time in most places."""
        if self._of.options.get("job") or time.monotonic() < self._asked_s + ASK_S:
            return False
        self._asked_s = time.monotonic()
        return allocation.is_another_queued()

    def transfer(self, run: str, fds: Sequence[int], given_up: threading.Event, folder: str) -> Transfer:
        return PartTransfer(run, fds, self._of.calls, given_up, carrier(fds, folder))

    def cause(self, error: BaseException) -> str:
        """Describe an exception, starting with how the job ended, if it did."""
        said = str(error) or type(error).__name__
        ended = end_of(self._job) if self._job and not self.was_raised_on_node(error) else ""
        return f"{ended}: {said}" if ended else said

    def was_raised_on_node(self, error: BaseException) -> bool:
        return self._nodes is not None and self._nodes.was_raised_on_node(error)
