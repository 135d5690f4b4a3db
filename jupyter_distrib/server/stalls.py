"""Reports the stalls of one run. Runs where all of its ranks are visible: in the agent's loop, or the coordinator's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jupyter_distrib.server.diagnose import Diagnosis, diagnose
from jupyter_distrib.wire import messages as m

HOPELESS_S = 60.0
"""Seconds after which a wait for a rank that has left the cell ends the run, unless `--hang-timeout` says otherwise."""


class Stalls:
    """The stalls of one run.

    Args:
        emit: Takes the events.
        stop: Stops the run, after `--hang-timeout`.
    """

    def __init__(self, command: m.Execute, *, emit: Callable[[m.RunEvent], None], stop: Callable[[], None]) -> None:
        self._command, self._emit, self._stop = command, emit, stop
        self._last = Diagnosis(text="", places=(), waited_s=0.0)
        self.limit_s = command.hang_timeout_s
        """Seconds of a stall after which the run is stopped; None: only if it cannot end."""
        self._debugged_s = float("-inf")
        """Time at which a rank was last seen in the debugger: ranks that wait for it wait for the user."""

    def judge(self, looks: Sequence[m.RankSighting]) -> None:
        """Report a new stall, a changed one, or its end; `looks` has a sighting of each rank of the run."""
        run, now_s = self._command.run, time.monotonic()
        diagnosis = diagnose(looks, source=self._command.cell.source)
        if diagnosis is None:
            if self._last.text:
                self._emit(m.Moved(run=run, at_s=now_s))
            self._last = Diagnosis(text="", places=(), waited_s=0.0)
            return
        if (diagnosis.text, diagnosis.places) != (self._last.text, self._last.places):
            self._emit(m.Stalled(run=run, text=diagnosis.text, places=diagnosis.places, at_s=now_s))
        self._last = diagnosis
        if any(look.seen is not None and look.seen.in_debugger for look in looks):
            self._debugged_s = now_s
            return
        left = self.limit_s is None
        limit_s, waited_s = (
            (HOPELESS_S, diagnosis.hopeless_s) if self.limit_s is None else (self.limit_s, diagnosis.waited_s)
        )
        if min(waited_s, now_s - self._debugged_s) >= limit_s:
            told_s = HOPELESS_S if left else self._command.hang_timeout_s or waited_s
            self._emit(m.TimedOut(run=run, limit_s=told_s, stalled=True, left=left, at_s=now_s))
            self._stop()
