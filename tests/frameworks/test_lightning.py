"""Lightning as its users have it elsewhere: a stream that divides itself, checkpoints of rank 0, a Trainer in a function of
`TorchDistributor`. Real kernels, real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.frameworks.training import missing
from tests.notebook import Notebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing("lightning") is not None, reason=str(missing("lightning"))),
]

TWO_TOWERS = """
import os, torch, lightning
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from lightning.pytorch.callbacks import ModelCheckpoint
from jupyter_distrib.compat.torch_distributor import TorchDistributor

class Pairs(IterableDataset):
    def __iter__(self):
        pairs = torch.randn(64, 2, 6, generator=torch.Generator().manual_seed(0))
        for number in range(int(os.environ.get("RANK", 0)), 64, int(os.environ.get("WORLD_SIZE", 1))):
            user, item = pairs[number]
            yield number, user, item, (user @ item).sign()

class TwoTowers(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item, self.seen = nn.Linear(6, 4), nn.Linear(6, 4), []

    def training_step(self, batch, index):
        numbers, user, item, likes = batch
        self.seen += numbers.tolist()
        return nn.functional.mse_loss((self.user(user) * self.item(item)).sum(1), likes)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

def fitted(strategy="ddp", devices=2, num_nodes=1, **options):
    model = TwoTowers()
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=devices, num_nodes=num_nodes, max_epochs=2,
        logger=False, enable_progress_bar=False, enable_model_summary=False, **options)
    trainer.fit(model, DataLoader(Pairs(), batch_size=8))
    return trainer, model
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("lightning")) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(TWO_TOWERS)
        yield book


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_a_stream_that_divides_itself_is_read_once_and_rank_0_saves(
    book: Notebook, tmp_path: Path, strategy: str
) -> None:
    book.ok(
        dedent(f"""\
            %%distributed --ranks 2 --strategy {strategy} --out got
            trainer, model = fitted(callbacks=[ModelCheckpoint(dirpath={str(tmp_path)!r}, filename='last')], enable_checkpointing=True)
            model.seen, weights_of(model), trainer.is_global_zero""")
    )
    check = (
        f"saved = weights_of(TwoTowers.load_from_checkpoint({str(tmp_path / 'last.ckpt')!r}))\n"
        "[len(seen) for seen, *_ in got], sorted(got[0][0] + got[1][0]) == sorted(2 * list(range(64))), "
        "[torch.equal(weights, saved) for _, weights, _ in got], [first for *_, first in got], "
        "torch.equal(saved, weights_of(TwoTowers()))"
    )

    assert book.ok(check).result == "([64, 64], True, [True, True], [True, False], False)"
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_fsdp_of_lightning_needs_gpus_and_says_so(book: Notebook) -> None:
    outcome = book.fails("%%distributed --ranks 2\nfitted('fsdp')")

    assert outcome.ename == "ValueError"
    assert "The strategy `fsdp` requires a GPU accelerator" in outcome.evalue


def test_a_trainer_trains_in_a_function_of_torch_distributor(book: Notebook) -> None:
    book.ok("def train(devices, num_nodes):\n    return fitted('ddp', devices, num_nodes)[0].world_size")

    run = "TorchDistributor(num_processes=2, use_gpu=False).run(train, {}, {})"
    assert book.ok(run.format(2, 1)).result == "2"
    assert book.ok(run.format(1, 2)).result == "2", "as it is written for Spark"
    wrong = book.fails(run.format(3, 1))
    assert wrong.ename == "RuntimeError"
    assert "ValueError: You set `devices=3` and `num_nodes=1` in Lightning" in wrong.evalue
    assert "the world size (2)" in wrong.evalue


def test_fabric_takes_the_ranks_as_they_are_written_for_spark(book: Notebook) -> None:
    cell = book.ok(
        dedent("""\
            %%distributed --ranks 2
            from lightning.fabric import Fabric
            fabric = Fabric(accelerator='cpu', strategy='ddp', devices=1, num_nodes=2)
            fabric.launch()
            fabric.world_size, fabric.local_rank, fabric.node_rank""")
    )
    assert cell.result == "rank 0: (2, 0, 0)\nrank 1: (2, 1, 0)"
