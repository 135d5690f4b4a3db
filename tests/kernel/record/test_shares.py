"""What is said of the time of a training, from the times that its ranks have measured."""

from __future__ import annotations

import pytest

from jupyter_distrib.kernel.analysis.shares import PARTS, Shares
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import html, share_bars, text, timeline
from jupyter_distrib.kernel.views import shares as views
from jupyter_distrib.kernel.views.chart import chart_of
from jupyter_distrib.wire import messages as m

EVEN = {"data": 1.0, "forward": 2.0, "backward": 3.0, "collective": 2.0, "optimizer": 1.0, "other": 1.0}


def trained(*times: dict[str, float], steps: int = 50) -> RunRecord:
    record = RunRecord(run="r-1", label="Cell", ranks=range(len(times)), world_size=len(times))
    for rank, seconds in enumerate(times):
        record.apply(
            m.Returned(run="r-1", rank=rank, value=None, times=m.PhaseTimes(steps=steps, seconds=EVEN | seconds))
        )
    return record


def test_what_a_rank_spends_in_collectives_beyond_the_last_one_is_waiting() -> None:
    shares = Shares.of(trained({"collective": 2.0}, {"collective": 0.5, "forward": 3.5}))

    assert shares[0]["moving"] == pytest.approx(0.05)
    assert shares[0]["waiting"] == pytest.approx(0.15)
    assert shares[1]["waiting"] == 0
    with pytest.raises(KeyError, match=r"no shares of rank 7; there are those of: \[0, 1\]"):
        shares[7]
    assert all(sum(shares[rank].values()) == pytest.approx(1) for rank in shares)
    assert list(shares[0]) == list(PARTS)


@pytest.mark.parametrize(
    ("phase", "named"),
    [
        ("data", "data loading"),
        ("forward", "the forward pass"),
        ("backward", "the backward pass"),
        ("optimizer", "the optimizer"),
        ("other", "code between its steps"),
    ],
)
def test_the_rank_for_which_the_others_wait_is_named_with_what_it_is_slow_in(phase: str, named: str) -> None:
    fast = {"collective": 5.0}
    record = trained(fast, fast, fast | {"collective": 1.0, phase: EVEN[phase] + 4.0}, fast)

    sentence = f"ranks 0-1, 3 wait 31% of their time for rank 2, which is slow in {named}"
    assert Shares.of(record).sentence == sentence
    assert f"· {sentence}" in text.as_text(record, 10.0)


def test_one_rank_waits_for_one() -> None:
    shares = Shares.of(trained({"collective": 4.0}, {"collective": 1.0, "data": 4.0}))

    assert shares.sentence == "rank 0 waits 25% of its time for rank 1, which is slow in data loading"


@pytest.mark.parametrize(
    "times",
    [
        ({}, {}),
        ({"collective": 1.9}, {"collective": 1.5}, {"collective": 1.0}),
        ({"collective": 5.0}, {"collective": 1.0}, {"collective": 1.0}, {"collective": 1.0}),
    ],
    ids=["nobody waits", "waits little", "most ranks are the slow ones"],
)
def test_nobody_is_named_who_is_not_clearly_slow(times: tuple[dict[str, float], ...]) -> None:
    assert Shares.of(trained(*times)).sentence == ""


def test_a_part_is_named_only_if_it_explains_the_waiting() -> None:
    shares = Shares.of(trained({"collective": 6.0}, {"collective": 1.0}))

    assert shares.sentence == "rank 0 waits 36% of its time for rank 1"


def test_ranks_that_wait_for_data_are_reported() -> None:
    assert Shares.of(trained({"data": 9.0})).sentence == "rank 0 spends 50% of its time on data loading"


def test_little_training_says_nothing() -> None:
    for record in (trained({"data": 9.0}, steps=4), trained(dict.fromkeys(EVEN, 0.01))):
        assert Shares.of(record).sentence == ""
        assert (views.lines(record), share_bars.picture(record), views.state(record)) == ([], None, {})
    assert len(Shares.of(RunRecord(run="r-1", label="", ranks=[0], world_size=1))) == 0


def test_times_come_with_samples_while_the_cell_runs() -> None:
    record = RunRecord(run="r-1", label="Cell", ranks=[0], world_size=1)
    sample = m.Sampled(
        run="r-1", rank=0, rss_bytes=1, cpu_percent=0.0, gpu_memory_bytes=None, gpu_memory_total_bytes=None,
        gpu_percent=None, times=m.PhaseTimes(steps=9, seconds=EVEN), at_s=1.0,
    )  # fmt: skip
    record.apply(sample)

    assert Shares.of(record)[0]["backward"] == pytest.approx(0.3)


def test_the_line_and_the_bars_show_all_parts() -> None:
    record = trained({"collective": 2.0}, {"collective": 1.0, "forward": 3.0})

    line = "time: data 10% · forward 25% · backward 30% · optimizer 10% · moving 10% · waiting 5% · rest 10%"
    assert views.lines(record) == [line]
    assert views.state(record)["shares"]["ranks"] == [
        [0, [100, 200, 300, 100, 100, 100, 100]],
        [1, [100, 300, 300, 100, 100, 0, 100]],
    ]
    picture = share_bars.picture(record)
    assert picture is not None
    assert "rank 1: data 10% · forward 30%" in picture.alt
    assert len(picture.as_png()) > 500


def test_of_many_ranks_those_that_wait_most_and_least_are_drawn() -> None:
    record = trained(*({"collective": 1.0 + rank} for rank in range(40)))

    assert views.drawn_ranks(Shares.of(record)) == [*range(8), *range(32, 40)]


def test_charts_bars_and_timeline_are_one_picture_and_leave_no_markup_for_a_sanitizer() -> None:
    record = trained({"collective": 2.0}, {"collective": 1.0, "forward": 3.0})
    for step in range(20):
        for rank, each in record.ranks.items():
            record.apply(m.Measured(run="r-1", rank=rank, step=step, values={"loss": 1 / (step + 1)}, at_s=float(step)))
            each.course.count(step * (10 if rank else 3), float(step))
            each.ended_at_s = 20.0
    record.apply(m.Ended(run="r-1", at_s=20.0))

    picture = html.picture_of(record)
    assert picture is not None
    assert [text.split(" ")[0] for text in picture.sentences] == ["loss,", "Where", "Steps"]
    assert "rank 0 up to" in picture.sentences[2]
    chart, bars, course = (
        drawing.height
        for drawing in (chart_of(record), share_bars.picture(record), timeline.picture(record))
        if drawing
    )
    assert picture.height > chart + bars + course
    assert "<img" not in html.as_html(record, 20.0, always=True, with_chart=False)
    assert html.as_html(record, 20.0, always=True, with_chart=True).count("<img") == 1
