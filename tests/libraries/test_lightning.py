"""Which devices and nodes Lightning is told."""

from __future__ import annotations

import pytest

from jupyter_distrib.libraries.lightning import fitting


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ((1, 8), (4, 2)),
        ((8, 1), (4, 2)),
        ((4, 2), (4, 2)),
        ((1, 1), (1, 1)),
        ((3, 1), (3, 1)),
        (("auto", 8), ("auto", 8)),
        (([0, 1], 4), ([0, 1], 4)),
        ((True, 8), (True, 8)),
    ],
)
def test_arguments_that_name_all_ranks_are_reported_as_the_ranks_are_placed(
    monkeypatch: pytest.MonkeyPatch, given: tuple[object, object], fits: tuple[object, object]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert fitting(*given) == fits


def test_nothing_is_changed_without_ranks_or_where_nodes_have_different_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert fitting(1, 2) == (1, 2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert fitting(1, 3) == (1, 3)
