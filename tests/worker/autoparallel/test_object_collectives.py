"""Values that ranks exchange: what rank 0 sends is what the others get, and nothing is unpickled."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jupyter_distrib.worker.autoparallel import object_collectives
from jupyter_distrib.worker.pytorch import private

VALUES = {
    "an order": [3, 1, 2],
    "batches": [[3, 1], [2]],
    "pairs and texts": [(1, "a"), (2, "ü")],
    "numbers": [1.5, float("inf"), True, None, 10**30],
    "keys": {3: "three", ("a", 1): [b"\x00\xff"]},
    "marks of its own": {"tuple": [1], "tensor": 2},
    "an optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3).bfloat16()}}, "lr": 0.1},
    "tensors of many kinds": [torch.empty(0, 2), torch.tensor(True), torch.randn(3, dtype=torch.complex64).conj()],
}


class Wire:
    """Both ends of a broadcast: what rank 0 sends is what another rank gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.sent = 0, list[torch.Tensor]()
        monkeypatch.setattr(dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(dist, "broadcast", self.broadcast)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        if self.rank == src:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))

    def arrived(self, value: Any) -> Any:
        """What rank 1 gets for a value of rank 0."""
        self.rank = 0
        object_collectives.from_rank_0(value)
        self.rank = 1
        return object_collectives.from_rank_0(None)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


@pytest.mark.parametrize("what", VALUES)
def test_a_value_of_rank_0_arrives_as_it_is(wire: Wire, what: str) -> None:
    assert same(VALUES[what], wire.arrived(VALUES[what]))
    assert not wire.sent


def test_numbers_of_numpy_arrive_as_numbers(wire: Wire) -> None:
    numpy = pytest.importorskip("numpy")
    assert wire.arrived(list(numpy.arange(3))) == [0, 1, 2]


def test_what_cannot_be_sent_is_an_error_on_every_rank(wire: Wire) -> None:
    for rank in (0, 1):
        wire.rank = rank
        with pytest.raises(TypeError, match=r"builtins\.set"):
            object_collectives.from_rank_0([torch.ones(2), {1, 2}])
    assert not wire.sent


def test_a_value_that_holds_itself_is_an_error_on_every_rank(wire: Wire) -> None:
    endless: list[Any] = []
    endless.append(endless)
    for rank in (0, 1):
        wire.rank = rank
        with pytest.raises(TypeError, match="RecursionError"):
            object_collectives.from_rank_0(endless)


def test_nothing_that_comes_is_unpickled(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> None:
    evil = pickle.dumps(print)
    wire.sent = [torch.tensor([len(evil)]), torch.frombuffer(bytearray(evil), dtype=torch.uint8)]
    wire.rank = 1
    with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
        object_collectives.from_rank_0(None)


def test_nothing_that_is_gathered_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = pickle.dumps(print)

    def all_gather(every: list[torch.Tensor], _: torch.Tensor, group: None) -> None:
        is_size = every[0].dtype == torch.int64
        every[0].copy_(torch.tensor([len(evil)]) if is_size else torch.frombuffer(bytearray(evil), dtype=torch.uint8))

    monkeypatch.setattr(dist, "get_world_size", lambda _: 1)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
        object_collectives.gather("")


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo", "cpu"), ("cuda:nccl", "cuda"), ("xpu:xccl", "xpu"), ("", "cpu")],
)
def test_values_travel_by_what_the_group_has(backends: str, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(private, "backends", lambda _: backends)

    assert object_collectives._device() == device
