"""Loaders and data sets of other packages in an unchanged cell: each rank reads its share, and a position is kept."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

STATEFUL = """
import torch, jupyter_distrib
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
data = TensorDataset(torch.arange(24.0).view(24, 1))

def train(steps, resumed, workers, seed=None):
    torch.manual_seed(1)
    own = None if seed is None else torch.Generator().manual_seed(seed + resumed)
    loader = StatefulDataLoader(data, batch_size=2, shuffle=True, num_workers=workers, generator=own)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if resumed:
        jupyter_distrib.resume("stateful", loader=loader)
    seen = []
    for (x,) in loader:
        seen.append([int(each) for each in x])
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) == steps:
            jupyter_distrib.save("stateful", loader=loader)
            break
    return seen
"""


@pytest.mark.parametrize(("workers", "seed"), [(0, None), (2, None), (0, 5), (1, 5)])
def test_a_stateful_loader_is_divided_and_goes_on_at_its_position(
    shared_notebook: Notebook, workers: int, seed: int | None
) -> None:
    pytest.importorskip("torchdata")
    shared_notebook.ok(STATEFUL)
    line = "%%distributed --ranks 2 --strategy ddp --out"
    shared_notebook.ok(f"{line} whole\ntrain(99, False, {workers}, {seed})")
    shared_notebook.ok(f"{line} begun\ntrain(2, False, {workers}, {seed})")
    shared_notebook.ok(f"{line} rest\ntrain(99, True, {workers}, {seed})")

    assert shared_notebook.ok("sorted(sum(whole[0] + whole[1], [])) == list(range(24))").result == "True"
    assert shared_notebook.ok("[a + b for a, b in zip(begun, rest)] == list(whole)").result == "True"


UNSEEDED = """%%distributed --ranks 2 --strategy ddp --keep state --out seen
import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
data = TensorDataset(torch.arange(24.0).view(24, 1))
loader = StatefulDataLoader(data, batch_size=2, shuffle=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
seen = []
for (x,) in loader:
    seen.append([int(each) for each in x])
    model(x).pow(2).mean().backward()
    optimizer.step()
    if len(seen) == 2:
        state = loader.state_dict()
seen
"""


def test_a_stateful_loader_without_a_seed_goes_on_in_the_order_of_its_state(notebook: Notebook) -> None:
    pytest.importorskip("torchdata")
    notebook.ok(UNSEEDED)
    restored = UNSEEDED.replace("model =", "loader.load_state_dict(state)\nmodel =").replace("out seen", "out rest")
    outcome = notebook.ok(restored.replace(" --keep state", ""))

    assert notebook.ok("[each[2:] for each in seen] == list(rest)").result == "True"
    assert "Traceback" not in outcome.text


def test_ranks_live_on_after_a_stateful_loader_was_restored(notebook: Notebook) -> None:
    pytest.importorskip("torchdata")
    notebook.ok(UNSEEDED)
    restored = UNSEEDED.replace("model =", "loader.load_state_dict(state)\nmodel =").replace(" --keep state", "")
    notebook.ok(restored)

    outcome = notebook.ok("%%distributed --ranks 2\nsorted(state)[:1]")
    assert "ranks 0-1" in outcome.text


TABLE = """%%distributed --ranks 2 --strategy ddp --out seen
import torch
from datasets import Dataset
table = Dataset.from_dict({"x": [float(number) for number in range(24)]}).with_format("torch")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
seen = []
for batch in torch.utils.data.DataLoader(table, batch_size=4, shuffle=True):
    seen += [int(each) for each in batch["x"]]
    model(batch["x"].view(-1, 1)).pow(2).mean().backward()
    optimizer.step()
seen
"""


def test_a_table_of_datasets_is_divided(shared_notebook: Notebook) -> None:
    pytest.importorskip("datasets")
    assert "sampler added" in shared_notebook.ok(TABLE).text

    assert shared_notebook.ok("[len(each) for each in seen], sorted(sum(seen, [])) == list(range(24))").result == (
        "([12, 12], True)"
    )


STREAM = """
import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader

def numbers(shards):
    for shard in shards:
        for number in range(6 + shard):
            yield {"x": float(100 * shard + number)}

def train(shards):
    stream = IterableDataset.from_generator(numbers, gen_kwargs={"shards": list(range(shards))})
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    seen = []
    for batch in DataLoader(stream, batch_size=2):
        x = batch["x"].float().view(-1, 1)
        seen += [int(each) for each in x]
        model(x).pow(2).mean().backward()
        optimizer.step()
    return seen
"""


def test_a_stream_of_datasets_is_divided_by_its_shards_and_ends_on_all_ranks_at_once(shared_notebook: Notebook) -> None:
    pytest.importorskip("datasets")
    shared_notebook.ok(STREAM)
    line = "%%distributed --ranks 2 --strategy ddp --out"
    told = shared_notebook.ok(f"{line} two\ntrain(2)").text
    assert "shards of IterableDataset dealt to 2 ranks" in told
    shared_notebook.ok(f"{line} three\ntrain(3)")

    assert shared_notebook.ok("list(two) == [[*range(6)], [*range(100, 106)]]").result == "True"
    order = "[*range(6), *range(100, 107), *range(200, 208)]"
    assert (
        shared_notebook.ok(f"[each[:8] for each in three] == [{order}[0::2][:8], {order}[1::2][:8]]").result == "True"
    )


EPOCHS = """%%distributed --ranks 2 --strategy ddp --out seen
import torch
from datasets import Dataset
table = Dataset.from_dict({{"x": [float(number) for number in range(24)]}}).with_format("torch")
stream = table.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=8)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
seen = []
loader = torch.utils.data.DataLoader(stream, batch_size=4{options})
for epoch in range(2):
    stream.set_epoch(epoch)
    seen.append([])
    for batch in {read}:
        seen[-1] += [int(each) for each in batch["x"]]
        model(batch["x"].view(-1, 1)).pow(2).mean().backward()
        optimizer.step()
seen
"""


@pytest.mark.parametrize(
    ("read", "options"),
    [
        ("loader", ""),
        ("loader", ", num_workers=2, persistent_workers=True"),
        ("torch.utils.data.DataLoader(stream, batch_size=4)", ""),
    ],
)
def test_a_stream_of_datasets_is_shuffled_again_by_its_epoch(
    shared_notebook: Notebook, read: str, options: str
) -> None:
    pytest.importorskip("datasets")
    shared_notebook.ok(EPOCHS.format(read=read, options=options))

    for epoch in range(2):
        check = f"sorted(seen[0][{epoch}] + seen[1][{epoch}]) == list(range(24))"
        assert shared_notebook.ok(check).result == "True"
    assert shared_notebook.ok("[first != second for first, second in seen]").result == "[True, True]"


LEFT_OUT = """%%distributed --ranks 2 --strategy ddp --out seen
import torch
from datasets import Dataset, concatenate_datasets
table = Dataset.from_dict({"x": [float(number) for number in range(24)]}).with_format("torch")
stream = table.to_iterable_dataset(num_shards=4)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
seen = []
for part in (stream.skip(8).shuffle(seed=3, buffer_size=8), concatenate_datasets([stream.take(8), stream.take(8)])):
    for batch in torch.utils.data.DataLoader(part, batch_size=4):
        seen += [int(each) for each in batch["x"]]
        model(batch["x"].view(-1, 1)).pow(2).mean().backward()
        optimizer.step()
seen
"""


def test_samples_that_a_stream_leaves_out_are_those_of_one_process(shared_notebook: Notebook) -> None:
    """The others are those that it is evaluated with."""
    pytest.importorskip("datasets")
    shared_notebook.ok(LEFT_OUT)

    expected = "sorted([*range(8, 24), *range(8), *range(8)])"
    assert shared_notebook.ok(f"sorted(seen[0] + seen[1]) == {expected}").result == "True"
