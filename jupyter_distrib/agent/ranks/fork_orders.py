"""Keeps the orders to fork ranks: those that wait for a forkserver, and those that one is executing. Runs in the
agent's loop."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jupyter_distrib.server.watched_link import WatchedLink
from jupyter_distrib.system import open_files
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

ATTEMPTS = 2
"""Number of forkservers that may die over one order."""
_numbers = itertools.count(1)


@dataclass(slots=True, kw_only=True, eq=False)
class ForkOrder:
    """Ranks to be forked together."""

    orders: tuple[m.WorkerOrder, ...]
    descriptors: Descriptors
    """Descriptors of the ranks, four for each."""
    on_forked: Callable[[tuple[int, ...]], None]
    on_failed: Callable[[str], None]
    number: int = field(default_factory=lambda: next(_numbers))
    attempts: int = 0

    def fail(self, reason: str) -> None:
        self.descriptors.close()
        self.on_failed(reason)


class ForkOrders:
    """The orders of one agent."""

    def __init__(self) -> None:
        self._waiting: deque[ForkOrder] = deque()
        self._sent: dict[int, tuple[WatchedLink, ForkOrder]] = {}
        """Orders that were not answered, by their number, with the forkservers that execute them."""

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def sent(self) -> bool:
        """Return whether some forkserver is executing an order."""
        return bool(self._sent)

    def add(self, order: ForkOrder) -> None:
        self._waiting.append(order)

    def send(self, link: WatchedLink) -> None:
        """Send all waiting orders to this forkserver."""
        while self._waiting:
            order = self._waiting.popleft()
            order.attempts += 1
            self._sent[order.number] = (link, order)
            try:
                link.post(m.Fork(number=order.number, orders=order.orders), tuple(order.descriptors))
            except OSError as error:
                del self._sent[order.number]
                order.fail(f"the ranks could not be started: {open_files.reason(error)}.")

    def are_with(self, link: WatchedLink) -> bool:
        """Return whether this forkserver is executing an order."""
        return any(other is link for other, _ in self._sent.values())

    def answer(self, answer: m.Forked | m.ForkFailed) -> None:
        """Complete the order that was answered, if it was not given up."""
        _, order = self._sent.pop(answer.number, (None, None))
        if order is None:
            return
        match answer:
            case m.Forked():
                order.descriptors.close()
                order.on_forked(answer.pids)
            case m.ForkFailed():
                order.fail(answer.reason)

    def take_back(self, link: WatchedLink, ended: str) -> None:
        """Let orders of a forkserver that has ended wait for the next one; orders that were tried before fail, and say
        how it `ended`."""
        cut = [order for other, order in self._sent.values() if other is link]
        for order in reversed(cut):
            del self._sent[order.number]
            if order.attempts < ATTEMPTS:
                self._waiting.appendleft(order)
        for order in cut:
            if order.attempts >= ATTEMPTS:
                reason = f"the process that starts them {ended} while it did so, as the one before it had: try again."
                order.fail(f"the ranks could not be started: {reason}")

    def fail_all(self, reason: str) -> None:
        orders = [*(order for _, order in self._sent.values()), *self._waiting]
        self._sent.clear()
        self._waiting.clear()
        for order in orders:
            order.fail(reason)
