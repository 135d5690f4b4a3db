"""A cell that has come while its ranks are not ready for it. In the loop of whoever holds them: agent or
coordinator."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from jupyter_distrib.wire import endings
from jupyter_distrib.wire.messages import Event, Execute

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
        for event in endings.interrupted(self.command.run, self.command.ranks):
            self.tell(event, ())
