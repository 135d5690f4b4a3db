"""Options of strategies that are refused, each in its sentence. Pure."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from jupyter_distrib.errors import DistributedError, OptionsError
from jupyter_distrib.kernel.settings.cell_options import Options, parse_line
from jupyter_distrib.strategies.deepspeed import DeepSpeedStrategy
from jupyter_distrib.strategies.tensorflow import TensorFlowStrategy
from jupyter_distrib.strategies.tp import TensorParallelStrategy, dimensions
from jupyter_distrib.worker.autoparallel.data.shard_samplers import ShardChoice, batch_size

STRATEGIES = {
    "none": (),
    "ddp": (),
    "deepspeed": DeepSpeedStrategy.options,
    "tensorflow": TensorFlowStrategy.options,
    "tp": TensorParallelStrategy.options,
}


def line(text: str) -> Options:
    return parse_line(text, strategies=STRATEGIES, pools={"local": ()})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--strategy deepspeed --zero 4", "--zero 4 is not known: choose 0, 1, 2 or 3"),
        ("--strategy tp --zero 1", "--zero is an option of --strategy deepspeed: choose that, or leave --zero out"),
        ("--strategy tp --mesh pp2", "--mesh must be names and sizes of dimensions, such as data=2,model=2; got 'pp2'"),
        (
            "--strategy tp --mesh pp=0",
            "--mesh must be names and sizes of dimensions, such as data=2,model=2; got 'pp=0'",
        ),
        ("--strategy tp --mesh pp=2,pp=2", "--mesh names a dimension twice; got 'pp=2,pp=2'"),
        ("--strategy tensorflow --own-scope 1", "'1' stands alone"),
        ("--strategy ddp --own-scope", "--own-scope is an option of --strategy tensorflow: choose that"),
    ],
)
def test_an_option_that_is_wrong_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(OptionsError) as refused:
        line(text)
    assert sentence in str(refused.value)


def test_a_batch_that_nobody_can_split_is_refused() -> None:
    part = ShardChoice(rank=0, size=2, batch="global")

    with pytest.raises(
        DistributedError, match="cannot split the batches of this data loader, since its batch_size is None"
    ):
        batch_size(DataLoader([1, 2], batch_size=None), part)
    with pytest.raises(DistributedError, match="the batch size 3 does not divide by 2 ranks; take 2 or 4"):
        batch_size(DataLoader([1, 2], batch_size=3), part)


def test_a_mesh_is_read() -> None:
    assert dimensions("--mesh", "pp=2, data=4") == (("pp", 2), ("data", 4))
