"""`serverless_gpu.data` on ranks: files that are divided among them, and torch's checkpoints in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_distrib.compat.serverless_gpu_data import DataLoader, UCVolumeDataset
from tests.notebook import Notebook

pytestmark = [pytest.mark.timeout(200)]
IMPORTS = """\
%load_ext jupyter_distrib
%distributed_compat databricks
import pathlib
volume = pathlib.Path('volume')
(volume / 'sub').mkdir(parents=True)
for i in range(8):
    (volume / ('sub' if i % 2 else '.') / f'{i}.txt').write_text(str(i))
(volume / '.hidden').write_text('no')
from torch.utils.data import IterableDataset
from serverless_gpu.data import DataLoader, UCVolumeDataset, UCVolumeReader, UCVolumeWriter

class Numbers(IterableDataset):
    def __init__(self, paths: UCVolumeDataset):
        self._paths = paths

    def __iter__(self):
        for path in self._paths:
            with open(path) as file:
                yield float(file.read())
"""


@pytest.fixture
def book(tmp_path: Path) -> Notebook:
    return Notebook(tmp_path)


@pytest.mark.slow
def test_every_file_is_read_by_one_rank_and_one_worker(book: Notebook) -> None:
    with book:
        book.ok(IMPORTS)
        book.ok("""\
from serverless_gpu import distributed

@distributed(gpus=2)
def read(workers):
    loader = DataLoader(Numbers(UCVolumeDataset("volume")), batch_size=2, num_workers=workers)
    return [sorted(v for batch in loader for v in batch.tolist()) for _ in range(2)]

results = {workers: read.distributed(workers) for workers in (0, 2)}
""")
        every = [float(i) for i in range(8)]
        for workers in (0, 2):
            first, second = eval(book.ok(f"list(results[{workers}])").result)
            assert sorted(first[0] + second[0]) == every
            assert (first[0], second[0]) == (first[1], second[1])  # the same share in each epoch
            assert len(first[0]) == 4
        # in the notebook there is one rank, which reads everything
        assert eval(book.ok("sorted(Numbers(UCVolumeDataset(volume)))").result) == every


@pytest.mark.slow
def test_a_strategy_that_divides_data_does_not_divide_the_files_again(book: Notebook) -> None:
    with book:
        book.ok(IMPORTS)
        outcome = book.ok("""\
%%distributed --gpus 2 --strategy ddp
import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = []
for batch in DataLoader(Numbers(UCVolumeDataset("volume")), batch_size=2, num_workers=0):
    seen += batch.tolist()
    model(batch[:, None].float()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sorted(seen)
""")
        first, second = eval(book.ok("list(_)").result)
        assert sorted(first + second) == [float(i) for i in range(8)], outcome.text


@pytest.mark.slow
def test_a_checkpoint_is_written_by_all_ranks_and_read_back(book: Notebook) -> None:
    with book:
        book.ok(IMPORTS)
        outcome = book.ok("""\
from serverless_gpu import distributed

@distributed(gpus=2, backend_fallback=True)
def train(wait):
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from databricks.air.data import UCVolumeWriter as Writer
    dist.init_process_group(backend="cpu:gloo,cuda:nccl")
    path = f"saved-{wait}"
    state = {"weights": torch.arange(4.0), "step": 7}
    if wait:
        dcp.save(state, storage_writer=Writer(path))
    else:
        dcp.async_save(state, storage_writer=UCVolumeWriter(path)).result()
    dist.barrier()
    loaded = {"weights": torch.zeros(4), "step": 0}
    dcp.load(loaded, storage_reader=UCVolumeReader(path))
    dist.destroy_process_group()
    return loaded["weights"].tolist(), loaded["step"], (volume.parent / path / ".metadata").exists()

results = [train.distributed(wait) for wait in (True, False)]
""")
        assert (
            eval(book.ok("[list(each) for each in results]").result) == [[([0.0, 1.0, 2.0, 3.0], 7, True)] * 2] * 2
        ), outcome.text


@pytest.mark.filterwarnings("ignore:This DataLoader will create 6 worker processes")
def test_the_loader_has_the_defaults_of_the_platform_and_torchs_arguments(tmp_path: Path) -> None:
    dataset = UCVolumeDataset(tmp_path)
    loader = DataLoader(dataset, 4)
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (4, 6, 4)
    assert loader.persistent_workers
    chosen = DataLoader(dataset, num_workers=0)
    assert (chosen.num_workers, chosen.prefetch_factor, chosen.persistent_workers) == (0, None, False)
    by_place = DataLoader(dataset, 4, None, None, None, 1)
    assert (by_place.num_workers, by_place.prefetch_factor) == (1, 4)


def test_a_folder_that_is_not_there_says_what_to_give(tmp_path: Path) -> None:
    missing = UCVolumeDataset(tmp_path / "Volumes" / "main")
    with pytest.raises(FileNotFoundError, match=r"UCVolumeDataset reads a folder, and .*main is none on this machine"):
        list(missing)
