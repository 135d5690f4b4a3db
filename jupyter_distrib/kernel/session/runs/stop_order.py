"""The user's wish to stop one run: the requests so far, and the way to its pool. From any thread of the kernel, and
from a signal handler."""

from __future__ import annotations

import threading
import time

from jupyter_distrib.kernel.session.runs.start import PoolLink
from jupyter_distrib.wire import messages as m

UNANSWERED_S = 1.0
"""The seconds after an order to kill from which another press of Stop gives up a pool that has not answered."""


class StopOrder:
    """The user's wish to stop one run."""

    def __init__(self, link: PoolLink) -> None:
        self._link = link
        self.asked_at_s: float | None = None
        """The time of the first request, in seconds since the epoch; None without one."""
        self.kill_asked = False
        self._killed_at_s: float | None = None
        """The time of the first order to kill, by `time.monotonic`."""
        self.late = False
        """Whether a request came after the end of the run."""

    def give(self, *, force: bool, late: bool = False) -> None:
        self.asked_at_s = self.asked_at_s or time.time()
        self.kill_asked, self.late = self.kill_asked or force, self.late or late
        now_s = time.monotonic()
        if self._killed_at_s is not None and now_s - self._killed_at_s >= UNANSWERED_S and not late:
            # In a thread: a signal handler may have come amid a lock that this needs.
            threading.Thread(target=self._link.abandon, name="jupyter_distrib-abandon", daemon=True).start()
        elif force:
            self._killed_at_s = self._killed_at_s or now_s
        self._link.stop(force)

    def redirect(self, link: PoolLink) -> None:
        """Send requests, also one that was made before, another way from now on."""
        self._link = link
        if self.asked_at_s is not None:
            link.stop(self.kill_asked)

    def stage(self, now_s: float) -> str:
        """Return the stage of the stop at this time since the epoch: `asked`; `killed` once ranks that have not stopped
        are killed; empty without a request."""
        if self.asked_at_s is None:
            return ""
        return "killed" if self.kill_asked or now_s >= self.asked_at_s + m.KILL_AFTER_S else "asked"
