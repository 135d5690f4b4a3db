"""Lists, dictionaries and arrays of the notebook that a cell has changed on the ranks only."""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from jupyter_distrib.worker.environment.changed_values import ChangedValues
from tests.notebook import Notebook


class Recorder:
    """An object of the notebook, such as a trainer."""

    def __init__(self) -> None:
        self.step, self.history, self.weight = 0, list[int](), torch.zeros(2, requires_grad=True)

    def record(self, count: int) -> None:
        self.step += count


class Samples(torch.utils.data.Dataset[int]):
    """A data set that opens its file when it is read first."""

    file: object = None


class Scalar:
    """A number that knows where it came from, as in a course on back-propagation."""

    def __init__(self, data: float) -> None:
        self.data, self.parent = data, self


class Layer:
    """A layer or a neuron of such numbers."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


Layer.__module__ = Scalar.__module__ = Recorder.__module__ = Samples.__module__ = "__main__"

CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "list, appended": ([], lambda losses: losses.append(1.5)),
    "list, an item replaced": ([1, 2], lambda losses: losses.__setitem__(0, object())),
    "list in a dictionary": ({"train": [], "val": []}, lambda losses: losses["val"].append(1)),
    "dictionary": ({}, lambda losses: losses.update(a=1)),
    "set": (set(), lambda losses: losses.add(1)),
    "deque": (deque(), lambda losses: losses.append(1)),
    "array": (np.zeros(3), lambda losses: losses.__setitem__(1, 2)),
    "tensor": (torch.zeros(3), lambda losses: losses[1].add_(2)),
    "tensor that was trained": (torch.zeros(3, requires_grad=True), lambda losses: losses.data.add_(2)),
    "tensors in a list": ([torch.zeros(3), torch.ones(2, requires_grad=True)], lambda losses: losses[1].data.add_(2)),
    "parameters in a dictionary": ({"w": torch.nn.Parameter(torch.zeros(3))}, lambda losses: losses["w"].data.add_(2)),
    "attribute of an object": (Recorder(), lambda losses: losses.record(1)),
    "list in an object": (Recorder(), lambda losses: losses.history.append(1)),
    "object in a list": ([Recorder()], lambda losses: losses[0].history.append(1)),
    "numbers in the neurons of layers": (
        Layer([Layer([Layer([Scalar(0.5)])])]),
        lambda losses: setattr(losses.parts[0].parts[0].parts[0], "data", 0.4),
    ),
    "tensor in an object": (Recorder(), lambda losses: losses.weight.data.add_(1)),
}


@pytest.mark.parametrize("how", CHANGES)
def test_values_that_were_changed_in_place_are_named(how: str) -> None:
    value, change = CHANGES[how]
    name = f"losses_{list(CHANGES).index(how)}"  # a rank has each note once
    names = {name: value, "_hidden": value}
    changed, kept = ChangedValues(names, []), ChangedValues(names, [value])
    holder = ChangedValues({"holder": [value], "object": Namespace(value=value)}, [value])
    assert changed.note(how, (), None) == ""

    change(value)

    for keep, returned in (((name,), None), ((), value), ((), (0, value)), ((), {"a": value})):
        assert changed.note(how, keep, returned) == ""
    assert kept.note(how, (), None) == "", "a kept value is changed for good"
    assert holder.note(how, (), None) == "", "also in a list or an object of the notebook"
    note = changed.note(how, (), None)
    assert note.startswith(f"`{name}` of the notebook is as before: the cell has changed copies on the ranks.")
    assert f"add --keep {name}, and read {name}[0] in the notebook, or end the cell with it" in note
    assert changed.note(how, (), None) == note, "the cell is run again"
    assert changed.note("another cell", (), None) == ""


def test_values_that_are_not_compared_or_not_left_are_not_named() -> None:
    large, names, samples, other = [0] * 20_000, {"i": [1]}, Samples(), Namespace()
    before = ChangedValues({"large": large, "nan": np.array([np.nan]), "samples": samples, "args": other}, [])
    samples.file = object()
    other.total = 1
    rebound = ChangedValues(names, [])
    large.append(1)
    held = weakref.ref(item := {1})
    items = {"items": [item]}
    deleted = ChangedValues(items, [])
    del items["items"], item
    assert held() is None, "what the cell deletes is freed"
    assert deleted.note("cell", (), None) == ""
    names["i"].append(1)
    names["i"] = []

    assert before.note("cell", (), None) == rebound.note("cell", (), None) == ""


UNUSUAL: dict[str, Callable[[], object]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "bfloat16": lambda: torch.zeros(3, dtype=torch.bfloat16),
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "without memory": lambda: torch.zeros(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "lazy parameter": torch.nn.UninitializedParameter,
    "array of objects": lambda: np.array([[], None], dtype=object),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # that nested and compressed tensors are not finished
@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_that_have_no_plain_numbers_fail_no_cell(kind: str) -> None:
    """A graph's adjacency matrix is a sparse tensor, which has no `nbytes`."""
    value = UNUSUAL[kind]()
    changed = ChangedValues({"value": value, "batch": [value, 1], "args": Namespace(value=value)}, [])

    assert changed.note("cell", (), None) == ""


def test_names_that_a_function_binds_by_global_are_named() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "steps": 0, "loss": 0.5, "seen": 0, "kept": 0}
    exec(
        dedent("""\
            def step():
                global steps, kept
                steps += 1
                kept += 1
            class Agent:
                def act(self):
                    global seen
                    seen += 1"""),
        names,
    )
    changed = ChangedValues(names, [])
    assert changed.note("cell", (), None) == ""

    names["loss"] = 0.25  # a loop's variable
    names["step"]()
    names["Agent"]().act()

    assert changed.note("cell", ("kept",), None).startswith("`steps`, `seen` of the notebook are as before")
    assert changed.note("cell", ("kept", "steps", "seen"), None) == ""


@pytest.mark.slow
def test_a_list_that_a_cell_has_filled_on_the_ranks_is_named(shared_notebook: Notebook) -> None:
    shared_notebook.ok(
        dedent("""\
            history, seen = [], {}
            def fit():
                history.append(1)""")
    )
    left = "`history`, `seen` of the notebook are as before"

    assert left in shared_notebook.ok("%%distributed --ranks 2\nfit(); seen[1] = 2").view
    assert left in shared_notebook.ok("%%distributed --ranks 2\nfit(); seen[1] = 2").view
    assert "as before" not in shared_notebook.ok("%%distributed --ranks 2 --keep history,seen\nfit(); seen[1] = 2").view
    assert "as before" not in shared_notebook.ok("%%distributed --ranks 2\nfit(); seen[1] = 3; history").text
