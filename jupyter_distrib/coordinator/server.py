"""The coordinator: it serves worker groups whose ranks are on other machines. Kernels reach it like an agent, by one of
the user's sockets; it outlives them, so that a detached run continues and the next kernel finds it.

    kernel A --link--\\                     /--> node 0: agent, ranks
                      Server, Coordinator --+
    kernel B --link--/                     \\--> node 1: agent, ranks

The kernel itself never talks to the engine, whose library may start threads, take over signals, and end the process
when its cluster goes away. Single-threaded, in the loop of its `Server`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jupyter_distrib.coordinator.node_report import NodeReport, OnReport
from jupyter_distrib.coordinator.run import MultiNodeRun
from jupyter_distrib.coordinator.worker_group import MultiNodeWorkerGroup, NodeSource
from jupyter_distrib.server.server import Server
from jupyter_distrib.server.worker_group import Client
from jupyter_distrib.system import paths
from jupyter_distrib.system.event_loop import Timer
from jupyter_distrib.wire import messages as m

USE_S = 1.0
"""Seconds between two reports of the use of ranks."""
KernelClient = Client[MultiNodeWorkerGroup]
FindNodes = Callable[[KernelClient, m.OpenWorkerGroup], NodeSource]
AskNodes = Callable[[OnReport], None]


class Coordinator:
    """The worker groups on other machines, for the user's kernels that share an environment and a pool.

    Args:
        listener: A bound unix socket, to which kernels connect.
        directory: The folder of sockets and locks.
        name: This coordinator's name in that folder.
        idle_s: Seconds after which ranks that nobody uses and that keep nothing are given back.
    """

    def __init__(self, listener: socket.socket, directory: Path, name: str, *, idle_s: float) -> None:
        self.server: Server[MultiNodeWorkerGroup] = Server(self, listener, directory, name)
        self.loop = self.server.loop
        self.find_nodes: FindNodes
        """Function that finds nodes for a new worker group."""
        self.ask_nodes: AskNodes = lambda on_report: on_report(NodeReport())
        """Function that reports the nodes in the loop, soon."""
        self.on_use: Callable[[bool], None] | None = None
        """Function called with a flag, whether ranks are in use: for each cell that arrives, and then once a second."""
        self.title = "not connected"
        self.idle_s = idle_s
        self._leaving = False
        self._unused: dict[str, Timer] = {}

    def run(self) -> None:
        """Serve until it is no longer needed."""
        if self.on_use is not None:
            self._report_use()
        self.server.serve()

    def stop(self) -> None:
        self.server.stop()

    def give_up(self, after_s: float) -> None:
        """Accept no new kernels, because the cluster cannot be reached: connected kernels ask another coordinator from
        now on, and this one ends when their earlier requests are answered."""
        self.server.give_up_name()
        self._leaving = True
        for client in self.server.clients:
            self.server.send(client, m.Leaving())
        self.loop.later(after_s, self.stop)

    def lose(self, reason: str, after_s: float) -> None:
        """Report to all worker groups that the cluster can never be reached again by this process, and give up."""
        self.give_up(after_s)
        for group in list(self.server.groups):
            group.lose(reason)

    # ------------------------------------------------------------------------------------------------ for the server

    def welcome(self, client: KernelClient) -> None:
        if self._leaving:  # it connected by the name that is gone now
            self.server.send(client, m.Leaving())

    def open(self, client: KernelClient, command: m.OpenWorkerGroup) -> None:
        command = replace(command, size=command.ranks())
        group = MultiNodeWorkerGroup(
            command,
            loop=self.loop,
            find_nodes=lambda command: self.find_nodes(client, command),
            logs=paths.log_directory(),
            emit=lambda event, fds: self._send_event(client, group, event, fds),
        )
        group.on_ended = lambda run: self._run_ended(client, group, run)
        group.on_closed = lambda reason: self.server.close(group, force=True, reason=reason)
        self.server.add(client, group)
        group.open()

    def answer(self, answered: Callable[[m.ServerStatus], None]) -> None:
        self.ask_nodes(lambda report: answered(self._status(report)))

    def _status(self, report: NodeReport) -> m.ServerStatus:
        waiting = tuple(
            m.WaitingStatus(
                holder=client.hello.label if client.hello else "",
                ranks=group.command.size,
                gpus=group.command.gpus,
                reason=group.waits_for,
            )
            for client in self.server.clients
            for group in client.groups.values()
            if group.waits_for
        )
        return m.ServerStatus(state=self.title, name=self.title, waiting=waiting, **m.fields_of(report))

    def close_waiting(self, group: str) -> None:
        """Do nothing: a kernel that waits has a worker group, which looks for nodes."""

    def on_group_closed(self, group: MultiNodeWorkerGroup, *, force: bool) -> None:
        """Do nothing: a worker group gives its nodes back itself."""

    def on_client_gone(self, client: KernelClient) -> None:
        """Do nothing, see `close_waiting`."""

    def handle_command(self, client: KernelClient, command: m.Message) -> None:
        """Do nothing: kernels send no other commands."""

    def before_cell(self) -> None:
        """Report that ranks are in use; nodes report changes of their ranks by themselves."""
        if self.on_use is not None:
            self.on_use(True)

    def free_memory(self) -> None:
        """Do nothing: without worker groups there is no memory to free."""

    # ------------------------------------------------------------------------------------------------ idle ranks

    def _report_use(self) -> None:
        assert self.on_use is not None
        self.on_use(any(group.in_use for group in self.server.groups))
        self.loop.later(USE_S, self._report_use)

    def _send_event(
        self, client: KernelClient, group: MultiNodeWorkerGroup, event: m.Event, fds: tuple[int, ...]
    ) -> None:
        self.server.send(client, event, fds)
        if isinstance(event, m.WorkerGroupOpened):
            self._count_idle(group)

    def _run_ended(self, client: KernelClient, group: MultiNodeWorkerGroup, run: MultiNodeRun) -> None:
        self.server.run_ended(client, group, run.command)
        self._count_idle(group)

    def _count_idle(self, group: MultiNodeWorkerGroup) -> None:
        """Restart the count of a worker group's idle time."""
        if (timer := self._unused.pop(group.name, None)) is not None:
            timer.cancel()
        if not group.closed:
            self._unused[group.name] = self.loop.later(self.idle_s, lambda: self._release(group))

    def _release(self, group: MultiNodeWorkerGroup) -> None:
        if group.closed:
            return
        if group.kept or not group.idle:
            return self._count_idle(group)
        group.end(f"released after {self.idle_s:g} s without a cell", set())
