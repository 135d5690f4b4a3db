"""The outcome of a run, as its server knows it: the fold of the few events that matter for that. In the server's
loop."""

from __future__ import annotations

from jupyter_distrib.wire import messages as m

_WORST = ("lost", "failed", "interrupted", "done")
"""The ways in which a rank can end, the worst first: a run ends in the worst way of its ranks."""


class Outcome:
    """The outcome of one run, so far."""

    def __init__(self) -> None:
        self.error = ""
        """The first failure, in one line."""
        self._states = {"done"}
        self._metrics: dict[int, dict[str, float]] = {}

    @property
    def state(self) -> str:
        """The way in which the run has ended: `done`, `failed`, `lost` or `interrupted`."""
        return next(each for each in _WORST if each in self._states)

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric, on the first rank that reported it."""
        last: dict[str, float] = {}
        for rank in sorted(self._metrics):
            last = {**self._metrics[rank], **last}
        return last

    def follow(self, event: m.Event) -> None:
        """Take account of an event; a restart makes earlier failures void."""
        match event:
            case m.Measured():
                self._metrics[event.rank] = {**self._metrics.get(event.rank, {}), **event.values}
            case m.Failed():
                self._states.add("failed")
                self.error = self.error or f"{event.failure.type_name}: {event.failure.message}"
            case m.Interrupted() | m.Exited(asked=True):
                self._states.add("interrupted")
            case m.Exited():
                self._states.add("lost")
                self.error = self.error or f"rank {event.rank} was lost"
            case m.Restarted():
                self._states, self.error = {"done"}, ""
            case _:
                pass
