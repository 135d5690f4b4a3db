"""Starts the forkserver and has it fork ranks. Runs in the agent's loop.

The agent forks nothing itself: a forkserver (see `worker/forkserver.py`) is exec'd as soon as the agent is up, and
orders wait until it has imported torch."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.system.launch import Launched, launch, new_log
from jupyter_distrib.wire.link import Link, encode
from jupyter_distrib.wire.messages import Fork, Forked, ForkserverReady, Preload, WorkerOrder

PRELOAD_AFTER_S = 0.2
"""Seconds in which the first ranks and their first cell have the processor for themselves."""


@dataclass(slots=True, kw_only=True)
class _Order:
    orders: tuple[WorkerOrder, ...]
    fds: list[int]
    """Three descriptors for each rank; ours to close once sent."""
    forked: Callable[[tuple[int, ...]], None]
    failed: Callable[[str], None]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Forkservers:
    """At most two forkservers: the base one, and the preloaded one that replaces it.

    Args:
        on_fuller: Called when it has.
        launched: The first, if it is on its way already.
    """

    def __init__(self, loop: Loop, on_preloaded: Callable[[], None], launched: Launched | None = None) -> None:
        self._loop, self._on_preloaded, self._launched = loop, on_preloaded, launched
        self._waiting: deque[_Order] = deque()
        self._forking: deque[tuple[Link, _Order]] = deque()
        self._link: Link | None = None
        self._pending: list[Link] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._log = launched[2] if launched else new_log()
        self.growing = True
        """Whether a preloaded forkserver is wanted."""
        self._preload_timer: Timer | None = None
        self.session = 0
        """Session of the forkservers and of what they have just forked."""

        self.preloaded = False
        self._proved = False
        """Whether a forkserver of this process has been ready, so that torch can be imported: if it dies, another will
        do."""

    @property
    def busy(self) -> bool:
        """Return whether ranks are being forked: children may be ours that we do not know yet."""
        return bool(self._forking)

    @property
    def state(self) -> str:
        if self._link is None:
            return "importing torch" if self._process else "not running"
        return "ready" if self.preloaded or not self.growing else "ready (still importing)"

    def start(self) -> None:
        """Exec the forkserver, unless one is up or on its way."""
        if self._process is not None:
            return
        self._process, links, _ = self._launched or launch(self._log)
        self._launched = None
        self.session = self._process.pid
        for mine in links:
            mine.setblocking(False)
            link = Link(mine)
            self._pending.append(link)
            self._watch(link)

    def stop(self) -> None:
        """End the forkserver; the next order, or `start`, makes another one."""
        for link in [link for link in (self._link, *self._pending) if link is not None]:
            self._drop(link)
        self._link, self._pending = None, []
        self._forget()

    def fork(
        self,
        orders: tuple[WorkerOrder, ...],
        fds: list[int],
        forked: Callable[[tuple[int, ...]], None],
        failed: Callable[[str], None],
    ) -> None:
        """Fork ranks, now or when the forkserver is ready; one of the two callbacks follows."""
        self.start()
        self._waiting.append(_Order(orders=orders, fds=fds, forked=forked, failed=failed))
        self._send()

    def ended(self, pid: int) -> None:
        """Handle the end of any child: if the first forkserver ends before it was ever ready, torch cannot be
        imported."""
        if self._process is not None and pid == self._process.pid and not self._proved:
            self._fail()

    def _watch(self, link: Link) -> None:
        self._loop.watch(
            link.fileno(), lambda: self._readable(link), (lambda: self._flush(link)) if link.unsent else None
        )

    def _flush(self, link: Link) -> None:
        try:
            link.flush()
        except OSError:
            return self._closed(link)
        self._watch(link)

    def _send(self) -> None:
        while self._waiting and (link := self._link) is not None:
            order = self._waiting[0]
            link.post(encode(Fork(orders=order.orders), len(order.fds)), order.fds)
            try:
                link.flush()
            except OSError:  # the forkserver has died; the order is for the next one
                self._closed(link)
                continue
            self._waiting.popleft()
            order.close()
            self._forking.append((link, order))
            self._watch(link)

    def _readable(self, link: Link) -> None:
        try:
            for message, _ in link.read():
                match message:
                    case ForkserverReady():
                        self._ready(link, early=message.early)
                    case Forked():
                        self._forked(link, message.pids)
        except (EOFError, OSError):
            self._closed(link)

    def _ready(self, link: Link, *, early: bool) -> None:
        old, self._link, self._proved = self._link, link, True
        self._pending.remove(link)
        self._send()
        if early:
            self._preload_soon()
        else:
            self.preloaded = True
            if old is not None:
                self._drop_unless_forking(old)
            self._on_preloaded()

    def _forked(self, link: Link, pids: tuple[int, ...]) -> None:
        """Complete the oldest order of this forkserver; the other forkserver may have newer ones."""
        entry = next(entry for entry in self._forking if entry[0] is link)
        self._forking.remove(entry)
        entry[1].forked(pids)
        if link is not self._link:
            self._drop_unless_forking(link)
        elif self._preload_timer is not None:
            self._preload_soon()

    def _preload_soon(self) -> None:
        if self._preload_timer is not None:
            self._preload_timer.cancel()
        self._preload_timer = self._loop.later(PRELOAD_AFTER_S, self._preload)

    def _preload(self) -> None:
        self._preload_timer = None
        if self._link is not None and self._pending and self.growing:
            self._link.post(encode(Preload()))
            self._flush(self._link)

    def _drop_unless_forking(self, link: Link) -> None:
        if not any(other is link for other, _ in self._forking):
            self._drop(link)

    def _closed(self, link: Link) -> None:
        self._drop(link)
        if link in self._pending:
            self._pending.remove(link)
        if link is self._link:
            self._link = None
        cut = [order for other, order in self._forking if other is link]
        self._forking = deque(entry for entry in self._forking if entry[0] is not link)
        for order in cut:
            order.failed("the process that starts ranks has ended; try again.")
        if self._link is not None or self._pending or self._process is None:
            return
        if self._proved:
            self._forget()
            if self._waiting:
                self.start()
        else:
            self._fail()

    def _fail(self) -> None:
        """Give up on a forkserver: tell all waiting orders why, and try anew next time."""
        self._forget()
        self._log.seek(0)
        reason = self._log.read().decode("utf-8", "replace").strip()[-2000:]
        self._log.seek(0)
        self._log.truncate()
        orders = [*(order for _, order in self._forking), *self._waiting]
        self._forking.clear()
        self._waiting.clear()
        for order in orders:
            order.close()
            order.failed(f"the ranks could not be started:\n{reason}")

    def _forget(self) -> None:
        self._process, self._proved, self.preloaded = None, False, False

    def _drop(self, link: Link) -> None:
        if link.fileno() >= 0:
            self._loop.watch(link.fileno(), None)
            link.close()
