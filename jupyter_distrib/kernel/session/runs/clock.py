"""The clock of one run. Read in any thread of the kernel."""

from __future__ import annotations

import threading
import time


class RunClock:
    """The clock of one run, from its beginning, `age_s` ago, to its end."""

    def __init__(self, age_s: float = 0.0) -> None:
        self.began_at_s = time.time() - age_s
        """The time of the beginning, in seconds since the epoch."""
        self.ended = threading.Event()
        """The event that is set when nothing of the run is left to do."""
        self._began_s = time.monotonic() - age_s
        self._stopped_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        return (self._stopped_s or time.monotonic()) - self._began_s

    def restart(self) -> None:
        """Let the run begin now: until now it was queued."""
        self.began_at_s, self._began_s = time.time(), time.monotonic()

    def stop(self) -> None:
        self._stopped_s = time.monotonic()
