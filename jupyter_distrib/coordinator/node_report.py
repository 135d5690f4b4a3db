"""Reports the nodes of an engine. An engine may be slow or hang, so it is asked in a separate thread, and the last
report is used when it does not answer soon. Used in the coordinator's loop."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m

ANSWER_S = 2.0
"""Seconds to wait for the engine before the last report is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The nodes that ranks can have."""

    nodes: tuple[m.NodeStatus, ...] | None = None
    """The nodes; None as long as they are unknown."""
    next_rank: str = ""
    """See `ServerStatus.next_rank`."""


OnReport = Callable[[NodeReport], None]


class NodeReporter:
    """Asks one engine.

    Args:
        query: Asks the engine, and may send a partial report before it returns the full one; blocks. May raise
            anything.
        fresh_s: Seconds for which a report is reused, to spare an engine that others use.
    """

    def __init__(
        self, loop: Loop, calls: CallSoon, query: Callable[[OnReport], NodeReport], fresh_s: float = 0.0
    ) -> None:
        self._loop, self._calls, self._query, self._fresh_s = loop, calls, query, fresh_s
        self._latest = NodeReport()
        self._at_s: float | None = None
        self._waiting: list[OnReport] = []
        self._asking = False

    def ask(self, on_report: OnReport) -> None:
        """Have `on_report` called soon."""
        if self._at_s is not None and time.monotonic() < self._at_s + self._fresh_s:
            return on_report(self._latest)
        self._waiting.append(on_report)
        self._loop.later(ANSWER_S, self._answer)
        if not self._asking:
            self._asking = True
            threading.Thread(target=self._ask, name="jupyter_distrib-nodes", daemon=True).start()

    def _ask(self) -> None:
        """Ask the engine; in a thread of its own."""
        try:
            report = self._query(lambda part: self._calls.put(lambda: self._know(part)))
            self._calls.put(lambda: self._know(report))
        except Exception:  # noqa: BLE001 - engines raise all kinds: the last known report is used
            traceback.print_exc()  # into the coordinator's log
        self._calls.put(self._asked)

    def _know(self, report: NodeReport) -> None:
        self._latest = report

    def _asked(self) -> None:
        self._asking, self._at_s = False, time.monotonic()
        self._answer()

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for on_report in waiting:
            on_report(self._latest)
