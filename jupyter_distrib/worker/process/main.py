"""The process of a rank: one command after another in the main thread, and a control thread that receives a stop while
the main thread is busy.

    agent ==link==> control thread --inbox--> main thread: Execute, ResetGroups, KeepGroups, Forget, Leave
                         |
                         +-- Cut: shut the sockets that a blocked collective waits on

The user's code runs in the main thread, where signals arrive. SIGINT raises `KeyboardInterrupt` only while a cell runs.
"""

from __future__ import annotations

import os
import queue
import socket
from typing import NoReturn

from jupyter_distrib.cells import event_loops
from jupyter_distrib.interfaces import framework, identity
from jupyter_distrib.system import crash_notes, open_files, process
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link
from jupyter_distrib.worker.debugging import debugger_channel
from jupyter_distrib.worker.debugging.probe import Prober
from jupyter_distrib.worker.environment import child_processes, threads
from jupyter_distrib.worker.environment.cleanup import Cleanup
from jupyter_distrib.worker.interrupts import Interrupts
from jupyter_distrib.worker.messenger import Messenger
from jupyter_distrib.worker.output import displaying
from jupyter_distrib.worker.process.control_thread import ControlThread, Entry
from jupyter_distrib.worker.process.device_check import give_up
from jupyter_distrib.worker.process.execution import CellRunner
from jupyter_distrib.worker.process.repair import Repair


def run_worker(
    order: m.WorkerOrder,
    link_fd: int,
    stdout_fd: int,
    stderr_fd: int,
    loading_fd: int,
    *,
    early: bool,
    gone: int | None = None,
) -> NoReturn:
    """Run as this rank until ordered to leave. Called in a process just forked from the forkserver, or just exec'd.

    `gone`, if given, is a pipe that closes when the process that forked this one exits, so that the agent adopts it.
    """
    os.setsid()
    process.redirect_streams(stdout_fd, stderr_fd)
    identity.assume(order)
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **identity.device_variables()}
    link = Link(socket.socket(fileno=link_fd))
    messenger = Messenger(link)
    interrupts = Interrupts(messenger)
    interrupts.install()
    crash_notes.write_place_on_signal(loading_fd)
    library = set_up_process(order)
    repair = Repair(link_fd, loading_fd)
    worker = Worker(order, link, repair, messenger=messenger, interrupts=interrupts, library=library)
    if gone is not None:
        os.read(gone, 1)
        os.close(gone)
    process.die_with_parent(order.agent_pid)
    messenger.send(m.Ready(rank=order.rank, pid=os.getpid(), early=early, reports_reset=worker.reports_reset))
    worker.serve()


def set_up_process(order: m.WorkerOrder) -> framework.Framework:
    """Set up what a fork leaves open (threads, children, framework, device). Return the framework."""
    assert framework.current is not None
    threads.use(order.threads, {})
    displaying.install()
    child_processes.install()
    event_loops.install()
    framework.current.set_up(order)
    try:
        framework.current.use_device()
    except Exception as error:  # noqa: BLE001 - whatever the driver says
        give_up(f"{crash_notes.NO_DEVICE}{str(error).partition(chr(10))[0] or type(error).__name__}")
    return framework.current


class Worker:
    """One rank's process: its parts, and the commands that its main thread executes."""

    def __init__(
        self,
        order: m.WorkerOrder,
        link: Link,
        repair: Repair,
        *,
        messenger: Messenger,
        interrupts: Interrupts,
        library: framework.Framework,
    ) -> None:
        self._inbox: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._missed: tuple[m.ResetGroups, list[int]] | None = None
        """A group reset that could not be carried out yet, with its descriptors."""
        self._order, self._messenger, self._groups = order, messenger, library.groups
        self._repair = repair
        self._cleanup = Cleanup(library, has_gpu=order.visible_devices is not None)
        debugger = debugger_channel.DebuggerChannel(order.rank, messenger.send, interrupts, _new_debugger)
        debugger_channel.install(debugger)
        prober = Prober(
            order.rank,
            library.sightings,
            library.device_memory,
            library.phase_times,
            in_debugger=lambda: debugger.stopped,
        )
        self._control = ControlThread(
            link,
            self._inbox,
            messenger=messenger,
            interrupts=interrupts,
            prober=prober,
            groups=library.groups,
            debugger=debugger,
            use_device=library.use_device,
        )
        self._runner = CellRunner(
            order,
            repair,
            library,
            messenger=messenger,
            interrupts=interrupts,
            control=self._control,
            prober=prober,
            cleanup=self._cleanup,
            debugger=debugger,
        )

    @property
    def reports_reset(self) -> bool:
        """Return whether this rank reports the end of a group reset, for which the next cell waits."""
        return self._order.visible_devices is not None or self._groups.ends_at_reset

    def serve(self) -> NoReturn:
        """Execute commands until ordered to leave."""
        self._control.start()
        while True:
            try:
                entry = self._next()
                if entry is None:
                    process.leave()
                self._obey(*entry)
                del entry
                if self._cleanup.is_urgent:
                    self._cleanup.collect()
            except KeyboardInterrupt:  # the interrupt came a moment too late for the cell
                continue
            except Exception as error:  # noqa: BLE001 - the agent has to know why
                self._repair.leave_after(error)

    def _next(self) -> Entry:
        for idle_s, clean in self._cleanup.when_idle():
            try:
                return self._inbox.get(timeout=idle_s)
            except queue.Empty:
                clean()
        return self._inbox.get()

    def _reset_groups(self, command: m.ResetGroups, fds: list[int], *, may_wait: bool = True) -> None:
        """Drop all groups, as all ranks do at the same time; if `reports_reset`, report when this is done.

        If too many files are open, the reset waits for the next cell, which closes the files of a failed cell or gets
        the reason why this rank is lost.
        """
        if self._missed is not None:
            Descriptors(self._missed[1]).close()
        self._missed = None
        try:
            if open_files.LOST in fds:
                raise open_files.error()
            self._groups.reset(command.host, command.port, fds[0] if fds else -1)
        except (OSError, RuntimeError) as error:
            if not may_wait or not isinstance(error, OSError):
                give_up(f"rank {self._order.rank} is replaced: {open_files.advice_on(error) or error}")
            self._missed = command, fds
        if self.reports_reset:
            self._messenger.send(m.DeviceSettled(rank=self._order.rank))

    def _obey(self, command: m.Message, fds: list[int]) -> None:
        match command:
            case m.Execute():
                if (missed := self._missed) is not None:
                    self._runner.failure.drop()
                    self._missed = None
                    self._reset_groups(*missed, may_wait=False)
                self._runner.execute(command, fds)
            case m.ResetGroups():
                self._reset_groups(command, fds)
            case m.KeepGroups():
                self._groups.keep()
            case m.ReplaceStreams():
                self._runner.replace_streams(command.run)
            case m.Forget():
                self._cleanup.forget(command.keys)
            case m.Debug(action="drop"):
                self._runner.failure.drop()
            case m.Debug():
                self._runner.failure.examine(command)
            case m.Leave():
                process.leave()


def _new_debugger(channel: debugger_channel.DebuggerChannel) -> debugger_channel.Debugger:
    """Return a debugger for one cell; loaded here because most ranks need none."""
    from jupyter_distrib.worker.debugging.debugger import RankPdb

    return RankPdb(channel)
