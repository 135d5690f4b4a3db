"""The thread of a rank that receives a stop while the main thread is busy. It passes commands on, answers probes, and
acts on `CutSockets` at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.framework import Groups
from jupyter_distrib.system import process
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors
from jupyter_distrib.wire.link import Link
from jupyter_distrib.worker.debugging import probe
from jupyter_distrib.worker.debugging.debugger_channel import DebuggerChannel
from jupyter_distrib.worker.debugging.probe import Prober
from jupyter_distrib.worker.interrupts import Interrupts
from jupyter_distrib.worker.messenger import Messenger

ANNOUNCE_S = 0.02
"""A cell that ends within this many seconds sends its start and its end together."""
FLUSH_EVERY_S = 0.1
"""The interval in which unfinished lines of a running cell are sent."""

RESERVE = 2
"""Number of descriptors that may come with the commands between two cells."""

Entry: TypeAlias = tuple[m.Message, list[int]] | None
"""A command for the main thread and its descriptors; None: the agent is gone."""


class ControlThread:
    """The receiver of all messages from the agent.

    Args:
        link: The link to the agent.
        inbox: The queue of commands for the main thread.
        use_device: Makes the rank's device the current one of this thread: a probe reads the flight recorder, which
            calls CUDA.
    """

    def __init__(
        self,
        link: Link,
        inbox: queue.SimpleQueue[Entry],
        *,
        messenger: Messenger,
        interrupts: Interrupts,
        prober: Prober,
        groups: Groups,
        debugger: DebuggerChannel,
        use_device: Callable[[], None],
    ) -> None:
        self._link, self._inbox = link, inbox
        self._messenger, self._interrupts, self._prober, self._groups = messenger, interrupts, prober, groups
        self._debugger, self._use_device = debugger, use_device
        self._running = ""
        """The id of the run whose cell is being executed."""
        self._cells = 0
        """Number of cells that were handed to the main thread."""
        self.cut = False
        """Whether collectives of the current run, or of the last one, were cut or aborted."""
        self._reserve = NO_DESCRIPTORS
        """Descriptors kept back from the cell, as many as the next commands bring."""
        self._left = ""
        """Id of the previous run: a rank that left it early may still be ordered to cut its connections."""

    def start(self) -> None:
        threading.Thread(target=self._serve, name="jupyter_distrib-control", daemon=True).start()

    def reserve(self) -> None:
        """Keep descriptors back for the commands after the cell and for the files opened before the next cell's code
        runs, so that the next cell can free what this one holds. Called in the main thread."""
        with suppress(OSError):
            self._reserve = Descriptors.duplicates([self._link.fileno()] * RESERVE)

    def ended(self, run: str) -> None:
        """Ignore later stops of this run. Called in the main thread."""
        self._running, self._left = "", run
        reserve, self._reserve = self._reserve, NO_DESCRIPTORS
        reserve.close()

    def _serve(self) -> None:
        with suppress(Exception):  # a device that fails also fails in the main thread, which reports it
            self._use_device()
        while True:
            while self._running and not self._link.wait(FLUSH_EVERY_S):
                process.flush_unfinished()
                if self._interrupts.stopping and self._interrupts.postponed:
                    self._messenger.send(m.StopPostponed(run=self._running, rank=identity.rank()))
                self._interrupts.repeat()
            try:
                message, fds = self._link.receive()
            except (EOFError, OSError):
                self._inbox.put(None)
                self._debugger.end()
                return
            match message:
                case m.CutSockets():
                    self._cut(message)
                case m.Probe():
                    self._answer(message)
                case m.AskStacks():
                    self._show_stack(message)
                case m.Debug():
                    self._debug(message)
                case m.Execute():
                    self._hand_on(message, fds)
                case _:
                    if isinstance(message, m.Leave):
                        self._debugger.end_examination()
                    self._inbox.put((message, fds))

    def _hand_on(self, command: m.Execute, fds: list[int]) -> None:
        self._interrupts.begin()
        self.cut = False
        self._running = command.run  # set in this thread, so that a stop right behind the command finds its run
        self._cells += 1
        self._inbox.put((command, fds))
        self._debugger.end_examination()
        self._link.wait(ANNOUNCE_S)
        with suppress(OSError):  # the agent has gone, as the next receive will show
            self._messenger.announce(self._cells)

    def _debug(self, command: m.Debug) -> None:
        match command.action:
            case "read":
                self._debugger.answer(command.line)
            case "end":
                self._debugger.end()
            case "interrupt":
                self._interrupts.raise_now()
            case _:
                self._inbox.put((command, []))

    def _answer(self, probe: m.Probe) -> None:
        if probe.run != self._running:
            return
        try:
            answer = self._prober.probe(deep=probe.deep)
        except Exception:  # noqa: BLE001 - it reads data that the main thread changes; the next probe will succeed
            answer = self._prober.nothing_seen()  # the agent asks again only if it has an answer
        self._messenger.send(answer)

    def _show_stack(self, command: m.AskStacks) -> None:
        if command.run == self._running:
            self._messenger.send(probe.stack_of_main_thread(command.run, identity.rank()))

    def _cut(self, command: m.CutSockets) -> None:
        if command.run not in (self._running, self._left):
            return
        if command.stop and command.run == self._running:
            self._interrupts.stop()
            self._debugger.end()
        self._groups.apart = self._groups.apart or self._interrupts.stopping or bool(command.inodes) or command.abort
        if command.inodes or command.abort:
            self.cut = True
            self._groups.abort(then=lambda: process.shut_sockets(frozenset(command.inodes)))
