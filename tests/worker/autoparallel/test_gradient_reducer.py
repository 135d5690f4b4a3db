"""Gradients are averaged without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from jupyter_distrib.worker.autoparallel.checks import divergence
from jupyter_distrib.worker.autoparallel.training import gradient_reducer
from jupyter_distrib.worker.autoparallel.training.gradient_reducer import GradientReducer
from tests.worker.feigned_device import FeignedDevice


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process only."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        left: torch.Tensor = self.left(x)
        return left + self.right(x) if both else left


def backward(reducer: GradientReducer, loss: torch.Tensor) -> bool:
    assert reducer.announce()
    loss.register_hook(
        lambda _: torch.autograd.Variable._execution_engine.queue_callback(lambda: reducer.finish(lambda: None))
    )
    loss.backward()  # type: ignore[no-untyped-call]
    return reducer.complete()


def test_a_parameter_that_nobody_has_used_is_without_a_gradient_when_the_optimizer_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, model = FeignedDevice(monkeypatch), Branches()
    reducer = GradientReducer([model], [])

    assert backward(reducer, model(torch.ones(2, 2), both=False).sum())

    assert (device.copies, device.waits) == (1, 0)
    reducer.resolve()  # as before a step
    assert device.waits == 1
    assert model.left.weight.grad is not None
    assert model.right.weight.grad is None
    reducer.drop()


def test_a_gradient_that_has_come_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = FeignedDevice(monkeypatch), Branches()
    reducer = GradientReducer([model], [])
    backward(reducer, model(torch.ones(2, 2), both=False).sum())
    model.right.weight.grad = torch.ones(1, 2)

    reducer.resolve()

    assert model.right.weight.grad.tolist() == [[1.0, 1.0]]
    assert model.right.bias.grad is None
    reducer.drop()


def test_a_model_of_which_everything_is_used_sends_nothing_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    device, model = FeignedDevice(monkeypatch), Branches()
    reducer = GradientReducer([model], [])
    for _ in range(3):
        assert backward(reducer, model(torch.ones(2, 2), both=True).sum())
        reducer.resolve()
    assert (device.copies, device.waits) == (0, 0)
    reducer.drop()


def test_a_step_that_is_captured_as_a_cuda_graph_sends_nothing_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA ends a capture with an error where something is read on the host."""
    device, model, losses = FeignedDevice(monkeypatch), Branches(), divergence.LossComparison()
    reducer = GradientReducer([model], [])
    backward(reducer, model(torch.ones(2, 2), both=True).sum())
    reducer.resolve()
    monkeypatch.setattr(gradient_reducer, "is_capturing", lambda: True)
    monkeypatch.setattr(divergence, "is_capturing", lambda: True)

    for parameter in model.parameters():
        parameter.grad = None
    loss = model(torch.ones(2, 2), both=False).sum()
    losses.before([loss])
    assert backward(reducer, loss)
    reducer.resolve()

    assert (device.copies, device.waits) == (0, 0)
    reducer.drop()


def test_a_stopped_cell_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device, model = FeignedDevice(monkeypatch), Branches()
    reducer = GradientReducer([model], [])
    backward(reducer, model(torch.ones(2, 2), both=False).sum())
    reducer.drop()
    assert device.waits == 0


def plain(gradients: Iterable[torch.Tensor | None]) -> list[object]:
    return [None if each is None else each.tolist() for each in gradients]


def kept(model: Branches, reducer: GradientReducer | None, share: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Gradients of each step that the cell keeps, without a copy, until the end."""
    steps = list[list[torch.Tensor | None]]()
    for i in range(4):
        for each in model.parameters():
            each.grad = None
        train(model, reducer, i, both=True)
        steps.append([None if each.grad is None else share(each.grad) for each in model.parameters()])
    return [plain(each) for each in steps]


def assigned(model: Branches, reducer: GradientReducer | None) -> object:
    """Gradients in memory of the cell, which is one tensor."""
    memory, found = torch.zeros(6), list[object]()
    for each, part in zip(model.parameters(), memory.split([2, 1, 2, 1]), strict=True):
        each.grad = part.view_as(each)
    for i in range(4):
        memory.zero_()
        train(model, reducer, i, both=True)
        found.append(memory.tolist())
    return found


def accumulated(model: Branches, reducer: GradientReducer | None, begin: Callable[[torch.Tensor], object]) -> object:
    found = list[object]()
    for i, both in enumerate((True, False, True, False, False, True)):
        for each in model.parameters():
            if each.grad is not None:
                begin(each.grad)
        train(model, reducer, i, both=both)
        found.append(plain(each.grad for each in model.parameters()))
    return found


def train(model: Branches, reducer: GradientReducer | None, step: int, *, both: bool) -> None:
    x = torch.full((2, 2), step + 1.0)
    loss = model(x, both=both).pow(2).sum()
    if reducer is None:
        loss.backward()
    else:
        backward(reducer, loss)
        reducer.resolve()


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(partial(kept, share=lambda grad: grad), id="kept"),
        pytest.param(partial(kept, share=torch.Tensor.detach), id="kept and detached"),
        pytest.param(assigned, id="assigned"),
        pytest.param(partial(accumulated, begin=lambda _: None), id="accumulated"),
        pytest.param(partial(accumulated, begin=torch.Tensor.zero_), id="set to zero"),
        pytest.param(partial(accumulated, begin=lambda grad: grad.detach_().zero_()), id="detached in place"),
    ],
)
def test_gradients_are_as_without_a_reducer(cell: Callable[[Branches, GradientReducer | None], object]) -> None:
    """They do not share memory with the buckets, whatever the cell does with them."""
    torch.manual_seed(0)
    model = Branches()
    expected = cell(deepcopy(model), None)
    reducer = GradientReducer([model], [])
    assert cell(model, reducer) == expected
    reducer.drop()
