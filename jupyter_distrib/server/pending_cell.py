"""A cell that has come while its ranks are not ready for it. In the loop of whoever holds them: agent or
coordinator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from jupyter_distrib.wire.messages import Ended, Event, Execute, Interrupted

Tell = Callable[[Event, tuple[int, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCell:
    """Executed in the end, or cancelled."""

    command: Execute
    fds: list[int]
    """Its own."""
    tell: Tell

    def cancel(self) -> None:
        """Tell that it was stopped before it began."""
        for fd in self.fds:
            os.close(fd)
        now = time.monotonic()
        for number in self.command.ranks:
            self.tell(Interrupted(run=self.command.run, rank=number, frames=(), at_s=now), ())
        self.tell(Ended(run=self.command.run, at_s=now), ())
