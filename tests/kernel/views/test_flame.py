"""Flame graphs of sampled stacks."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from jupyter_distrib.kernel.views.flame import WIDTH, FlameGraph
from jupyter_distrib.wire import messages as m


def stack(*functions: str) -> tuple[m.Frame, ...]:
    return tuple(m.Frame(filename="/home/me/train.py", line=1, function=each) for each in functions)


GRAPH = FlameGraph.of(
    [
        (0, stack("<module>", "load")),
        (1, stack("<module>", "step", "step<T>")),
        (1, stack("<module>", "step")),
        (2, ()),
    ],
    5.0,
)


def test_boxes_are_as_wide_as_the_share_of_their_function() -> None:
    widths = {}
    for box in ET.fromstring(GRAPH.svg):
        title, rect = box[0].text or "", box[1]
        widths[title] = round(float(rect.get("width", "0")) + 0.5)

    assert widths == {
        "all: 100.0%": WIDTH,
        "<module> (train.py): 100.0%": WIDTH,
        "load (train.py): 33.3%": WIDTH / 3,
        "step (train.py): 66.7%": 2 * WIDTH / 3,
        "step<T> (train.py): 33.3%": WIDTH / 3,
    }


def test_the_text_names_functions_with_their_shares_and_the_ranks_that_answered() -> None:
    lines = repr(GRAPH).splitlines()

    assert lines[0] == "3 samples of ranks 0-1 in 5.0 s"
    assert "  67%    33%  step (train.py)" in lines
    assert "<T>" not in GRAPH._repr_html_()
