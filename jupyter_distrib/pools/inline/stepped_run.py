"""Runs one cell on inline ranks that take turns, so that collectives work, and shows each of them: a rank has a thread,
and runs until it waits for others (`stage.py`). The thread that sends the cell waits, and shows the steps at the end.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from contextlib import nullcontext

from jupyter_distrib.pools.inline import steps
from jupyter_distrib.pools.inline.cell_interrupts import CellInterrupts
from jupyter_distrib.pools.inline.collectives import Collectives
from jupyter_distrib.pools.inline.run import InlineRun, Outcome
from jupyter_distrib.pools.inline.stage import Stage
from jupyter_distrib.pools.inline.torch_functions import in_place_of_torch
from jupyter_distrib.wire import messages as m

HEAR_S = 0.1


class SteppedRun(InlineRun):
    """One cell on ranks that take turns."""

    _stage: Stage

    def _execute_ranks(self, orders: Sequence[m.WorkerOrder]) -> None:
        if not orders:
            return
        self._stage = Stage([order.rank for order in orders])
        collectives = Collectives(self._stage, self.command.cell.filename)
        self._guards: list[CellInterrupts] = []
        threads = [threading.Thread(target=self._execute_on_rank, args=[order], daemon=True) for order in orders]
        with in_place_of_torch(collectives) if importlib.util.find_spec("torch") else nullcontext():
            for thread in threads:
                thread.start()
            stopped = False
            while not self._stage.wait_for_end(HEAR_S):
                if self._interrupts.asked and not stopped:
                    stopped = True
                    self._stop_ranks()
        steps.show(collectives.steps, [order.rank for order in orders], collectives.left_out)

    def _execute_on_rank(self, order: m.WorkerOrder) -> None:
        """Execute the cell on one rank, in its thread."""
        self._stage.enter(order.rank)
        guard = CellInterrupts()
        self._guards.append(guard)
        guard.asked = self._interrupts.asked
        try:
            self._execute_rank(order, guard)
        finally:
            guard.end()
            self._stage.leave(order.rank)

    def _outcome(self, rank: int, began_at_s: float, interrupts: CellInterrupts) -> tuple[Outcome, list[int]]:
        event, fds = super()._outcome(rank, began_at_s, interrupts)
        if isinstance(event, m.Failed):
            self._interrupts.asked = True  # ranks that wait for this one wait in vain
            self._stage.stop()
        return event, fds

    def _stop_ranks(self) -> None:
        self._stage.stop()
        for guard in list(self._guards):
            guard.ask()
