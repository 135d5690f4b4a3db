"""Loaders that are divided among ranks: what they keep of the loader that the cell has made."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
