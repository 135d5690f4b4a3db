"""The requests of this kernel that await an answer of a pool's process. Answers come in the pool's own thread."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from typing import Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.pools.base import Node
from jupyter_distrib.system import interrupts
from jupyter_distrib.wire import messages as m

ANSWER_S = 5.0


class Requests:
    """The requests that await an agent's answer, and the answers."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._answers: dict[int, queue.SimpleQueue[m.ServerStatus | PoolError]] = {}
        self._numbers = itertools.count(1)
        self._attachments: queue.SimpleQueue[Run | m.NotAttached | PoolError] = queue.SimpleQueue()
        self._make: Callable[[m.Attached], Run] | None = None

    def ask(self, node: Node) -> m.ServerStatus:
        """Return the status that the pool's process tells. Raises `PoolError`."""
        number = next(self._numbers)
        answers = self._answers[number] = queue.SimpleQueue()
        node.send(m.Ask(question=number))
        status: m.ServerStatus = self._within(answers)
        return status

    def attach(self, node: Node, run: str, make: Callable[[m.Attached], Run]) -> Run | m.NotAttached:
        """Request the events of a detached run from its beginning, and return the run. Raises `PoolError`."""
        self._make = make
        node.send(m.Attach(run=run))
        answer: Run | m.NotAttached = self._within(self._attachments)
        return answer

    def _within(self, box: queue.SimpleQueue[Any]) -> Any:
        try:
            answer = interrupts.take(box, ANSWER_S)
        except queue.Empty:
            raise PoolError(f"the {self._pool} pool has not answered within {ANSWER_S:g} s.") from None
        if isinstance(answer, PoolError):
            raise answer
        return answer

    def give_up(self, reason: str) -> None:
        """Make the threads that wait for an answer raise, since none will come."""
        refusal = PoolError(f"the {self._pool} pool cannot answer: {reason}.")
        for box in list(self._answers.values()):
            box.put(refusal)
        self._attachments.put(refusal)

    def answered(self, event: m.Answered) -> None:
        if (box := self._answers.pop(event.question, None)) is not None:
            box.put(event.status)

    def attached(self, event: m.Attached) -> Run | None:
        """Return the run that `attach` has requested; None without such a request."""
        if self._make is None:
            return None
        run = self._make(event)
        self._attachments.put(run)
        return run

    def not_attached(self, event: m.NotAttached) -> None:
        self._attachments.put(event)
