"""The way of one run to its ranks: in the queue, starting, begun or refused. In any thread of the kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jupyter_distrib.system import interrupts
from jupyter_distrib.system.data_class import data_class


@data_class
class PoolLink:
    """The connection of a run to the pool of its ranks."""

    pool: str
    """The pool's name."""
    stop: Callable[[bool], None] = lambda force: None
    """Asks the pool to stop the run; with True, to kill it."""
    ask_stacks: Callable[[], object] = lambda: None
    """Asks the pool for the Python stacks of the ranks."""
    debug: Callable[[int, str, str], object] = lambda rank, action, line: None
    """Gives an order to the debugger of a rank, see `Debug`: the rank, the order, and its line."""
    abandon: Callable[[], None] = lambda: None
    """Gives up the pool, after a third press of Stop that nothing has followed."""
    echoes_output: bool = False
    """Whether its ranks print straight into the notebook."""


class RunStart:
    """The start of one run."""

    def __init__(self) -> None:
        self.state = ""
        """The state before it runs: `queued` or `starting`; empty once its ranks have been given their order."""
        self.place = 0
        """The place in the queue, counted from 1; 0 if it is not queued."""
        self.refusal: BaseException | None = None
        """The error with which the run was refused before it had ranks."""
        self._settled = threading.Event()
        """The event that is not set while a submitted run is on its way to its ranks and waits for nobody."""
        self._settled.set()

    def move_on(self, state: str, place: int) -> None:
        if not self.state:
            self._settled.clear()
        self.state, self.place = state, place

    def begin(self) -> None:
        self.state, self.place = "", 0

    def settle(self) -> None:
        """Wake who waits for the start: the ranks have the cell, or the run waits for others, or was refused."""
        self._settled.set()

    def refuse(self, refusal: BaseException | None) -> None:
        self.refusal, self.place = refusal, 0

    def wait(self) -> None:
        """Wait while the run is starting. Raises the error with which it was refused."""
        while self.state != "queued" and not interrupts.wait(self._settled, interrupts.HEAR_S):
            continue
        if self.refusal is not None:
            raise self.refusal
