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

from jupyter_distrib.coordinator.engine import ReservedNodes
from jupyter_distrib.coordinator.node_count import NodeCount
from jupyter_distrib.coordinator.node_report import NodeReporter
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command.hosts import Host, reconnect_s
from jupyter_distrib.pools.command.requested import RequestedHosts
from jupyter_distrib.pools.command.reservation import HostOptions, Hosts
from jupyter_distrib.pools.slurm import allocation, command, report
from jupyter_distrib.pools.slurm.allocation import Allocation, end_of, notebooks_job, seconds_left
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m


class SlurmCluster:
    """Slurm, for one coordinator; `options` are the pool's, and `job` the notebook's own allocation, if any."""

    def __init__(self, options: Mapping[str, str], loop: Loop, calls: CallSoon, archive: Future[bytes]) -> None:
        self.options, self.loop, self.calls, self.archive = options, loop, calls, archive
        self.facts: dict[str, Mapping[str, Any]] = {}
        self.ask = NodeReporter(loop, calls, partial(report.query_nodes, options), fresh_s=report.FRESH_S).ask
        """See `Coordinator.ask_nodes`."""
        threading.Thread(target=allocation.cancel_left, name="jupyter_distrib-cancel", daemon=True).start()

    def reserve(self, opening: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]) -> SlurmReservation:
        """See `coordinator.engine.Reserve`."""
        return SlurmReservation(self, opening, hello, say)

    def hosts(self, job: command.Job, hosts: tuple[Host, ...], *, gpus: bool) -> Hosts:
        """Return the nodes of an allocation."""
        # Else salloc has taken care of it.
        nodes = NodeCount.of(self.options) if self.options.get("job") else NodeCount()
        own = HostOptions(
            hosts=hosts,
            nodes=nodes,
            interface=self.options.get("interface", ""),
            reconnect_s=reconnect_s(self.options),
        )
        found = Hosts(
            command.Srun(
                job=job.id, python=self.options["python"], gpus=job.gpus if gpus else {}, components=job.components
            ),
            own,
            self.loop,
            self.calls,
            self.archive,
        )
        found.facts = self.facts
        return found


class SlurmReservation(RequestedHosts):
    """See `coordinator.engine.Reservation`.

    Args:
        without: Names of nodes that a run which grows by whole nodes has already.
    """

    engine = "Slurm"

    def __init__(
        self,
        of: SlurmCluster,
        opening: m.OpenWorkerGroup,
        hello: m.Hello,
        say: Callable[[str], None],
        without: Sequence[str] = (),
    ) -> None:
        super().__init__(of.calls, opening, hello, say)
        self._of = of
        count = NodeCount.of(of.options)
        options = dict(of.options)
        if nodes := count.for_ranks(opening.size, opening.unit):
            options["nodes"] = str(nodes)
        if count.step and without:
            options["salloc"] = command.elsewhere(options.get("salloc", ""), without)
        self._allocation = Allocation(options, say, self._given_up)
        self._job = ""

    def acquire(self, running: Mapping[str, str]) -> ReservedNodes:
        job, hosts = self._found()
        try:
            nodes = self._connected(self._of.hosts(job, hosts, gpus=self._opening.gpus))
        except BaseException:
            self._allocation.release()
            raise
        self._job = job.id
        left_s = seconds_left(job.id)
        self._reserved = nodes if left_s is None else replace(nodes, ends_at_s=time.monotonic() + left_s)
        return self._reserved

    def acquire_more(self, ranks: int, unit: int) -> ReservedNodes | None:
        """See `Reservation.acquire_more`: free nodes of the notebook's own job if it is in one, else one more job."""
        if not self._of.options.get("job"):
            return super().acquire_more(ranks, unit)
        assert self._nodes is not None
        return self._nodes.acquire_more(ranks, unit)

    def drop_more(self) -> None:
        if not self._of.options.get("job"):
            super().drop_more()
        elif self._nodes is not None:
            self._nodes.drop_more()

    def _of_ranks(self, ranks: int) -> SlurmReservation:
        opening = replace(self._opening, size=ranks, wait_s=0.0)
        has = self._reserved.names if self._reserved is not None else ()
        return SlurmReservation(self._of, opening, self._hello, lambda text: None, has)

    def _found(self) -> tuple[command.Job, tuple[Host, ...]]:
        """Return the job and the nodes for these ranks."""
        if number := self._of.options.get("job", ""):
            job = notebooks_job(number, self._opening.wait_s, self._say, self._given_up)
            return job, command.hosts(list(job.nodes), [])
        size = self._opening.ranks()
        if not 0 < size < 100_000:
            raise PoolError(f"Slurm needs a number of ranks, not {size}: write --gpus N or --ranks N.")
        title = f"jupyter_distrib {os.path.basename(self._hello.notebook) or self._hello.label}"
        try:
            return self._allocation.obtain(size, gpus=self._opening.gpus, wait_s=self._opening.wait_s, title=title)
        except BaseException:
            self._allocation.release()
            raise

    def release(self, *, keep_agents: bool) -> None:
        self.give_up()
        self._further.release(keep_agents=keep_agents)
        if self._nodes is not None:
            self._nodes.release(keep_agents=keep_agents)
        self._allocation.release()

    def _is_another_waiting(self) -> bool:
        return not self._of.options.get("job") and allocation.is_another_queued(self._job)

    def end(self) -> str:
        return end_of(self._job) if self._job else ""
