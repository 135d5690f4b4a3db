"""The course of a run over time: how far ranks were behind."""

from __future__ import annotations

from jupyter_distrib.kernel.record.nested_progress import seconds_left
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.record.terminal_stream import Progress
from jupyter_distrib.kernel.record.timeline import POINTS, RECENT_S, Course, Place, levels
from jupyter_distrib.kernel.views import timeline as view
from jupyter_distrib.wire import messages as m


def places(*steps: float) -> list[Place]:
    return [Place(float(second), step) for second, step in enumerate(steps)]


def test_a_rank_that_falls_behind_gets_higher_levels() -> None:
    found = levels({0: places(*range(0, 110, 10)), 1: places(*range(0, 60, 10), 52, 54, 56, 58, 60)}, {})

    assert found is not None
    assert found.rows[0] == "0" * 10
    # 8, 16, 24, 32 and 40 steps behind: 8-15, 16-31, 16-31, 32-63, 32-63
    assert found.rows[1] == "0000045566"
    assert found.show_delay
    assert view.spoken(found) == "rank 1 up to 32-63"


def test_ranks_at_the_same_step_differ_by_the_moments_of_their_samples_only() -> None:
    late = [Place(second + 0.1, 100.0 * second) for second in range(11)]
    found = levels({0: places(*range(0, 1100, 100)), 1: late}, {})

    assert found is not None
    assert not found.show_delay


def test_a_rank_that_has_ended_is_not_behind() -> None:
    found = levels({0: places(*range(11)), 1: places(*range(6))}, {1: 5.0})

    assert found is not None
    assert found.rows[1] == "00000....."


def test_a_rank_stays_behind_when_the_others_have_ended() -> None:
    ahead = places(*range(0, 70, 10))  # 60 steps in 6 s
    late = [Place(float(second), 4.0 * second) for second in range(13)]
    found = levels({0: ahead, 1: ahead, 2: late}, {0: 6.0, 1: 6.0})

    assert found is not None
    assert found.rows[0] == "000000......"
    # 6 to 36 steps behind the others, then 32 to 12 behind where they ended
    assert found.rows[2] == "345556" + "655554"
    assert view.spoken(found) == "rank 2 up to 32-63"


def test_one_rank_and_a_run_of_seconds_have_no_course() -> None:
    assert levels({0: places(*range(11))}, {}) is None
    assert levels({0: places(0, 1, 2), 1: places(0, 1, 2)}, {}) is None


def test_memory_is_bounded_and_spans_the_whole_run() -> None:
    course = Course()
    for second in range(5000):
        course.use(50.0, 1000)
        course.count(second, float(second))

    assert len(course.uses) == RECENT_S
    assert len(course.places) <= POINTS
    assert (course.places[0].step < 200, course.places[-1].step) == (True, 4999)


def test_steps_are_those_of_bars_else_of_optimizers() -> None:
    record = RunRecord(run="r", label="c", ranks=[0], world_size=1)
    times = m.PhaseTimes(
        steps=7, seconds=dict.fromkeys(("data", "forward", "backward", "collective", "optimizer", "other"), 1.0)
    )

    def sample(at_s: float) -> None:
        record.apply(
            m.Sampled(run="r", rank=0, rss_bytes=500, cpu_percent=40.0, gpu_memory_bytes=None,
                    gpu_memory_total_bytes=None, gpu_percent=None, times=times, at_s=at_s)
        )  # fmt: skip

    sample(1.0)
    assert record.ranks[0].course.places == [Place(1.0, 7)]
    record.apply(m.Progressed(run="r", rank=0, label="epoch", step=2, total=5, at_s=1.5))
    record.apply(m.Progressed(run="r", rank=0, label="step", step=3, total=10, at_s=1.5))
    sample(2.0)
    assert record.ranks[0].course.places == [Place(2.0, 23)]
    assert view.strips(record.ranks[0]) == ["ee", "zz"]


def test_steps_go_on_from_loop_to_loop() -> None:
    course = Course()

    def come_to(*steps: tuple[float, float | None]) -> float:
        course.come_to(tuple(Progress(label=f"at {step}", step=step, total=total) for step, total in steps), 0.0)
        return course.places[-1].step

    assert come_to((0, 3), (290, 300)) == 290
    assert come_to((1, 3)) == 300  # between two rounds
    assert come_to((1, 3)) == 300
    assert come_to((1, 3), (5, 300)) == 305
    assert come_to((1, 3), (4, 20)) == 604  # another loop inside: 295 were left
    assert come_to((2, 3), (1, 300)) == 621
    assert come_to((3, 3)) == 920
    assert come_to((7, 50)) == 927  # a loop of its own
    assert come_to((3, 50)) == 973  # and the same again
    assert come_to((40, None)) == 1060
    assert come_to((2, None)) == 1062


def test_a_loop_that_is_found_inside_another_counts_from_the_beginning() -> None:
    course = Course()
    epoch = Progress(label="epoch", step=1, total=3)
    course.come_to((epoch,), 1.0)
    course.come_to((epoch, Progress(label="step", step=4, total=10)), 2.0)

    assert course.places == [Place(2.0, 14)]


def test_the_time_left_is_that_of_the_outermost_loop() -> None:
    def bar(step: float, total: float | None, rate: float | None) -> Progress:
        return Progress(label="", step=step, total=total, rate=rate)

    assert seconds_left((bar(8, 14, 0.5), bar(11, 11, 25.6))) == 10.0
    assert seconds_left((bar(8, 14, 0.5),)) == 12.0
    assert seconds_left((bar(0, 14, None), bar(0, 11, 22.0))) == 7.0
    assert seconds_left((bar(14, 14, 0.5),)) is None
    assert seconds_left((bar(3, None, 2.0),)) is None
    assert seconds_left(()) is None
