"""The strategy `ddp`: every rank holds the whole model and sees its share of the data; gradients are averaged.

Makes the default process group before the cell, and turns the training code of an unchanged cell into data-parallel
training while it runs. Objects given to `prepare` are treated like the ones that are found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_distrib.interfaces.strategy import StrategyRun, TrainingStrategy
from jupyter_distrib.options import Option, switch
from jupyter_distrib.worker.autoparallel import heuristics

if TYPE_CHECKING:
    from jupyter_distrib.worker.autoparallel.training.data_parallel import DataParallel

BATCH = Option(
    flag="--batch",
    metavar="HOW",
    meaning="what a data loader's batch size counts: the samples of each rank, or of all ranks together",
    choices=("per-rank", "global"),
    default="per-rank",
    synonyms=("batch-size",),
)
SHARD_EVAL = Option(
    flag="--shard-eval",
    meaning="divide data loaders that are read for an evaluation, too; `jupyter_distrib.total` adds up",
    read=switch,
)
NO_GUESS = Option(
    flag="--no-guess",
    metavar="NAME,...",
    meaning="turn off these guesses about the cell (listed in docs/strategies.md): divided-data, first-device, ...",
    read=heuristics.parse_names,
    synonyms=("guess", "guesses"),
)


class DataParallelStrategy(TrainingStrategy):
    """Plain data parallelism."""

    options = (BATCH, SHARD_EVAL, NO_GUESS)
    summary = "replicated on every rank, gradients averaged"
    training: DataParallel | None = None

    def returning(self, value: object) -> None:
        if self.training is not None:
            self.training.returning(value)

    def begin(self, run: StrategyRun) -> None:
        from jupyter_distrib.interfaces import identity
        from jupyter_distrib.worker.autoparallel.training.data_parallel import DataParallel
        from jupyter_distrib.worker.pytorch import process_group, randomness

        # On some of the ranks only, a new group would wait for the others for ever.
        met_again = run.everyone and process_group.current.ensure(process_group.default_backend(identity.device()))
        if run.everyone:
            randomness.adopt_rank_0(run.note)
        self.training = training = DataParallel(run)
        training.begin(met_again=met_again)
