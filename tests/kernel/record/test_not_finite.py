"""Where a reported number stopped being one, in the record, the chart and the saved run; and which values are better."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path

import pytest

from jupyter_distrib.kernel.analysis.best_value import best_of, direction
from jupyter_distrib.kernel.record.not_finite import NotFinite, of_points, of_ranks
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import chart, png
from jupyter_distrib.kernel.views.state import columns
from jupyter_distrib.kernel.views.text import statuses
from jupyter_distrib.wire import messages as m


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0, nan, nan], "nan from step 1"),
        ([1.0, nan, 2.0], "nan at step 1"),
        ([inf, inf, 2.0], "inf at steps 0-1"),
        ([nan, 1.0, -inf], "-inf from step 2"),
    ],
)
def test_the_steps_are_reported(values: list[float], text: str) -> None:
    found = of_points(enumerate(values))
    assert found is not None
    assert found.text == text


def test_a_finite_metric_has_none() -> None:
    assert of_points(enumerate([1.0, 2.0])) is None


def test_ranks_are_named_unless_all_agree() -> None:
    late, early = (NotFinite(word="nan", first=step, last=9, is_now=True) for step in (7, 3))
    assert of_ranks({0: early, 1: early}, 2) == "nan from step 3"
    assert of_ranks({0: late, 2: early, 3: early}, 4) == "nan from step 3 on ranks 2-3"
    assert of_ranks({}, 4) == ""


def a_run(ranks: int, turned: frozenset[int]) -> RunRecord:
    """Ranks that report up to step 59, of which some turn to nan at step 31."""
    record = RunRecord(run="r-7", label="Cell In[5]", ranks=range(ranks), world_size=ranks)
    for rank in range(ranks):
        record.apply(m.Started(run="r-7", rank=rank, pid=1, device="cpu", at_s=1.0))
        for step in range(60):
            value = nan if rank in turned and step >= 31 else 2.0 - step / 40
            record.apply(m.Measured(run="r-7", rank=rank, step=step, values={"loss": value}, at_s=1.0 + step / 10))
    return record


@pytest.mark.parametrize(
    ("ranks", "turned", "told"),
    [
        (1, frozenset({0}), "nan from step 31"),
        (4, frozenset(range(4)), "nan from step 31"),
        (4, frozenset({2}), "nan from step 31 on rank 2"),
        (64, frozenset(range(64)), "nan from step 31"),
    ],
)
def test_a_chart_has_a_cross_where_it_turned_and_says_so(ranks: int, turned: frozenset[int], told: str) -> None:
    record = a_run(ranks, turned)
    drawing = chart.chart_of(record)
    assert drawing is not None
    crosses = [mark for mark in drawing.marks if isinstance(mark, png.Stroke) and mark.colour == "bad"]
    texts = [mark.text for mark in drawing.marks if isinstance(mark, png.Text)]
    assert len(crosses) == (2 * len(turned) if ranks <= chart.MANY else 2)
    assert drawing.alt.endswith(told)
    assert told in texts
    assert ("nan" in texts) == (0 in turned), "in place of a last value that it has not"
    axis = chart.WIDTH - chart.LEFT - chart.RIGHT
    expected = chart.LEFT + axis * 31 / (59 if len(turned) < ranks else 31)
    assert sum(x for x, _ in crosses[0].spots) / 2 == pytest.approx(expected)
    assert columns(record.ranks[max(turned)], 1000)["not_finite"] == {"loss": ["nan", 31, 59, True]}
    assert any("nan from step 31" in row[3] for row in statuses(record, 9.0))


def test_the_best_value_is_the_first_of_the_best() -> None:
    assert best_of("loss", [(0, 2.0), (1, 1.0), (2, 1.0)]) == (1, 1.0)
    assert best_of("val/accuracy", [(0, 0.2), (1, 0.9), (2, 0.5)]) == (1, 0.9)
    assert best_of("lr", [(0, 2.0)]) is None
    assert best_of("loss", []) is None


@pytest.mark.parametrize(
    ("name", "expected"), json.loads((Path(__file__).parent / "golden_direction.json").read_text())
)
def test_the_name_tells_which_values_are_better(name: str, expected: int) -> None:
    assert direction(name) == expected
