"""The decorator `@distributed(gpus=8)`, which runs a function on ranks as `%%distributed` runs a cell."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.capture import inputs as inputs_module
from jupyter_distrib.kernel.capture.capture import Input
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.presses import early_interrupt
from jupyter_distrib.kernel.session.results import RankValue, Results
from jupyter_distrib.kernel.session.run import Run
from jupyter_distrib.kernel.settings.cell_options import Options, from_keywords
from jupyter_distrib.system import interrupts
from jupyter_distrib.wire.messages import Cell
from jupyter_distrib.worker import identity

P = ParamSpec("P")
R = TypeVar("R")

_OF_CELLS = ("out", "keep", "with_", "explain")
_CALL = "__function__(*__arguments__, **__keywords__)"


def distributed(**options: Any) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Make a function run on every rank of a pool; the keywords are the options of `%%distributed`.

    Without `strategy`, each rank finds torchrun's environment and no process group.

    Raises:
        OptionsError: It names the keyword that is wrong.
    """
    chosen = from_keywords(options, **session.current().settings.possible)
    for name in _OF_CELLS:
        if getattr(chosen, name):
            raise OptionsError(f"{name} is about the names of a cell: a function has arguments and a value instead")
    return lambda function: DistributedFunction(function, chosen)


class DistributedFunction(Generic[P, R]):
    """A function that runs on every rank when it is called; on a rank it is the plain function."""

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        functools.update_wrapper(self, function)
        self._path = function.__qualname__
        self.function, self.options = function, options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the function with these arguments on every rank. Return the `Results`; with `detach=True`, the `Run`."""
        if identity.is_rank():
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
        current, namespace = session.current(), _namespace()
        if self.options.pool:
            current.choices.name(self.options.pool)
        with interrupts.WholeImports():
            packed_inputs = inputs_module.pack(inputs, namespace)
        handles = [value for value in (*args, *kwargs.values()) if isinstance(value, RankValue)]
        absent = inputs_module.absent(_CALL, packed_inputs, namespace, current.dropped)
        cell = Cell(source=_CALL, filename=f"call of {name}", absent=absent)
        return current.start(cell, packed_inputs.packed, self.options, label=f"{name}()", handles=handles)

    def _is_importable(self) -> bool:
        """Return whether the ranks can import the function from a module, where it has that module's globals."""
        home: object = None if self.__module__ == "__main__" else sys.modules.get(self.__module__)
        for part in self._path.split("."):
            home = getattr(home, part, None)
        return home is self

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self._path if self._is_importable() else (DistributedFunction, (self.function, self.options))


def _namespace() -> dict[str, Any]:
    """Return the names of the notebook or of the script."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        if (shell := get_ipython()) is not None:
            return shell.user_ns  # type: ignore[no-any-return]
    return vars(sys.modules["__main__"])


def _view(run: Run) -> Any:
    from jupyter_distrib.kernel.notebook.live_view import LiveView

    return LiveView(run)
