"""Parallel coordinates of a sweep that has ended, and how submitted runs are told apart."""

from __future__ import annotations

import pytest

from jupyter_distrib.kernel.notebook.runs_view import told_apart
from jupyter_distrib.kernel.views import parallel
from jupyter_distrib.kernel.views.png import Stroke, Text


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
    drawing = parallel.drawn(["lr", "kind", "loss"], rows, "lr=0.1", 344)

    assert drawing is not None
    lines = [mark for mark in drawing.marks if isinstance(mark, Stroke) and len(mark.spots) == 3]
    assert [(line.colour, [y for _, y in line.spots]) for line in lines] == [
        ("others", [parallel.TOP] * 3),
        ("first", [parallel.BOTTOM] * 3),
    ]
    words = [mark.text for mark in drawing.marks if isinstance(mark, Text)]
    assert words == ["lr", "0.3", "0.1", "kind", "'b'", "'a'", "loss", "3", "1"]
    assert drawing.alt == "loss by lr, kind: the best is lr=0.1"
    assert parallel.drawn(["lr", "kind", "loss"], rows[1:], "lr=0.3", 344) is None


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
    assert told_apart(calls, given) == (told or [{"call": call} for call in calls])
