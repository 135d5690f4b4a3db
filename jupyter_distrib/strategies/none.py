"""The strategy `none`: torchrun's contract. The environment identifies the rank; the cell makes its own process group,
or none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from jupyter_distrib.interfaces.strategy import Strategy, StrategyRun

if TYPE_CHECKING:
    from jupyter_distrib.worker.autoparallel.training.separate_training import SeparateTraining


class NoStrategy(Strategy):
    """A strategy that changes nothing, and notices a cell that trains on each rank alone."""

    framework = ""
    _training: SeparateTraining | None = None

    def begin(self, run: StrategyRun) -> None:
        if run.keep is None or "torch" not in sys.modules:  # a script or a function, or another library's ranks
            return
        from jupyter_distrib.interfaces import identity
        from jupyter_distrib.worker.autoparallel import object_collectives
        from jupyter_distrib.worker.autoparallel.training.separate_training import SeparateTraining

        if identity.rank() == 0 and object_collectives.others.have_values:
            self._training = SeparateTraining(run)
            self._training.begin()

    def returning(self, value: object) -> None:
        if self._training is not None:
            self._training.returning(value)

    def end(self, *, ok: bool) -> None:
        if self._training is not None:
            self._training.end(ok=ok)
