"""What a failed cell holds of a GPU is freed, and nothing else is touched."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from jupyter_distrib.worker.debugging import kept_failure


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are taken for those of a GPU, and 1 kB for much."""
    monkeypatch.setattr(kept_failure, "is_on_accelerator", lambda storage: True)
    monkeypatch.setattr(kept_failure, "LEFT_BYTES", 1000)


def failed(function: Callable[..., object], *arguments: object) -> BaseException:
    try:
        function(*arguments)
    except ValueError as error:
        return error
    raise AssertionError("it should have failed")


def variables(error: BaseException, name: str) -> dict[str, Any]:
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_name != name:
        step = step.tb_next
    assert step is not None
    return dict(step.tb_frame.f_locals)


def alive(size: int) -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) and each.numel() == size for each in gc.get_objects())


def inner(batch: dict[str, torch.Tensor]) -> None:
    hidden, text = torch.ones(7001), "of the CPU"
    if len(text) > 1:
        raise ValueError(hidden.sum().item())


def outer() -> None:
    small_one, model = torch.ones(3), torch.nn.Linear(100, 50)
    inner({"x": torch.ones(7001)})
    print(small_one, model)


def test_large_values_are_freed_wherever_they_are_and_the_debugger_sees_what_they_were() -> None:
    error = failed(outer)
    assert alive(7001) == 2

    assert kept_failure.free_device_values(error, frozenset()) == 3
    assert alive(7001) == 0
    assert repr(variables(error, "inner")["hidden"]) == (
        "<Tensor of shape (7001,) and torch.float32 on cpu, freed after the failure: 28.0 kB>"
    )
    assert repr(variables(error, "inner")["batch"]) == "<dict on cpu, freed after the failure: 28.0 kB>"
    assert repr(variables(error, "outer")["model"]) == "<Linear on cpu, freed after the failure: 20.2 kB>"
    assert variables(error, "inner")["text"] == "of the CPU"
    assert variables(error, "outer")["small_one"].tolist() == [1.0, 1.0, 1.0]


def test_what_else_holds_a_value_keeps_it_unchanged() -> None:
    model = torch.nn.Linear(100, 50)

    def trains(model: torch.nn.Module) -> None:
        weights = list(model.parameters())
        raise ValueError(len(weights))

    error = failed(trains, model)
    kept_failure.free_device_values(error, frozenset())

    assert isinstance(variables(error, "trains")["model"], kept_failure.Freed)
    assert model(torch.ones(100)).shape == (50,)


def test_a_small_result_stays_without_its_graph_which_may_hold_much() -> None:
    def computes() -> None:
        loss = (torch.ones(7001, requires_grad=True) * 2).sum()
        losses = [loss]
        raise ValueError(len(losses))

    error = failed(computes)
    assert alive(7001) == 1
    kept_failure.free_device_values(error, frozenset())

    assert alive(7001) == 0
    loss, losses = variables(error, "computes")["loss"], variables(error, "computes")["losses"]
    assert (loss.item(), loss.grad_fn) == (14002.0, None)
    assert isinstance(losses, kept_failure.Freed)


def test_frames_of_what_an_exception_was_raised_from_are_seen_too() -> None:
    def again() -> None:
        try:
            inner({})
        except ValueError as first:
            raise ValueError("second") from first

    error = failed(again)
    gone = weakref.ref(variables(error.__cause__ or error, "inner")["hidden"])
    kept_failure.free_device_values(error, frozenset())
    gc.collect()

    assert gone() is None


def test_kept_names_of_the_cell_and_variables_shared_with_functions_stay() -> None:
    namespace: dict[str, Any] = {"torch": torch, "function": None}
    code = "kept, other = torch.ones(7001), torch.ones(7001)\nraise ValueError"

    def shares() -> None:
        seen = torch.ones(7001)
        namespace["function"] = lambda: seen
        exec(compile(code, "cell", "exec"), namespace)

    error = failed(shares)
    kept_failure.free_device_values(error, frozenset({"kept"}))

    assert namespace["function"]().shape == namespace["kept"].shape == (7001,)
    assert isinstance(namespace["other"], kept_failure.Freed)
