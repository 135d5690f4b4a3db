"""Which replicas there are, and for which optimizers: one that nobody has asked for by name ends with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

from torch.optim import Optimizer

from jupyter_distrib.worker.autoparallel.gradient_reducer import Replica


class Roster:
    """Those of one run."""

    def __init__(self) -> None:
        self._of: dict[ref[Optimizer], list[Replica]] = {}
        self._by_name: list[Replica] = []
        self._all: list[Replica] | None = None
        """What `all` gives, as long as nothing changes: it is asked for in every step."""

    def all(self) -> Sequence[Replica]:
        """Each once."""
        if self._all is None:
            self._all = list(
                dict.fromkeys([*self._by_name, *(each for replicas in self._of.values() for each in replicas)])
            )
        return self._all

    def of(self, optimizer: Optimizer) -> Sequence[Replica]:
        return self._of.get(ref(optimizer), ())

    def put(self, optimizer: Optimizer, replicas: Sequence[Replica]) -> None:
        self._of[ref(optimizer, self._gone)] = list(replicas)
        self._all = None

    def keep(self, replicas: Sequence[Replica]) -> None:
        """Until the run ends."""
        self._by_name += replicas
        self._all = None

    def replace(self, concerned: Callable[[Replica], bool], by: Sequence[Replica] = ()) -> None:
        """Everywhere, or leave them out."""

        def changed(replicas: Sequence[Replica]) -> list[Replica]:
            return list(dict.fromkeys(new for each in replicas for new in (by if concerned(each) else (each,))))

        self._of = {optimizer: changed(replicas) for optimizer, replicas in self._of.items()}
        self._by_name = changed(self._by_name)
        self._all = None

    def clear(self) -> None:
        """The run has ended."""
        for replica in self.all():
            replica.drop()
        self._of, self._by_name, self._all = {}, [], None

    def _gone(self, optimizer: ref[Optimizer]) -> None:
        self._of.pop(optimizer, None)
        self._all = None
