"""The timeouts of process groups: none while a cell runs that may stop in the debugger, since the other ranks then wait
for the user. Rank's main thread."""

from __future__ import annotations

from datetime import timedelta

from jupyter_distrib.worker.pytorch import private

PATIENCE = timedelta(days=30)


class Patience:
    """The timeouts of the groups of this rank."""

    def __init__(self) -> None:
        self.endless = False
        """Whether collectives wait without a limit during this cell."""
        self._before: dict[tuple[str, str], timedelta] = {}
        """The timeouts that were changed, by the names of group and backend."""

    def begin(self, *, endless: bool) -> None:
        """Begin a cell, with the groups that there are."""
        if self._before:
            for key, backend in private.backends_of_groups().items():
                if (timeout := self._before.get(key)) is not None:
                    private.set_timeout(backend, timeout)
            self._before.clear()
        self.endless = endless
        self.apply()

    def apply(self) -> None:
        """Lift the timeouts of groups that have just been made, if this cell needs that."""
        for key, backend in private.backends_of_groups().items() if self.endless else ():
            timeout = private.timeout(backend)
            if timeout is not None and timeout != PATIENCE:
                self._before[key] = timeout
                private.set_timeout(backend, PATIENCE)

    def limit_s(self) -> float | None:
        """Return the seconds after which a collective gives up; None without a group."""
        limits = [timeout for each in private.backends_of_groups().values() if (timeout := private.timeout(each))]
        return min(limits).total_seconds() if limits else None
