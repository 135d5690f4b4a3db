"""Loaders that are divided among ranks: what they keep of the loader that the cell has made."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from jupyter_distrib.worker.autoparallel.data.shard_samplers import ShardChoice, share

HIDDEN = """\
from torch.utils.data import DataLoader
original = DataLoader.__init__
def begin(self, *args, **keywords):
    original(self, *args, **keywords)
DataLoader.__init__ = begin
from jupyter_distrib.worker.autoparallel.data.shard_samplers import ShardChoice, share
def collate(items): return items
loader = DataLoader(range(8), batch_size=2, collate_fn=collate)
part = share(loader, ShardChoice(rank=1, size=2, batch="per-rank", exact=False, together=False))
print(part.collate_fn is collate, len(part))
"""


@pytest.mark.slow
def test_a_loader_keeps_its_settings_where_a_library_hides_the_parameters_of_its_class() -> None:
    done = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True, check=False)
    assert done.stdout == "True 2\n", done.stderr


class EqualToNone:
    """A data set with an equality of its own."""

    __hash__ = None  # type: ignore[assignment] # as Python does it for such a class

    def __eq__(self, other: object) -> bool:
        return NotImplemented

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("data", [torch.arange(8), EqualToNone()], ids=["tensor", "unhashable"])
def test_a_loader_made_anew_for_each_epoch_reshuffles_data_whose_equality_says_nothing(data: Any) -> None:
    part = ShardChoice(rank=0, size=1)
    orders = [[int(one) for one in share(DataLoader(data, batch_size=None, shuffle=True), part)] for _ in range(2)]

    assert [sorted(order) for order in orders] == [[*range(8)]] * 2
    assert orders[0] != orders[1]
