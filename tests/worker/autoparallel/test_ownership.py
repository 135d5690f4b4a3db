"""Which objects of a rank's process belong to the cell that runs."""

from __future__ import annotations

import json.decoder
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from jupyter_distrib.worker.autoparallel import ownership


class Thing:
    """What is looked for."""


@pytest.fixture
def in_a_library() -> Iterator[Thing]:
    """One that a library's module holds."""
    thing = Thing()
    vars(json.decoder)["held"] = [thing]
    yield thing
    del vars(json.decoder)["held"]


def test_what_a_variable_holds_is_within_reach_however_deep() -> None:
    near, deep, far = Thing(), Thing(), Thing()
    cell: dict[str, Any] = {}  # the globals of this module lead to all that pytest holds
    exec("def make(deep):\n    return lambda: deep", cell)

    assert ownership.within_reach([near, deep, far], {"a": [near], "b": {"c": (cell["make"](deep),)}}) == [near, deep]


def test_what_only_a_library_holds_is_not_though_the_cell_has_a_function_of_it(in_a_library: Thing) -> None:
    assert ownership.within_reach([in_a_library], {"decode": json.decoder.py_scanstring}) == []


def test_where_nothing_is_looked_for_no_library_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new rank joins a group in a moment: to look through all modules would take it 0.1 s."""
    monkeypatch.setattr(ownership.file_owner, "is_library", None)

    assert ownership.within_reach([], {"a": 1}) == []


def test_a_heap_that_is_too_large_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "REACH", 10)
    far = Thing()

    assert ownership.within_reach([far], {"data": [[number] for number in range(100)]}) == [far]


def test_a_module_whose_init_has_not_run_has_no_parameters() -> None:
    """As a class has it that sets something before it calls `nn.Module.__init__`."""
    half = nn.Linear.__new__(nn.Linear)

    assert list(ownership.own_parameters(half)) == []
    assert half in ownership.present(nn.Linear)
