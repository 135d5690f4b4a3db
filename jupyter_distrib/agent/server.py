"""The agent of one node: it opens worker groups for kernels, leases their GPUs, and clears away what ranks leave.

    kernel A --link--\\                           /-- ranks 0, 1 of A
                      Server, Agent -- forkserver --+
    kernel B --link--/                           \\-- ranks 0..7 of B

Single-threaded, in the loop of its `Server`.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jupyter_distrib.agent.gpus import choice as gpu_choice
from jupyter_distrib.agent.gpus import devices, nvml
from jupyter_distrib.agent.gpus.choice import Choice
from jupyter_distrib.agent.gpus.devices import Inventory
from jupyter_distrib.agent.gpus.inventory import GpuInventory
from jupyter_distrib.agent.gpus.leases import Leases
from jupyter_distrib.agent.gpus.torch_build import torch_build
from jupyter_distrib.agent.groups import gpu_allocation
from jupyter_distrib.agent.groups.gpu_allocation import Allotted, Busy, IdleGpus, WaitingGroups
from jupyter_distrib.agent.groups.room import Room, within
from jupyter_distrib.agent.groups.worker_group import NodeWorkerGroup
from jupyter_distrib.agent.package_sync import PackageSync, Report
from jupyter_distrib.agent.ranks.forkservers import Forkservers
from jupyter_distrib.agent.ranks.leftovers import AdoptedProcesses
from jupyter_distrib.server.server import Server
from jupyter_distrib.server.worker_group import Client
from jupyter_distrib.system import control_groups, formatting, log_folder, network_interfaces, paths, scratch
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.launch import Launched
from jupyter_distrib.wire import messages as m

LEAVING_S = 15.0
"""Seconds within which dismissed or killed ranks are gone: a driver needs seconds to free much memory."""
ANSWER_LIMIT_S = 1.0
"""Seconds after which the status falls back to the GPU driver's last answer."""
WAITS_S = 2.0
"""Seconds after which a cell says that it waits for the GPU driver."""
SWEEP_S = 0.5
"""Seconds after the end of a rank until its temporary files are removed."""
KernelClient = Client[NodeWorkerGroup]


class Agent:
    """The agent that serves the ranks of this node to the user's kernels with one environment.

    Args:
        listener: A bound unix socket, to which kernels connect.
        directory: The folder of sockets, locks and leases.
        name: This agent's name in that folder.
        launched: A forkserver that is starting already.
    """

    def __init__(self, listener: socket.socket, directory: Path, name: str, launched: Launched | None = None) -> None:
        self.server: Server[NodeWorkerGroup] = Server(self, listener, directory, name)
        self._loop = self.server.loop
        self._logs = paths.log_directory(otherwise=directory)
        self._forkservers = Forkservers(self._loop, self._exchange_early, launched)
        self._calls = CallSoon(self._loop)
        self._gpus = GpuInventory(self._loop, self._calls, nvml.session)
        self._gpu_allocation = gpu_allocation.GpuAllocation(
            Leases(self._loop), self.server.groups, lambda group: self.server.close(group, force=True)
        )
        self._idle_gpus = IdleGpus(self._loop, self.server.groups, self._give_up_idle)
        self._package_sync = PackageSync(self._calls)
        self._opening: dict[str, KernelClient] = {}
        """Worker groups to be opened once the driver has listed its GPUs or their packages have been compared, with
        their kernels."""
        self._early_stores: dict[str, m.UseStore] = {}
        """The stores of worker groups that other nodes have opened earlier."""
        self._reports: dict[str, Report] = {}
        """Reports on the packages of worker groups that are about to be opened."""
        self._closing: dict[NodeWorkerGroup, float] = {}
        """Closing time of each closed group whose ranks may still exist."""
        self._swept: set[str] = set()
        """The folders of temporary files that ranks have had."""
        self._is_sweeping = False
        self._waiting = WaitingGroups(self._loop, self.open, self.server.send)
        self._adopted = AdoptedProcesses(
            self._loop,
            forking=lambda: self._forkservers.busy,
            pids=lambda: {pid for group in self._all_groups() for pid in group.ranks.pids},
            sessions=lambda: {self._forkservers.session, *self._package_sync.sessions},
            marks=lambda: {mark for group in self._all_groups() for mark in group.ranks.marks},
        )
        self._loop.on_child_ended = self._reap

    def _all_groups(self) -> Sequence[NodeWorkerGroup]:
        return (*self.server.groups, *self._closing)

    def run(self) -> None:
        """Serve until nobody needs this node's ranks any more."""
        self._forkservers.start()
        self._gpus.ask(lambda inventory: None)  # while the forkserver imports torch
        log_folder.of(self._logs).tidy()
        scratch.sweep()
        self.server.serve()
        self._sweep()

    def stop(self) -> None:
        self.server.stop()

    # ------------------------------------------------------------------------------------------------ for the server

    def welcome(self, client: KernelClient) -> None:
        self._forkservers.start()  # the session is closed if this agent has rested

    def on_client_gone(self, client: KernelClient) -> None:
        self._waiting.remove_client(client)
        for group in [group for group, each in self._opening.items() if each is client]:
            self.close_waiting(group)

    def close_waiting(self, group: str) -> None:
        self._waiting.remove(group)
        self._opening.pop(group, None)
        self._package_sync.give_up(group)
        self._reports.pop(group, None)
        self._early_stores.pop(group, None)

    def free_memory(self) -> None:
        self._forkservers.stop()

    def handle_command(self, client: KernelClient, command: m.Message) -> None:
        """Follow a command about a worker group that spans several nodes."""
        match command:
            case m.MakeStore():
                if (group := client.groups.get(command.group)) is not None:
                    group.store.renew()
            case m.UseStore():
                if (group := client.groups.get(command.group)) is not None:
                    group.store.use(command)
                elif command.group in self._opening:
                    self._early_stores[command.group] = command
            case m.KeepNodeGroups():
                if (group := client.groups.get(command.group)) is not None:
                    group.keep_groups(command)
            case m.CutRemoteSockets():
                for group in client.groups.values():
                    group.cut_remote_sockets(command)
            case m.Probe():
                for group in client.groups.values():
                    if group.run is not None and group.is_for(command.run):
                        group.run.probe_deeply()

    def before_cell(self) -> None:
        self._reap()  # a rank that died a moment ago is replaced before the cell, not lost in it

    def answer(self, answered: Callable[[m.ServerStatus], None]) -> None:
        self._gpus.ask(lambda inventory: answered(self._status(inventory)), limit_s=ANSWER_LIMIT_S)

    def _status(self, inventory: Inventory) -> m.ServerStatus:
        gpus = self._gpu_allocation.statuses(inventory)
        node = m.NodeStatus(
            name=platform.node(),
            cpus=control_groups.cores(),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            gpus=len(gpus),
            free_gpus=sum(not gpu.holder for gpu in gpus),
            gpu_type=", ".join(dict.fromkeys(gpu.name for gpu in gpus)),
        )
        return m.ServerStatus(
            state=f"forkserver {self._forkservers.state}",
            name=node.name,
            nodes=(node,),
            gpus=gpus,
            waiting=self._waiting.statuses(),
            gpu_problem=gpu_choice.troubles(inventory, torch_build()),
        )

    def open(self, client: KernelClient, command: m.OpenWorkerGroup) -> None:
        """Open a worker group; with GPUs, as soon as the driver has reported their present use. Packages come first. A
        group of this name is replaced: its run grows over more nodes."""
        if (before := client.groups.get(command.group)) is not None:
            self.server.close(before, force=True)
        if reason := network_interfaces.why_unreachable(command.host):
            return self._refuse(client, command, reason)
        if command.packages is not None:
            return self._sync_packages(client, command)
        if not command.gpus:
            return self._open_with(client, command, Choice(size=command.ranks()))
        self._opening[command.group] = client
        given_back = self._gpu_allocation.given_back
        self._loop.later(WAITS_S, lambda: self._report_driver_wait(client, command))
        return self._gpus.ask(lambda inventory: self._open_on(client, command, inventory, given_back), fresh_s=0.0)

    def _report_driver_wait(self, client: KernelClient, command: m.OpenWorkerGroup) -> None:
        if self._opening.get(command.group) is client:
            reason = "the GPU driver has not answered yet."
            self.server.send(client, m.WorkerGroupQueued(group=command.group, reason=reason))

    def _sync_packages(self, client: KernelClient, command: m.OpenWorkerGroup) -> None:
        """Open a worker group when its Python has the packages that the notebook has."""
        self._opening[command.group] = client

        def say(installing: str) -> None:
            reason = f"packages that the ranks lack are being installed: {installing}"
            self.server.send(client, m.WorkerGroupQueued(group=command.group, reason=reason))

        def then(report: Report) -> None:
            if self._opening.pop(command.group, None) is not client:
                return None
            if refusal := report.get("refusal"):
                return self._refuse(client, command, refusal)
            self._reports[command.group] = report
            return self.open(client, replace(command, packages=None))

        self._package_sync.start(command, say, then)

    def _open_on(self, client: KernelClient, command: m.OpenWorkerGroup, inventory: Inventory, given_back: int) -> None:
        """Open a worker group on GPUs, if the node has any."""
        if self._opening.pop(command.group, None) is not client:
            return
        if given_back != self._gpu_allocation.given_back:
            return self.open(client, command)
        try:
            self._open_on_gpus(client, command, inventory)
        except Exception as error:  # noqa: BLE001 - called by the loop: the ranks of others live on
            self.server.fail_command(client, command, error)

    def _open_on_gpus(self, client: KernelClient, command: m.OpenWorkerGroup, inventory: Inventory) -> None:
        try:
            choice = gpu_choice.choose(command, inventory, torch_build())
        except gpu_choice.GpusRefused as error:
            return self._refuse(client, command, str(error))
        if reason := gpu_allocation.too_many(choice.size):
            return self._refuse(client, command, reason)
        if not choice.alternatives:
            return self._open_with(client, command, choice)
        assert client.hello is not None
        match self._gpu_allocation.lease(choice, client.hello, self._leaving()):
            case Allotted(gpus=gpus, notes=notes):
                return self._open_with(client, command, replace(choice, notes=(*choice.notes, *notes)), gpus)
            case Busy() as busy:
                wait_s = max(command.wait_s, busy.soon_s)
                if not wait_s:
                    return self._refuse(client, command, busy.reason)
                return self._waiting.add(client, replace(command, wait_s=wait_s), "" if busy.soon_s else busy.reason)

    def _refuse(self, client: KernelClient, command: m.OpenWorkerGroup, reason: str) -> None:
        self._waiting.remove(command.group)
        self.server.send(client, m.WorkerGroupRefused(group=command.group, reason=reason))

    def _open_with(
        self, client: KernelClient, command: m.OpenWorkerGroup, choice: Choice, gpus: Sequence[devices.Gpu] = ()
    ) -> None:
        if reason := gpu_allocation.too_many(choice.size):
            self._gpu_allocation.give_back(gpus)
            return self._refuse(client, command, reason)
        size = len(gpus) or self._cpu_ranks(command, choice.size)
        if not gpus and (reason := gpu_allocation.too_many_for_cpus(size)):
            return self._refuse(client, command, reason)
        self._waiting.remove(command.group)
        command = replace(command, gpus=bool(gpus), size=size)
        if command.world_size > command.size:  # such ranks are not exchanged, see `NodeWorkerGroup.has_early_ranks`
            self._forkservers.growing = False
        report = self._reports.pop(command.group, {})
        group = NodeWorkerGroup(
            command,
            overlay=report.get("overlay", ""),
            loop=self._loop,
            forkservers=self._forkservers,
            gpus=list(gpus),
            node_has_gpus=lambda: gpu_choice.outlook(command, self._gpus.latest, torch_build()),
            notes=(*choice.notes, *filter(None, [report.get("note")])),
            logs=self._logs,
            emit=lambda event, fds: self.server.send(client, event, fds),
        )
        group.on_ended = lambda run: self.server.run_ended(client, group, run.command)
        group.on_failed = lambda reason: self.server.close(group, force=True, reason=reason)
        group.ask_room = lambda ranks, unit, then: self._find_room(client, group, ranks, unit, then)
        group.give_back = self._give_back
        group.find_other_gpu = lambda gpu, error, then: self._find_other_gpu(client, group, gpu, error, then)
        group.starts.on_unstarted = lambda: self._loop.soon(self._release_closed)
        self.server.add(client, group)
        self._idle_gpus.watch(group, client.hello.idle_s if client.hello else 0.0)
        group.open()
        if (store := self._early_stores.pop(command.group, None)) is not None:
            group.store.use(store)

    def _cpu_ranks(self, command: m.OpenWorkerGroup, most: int) -> int:
        """Return the number of CPU ranks that a worker group begins with, if several numbers will do."""
        if not command.least:
            return most
        return max(command.least, within(self._free_cores(), most, command.unit))

    def _free_cores(self) -> int:
        """Return the number of cores that no CPU rank of a cell uses."""
        used = sum(group.command.size for group in self.server.groups if not (group.gpus or group.idle))
        return control_groups.cores() - used

    def _find_room(
        self, client: KernelClient, group: NodeWorkerGroup, ranks: int, unit: int, then: Callable[[Room], None]
    ) -> None:
        """Get room for up to this many more ranks of a worker group that executes a cell, as far as nobody waits."""
        if group.store.spans_nodes or group.command.world_size:
            return then(Room())  # the coordinator decides
        if not group.gpus:
            return then(Room(ranks=within(self._free_cores(), ranks, unit)))

        def lease_free(inventory: Inventory) -> None:
            if self._waiting or self._opening or group.closed or client.hello is None:
                return then(Room())
            fitting = gpu_choice.alike(group.command, group.gpus, inventory)
            gpus = self._gpu_allocation.lease_free(fitting, ranks, unit, client.hello.label)
            return then(Room(ranks=len(gpus), gpus=gpus))

        return self._gpus.ask(lease_free, fresh_s=0.0)

    def _find_other_gpu(
        self,
        client: KernelClient,
        group: NodeWorkerGroup,
        gpu: devices.Gpu,
        error: str,
        then: Callable[[devices.Gpu | None, str], None],
    ) -> None:
        """Lease another GPU for a rank that could not start on this one; see `FindOtherGpu`."""

        def lease_other(inventory: Inventory) -> None:
            broken = f"GPU {gpu.number} cannot be used ({error})" if error else ""
            why = gpu_choice.loss(gpu, inventory) or broken
            if not why or group.closed:
                return then(None, why)
            fitting = [each for each in gpu_choice.alike(group.command, group.gpus, inventory) if each != gpu]
            label = client.hello.label if client.hello else ""
            return then(next(iter(self._gpu_allocation.lease_free(fitting, 1, 1, label)), None), why)

        self._gpus.ask(lease_other, fresh_s=0.0, limit_s=ANSWER_LIMIT_S)

    def _give_back(self, gpus: Sequence[devices.Gpu]) -> None:
        if gpus:
            self._gpu_allocation.give_back(gpus)
            self._waiting.retry_soon()

    def _leaving(self) -> dict[devices.Gpu, float]:
        """Return the GPUs of ranks that are leaving, and how long to wait for each."""
        left_s = {group: LEAVING_S - (time.monotonic() - closed_s) for group, closed_s in self._closing.items()}
        return {gpu: left_s[group] for group in self._closing for gpu in group.gpus if left_s[group] > 0}

    def _give_up_idle(self, group: NodeWorkerGroup, idle_s: float) -> None:
        self.server.close(group, force=False)
        reason = f"its GPUs were given back after {formatting.duration(idle_s)} without a cell"
        group.emit(m.WorkerGroupClosed(group=group.name, reason=reason), ())

    def on_group_closed(self, group: NodeWorkerGroup, *, force: bool) -> None:
        self._closing[group] = time.monotonic()
        self._release_closed()

    def _release_closed(self) -> None:
        """Give back the GPUs of closed groups whose ranks are gone: a killed rank has its GPU until it is reaped."""
        for group in [group for group in self._closing if not group.ranks.living]:
            del self._closing[group]
            self._gpu_allocation.give_back(group.gpus)
            group.drop_room()
            group.gpus = []
            if group.command.world_size:  # a coordinator has opened it, which gives the node back now
                group.emit(m.RanksLeft(group=group.name), ())
            self._waiting.retry_soon()

    # ------------------------------------------------------------------------------------------------ better ranks

    def _exchange_early(self) -> None:
        """Replace the ranks of groups that have run no cell by ranks of the preloaded forkserver, which is ready.

        A cell may leave anything in its process, such as a seed or a changed module, which later cells rely on.
        """
        for group in tuple(self.server.groups):
            better = group.has_early_ranks and group.idle and not group.ran_s
            if better and not gpu_allocation.too_many(group.command.size):
                try:
                    group.starts.replace_all()
                except Exception as error:  # noqa: BLE001 - the ranks of others live on
                    group.fail_for(error)

    # ------------------------------------------------------------------------------------------------ processes

    def _reap(self) -> None:
        """Reap every child that has ended, and clean up after ended ranks."""
        ended = False
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._forkservers.on_child_ended(pid, os.waitstatus_to_exitcode(status))
            for group in self._all_groups():
                if (rank := group.ranks.find(pid)) is not None:
                    ended = True
                    self._swept |= group.temporary_folders
                    group.on_rank_lost(rank, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
        if ended:
            self._release_closed()
            self._adopted.kill()
            self._sweep_soon()

    def _sweep_soon(self) -> None:
        """Remove the temporary files of ended ranks once everything that they started has ended too."""
        if not self._is_sweeping:
            self._is_sweeping = True
            self._loop.later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._is_sweeping = False
        scratch.sweep(*self._swept)
