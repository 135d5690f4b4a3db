"""The same from Python: `@distributed(gpus=8)` on a function, and `prepare` for a training loop."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from jupyter_distrib import packing, session
from jupyter_distrib.capture import Input
from jupyter_distrib.errors import DistributedError, OptionsError
from jupyter_distrib.events import Cell
from jupyter_distrib.options import Options, from_keywords
from jupyter_distrib.results import RankValue, Results
from jupyter_distrib.run import Run, early_interrupt

P = ParamSpec("P")
R = TypeVar("R")

_OF_CELLS = ("out", "keep", "with_", "explain")
_CALL = "__function__(*__arguments__, **__keywords__)"


def distributed(**options: Any) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Have a function run on every rank of a pool: the options of `%%distributed` as keywords.

    Without `strategy`, each rank finds torchrun's environment and no process group.

    Raises:
        OptionsError: Names the keyword that is wrong.
    """
    chosen = from_keywords(options, **session.current().settings.possible)
    for name in _OF_CELLS:
        if getattr(chosen, name):
            raise OptionsError(f"{name} is about the names of a cell: a function has arguments and a value instead")
    return lambda function: DistributedFunction(function, chosen)


class DistributedFunction(Generic[P, R]):
    """A function that runs on every rank when it is called; inside a rank it is the plain function."""

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        functools.update_wrapper(self, function)
        self._path = function.__qualname__
        self.function, self.options = function, options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run it with these arguments on every rank; gives the `Results`, or the `Run` with `detach=True`."""
        if in_rank():
            return self.function(*args, **kwargs)
        try:
            run = self._start(args, kwargs)
            if self.options.detach:
                return run
            results = run.wait(_view(run))
        except KeyboardInterrupt as interrupt:
            stopped = early_interrupt(interrupt)
        else:
            return results if results is not None else Results(dict.fromkeys(run.record.ranks))
        raise stopped

    distributed = __call__

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        name = self.function.__name__
        function = self if self._is_importable() else self.function
        parts = {"__function__": function, "__arguments__": args, "__keywords__": kwargs}
        inputs = tuple(
            Input(name=key, value=value, line=0, certain=True, reason="the call") for key, value in parts.items()
        )
        here, namespace = session.current(), _namespace()
        shipment = packing.pack(inputs, namespace)
        handles = [value for value in (*args, *kwargs.values()) if isinstance(value, RankValue)]
        absent = packing.absent(_CALL, shipment, namespace, here.dropped)
        cell = Cell(source=_CALL, filename=f"call of {name}", absent=absent)
        return here.start(cell, shipment.packed, self.options, label=f"{name}()", handles=handles)

    def _is_importable(self) -> bool:
        """Whether the ranks find it in a module, where it has that module's own globals."""
        home: object = None if self.__module__ == "__main__" else sys.modules.get(self.__module__)
        for part in self._path.split("."):
            home = getattr(home, part, None)
        return home is self

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self._path if self._is_importable() else (DistributedFunction, (self.function, self.options))


def prepare(*objects: Any) -> Any:
    """Models, optimizers, schedulers and data loaders, made ready for the strategy of this run; outside a run, as they
    are.

    Under `--strategy ddp` a model is replicated in place (it stays the object it is), moved to the rank's device, and a
    loader is replaced by one over the rank's share of the dataset, shuffled anew in every epoch. Several objects come
    back in the order given.

    Raises:
        DistributedError: The run has no strategy, or the object cannot be prepared; says what to do.
    """
    if not in_rank():
        return objects[0] if len(objects) == 1 else objects
    from jupyter_distrib.worker import identity  # only in a rank

    if identity.strategy is None:
        raise DistributedError("jupyter_distrib.prepare() works inside a %%distributed cell only.")
    return identity.strategy.prepare(*objects)


def total(*values: Any) -> Any:
    """Numbers or tensors of an evaluation, summed over all ranks; one value comes back as itself.

    Only with `--shard-eval` does each rank evaluate a share of the data; else, and outside a run, every rank has
    evaluated all of it and the values come back as they are. So the same cell is right in all three places:
    `correct, seen = jupyter_distrib.total(correct, seen)`.
    """
    from jupyter_distrib.worker import identity  # loads no torch

    summed = identity.strategy.total(*values) if in_rank() and identity.strategy is not None else values
    return summed[0] if len(summed) == 1 else summed


def in_rank() -> bool:
    """Whether this process is a rank."""
    identity = sys.modules.get("jupyter_distrib.worker.identity")
    return identity is not None and identity.is_rank()


def _namespace() -> dict[str, Any]:
    """The notebook's names, or those of the script."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        if (shell := get_ipython()) is not None:
            return shell.user_ns  # type: ignore[no-any-return]
    return vars(sys.modules["__main__"])


def _view(run: Run) -> Any:
    from jupyter_distrib.widget import LiveView

    return LiveView(run)
