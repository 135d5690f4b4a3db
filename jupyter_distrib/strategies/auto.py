"""The strategy `auto`: the first of ddp, fsdp, and fsdp in bf16 that fits in the memory of the GPUs by a dry run.

The kernel puts that strategy in its place before a cell is started (`kernel/notebook/dry_choice.py`), so no rank ever
runs this one.
"""

from __future__ import annotations

from typing import ClassVar

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces.strategy import Strategy, StrategyRun
from jupyter_distrib.options import Option
from jupyter_distrib.strategies.ddp import BATCH, NO_GUESS, SHARD_EVAL


class AutomaticStrategy(Strategy):
    """The choice of a strategy by a dry run."""

    options: ClassVar[tuple[Option, ...]] = (BATCH, SHARD_EVAL, NO_GUESS)
    summary = "replicated on every rank, or sharded over the ranks if it does not fit otherwise"

    def begin(self, run: StrategyRun) -> None:
        raise DistributedError("--strategy auto is chosen in the notebook, before ranks start: name a strategy here.")
