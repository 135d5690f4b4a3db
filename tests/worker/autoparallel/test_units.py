"""Which parts of a model FSDP gathers together."""

from __future__ import annotations

import pytest
from torch import nn

from jupyter_distrib import DistributedError
from jupyter_distrib.worker.autoparallel.training.units import has_forward, units_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x):
        return self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Linear(4, 4), nn.ModuleList([Block(), Block()]), nn.Linear(4, 4)

    def forward(self, x):
        return x


def test_the_blocks_that_are_repeated_if_they_are_large():
    model = Model()

    assert units_of(model) == []
    assert units_of(model, least=10) == [model.blocks[1], model.blocks[0]]


def test_what_a_model_of_transformers_declares():
    model = Model()
    model._no_split_modules = ["Linear"]

    assert model.embedding in units_of(model, least=10)
    assert model.blocks[0] not in units_of(model, least=10)


def test_classes_by_name_inner_ones_first_whatever_their_size():
    model = Model()

    found = units_of(model, "Block,Sequential")

    assert [type(each).__name__ for each in found] == ["Sequential", "Block", "Sequential", "Block"]


def test_an_unknown_class_names_the_near_one_or_those_there_are():
    with pytest.raises(DistributedError, match=r"no part of Model has this class; did you mean Block\?"):
        units_of(Model(), "Blok")
    with pytest.raises(DistributedError, match="it has Linear, ModuleList, Block, Sequential, ReLU"):
        units_of(Model(), "GPT2Layer")


def test_parts_that_share_a_weight_stay_together_in_the_model():
    model = Model()
    model.head.weight = model.blocks[0].inner[0].weight

    assert units_of(model, "Block") == [model.blocks[1]]
    assert units_of(model, "Linear") == [
        model.blocks[1].inner[2],
        model.blocks[1].inner[0],
        model.blocks[0].inner[2],
        model.embedding,
    ]


@pytest.mark.versions
def test_containers_have_no_forward():
    assert has_forward(Model())
    assert not has_forward(nn.ModuleList())
    assert not has_forward(nn.Module())
