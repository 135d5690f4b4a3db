"""Parallel coordinates of a sweep that has ended, and how submitted runs are told apart."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from jupyter_distrib.kernel.notebook.runs_view import distinctions, texts
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import parallel
from jupyter_distrib.kernel.views.png import Stroke, Text
from jupyter_distrib.kernel.views.run_table import RunRow, chart_of_sweep, of_sweep
from jupyter_distrib.wire import messages as m


@pytest.mark.parametrize(
    ("values", "places"),
    [
        (["1", "3", "2"], [0, 1, 0.5]),
        (["0.001", "0.1", "0.01"], [0, 1, 0.5]),
        ([0.0, 100.0, 50.0], [0, 1, 0.5]),
        (["'adam'", "'sgd'", "'adam'"], [0, 1, 0]),
        ([None, 4.0, 4.0], [None, 0.5, 0.5]),
        (["", "", None], [None, None, None]),
    ],
)
def test_values_are_placed_as_in_the_live_view(values: list[str | float | None], places: list[float | None]) -> None:
    assert parallel.axis_of("lr", values).places == pytest.approx(places)


def test_each_run_that_has_the_metric_has_a_line_and_the_best_is_on_top() -> None:
    rows = [["0.1", "'a'", 1.0], ["0.3", "'b'", 3.0], ["0.2", "'a'", None]]
    drawing = parallel.drawn(["lr", "kind", "loss"], rows, "the best is lr=0.1", 344)

    assert drawing is not None
    lines = [mark for mark in drawing.marks if isinstance(mark, Stroke) and len(mark.spots) == 3]
    assert [(line.colour, [y for _, y in line.spots]) for line in lines] == [
        ("others", [parallel.TOP] * 3),
        ("first", [parallel.BOTTOM] * 3),
    ]
    words = [mark.text for mark in drawing.marks if isinstance(mark, Text)]
    assert words == ["lr", "0.3", "0.1", "kind", "'b'", "'a'", "loss", "3", "1"]
    assert drawing.alt == "loss by lr, kind: the best is lr=0.1"
    assert parallel.drawn(["lr", "kind", "loss"], rows[1:], "the best is lr=0.3", 344) is None


@pytest.mark.parametrize(
    ("metrics", "order", "told"),
    [
        ([{"epoch": 1, "val_acc": 0.1}, {"epoch": 1, "val_acc": 0.3}], ["1", "0"], "val_acc by lr: the best is lr=1"),
        ([{"epoch": 2, "loss": 0.1}, {"epoch": 1, "loss": 0.3}], ["0", "1"], "loss by lr: the best is lr=0"),
        ([{"samples": 9}, {"samples": 7}], ["1", "0"], "samples by lr: the smallest is lr=1"),
        ([{"loss": nan}, {"loss": nan}], ["0", "1"], "loss by lr"),
        ([{"loss": nan}, {"loss": inf}, {"loss": 2}], ["2", "0", "1"], "loss by lr: the best is lr=2"),
        ([{"score": inf}, {"score": nan}, {"score": -inf}], ["0", "1", "2"], "score by lr"),
    ],
)
def test_runs_are_compared_by_one_number_in_the_table_and_in_words(
    metrics: list[dict[str, float]], order: list[str], told: str
) -> None:
    rows = []
    for place, values in enumerate(metrics):
        record = RunRecord(run=f"a-{place}", label="Cell In[5]", ranks=[0], world_size=1)
        record.apply(m.Started(run=f"a-{place}", rank=0, pid=1, device="cpu", at_s=1.0))
        record.apply(m.Measured(run=f"a-{place}", rank=0, step=0, values=values, at_s=2.0))
        swept = {"lr": str(place)}
        rows.append(RunRow(run=record.run, label="", state="done", elapsed_s=1.0, record=record, swept=swept))
    drawing = chart_of_sweep(rows)

    assert [row[0] for row in of_sweep(rows).rows] == order
    assert drawing is not None
    assert drawing.sentences[-1] == told


def test_a_value_of_several_lines_takes_one() -> None:
    assert texts({"optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1)}) == {
        "optimizer": "SGD ( Parameter Group 0 dampening: 0 di…"
    }


@pytest.mark.parametrize(
    ("calls", "given", "told"),
    [
        (["f(1, 3)", "f(2, 3)"], [{"lr": "1", "epochs": "3"}, {"lr": "2", "epochs": "3"}], [{"lr": "1"}, {"lr": "2"}]),
        (["f(<list>, 1)", "f(<list>, 1)"], [{"n": "1"}, {"n": "1"}], [{"call": "f(<list>, 1)"}] * 2),
        (["f(a, 1)", "f(b, 1)", "f(b, 2)"], [{"n": "1"}, {"n": "1"}, {"n": "2"}], None),
        (["f(1)", "g(2)"], [{"lr": "1"}, {"width": "2"}], None),
        (["f(1)"], [{"lr": "1"}], None),
    ],
)
def test_submitted_runs_are_told_apart_by_what_differs(
    calls: list[str], given: list[dict[str, str]], told: list[dict[str, str]] | None
) -> None:
    assert distinctions(calls, given) == (told or [{"call": call} for call in calls])
