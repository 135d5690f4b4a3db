"""Notices training in a cell without a strategy: each rank then trains a model of its own, with all of the data, and
the notebook's own models stay as they were. Rank's main thread."""

from __future__ import annotations

import linecache
import re
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.strategy import StrategyRun
from jupyter_distrib.serialization import payload
from jupyter_distrib.system.nested_code import codes_in, own_functions
from jupyter_distrib.worker.autoparallel import ownership
from jupyter_distrib.worker.autoparallel.checks import notebook_models
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.pytorch import private

_RANKS = re.compile(
    r"\b(local_|node_|group_)?rank\b|get_\w*rank|RANK|world_?size|WORLD_SIZE|\bdist(ributed)?\b|Distributed|distrib\b"
)
"""Names by which code tells its ranks apart, or has them work together."""


class SeparateTraining:
    """The training of one run without a strategy."""

    def __init__(self, run: StrategyRun) -> None:
        self._run = run
        self._models = notebook_models.NotebookModels(run)
        self._patches = Patches()
        self._seen: set[int] = set()
        """Ids of the optimizers that have made a step."""
        self._collectives = -1
        """Number of collectives before the cell in the groups that an earlier cell has left; -1 if it has left none."""

    def begin(self) -> None:
        """Watch the optimizers; called before the cell."""
        self._collectives = _collectives()
        self._models.begin(self._patches, payload.kept_values.values())
        self._unwatch = register_optimizer_step_post_hook(self._stepped).remove

    def returning(self, value: object) -> None:
        """Record the value that the cell returns."""
        self._models.returning(value)

    def end(self, *, ok: bool) -> None:
        """Add a note on each model of the notebook that was trained on the ranks only."""
        self._unwatch()
        self._patches.undo()
        if ok or self._run.stopped():
            self._models.note()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in self._seen:
            return
        if not self._seen and self._is_alone() and not _has_wrapped(optimizer):
            self._run.note(
                f"each of the {identity.world_size()} ranks trains by itself, with all of the data: the cell has no "
                "strategy. To train one model together, add --strategy ddp to the cell's first line"
            )
        self._seen.add(id(optimizer))
        self._models.stepped(optimizer)

    def _is_alone(self) -> bool:
        """Return whether nothing suggests that the ranks should differ or that they work together by other means."""
        if not self._run.everyone or identity.world_size() == 1:
            return False
        if dist.is_initialized() and (self._collectives < 0 or _collectives() != self._collectives):
            return False
        texts = [line for line in linecache.getlines(self._run.filename) if not line.startswith("%")]
        codes = [each.__code__ for each in own_functions(self._run.names)]
        names = [name for each in codes for part in codes_in(each) for name in (*part.co_names, *part.co_consts)]
        return not any(_RANKS.search(each) for each in (*texts, *names) if isinstance(each, str))


def _has_wrapped(optimizer: Optimizer) -> bool:
    """Return whether an earlier cell has wrapped a model of this optimizer: it averages gradients in the group of that
    cell, also where this cell has none."""
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return any(id(each) in own for model in ownership.alive(DistributedDataParallel) for each in model.parameters())


def _collectives() -> int:
    """Return the number of collectives that this rank has called in all its groups; -1 if it has none."""
    return sum(private.sequence(group) for _, group, _ in private.known_groups()) if dist.is_initialized() else -1
