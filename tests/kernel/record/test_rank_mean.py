"""The mean of what many ranks report: the cases in `golden_mean.json`, with which the live view is tested, too."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.kernel.analysis.metrics import Metrics
from jupyter_distrib.kernel.analysis.rank_mean import means, stride
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import chart
from jupyter_distrib.kernel.views.state import columns
from jupyter_distrib.wire import messages as m

CASES = json.loads((Path(__file__).parent / "golden_mean.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_mean_is_that_of_nearly_all_ranks(case: dict[str, Any]) -> None:
    lines = {int(rank): [(step, value) for step, value in points] for rank, points in case["lines"].items()}
    found = [list(each) for each in means(lines, case["ended"])]
    assert found == [pytest.approx(each) for each in case["means"]]


def a_run(ranks: int = 64, steps: int = 200) -> RunRecord:
    """Ranks that report 1 / (step + 1) + 0.01 * rank, of which later ones are further back."""
    record = RunRecord(run="r-7", label="Cell In[5]", ranks=range(ranks), world_size=ranks)
    for rank in range(ranks):
        record.apply(m.Started(run="r-7", rank=rank, pid=1, device="cpu", at_s=1.0))
        for step in range(steps - rank):
            value = 1 / (step + 1) + 0.01 * rank
            record.apply(m.Measured(run="r-7", rank=rank, step=step, values={"loss": value}, at_s=1.0 + step / 10))
    return record


def test_a_known_series_is_drawn_as_it_is() -> None:
    drawing = chart.chart_of(a_run())
    assert drawing is not None
    spots = drawing.lines["loss"]
    assert spots[-1][0] == pytest.approx(200 - 64 + 6, abs=2), "the last step that nearly all ranks have come to"
    for step, value in spots:
        assert value == pytest.approx(1 / (step + 1) + 0.315, abs=0.04)
    assert all(after[1] < before[1] for before, after in pairwise(spots))


def test_live_settled_and_as_data_the_numbers_are_the_same() -> None:
    record = a_run(ranks=9, steps=100)
    drawing = chart.chart_of(record)
    assert drawing is not None
    settled, data = dict(drawing.lines["loss"]), dict(Metrics.of(record).mean("loss"))
    of_ranks = {number: columns(rank, 12_000 // 9) for number, rank in record.ranks.items()}
    lines = {number: list(zip(each["step"], each["=loss"], strict=True)) for number, each in of_ranks.items()}
    live = {each.step: each.mean for each in means(lines)}
    assert len(live) > 50
    for step, value in live.items():
        assert value == pytest.approx(data[step], rel=1e-4)
        if step in settled:
            assert settled[step] == pytest.approx(data[step], rel=1e-4)


def test_what_is_left_out_of_a_line_is_the_same_for_similar_lines() -> None:
    assert [stride(count, 100) for count in (0, 1, 100, 101, 200, 201, 400, 401)] == [1, 1, 1, 2, 2, 4, 4, 8]
