"""What each rank did over a run, and who waited for whom."""

from __future__ import annotations

import dataclasses

import pytest

from jupyter_distrib.kernel.record.over_time import BEHIND, BUSY, MEMORY, WAITING, OverTime, over_time
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.record.timeline import POINTS, Course, Seen
from jupyter_distrib.kernel.views import timeline as view
from jupyter_distrib.wire import messages as m


def a_course(seconds: int, busy: float, waits: float | None, memory: int = 500) -> Course:
    """A course whose rank is busy for so many percent, and in communication for a part of each second."""
    course = Course()
    for second in range(seconds + 1):
        course.see(Seen(float(second), busy, memory, None if waits is None else waits * second))
    return course


def test_use_is_reported_in_tenths_of_the_most_and_the_straggler_comes_first() -> None:
    courses = {0: a_course(10, 95.0, 0.6), 1: a_course(10, 40.0, 0.6), 2: a_course(10, 100.0, 0.0, memory=1000)}
    found = over_time(courses, {}, gpus=True, memory_bytes=2000)

    assert found is not None
    assert found.is_whole
    assert (found.seconds, found.ranks) == (10.0, [2, 0, 1])
    assert found.rows[BUSY] == ["9" * 10, "9" * 10, "4" * 10]
    assert found.rows[MEMORY] == ["5" * 10, "2" * 10, "2" * 10]
    assert found.rows[WAITING] == ["0" * 10, "6" * 10, "6" * 10]
    assert found.most == {BUSY: 100.0, MEMORY: 2000.0, WAITING: 1.0}
    assert sorted(found.waits) == [[0, 2, 6.0], [1, 2, 6.0]]


def test_the_rank_for_which_others_wait_may_change() -> None:
    first, second = Course(), Course()
    for at in range(11):
        first.see(Seen(float(at), 50.0, 1, min(at, 5) * 0.8))  # waits in the first half
        second.see(Seen(float(at), 50.0, 1, max(0, at - 5) * 0.4))
    found = over_time({0: first, 1: second}, {}, gpus=False)

    assert found is not None
    assert found.waits == [[0, 1, 4.0], [1, 0, 2.0]]


def test_a_rank_that_has_ended_or_not_begun_has_no_level() -> None:
    late = Course()
    for at in range(6, 11):
        late.see(Seen(float(at), 50.0, 1, None))
    found = over_time({0: a_course(10, 50.0, None), 1: late}, {0: 4.0}, gpus=False)

    assert found is not None
    rows = dict(zip(found.ranks, found.rows[BUSY], strict=True))
    assert rows == {0: "5555......", 1: ".....55555"}
    assert WAITING not in found.rows
    assert found.waits == []


def test_a_course_of_the_whole_run_is_bounded() -> None:
    course = a_course(5000, 50.0, 0.5)

    assert len(course.seen) <= POINTS
    assert (course.seen[0].at_s < 200, course.seen[-1].at_s) == (True, 5000.0)


def test_a_run_of_seconds_has_none() -> None:
    assert over_time({0: a_course(3, 50.0, None)}, {}, gpus=False) is None
    assert over_time({}, {}, gpus=False) is None


@pytest.mark.parametrize(
    "changes", [{"rows": {}}, {"ranks": [0]}, {"rows": {BUSY: ["12", "<b"]}}, {"rows": {BUSY: ["1", "12"]}}, {"waits": [[1.0]]}]
)  # fmt: skip
def test_what_does_not_fit_together_is_not_whole(changes: dict[str, object]) -> None:
    whole = OverTime(seconds=2.0, ranks=[0, 1], rows={BUSY: ["12", "34"]})

    assert whole.is_whole
    assert not dataclasses.replace(whole, **changes).is_whole


def test_many_ranks_have_their_map_also_if_nobody_is_behind() -> None:
    for ranks, shown in ((4, False), (64, True)):
        record = RunRecord(run="r", label="c", ranks=range(ranks), world_size=ranks)
        for second in range(20):
            for rank in range(ranks):
                record.apply(m.Progressed(run="r", rank=rank, label="step", step=second, total=99, at_s=float(second)))
                record.apply(
                    m.Sampled(run="r", rank=rank, rss_bytes=500, cpu_percent=40.0, gpu_memory_bytes=None,
                              gpu_memory_total_bytes=None, gpu_percent=None, at_s=float(second))
                )  # fmt: skip
        state = view.state(record)
        assert (state is not None) == shown
        if state is not None:
            assert len(state["rows"][BEHIND]) == ranks
