"""The number of nodes for a number of ranks, as `--nodes` asks for it."""

from __future__ import annotations

import pytest

from jupyter_distrib.coordinator.node_count import NodeCount


@pytest.mark.parametrize(
    ("nodes", "unit", "sizes", "on_each"),
    [
        (None, 1, {1: 0, 8: 0}, 0),
        ("2", 1, {1: 2, 8: 2}, 0),
        ("2:2", 1, {4: 2}, 0),
        ("1:4", 8, {8: 1, 16: 2, 32: 4}, 8),
        ("2:6:2", 6, {6: 2, 12: 4, 18: 6}, 3),
    ],
)
def test_a_range_gives_each_node_the_same_number_of_ranks(
    nodes: str | None, unit: int, sizes: dict[int, int], on_each: int
) -> None:
    count = NodeCount.of({} if nodes is None else {"nodes": nodes})

    assert {size: count.for_ranks(size, unit) for size in sizes} == sizes
    assert count.on_each(unit) == on_each
