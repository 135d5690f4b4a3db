"""The gradient reducers of a run, and their optimizers: a reducer that the cell has not requested by `prepare` ends
with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

from torch.optim import Optimizer

from jupyter_distrib.worker.autoparallel.training.gradient_reducer import GradientReducer


class ReplicaRegistry:
    """The reducers of one run."""

    def __init__(self) -> None:
        self._of: dict[ref[Optimizer], list[GradientReducer]] = {}
        self._by_name: list[GradientReducer] = []
        self._all: list[GradientReducer] | None = None
        """The cached result of `all`, which is called in every step."""

    def all(self) -> Sequence[GradientReducer]:
        """Return every reducer once."""
        if self._all is None:
            self._all = list(
                dict.fromkeys([*self._by_name, *(each for reducers in self._of.values() for each in reducers)])
            )
        return self._all

    def of(self, optimizer: Optimizer) -> Sequence[GradientReducer]:
        return self._of.get(ref(optimizer), ())

    def put(self, optimizer: Optimizer, reducers: Sequence[GradientReducer]) -> None:
        self._of[ref(optimizer, self._gone)] = list(reducers)
        self._all = None

    def keep(self, reducers: Sequence[GradientReducer]) -> None:
        """Keep these reducers until the run ends."""
        self._by_name += reducers
        self._all = None

    def replace(self, concerned: Callable[[GradientReducer], bool], by: Sequence[GradientReducer] = ()) -> None:
        """Replace the concerned reducers everywhere, or leave them out."""

        def changed(reducers: Sequence[GradientReducer]) -> list[GradientReducer]:
            return list(dict.fromkeys(new for each in reducers for new in (by if concerned(each) else (each,))))

        self._of = {optimizer: changed(reducers) for optimizer, reducers in self._of.items()}
        self._by_name = changed(self._by_name)
        self._all = None

    def clear(self) -> None:
        """Drop all reducers, because the run has ended."""
        for reducer in self.all():
            reducer.drop()
        self._of, self._by_name, self._all = {}, [], None

    def _gone(self, optimizer: ref[Optimizer]) -> None:
        self._of.pop(optimizer, None)
        self._all = None
