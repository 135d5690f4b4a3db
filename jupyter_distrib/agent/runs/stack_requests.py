"""Asks the ranks of one run for their Python stacks, and answers for silent ranks.

    AskStacks --> each rank --> StackSeen
                  silent: C code holds Python's lock  --signal--> faulthandler's frames --> StackSeen
                          stopped, or it waits        -----------------------------------> StackSeen without frames

Runs in the agent's loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from jupyter_distrib.agent.ranks import exit_info, usage
from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.wire import messages as m

ANSWER_S = 0.5
"""Seconds within which a rank answers if its control thread runs."""
SIGNAL_S = 0.2
"""Seconds to wait for faulthandler's output."""
LOCKED = "does not answer: C code holds Python's lock"


class StackRequests:
    """The requests for the stacks of one run's ranks on this node.

    Args:
        ranks: The ranks that still execute the cell, by number.
        later: Calls a function after some seconds, unless the run has ended by then.
        emit: Takes the answers.
    """

    def __init__(
        self,
        run: str,
        *,
        ranks: Callable[[], Mapping[int, Rank]],
        later: Callable[[float, Callable[[], None]], None],
        emit: Callable[[m.StackSeen], None],
    ) -> None:
        self._run, self._ranks, self._later, self._emit = run, ranks, later, emit
        self._asked: set[int] = set()
        """Ranks that have not answered yet."""
        self._signalled: set[int] = set()
        """Ranks among them that were signalled to write their place."""

    def ask(self) -> None:
        """Ask every rank; not again before it has answered, so that nothing piles up in a rank that cannot."""
        if self._asked:
            return
        ranks = self._ranks()
        self._asked = set(ranks)
        for rank in ranks.values():
            rank.post(m.AskStacks(run=self._run))
        if ranks:
            self._later(ANSWER_S, self._signal_silent)

    def on_answer(self, event: m.StackSeen) -> None:
        """Forward the answer of a rank, even a late one."""
        self._asked.discard(event.rank)
        self._emit(event)

    def _signal_silent(self) -> None:
        """Signal silent ranks to write their place, where the signal cannot harm them."""
        self._signalled.clear()
        for number, rank in self._silent():
            # A signal would end some waits of C code for the system early.
            if (used := usage.read(rank.pid)) is not None and used.state == "R":
                rank.notes.ask_place(rank.process)
                self._signalled.add(number)
        self._later(SIGNAL_S, self._answer_for_silent)

    def _answer_for_silent(self) -> None:
        for number, rank in self._silent():
            frames = exit_info.frames_in(rank.notes.place) if number in self._signalled else ()
            trouble = _trouble(rank, locked=number in self._signalled)
            self._emit(m.StackSeen(run=self._run, rank=number, frames=frames, trouble=trouble, at_s=time.monotonic()))
        self._asked.clear()

    def _silent(self) -> list[tuple[int, Rank]]:
        return [(number, rank) for number, rank in self._ranks().items() if number in self._asked]


def _trouble(rank: Rank, *, locked: bool) -> str:
    """Return why a rank is silent; `locked`: it was observed computing."""
    used = usage.read(rank.pid)
    if used is not None and used.stopped:
        return "is stopped (SIGSTOP)" if used.state == "T" else "is stopped by a debugger"
    return LOCKED if locked else "does not answer"
