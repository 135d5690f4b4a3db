"""Reserves pods for one worker group: in a Job of their own, which is deleted with them.
`pools/command/reservation.py` does everything inside the pods.

`acquire` and `release` run in threads of their own."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jupyter_distrib.coordinator.engine import ReservedNodes
from jupyter_distrib.coordinator.node_count import NodeCount
from jupyter_distrib.coordinator.node_report import NodeReporter
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command import bootstrap, command
from jupyter_distrib.pools.command.hosts import Host, reconnect_s
from jupyter_distrib.pools.command.requested import RequestedHosts
from jupyter_distrib.pools.command.reservation import HostOptions, Hosts
from jupyter_distrib.pools.kubernetes import guard, report, words
from jupyter_distrib.pools.kubernetes.job import PodJob
from jupyter_distrib.pools.kubernetes.kubectl import Kubectl
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m

MOST_RANKS = 100_000


class KubernetesCluster:
    """The cluster, for one coordinator; `options` are the pool's."""

    def __init__(self, options: Mapping[str, str], loop: Loop, calls: CallSoon, archive: Future[bytes]) -> None:
        self.options, self.loop, self.calls, self.archive = options, loop, calls, archive
        self.kubectl = Kubectl(options)
        self._is_checked = False
        self.facts: dict[str, Mapping[str, Any]] = {}
        self.ask = NodeReporter(loop, calls, partial(report.query_nodes, self.kubectl), fresh_s=report.FRESH_S).ask
        """See `Coordinator.ask_nodes`."""
        left = partial(guard.delete_left, self.kubectl)
        threading.Thread(target=left, name="jupyter_distrib-left", daemon=True).start()

    def reserve(self, opening: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]) -> KubernetesReservation:
        """See `coordinator.engine.Reserve`."""
        return KubernetesReservation(self, opening, hello, say)

    def check(self) -> None:
        """Raise `PoolError` if kubectl cannot be used."""
        if not self._is_checked:
            self.kubectl.check()
            self._is_checked = True

    def size(self, opening: m.OpenWorkerGroup) -> int:
        """Return the number of ranks. Raises `PoolError` if the cell names none."""
        all_gpus = NodeCount.of(self.options).most * int(self.options.get("gpus_per_pod", "0"))
        size = opening.ranks(all_gpus or None)
        if not 0 < size < MOST_RANKS:
            raise PoolError(
                f"Kubernetes has to be asked for a number of ranks, not {size}: write --gpus N or --ranks N."
            )
        return size

    def hosts(self, job: PodJob, hosts: tuple[Host, ...]) -> Hosts:
        """Return the pods of a Job."""
        own = HostOptions(
            hosts=hosts,
            nodes=NodeCount(len(hosts)),
            interface=self.options.get("interface", ""),
            reconnect_s=reconnect_s(self.options),
        )
        found = Hosts(Exec(job=job, python=self.options["python"]), own, self.loop, self.calls, self.archive)
        found.facts = self.facts
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Exec:
    """A command in a pod; see `HostCommand`."""

    job: PodJob
    python: str
    engine: str = "Kubernetes"
    kind: str = "kubernetes"
    shows_its_end: bool = False  # a server that restarts ends only the input

    def is_final(self, said: str) -> bool:
        return words.is_gone(said)

    def is_turned_away(self, said: str) -> bool:
        return False

    def words(self, host: str) -> list[str]:
        return self.job.exec(host, (self.python, *bootstrap.WORDS))

    def failure(self, host: str, status: int | None, said: str) -> str:
        if words.is_gone(said):
            return words.GONE
        if text := words.meaning(said):
            return text
        shown = self.job.exec(host, (self.python,))
        tried = shlex.join([*shown, "--version"])
        return command.sentence(host, self.python, status, said, tried=tried, shown=shlex.join(shown))


class KubernetesReservation(RequestedHosts):
    """See `coordinator.engine.Reservation`."""

    engine = "Kubernetes"

    def __init__(
        self, of: KubernetesCluster, opening: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]
    ) -> None:
        super().__init__(of.calls, opening, hello, say)
        self._of = of
        nodes = NodeCount.of(of.options).for_ranks(opening.size, opening.unit)
        options = {**of.options, "nodes": str(nodes)} if nodes else of.options
        self._job = PodJob(of.kubectl, options, say, self._given_up)

    def acquire(self, running: Mapping[str, str]) -> ReservedNodes:
        try:
            self._of.check()
            opening, title = self._opening, self._hello.notebook or self._hello.label
            hosts = self._job.start(
                self._of.size(opening), gpus=opening.gpus, wait_s=opening.wait_s, title=title.rpartition("/")[2]
            )
            nodes = self._reached(hosts)
        except BaseException:
            self._job.release()
            raise
        self._job.company.leave()
        self._reserved = replace(nodes, ends_at_s=self._job.deadline_s)
        return self._reserved

    def _reached(self, hosts: tuple[Host, ...]) -> ReservedNodes:
        """Connect to the pods. Raises `PoolError`, which says how a pod has ended, if one has."""
        try:
            return self._connected(self._of.hosts(self._job, hosts))
        except PoolError:
            if not self._given_up.is_set() and (ended := self.end()):
                raise PoolError(f"{ended} before its ranks had started: run the cell again.") from None
            raise

    def _of_ranks(self, ranks: int) -> KubernetesReservation:
        opening = replace(self._opening, size=ranks, wait_s=0.0)
        return KubernetesReservation(self._of, opening, self._hello, lambda text: None)

    def release(self, *, keep_agents: bool) -> None:
        self.give_up()
        ending = threading.Thread(target=self._job.release, name="jupyter_distrib-release")
        self._further.release(keep_agents=keep_agents)
        ending.start()  # side by side: one needs the connections, the other the server
        if self._nodes is not None:
            self._nodes.release(keep_agents=keep_agents)
        ending.join()

    def _is_another_waiting(self) -> bool:
        return self._job.is_another_waiting()

    def end(self) -> str:
        """Return how a pod has ended, if one has: a user wants to know this first."""
        return self._job.end_of()
