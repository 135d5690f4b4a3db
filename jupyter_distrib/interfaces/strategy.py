"""The interface of strategies, which distribute training over ranks: a new one needs one small file and no other
change.

A strategy is a subclass of `Strategy`. Each module of `strategies/` has one, which is the built-in strategy with the
module's name; other packages add strategies by an entry point:

    [project.entry-points."jupyter_distrib.strategies"]
    deepspeed = "their_package.strategy:DeepSpeed"

The notebook's kernel reads the class for its options, and a rank makes an instance for each run; so a strategy's file
imports torch inside its methods only. `worker/autoparallel/` has the parts that strategies share.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, ClassVar, Protocol

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces.framework import TORCH, VARIABLE
from jupyter_distrib.options import Declared, DeclaredOnDemand, Option
from jupyter_distrib.system import entry_points

ENTRY_POINTS = "jupyter_distrib.strategies"
BUILT_IN = "jupyter_distrib.strategies"
"""Package of the built-in strategies; imported by name, since they import this module."""
DIVIDED = "divided among the ranks where it is trained with, whole in an evaluation"
DIVIDED_ALWAYS = "divided among the ranks, in an evaluation without repetitions"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRun:
    """The facts of a run that its strategy gets."""

    options: Mapping[str, str]
    """The strategy's own options as given, by `Option.name`, as checked texts."""
    filename: str
    """The cell's name in tracebacks: `Cell In[5]`."""
    everyone: bool
    """Whether all ranks of the worker group run the cell, so that collectives of all ranks are possible."""
    names: MutableMapping[str, object]
    """The cell's own names, including captured ones; a strategy may add names."""
    exchange: Callable[[str], tuple[str, ...]]
    """Exchanges texts, such as addresses: returns the texts of all ranks, by rank. All ranks call it, and wait for one
    another."""
    note: Callable[[str], None]
    """Shows a message about the run in its view; equal messages of several ranks are shown once."""
    keep: Sequence[str] | None = None
    """The names that stay on the ranks after the cell (`--keep`); None: the names do not come from a notebook."""
    stopped: Callable[[], bool] = bool
    """Returns whether the cell has been ended by a stop; for `Strategy.end`."""

    def release(self) -> None:
        """Drop the names of the cell, so that its values can be freed although torch's compiler caches functions that a
        strategy has replaced (`torch._dynamo.trace_rules`)."""
        object.__setattr__(self, "names", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyStart:
    """The facts of a run before it starts, in the kernel."""

    names: Mapping[str, object]
    """The names of the notebook."""
    ranks: int | None
    """Number of ranks given by the options; None: as many as the pool provides."""
    on_cpu: bool
    """Whether the options ask for ranks on the CPU; if not, they may still get them where there is no GPU."""


class Strategy:
    """The way in which the ranks of one run work together; one instance in each rank for each run."""

    options: ClassVar[tuple[Option, ...]] = ()
    """Its own options, which appear in the help, in completion and in the table of docs/options.md."""
    shards: ClassVar[bool] = False
    """Whether values of its cells may be sharded over the ranks."""
    framework: ClassVar[str] = TORCH
    """The library that its cells compute with, as `package.module:Class` (`interfaces/framework.py`); empty: any
    library. Ranks of a library other than torch are programs of their own, which do not import torch."""
    summary: ClassVar[str] = ""
    """Its effect on the model of an unchanged cell, for `--explain`: `replicated on every rank`. Empty: none."""

    @classmethod
    def effects(cls, options: Mapping[str, str]) -> tuple[str, str]:
        """Return its effects on a model and on a data loader, for `--explain`; called in the kernel.

        Args:
            options: The given options among its own, by `Option.name`.
        """
        return cls.summary, DIVIDED_ALWAYS if "shard_eval" in options else DIVIDED

    @classmethod
    def ready(cls, options: Mapping[str, str], start: StrategyStart) -> Mapping[str, str]:
        """Return its options as the ranks get them; called in the kernel before anything starts.

        Read here what an option refers to, such as a dict of the notebook or a file, and refuse a run by raising
        `OptionsError` or `DistributedError` with one sentence.
        """
        return options

    @classmethod
    def environment(cls, options: Mapping[str, str]) -> Mapping[str, str]:
        """Return variables for its cells, which `--env` may override; called in the kernel.

        Cells that differ in variables read when a library loads run on different ranks.
        """
        return {}

    def begin(self, run: StrategyRun) -> None:
        """Prepare the run; called in the rank's main thread before the cell, with its names; may be interrupted."""

    def adapted(self, code: CodeType) -> CodeType:
        """Return the code to execute in place of the cell's; called after `begin`."""
        return code

    def returning(self, value: object) -> None:
        """Process the value of a cell that has ended well: the last opportunity for a collective of all ranks."""

    def end(self, *, ok: bool) -> None:
        """Restore torch after the cell; also called, with `ok` False, when `begin` or the cell has raised."""

    def prepare(self, *objects: Any) -> Any:
        """Return the arguments of `jupyter_distrib.prepare`, prepared, in the same order; a single object as itself."""
        raise DistributedError(
            "jupyter_distrib.prepare() needs a strategy to prepare for: add --strategy ddp to the first line of this "
            "cell."
        )

    def total(self, *values: Any) -> tuple[Any, ...]:
        """Return the arguments of `jupyter_distrib.total`, summed over ranks if each has evaluated only a share."""
        return values

    def check_checkpoint(self, function: str, objects: Mapping[str, Any]) -> None:
        """Raise `DistributedError` for objects that `function` (`save` or `load`) cannot handle under this strategy."""


class Training(Protocol):
    """Makes one cell's training code distributed."""

    def end(self, *, ok: bool) -> None: ...
    def adapted(self, code: CodeType) -> CodeType: ...
    def prepare(self, *objects: Any) -> tuple[Any, ...]: ...
    def total(self, values: tuple[Any, ...]) -> tuple[Any, ...]: ...


class TrainingStrategy(Strategy):
    """A strategy that turns the training code of an unchanged cell into distributed training; its `begin` sets
    `training`."""

    training: Training | None = None

    def adapted(self, code: CodeType) -> CodeType:
        return code if self.training is None else self.training.adapted(code)

    def end(self, *, ok: bool) -> None:
        if self.training is not None:
            self.training.end(ok=ok)

    def prepare(self, *objects: Any) -> Any:
        if self.training is None:
            return super().prepare(*objects)
        prepared = self.training.prepare(*objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def total(self, *values: Any) -> tuple[Any, ...]:
        return values if self.training is None else self.training.total(values)


def load(name: str) -> type[Strategy]:
    """Return the strategy with this name.

    Raises:
        DistributedError: There is none, or its package cannot be imported; the error names it and gives the reason.
    """
    if name in _built_in():
        return _class_of(name)
    for point in entry_points.of_group(ENTRY_POINTS).select(name=name):
        try:
            return _checked(point.load())
        except Exception as error:
            home = point.dist.name if point.dist else point.value
            raise DistributedError(
                f"--strategy {name} is declared by {home}, but {point.value} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
    raise DistributedError(f"--strategy {name} is not known here: its package is not installed on this rank.")


def environment(name: str, options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables for cells of this strategy; none if it cannot be loaded, which fails later."""
    try:
        cls = _known(name)
    except DistributedError:
        return {}
    return {**cls.environment(options), **({} if cls.framework in ("", TORCH) else {VARIABLE: cls.framework})}


def ready(name: str, options: Mapping[str, str], start: StrategyStart) -> Mapping[str, str]:
    """Return the options of a strategy as its ranks get them; unchanged if it cannot be loaded, which fails later."""
    try:
        cls = _known(name)
    except DistributedError:
        return options
    return cls.ready(options, start)


def load_built_in() -> None:
    """Import all built-in strategies, so that ranks forked from this process need not."""
    for name in _built_in():
        load(name)


def declared() -> Declared:
    """Return every strategy with its own options, `none` first; a strategy that cannot be loaded has none, and fails
    later. Strategies are imported when their options are read."""
    names = (*_built_in(), *(point.name for point in entry_points.of_group(ENTRY_POINTS)))
    return DeclaredOnDemand(names, _options)


def _options(name: str) -> tuple[Option, ...]:
    try:
        return _known(name).options
    except DistributedError:
        return ()


@cache
def _known(name: str) -> type[Strategy]:
    """Return a strategy, cached so that the packages are not searched for each cell."""
    return load(name)


@cache
def _built_in() -> Sequence[str]:
    names = (module.name for module in pkgutil.iter_modules(importlib.import_module(BUILT_IN).__path__))
    return sorted(names, key=lambda name: (name != "none", name))


@cache
def _class_of(built_in: str) -> type[Strategy]:
    module = importlib.import_module(f"{BUILT_IN}.{built_in}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, Strategy)
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__file__} must define one strategy, not {len(found)}.")
    return found[0]


def _checked(loaded: object) -> type[Strategy]:
    if isinstance(loaded, type) and issubclass(loaded, Strategy):
        return loaded
    raise TypeError(f"{loaded!r} is not a subclass of {Strategy.__module__}.Strategy")
