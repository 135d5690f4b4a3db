r"""A process that serves the user's kernels and outlives them. The agent has one, and so has the coordinator.

    kernel A --link--\          /-- worker group of A
                       server --+
    kernel B --link--/          \-- worker group of B

When a kernel's link or process ends, its worker groups end too, except one that executes a detached run. The `Service`
defines what a worker group is and how it is opened. Single-threaded, in one `Loop`.
"""

from __future__ import annotations

import os
import platform
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Generic, Protocol

from jupyter_distrib.server import detached_runs
from jupyter_distrib.server.attempts import Attempts
from jupyter_distrib.server.detached_runs import DetachedRuns
from jupyter_distrib.server.growth import Growth
from jupyter_distrib.server.listener import Listener, SocketName
from jupyter_distrib.server.worker_group import Client, Emit, G
from jupyter_distrib.system import confinement, last_seen, open_files, process_environment
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.wire import endings
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link, LinkError, encode

IDLE_S = float(os.environ.get("JUPYTER_DISTRIB_IDLE_S", "600"))
"""Seconds for which an idle server keeps running, so that the next kernel starts at once."""
GATHER_S = 0.003
"""Seconds to wait after a cell's start or end on one rank: those of other ranks, and the run's end, travel with it."""


class Service(Protocol[G]):
    """The methods that differ between the agent and the coordinator. Each is called in the loop, and returns at
    once."""

    def welcome(self, client: Client[G]) -> None:
        """Prepare for a kernel that has just been welcomed."""

    def open(self, client: Client[G], command: m.OpenWorkerGroup) -> None:
        """Open a worker group, refuse it, or queue it; an opened one is passed to `Server.add`."""

    def close_waiting(self, group: str) -> None:
        """Forget a worker group that waits to be opened."""

    def on_group_closed(self, group: G, *, force: bool) -> None:
        """Give back the resources of a worker group that is closed now."""

    def on_client_gone(self, client: Client[G]) -> None:
        """Drop the requests of a kernel that has gone."""

    def handle_command(self, client: Client[G], command: m.Message) -> None:
        """Handle a command that the server itself does not know."""

    def before_cell(self) -> None:
        """Process everything that has happened to the ranks so far, before a cell is sent to them."""

    def answer(self, answered: Callable[[m.ServerStatus], None]) -> None:
        """Report the status soon; the server adds its process and its worker groups."""

    def free_memory(self) -> None:
        """Free memory: no kernel is connected, and only records of detached runs are left."""


class Server(Generic[G]):
    """The kernels that are served, and their worker groups.

    Args:
        listener: A bound unix socket, to which kernels connect.
        directory: The folder of sockets and locks.
        name: This server's name in that folder.
    """

    def __init__(self, service: Service[G], listener: socket.socket, directory: Path, name: str) -> None:
        self._service = service
        self._listener, self._name = Listener(listener), SocketName(directory, name)
        self.loop = Loop(on_error=traceback.print_exception)  # into the process's log
        self.clients: list[Client[G]] = []
        self.groups: list[G] = []
        self._closed: dict[str, str] = {}
        """Reasons why worker groups were closed, for cells still on their way to them."""
        self._attempts: dict[str, Attempts] = {}
        """The runs that may be restarted, by id."""
        self._detached = DetachedRuns(self.send, directory, name)
        self._idle_timer: Timer | None = None
        self._seen_timer: Timer | None = None
        self._started_s = time.monotonic()

    def serve(self) -> None:
        """Accept kernels until this process is no longer needed."""
        self._listener.listen()
        self.loop.watch(self._listener.fileno(), self._accept)
        self._prune()
        self.count_idle()
        self.loop.run()

    def stop(self) -> None:
        """End every rank, and the process."""
        for group in self.groups:
            group.close(force=True)
        self.give_up_name()
        self.loop.stop()

    def give_up_name(self) -> None:
        """Accept no new kernels."""
        self._name.give_up()

    @property
    def keeps_records(self) -> bool:
        """Return whether it keeps records of detached runs, which would be lost with the process."""
        return bool(self._detached)

    # ------------------------------------------------------------------------------------------------ kernels

    def _accept(self) -> None:
        sock = self._listener.accept()
        if sock is None:
            return
        client: Client[G] = Client(link=Link(sock))
        self.clients.append(client)
        self._watch(client)
        self.count_idle()

    def _watch(self, client: Client[G]) -> None:
        self.loop.watch(
            client.link.fileno(),
            lambda: self._readable(client),
            (lambda: self._flush(client)) if client.link.unsent else None,
        )

    def _flush(self, client: Client[G]) -> None:
        client.gather_no_more()
        try:
            if client in self.clients:
                client.link.flush()
                self._watch(client)
        except OSError:
            self._gone(client)

    def send(self, client: Client[G] | None, event: m.Event, fds: tuple[int, ...] = ()) -> None:
        """Send an event to a kernel, if it is still connected; takes no descriptor."""
        if client is None or client not in self.clients:
            return
        is_first = not client.link.unsent
        client.link.post(encode(event, len(fds)), fds)
        if isinstance(event, m.Started | m.Returned):
            if is_first:
                client.gathering = self.loop.later(GATHER_S, lambda: self._flush(client))
        elif is_first or client.gathering is not None:
            client.gather_no_more()
            self.loop.soon(lambda: self._flush(client))

    def _readable(self, client: Client[G]) -> None:
        try:
            for message, fds in client.link.read():
                try:
                    with Descriptors(fds) as descriptors:
                        if not descriptors.complete:
                            raise open_files.error()
                        self._obey(client, message, descriptors)
                except Exception as error:  # noqa: BLE001 - whatever one kernel sends, the ranks of the others live on
                    self.fail_command(client, message, error)
        except (EOFError, OSError, LinkError):
            self._gone(client)

    def fail_command(self, client: Client[G], command: m.Message, error: Exception) -> None:
        """Report an internal error in one of a kernel's commands; if the command expects no answer, the link is
        closed."""
        traceback.print_exception(error)  # into the process's log
        reason = f"this command failed ({open_files.typed_reason(error)})."
        match command:
            case m.OpenWorkerGroup():
                if (group := client.groups.get(command.group)) is not None:
                    self.close(group, force=True, reason=reason)
                self.send(client, m.WorkerGroupRefused(group=command.group, reason=reason))
            case m.Execute():
                if (group := client.groups.get(command.group)) is not None:
                    self.close(group, force=True, reason=reason)
                    self.send(client, m.WorkerGroupClosed(group=command.group, reason=reason))
                for event in endings.lost(command.run, dict.fromkeys(command.ranks, 0), reason):
                    self.send(client, event)
            case _:
                self._gone(client)

    def _gone(self, client: Client[G]) -> None:
        """End the ranks of a kernel that has left or died, so that its GPU memory is free."""
        if client not in self.clients:
            return
        self.clients.remove(client)
        self._detached.remove_listener(client)
        self._service.on_client_gone(client)
        self.loop.watch(client.link.fileno(), None)
        client.link.close()
        if client.pidfd >= 0:
            self.loop.watch(client.pidfd, None)
            os.close(client.pidfd)
        for group in list(client.groups.values()):
            if not group.detached:
                self.close(group, force=True)
        self.count_idle()

    def _obey(self, client: Client[G], command: m.Message, descriptors: Descriptors) -> None:
        if client.hello is None and not isinstance(command, m.Hello):
            return self._gone(client)
        match command:
            case m.Hello():
                self._welcome(client, command)
            case m.OpenWorkerGroup():
                self._service.open(client, command)
            case m.Execute():
                self._execute(client, command, descriptors)
            case m.Stop():
                self._stop_run(command)
            case m.AskStacks():
                self._ask_stacks(command)
            case m.Debug():
                self._debug(client, command)
            case m.Forget():
                if (group := client.groups.get(command.group)) is not None:
                    group.forget(command)
            case m.CloseWorkerGroup():
                self._service.close_waiting(command.group)
                if (group := client.groups.get(command.group)) is not None:
                    self.close(group, force=command.force, reason=command.reason)
                    self.send(client, m.WorkerGroupClosed(group=command.group))
            case m.Ask():
                self._answer(client, command)
            case m.Attach():
                self._detached.attach(client, command)
            case _:
                self._service.handle_command(client, command)

    def _welcome(self, client: Client[G], hello: m.Hello) -> None:
        if hello.protocol != m.PROTOCOL:
            return self._gone(client)
        client.hello = hello
        own = confinement.pid_namespace()
        if hasattr(os, "pidfd_open") and hello.pid_namespace in ("", own):  # else the pid means another process here
            with suppress(OSError):
                client.pidfd = os.pidfd_open(hello.pid)
                self.loop.watch(client.pidfd, lambda: self._gone(client))
        versions = {name: process_environment.version(name) for name in ("torch", "cloudpickle")}
        python = platform.python_version()
        self.send(client, m.Welcomed(pid=os.getpid(), pid_namespace=own, python=python, **versions))
        self._service.welcome(client)

    # ------------------------------------------------------------------------------------------------ worker groups

    def add(self, client: Client[G], group: G) -> None:
        """Serve a worker group of this kernel."""
        client.groups[group.name] = group
        self.groups.append(group)

    def close(self, group: G, *, force: bool, reason: str = "") -> None:
        """Close a worker group, if it is not closed yet."""
        if group.closed:
            return
        try:
            group.close(force=force, reason=reason)
        except Exception:  # noqa: BLE001 - it is closed as far as possible, and the others live on
            traceback.print_exc()  # into the process's log
        self.groups.remove(group)
        self._closed[group.name] = reason
        for client in self.clients:
            client.groups.pop(group.name, None)
            client.began_at_s.pop(group.name, None)
        self._service.on_group_closed(group, force=force)
        self.count_idle()

    # ------------------------------------------------------------------------------------------------ runs

    def _execute(self, client: Client[G], command: m.Execute, descriptors: Descriptors) -> None:
        self._service.before_cell()
        group = client.groups.get(command.group)
        if group is None:  # the worker group went away while the cell was on its way
            reason = self._closed.get(command.group, "")
            for event in endings.lost(command.run, dict.fromkeys(command.ranks, 0), reason):
                self.send(client, event)
            return
        client.began_at_s[group.name] = time.time()
        frame = client.link.frame
        emit: Emit = lambda event, out: self.send(client, event, out)  # noqa: E731
        if command.detached:
            size = group.command.world_size or group.command.size
            gpus = group.command.gpus
            emit, frame = self._detached.start_record(client, command, group.infos(), size, gpus=gpus), b""
            self._touch_later()
        if (command.max_restarts or command.most_ranks) and not command.run_size:
            self._attempt(group, command, descriptors, emit)
        else:
            group.execute(command, descriptors, emit, frame)

    def _attempt(self, group: G, command: m.Execute, descriptors: Descriptors, emit: Emit) -> None:
        """Execute a cell that is restarted when a rank is lost, or when there is room for more ranks."""

        def execute(command: m.Execute, descriptors: Descriptors, emit: Emit) -> bool:
            if not group.closed:
                group.execute(command, descriptors, emit)
            return not group.closed

        def say(text: str) -> None:
            emit(m.Noted(run=command.run, rank=None, text=text), ())

        growth = Growth(command, group, later=self.loop.later, note=say) if command.most_ranks else None
        attempts = Attempts(
            command,
            descriptors,
            emit,
            execute=execute,
            soon=self.loop.soon,
            on_over=self._attempts.pop,
            growth=growth,
        )
        self._attempts[command.run] = attempts
        attempts.start()

    def _stop_run(self, command: m.Stop) -> None:
        if (attempts := self._attempts.get(command.run)) is not None:
            attempts.stop()
        for group in list(self.groups):
            if group.is_for(command.run):
                group.stop(force=command.force)
                self.close_if_left(group)

    def _ask_stacks(self, command: m.AskStacks) -> None:
        for group in self.groups:
            if group.is_for(command.run):
                group.ask_stacks()

    def _debug(self, client: Client[G], command: m.Debug) -> None:
        if (group := client.groups.get(command.group)) is not None:
            return group.debug(command)
        gone = m.DebuggerLeft(run=command.run, rank=command.rank, text="the rank has ended.", at_s=time.monotonic())
        return self.send(client, gone)

    def run_ended(self, client: Client[G], group: G, run: m.Execute) -> None:
        """Close a worker group whose kernel has gone, when the detached run for which it stayed has ended."""
        if run.detached and client not in self.clients and run.run not in self._attempts:
            self.loop.later(0, lambda: self.close_if_left(group))

    def close_if_left(self, group: G) -> None:
        if group.idle and not any(group in client.groups.values() for client in self.clients):
            self.close(group, force=False)

    # ------------------------------------------------------------------------------------------------ housekeeping

    def _answer(self, client: Client[G], ask: m.Ask) -> None:
        self._service.answer(
            lambda status: self.send(client, m.Answered(question=ask.question, status=self._completed(status)))
        )

    def _completed(self, status: m.ServerStatus) -> m.ServerStatus:
        groups = tuple(group for client in self.clients for group in client.statuses())
        return replace(status, pid=os.getpid(), up_s=time.monotonic() - self._started_s, groups=groups)

    def count_idle(self) -> None:
        """Start or stop counting the idle time."""
        busy = self.clients or self.groups or self._detached.going_on
        if busy and self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        elif not busy and self._idle_timer is None:
            self._idle_timer = self.loop.later(IDLE_S, self._rest if self._detached else self._retire)

    def _rest(self) -> None:
        """Keep only the records of detached runs, at little cost."""
        self._service.free_memory()
        self._idle_timer = self.loop.later(detached_runs.KEEP_S, self._retire)

    def _retire(self) -> None:
        """End the process, unless a kernel connects at this very moment.

        Kernels connect without the lock, so one may have come just before the name was removed: it is served to its
        end, while later kernels start a process of their own.
        """
        self._idle_timer = None
        if not self._name.reachable:
            return self.loop.stop()
        with self._name.held():
            self._accept()
            if not self.clients:
                self.give_up_name()
                self._accept()
            if not self.clients:
                self.loop.stop()

    def _touch_later(self) -> None:
        if self._seen_timer is None:
            self._seen_timer = self.loop.later(last_seen.EVERY_S, self._touch)

    def _touch(self) -> None:
        """Record that detached runs are alive, now and regularly as long as there are any."""
        self._seen_timer = None
        self._detached.touch()
        if self._detached.going_on:
            self._touch_later()

    def _prune(self) -> None:
        self._detached.prune()
        self.loop.later(detached_runs.KEEP_S / 24, self._prune)
