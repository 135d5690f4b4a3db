"""When a run is started again with more ranks: pure, with a feigned worker group and feigned timers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jupyter_distrib.server.growth import Growth
from jupyter_distrib.system.event_loop import Timer
from jupyter_distrib.wire import messages as m

COMMAND = m.Execute(
    run="r",
    group="c",
    ranks=(0, 1),
    cell=m.Cell(source="1", filename="Cell In[1]"),
    inputs=m.Parcel(data=b""),
    setting=m.Setting(),
    most_ranks=8,
)
SAVED = m.Saved(run="r", rank=0, at_s=0.0)


class Group:
    """A worker group that gets the room that it is given."""

    def __init__(self, has: int) -> None:
        self.has, self.asked, self.told = has, list[int](), list[str]()

    def find_room(self, size: int, unit: int, then: Callable[[int], None]) -> None:
        self.asked.append(size)
        then(min(size, self.has))

    def drop_room(self) -> None:
        self.told.append("dropped")

    def stop(self, *, force: bool = False) -> None:
        self.told.append("stopped")


def growing(group: Group, *, after_s: float = 0.0) -> tuple[Growth, list[Callable[[], None]]]:
    """A run of 2 ranks that may have 8, and what it does when its timers fire."""
    timers: list[Callable[[], None]] = []

    def later(delay_s: float, call: Callable[[], None]) -> Timer:
        timers.append(call)
        return Timer(call)

    growth = Growth(replace(COMMAND, grow_after_s=after_s), group, later=later, note=group.told.append)
    growth.begin(2)
    return growth, timers


def test_it_grows_at_a_checkpoint_when_there_is_room() -> None:
    group = Group(has=6)
    growth, _ = growing(group)
    growth.follow(SAVED)

    assert (growth.ending, growth.room, group.told) == (True, 6, ["stopped"])


def test_it_asks_for_nothing_before_its_time_and_without_a_checkpoint() -> None:
    early, late = Group(has=8), Group(has=8)
    growing(early, after_s=600)[0].follow(SAVED)
    _, timers = growing(late)
    timers[0]()

    assert early.asked == late.asked == []
    assert len(late.told) == 1
    assert "cannot grow from 2 to 8" in late.told[0]


def test_without_room_the_run_goes_on_and_says_nothing() -> None:
    group = Group(has=2)
    growth, _ = growing(group)
    growth.follow(SAVED)

    assert (group.asked, growth.ending, group.told) == ([8], False, [])


def test_room_that_comes_when_the_run_has_ended_or_was_stopped_is_given_back() -> None:
    group = Group(has=8)
    growth, _ = growing(group)
    asked: list[Callable[[int], None]] = []
    group.find_room = lambda size, unit, then: asked.append(then)  # type: ignore[method-assign]
    growth.follow(SAVED)
    growth.close()
    asked[0](8)

    assert (growth.ending, growth.room, group.told) == (False, 0, ["dropped"])


def test_a_rank_that_has_ended_keeps_the_run_from_growing() -> None:
    group = Group(has=8)
    growth, _ = growing(group)
    growth.follow(m.Interrupted(run="r", rank=1, frames=(), at_s=0.0))
    growth.follow(SAVED)

    assert group.asked == []


def test_the_next_attempt_keeps_its_room_and_another_gives_it_back() -> None:
    used, unused = Group(has=8), Group(has=8)
    for group, ranks in ((used, 8), (unused, 2)):
        growth, _ = growing(group)
        growth.follow(SAVED)
        growth.begin(ranks)

    assert used.told == ["stopped"]
    assert unused.told == ["stopped", "dropped"]
