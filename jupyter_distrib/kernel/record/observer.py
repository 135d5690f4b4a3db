"""The interface of observers of a run: the live view, the sidebar, and trackers of other packages.

A package adds one by an entry point of the group `jupyter_distrib.observers`: the observer's name, and a function that
takes each run and returns an observer of it, or None (docs/writing-an-observer.md). Kernel side; standard library only.
The callers and their threads are in `kernel/session/runs/observers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.wire import messages as m


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """Facts about a run that are known before its cell is sent."""

    id: str
    label: str
    """The run's name in lists: `Cell In[5]`."""
    source: str
    """The cell as the ranks execute it, with an empty line in place of the magic's, or the source of the function;
    empty for an attached run."""
    options: Mapping[str, object]
    """The options of the cell that are set, including defaults of the settings, by their names as keywords; without
    `env`, which may hold secrets. Of an attached run, only `track`: the trackers to which no other kernel writes."""
    strategy: str
    pool: str
    ranks: tuple[int, ...]
    world_size: int
    gpus: bool
    detached: bool
    attached: bool
    """Whether the run began earlier, maybe in another kernel, and its events are replayed from the beginning."""
    began_at_s: float
    """Start time in seconds since the epoch."""
    note: Callable[[str], None]
    """A function that adds a sentence to the output of the run, from any thread; an address in it becomes a link."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Results of each tracker's `active_run` in the thread that submitted the run, by tracker name."""
    uses: Mapping[str, Any] = field(default_factory=dict)
    """The trackers that the code itself uses, by name, with what it says about them."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """The plain values with which a function was called, or that the run of a sweep has, by name."""
    predicted_bytes: int | None = None
    """The peak of tensors on each GPU by a dry run of the same cell; None without one."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """The experiment trackers that `--track` or the settings name for the run."""
        asked = self.options.get("track")
        return asked if isinstance(asked, tuple) else ()


class Observer(Protocol):
    """An observer of one run."""

    ends_in_background: ClassVar[bool] = False
    """Whether it keeps running, instead of being dropped, once nobody waits for the end of the run; later notes are
    still added to the output. Nobody waits at all for a tracker, whose server may be slow."""

    def begin(self) -> Mapping[str, str]:
        """Return environment variables for the ranks; called once, before the cell is sent. The ranks of an attached
        run have started already and do not get them."""
        return {}

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        """Handle an event; called for each one, in order, with the record of all events up to this one.

        `Ended` is the last event; it is the only one if the cell could not be sent.
        """


Follow = Callable[[ObservedRun], Observer | None]
"""A function that returns an observer of a run, or None for a run that it does not follow."""
