"""Streams of libraries that divide themselves among the ranks: each sample is read once, and not half of them."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook

pytest.importorskip("webdataset")

pytestmark = pytest.mark.slow

SHARDS = """
import io, tarfile
for shard in range(4):
    with tarfile.open(f"shard-{shard}.tar", "w") as tar:
        for number in range(8):
            data = str(8 * shard + number).encode()
            info = tarfile.TarInfo(f"{8 * shard + number:03}.txt")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
"""
READ = """%%distributed --ranks 2 --strategy ddp
import torch, webdataset as wds
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
stream = wds.WebDataset("shard-{0..3}.tar", nodesplitter=wds.split_by_node, shardshuffle=False).decode().to_tuple("txt")
seen = []
for (texts,) in torch.utils.data.DataLoader(stream, batch_size=4):
    seen += map(int, texts)
    model(torch.tensor([[float(text)] for text in texts]) / 32).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
len(seen), sum(seen)
"""


def test_g10_webdataset_that_splits_by_node_is_left_alone(shared_notebook: Notebook) -> None:
    shared_notebook.ok(SHARDS)

    read = shared_notebook.ok(READ)

    assert read.result == "rank 0: (16, 184)\nrank 1: (16, 312)"
