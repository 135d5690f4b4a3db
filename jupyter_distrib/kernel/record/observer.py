"""What follows a run: the interface of the live view, of the sidebar, and of trackers that other packages bring.

A package adds one by an entry point of the group `jupyter_distrib.observers`: the observer's name, and a function that
is given each run and returns an observer of it, or None (docs/writing-an-observer.md). Kernel side; standard library
only. Who calls what, and in which thread, is in `kernel/session/observers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.wire.messages import RunEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """The facts of a run that are known before its cell is sent."""

    id: str
    label: str
    """The run's name in lists: `Cell In[5]`."""
    source: str
    """The cell as the ranks execute it, with an empty line in place of the magic's; empty for an attached run."""
    options: Mapping[str, object]
    """The options of the cell that are set, by their names as keywords, defaults of the settings included. Without
    `env`, which may hold secrets. Empty for an attached run."""
    strategy: str
    pool: str
    ranks: tuple[int, ...]
    world_size: int
    gpus: bool
    detached: bool
    attached: bool
    """Whether the run began earlier, maybe in another kernel, and its events are told again from the beginning."""
    began_at_s: float
    """Seconds since 1970."""
    note: Callable[[str], None]
    """Puts a sentence into the output of the run, from any thread; an address in it becomes a link."""


class Observer(Protocol):
    """Follows one run."""

    def begin(self) -> Mapping[str, str]:
        """Called once, before the cell is sent; returns environment variables for the ranks. Those of an attached run
        have theirs already."""
        return {}

    def observe(self, event: RunEvent, record: RunRecord) -> None:
        """Called for each event, in order, with the record of all events up to this one.

        `Ended` is the last event; it is the only one if the cell could not be sent.
        """


Follow = Callable[[ObservedRun], Observer | None]
"""Returns an observer of a run, or None for a run that is not to be followed."""
