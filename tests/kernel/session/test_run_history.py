"""The runs that a notebook remembers: all that go on, and the last that have ended."""

from __future__ import annotations

from typing import Any

from jupyter_distrib.kernel.session.runs.run_history import KEPT, RunHistory


class SomeRun:
    def __init__(self, number: int, *, ended: bool) -> None:
        self.id, self.ended, self.detached = f"run-{number}", ended, False

    def done(self) -> bool:
        return self.ended


def history(*runs: SomeRun) -> RunHistory:
    made: Any = RunHistory()
    for each in runs:
        made.add(each)
    return made


def test_a_run_that_goes_on_is_never_forgotten() -> None:
    going: Any = [SomeRun(number, ended=False) for number in range(2)]
    made = history(*going, *(SomeRun(number, ended=True) for number in range(2, 5 * KEPT)))

    assert made.all[:2] == (*going,)
    assert made.find("0") is going[0]
    assert len(made.all) == KEPT
    assert [each.id for each in made.all[2:]] == [f"run-{number}" for number in range(4 * KEPT + 2, 5 * KEPT)]


def test_more_are_remembered_only_while_more_go_on() -> None:
    going = [SomeRun(number, ended=False) for number in range(2 * KEPT)]
    made: Any = history(*going)
    assert len(made.all) == 2 * KEPT

    for each in going[:-1]:
        each.ended = True
    made.add(SomeRun(2 * KEPT, ended=True))

    assert len(made.all) == KEPT
    assert going[-1] in made.all
