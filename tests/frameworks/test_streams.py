"""Streams of libraries that divide themselves among the ranks: each sample is read once, and not half of them."""

from __future__ import annotations

from textwrap import dedent

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


@pytest.fixture(scope="module")
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(SHARDS)
    return shared_notebook


def test_webdataset_that_splits_by_node_is_left_alone(book: Notebook) -> None:
    assert book.ok(READ).result == "rank 0: (16, 184)\nrank 1: (16, 312)"


@pytest.mark.parametrize(
    "loader", ["torch.utils.data.DataLoader(stream, batch_size=4)", "wds.WebLoader(stream, batch_size=4)"]
)
def test_webdataset_is_divided_by_its_shards_and_read_whole_for_an_evaluation(book: Notebook, loader: str) -> None:
    divided = READ.replace("nodesplitter=wds.split_by_node, ", "").replace(
        "torch.utils.data.DataLoader(stream, batch_size=4)", loader
    )
    whole = dedent(f"""
        with torch.no_grad():
            count = sum(len(texts) for (texts,) in {loader})
        seen, count""")
    read = book.ok(divided + whole)

    shards = [[*range(8 * rank, 8 * rank + 8), *range(8 * rank + 16, 8 * rank + 24)] for rank in (0, 1)]
    assert read.result == "\n".join(f"rank {rank}: ({shards[rank]}, 32)" for rank in (0, 1))
    assert "shards of WebDataset dealt to 2 ranks" in read.text
    assert "different samples" not in read.text, "each rank has a seed of its own for the order of its shards"


def test_webdataset_with_fewer_shards_than_ranks_is_refused(book: Notebook) -> None:
    refused = book.fails(READ.replace("nodesplitter=wds.split_by_node, ", "").replace("{0..3}", "0"))

    assert "WebDataset has too few shards (1): 2 ranks need at least 2, one for each" in refused.evalue


def test_a_stream_that_cannot_be_divided_by_shards_is_named_as_read_by_all(book: Notebook) -> None:
    stream = READ.replace(
        'wds.WebDataset("shard-{0..3}.tar", nodesplitter=wds.split_by_node, shardshuffle=False).decode().to_tuple("txt")',
        "Numbers()",
    ).replace("for (texts,)", "for texts")
    numbers = dedent("""\
        import torch
        class Numbers(torch.utils.data.IterableDataset):
            def __iter__(self): return iter(range(8))
    """)
    read = book.ok(numbers).text + book.ok(stream).text

    assert "samples of Numbers dealt to 2 ranks, each of which reads all of them" in read
