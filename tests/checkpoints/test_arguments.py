"""What is given to `save`, `load` and `resume`: arguments of the wrong kind are one sentence, rare tensors are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jupyter_distrib import load, resume, save
from tests.checkpoints.test_checkpoints import refused, trained


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("function", [save, load, resume])
def test_arguments_of_the_wrong_kind_are_one_sentence(function: Any):
    model, optimizer = trained()
    save("here", model=model, optimizer=optimizer)
    name = f"jupyter_distrib.{function.__name__}()"

    for path in (None, 5, b"here", "~nobody-of-this-name/here"):
        assert refused(function, path, model=model).startswith(
            f"{name} takes the path of a folder, and {path!r} is none"
        )
    assert refused(function, "a\0b", model=model) == f"{name}: a path has no character \\0, as 'a\\x00b' has."
    assert (
        refused(function, "here", model=nn.Linear) == f"{name}: `model` is the class Linear, and not an object of it."
    )
    assert "the class SGD, and not" in refused(function, "here", model=model, optimizer=torch.optim.SGD)
    assert "there is no checkpoint xxx" in refused(load, "x" * 300)


@pytest.mark.parametrize("keep", [None, 1])
def test_tensors_without_values_are_named(keep: int | None):
    empty = torch.ones(2, device="meta")

    for value in (empty, {"x": empty}, {"x": [empty]}, nn.Linear(2, 2, device="meta")):
        said = refused(save, "new", value=value, keep=keep)
        assert said.startswith("`value") and "is on the meta device and has no values to save" in said  # noqa: PT018


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_written_as_they_are():
    rows = [torch.ones(2), torch.zeros(3)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(rows, layout=layout)
        save("here", one=nested, several={"x": nested})
        found = load("here")
        for each in (found["one"], found["several"]["x"]):
            assert [row.tolist() for row in each.unbind()] == [row.tolist() for row in rows]
