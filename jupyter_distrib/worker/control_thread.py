"""The thread of a rank that hears of a stop while the main thread is busy: it hands commands on, answers probes, and
acts on `CutSockets` at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from jupyter_distrib.system import process
from jupyter_distrib.wire.link import Link
from jupyter_distrib.wire.messages import CutSockets, Execute, Message, Probe
from jupyter_distrib.worker.framework import Groups
from jupyter_distrib.worker.interrupts import Interrupts
from jupyter_distrib.worker.messenger import Messenger
from jupyter_distrib.worker.probe import Prober

ANNOUNCE_S = 0.02
"""Seconds within which a cell that ends tells its start and its end in one go."""
FLUSH_EVERY_S = 0.1
"""Seconds after which unfinished lines of a running cell are seen."""

Entry: TypeAlias = tuple[Message, list[int]] | None
"""A command for the main thread and its descriptors; None: the agent is gone."""


class ControlThread:
    """Receives all that the agent says.

    Args:
        link: The way from the agent.
        inbox: Takes what the main thread is to do.
        take_device: Makes the rank's device that of this thread: a probe asks the flight recorder, which asks CUDA.
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
        take_device: Callable[[], None],
    ) -> None:
        self._link, self._inbox = link, inbox
        self._messenger, self._interrupts, self._prober, self._groups = messenger, interrupts, prober, groups
        self._take_device = take_device
        self._running = ""
        """Id of the run whose cell is being executed."""
        self._left = ""
        """Id of the run before: who left it early may still be told to cut its connections."""

    def start(self) -> None:
        threading.Thread(target=self._serve, name="jupyter_distrib-control", daemon=True).start()

    def ended(self, run: str) -> None:
        """Take no more stops for this run. Called in the main thread."""
        self._running, self._left = "", run

    def _serve(self) -> None:
        with suppress(Exception):  # a device that fails also fails in the main thread, which tells it
            self._take_device()
        while True:
            while self._running and not self._link.wait(FLUSH_EVERY_S):
                process.flush_unfinished()
                self._interrupts.repeat()
            try:
                message, fds = self._link.receive()
            except (EOFError, OSError):
                self._inbox.put(None)
                return
            match message:
                case CutSockets():
                    self._cut(message)
                case Probe():
                    self._answer(message)
                case Execute():
                    self._hand_on(message, fds)
                case _:
                    self._inbox.put((message, fds))

    def _hand_on(self, command: Execute, fds: list[int]) -> None:
        self._interrupts.begin()
        self._running = command.run  # here, so that a stop right behind it finds its run
        self._inbox.put((command, fds))
        if not self._link.wait(ANNOUNCE_S):
            self._messenger.announce()

    def _answer(self, probe: Probe) -> None:
        if probe.run != self._running:
            return
        try:
            answer = self._prober.look(deep=probe.deep)
        except Exception:  # noqa: BLE001 - a look at what the main thread changes; the next one will do
            return
        self._messenger.send(answer)

    def _cut(self, command: CutSockets) -> None:
        if command.run not in (self._running, self._left):
            return
        if command.stop and command.run == self._running:
            self._interrupts.stop()
        self._groups.apart = self._groups.apart or self._interrupts.stopping or bool(command.inodes)
        if command.inodes:
            self._groups.abort(then=lambda: process.shut_sockets(frozenset(command.inodes)))
