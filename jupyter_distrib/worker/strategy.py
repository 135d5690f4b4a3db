"""How a model is spread over ranks: one small file for each strategy, and nothing else to change for a new one.

A strategy is a subclass of `Strategy`. Built in are those of the modules of `strategies/`, each under its file's name;
other packages add theirs by an entry point:

    [project.entry-points."jupyter_distrib.strategies"]
    deepspeed = "their_package.strategy:DeepSpeed"

The notebook's kernel reads the class for its options, and a rank makes an instance for each run; so a strategy's file
imports torch inside its methods only. What strategies share is in `worker/autoparallel/`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, ClassVar, Protocol

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.options import Declared, Option
from jupyter_distrib.worker.framework import TORCH, VARIABLE

ENTRY_POINTS = "jupyter_distrib.strategies"
BUILT_IN = "jupyter_distrib.strategies"
"""The package whose modules are strategies; loaded by name, since they import this module."""
DIVIDED = "divided among the ranks where it is trained with, whole in an evaluation"
DIVIDED_ALWAYS = "divided among the ranks, in an evaluation without repetitions"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRun:
    """The facts of a run that its strategy knows."""

    options: Mapping[str, str]
    """By `Option.name`, those of the strategy's own options that were given, as texts that were checked."""
    filename: str
    """The cell's name in tracebacks: `Cell In[5]`."""
    everyone: bool
    """All ranks of the worker group run the cell, so they can meet in a collective."""
    names: MutableMapping[str, object]
    """The cell's own names, captured ones included; a strategy may add to them."""
    exchange: Callable[[str], tuple[str, ...]]
    """Gives every rank the texts of all ranks, by rank: addresses, say. All ranks call it, and wait for one another."""
    note: Callable[[str], None]
    """Shows a sentence about the run in its view; equal sentences of several ranks are shown once."""


class Strategy:
    """The way in which the ranks of one run work together; one instance in each rank for each run."""

    options: ClassVar[tuple[Option, ...]] = ()
    """Its own options: they are part of the help, of completion and of the table in docs/options.md."""
    shards: ClassVar[bool] = False
    """Whether values of its cells may be sharded over the ranks."""
    framework: ClassVar[str] = TORCH
    """The library that its cells compute with, as `package.module:Class` (`worker/framework.py`); empty: whichever
    there is. Ranks of another one than torch are programs of their own, which do not import torch."""
    summary: ClassVar[str] = ""
    """Its effect on the model of an unchanged cell, for `--explain`: `replicated on every rank`. Empty: nothing."""

    @classmethod
    def effects(cls, options: Mapping[str, str]) -> tuple[str, str]:
        """Return what it will do with a model and with a data loader, for `--explain`; called in the kernel.

        Args:
            options: Those of its own that were given, by `Option.name`.
        """
        return cls.summary, DIVIDED_ALWAYS if "shard_eval" in options else DIVIDED

    @classmethod
    def environment(cls, options: Mapping[str, str]) -> Mapping[str, str]:
        """Return variables for its cells, which `--env` may override; called in the kernel.

        Cells that differ in what a library reads when it loads run on different ranks.
        """
        return {}

    def begin(self, run: StrategyRun) -> None:
        """Called in the rank's main thread before the cell, when the captured names are there; may be interrupted."""

    def adapted(self, code: CodeType) -> CodeType:
        """Return the code of the cell as it is to be executed; called after `begin`."""
        return code

    def returning(self, value: object) -> None:
        """Called when the cell has ended well, with its value: the last moment for the ranks to work on it together."""

    def end(self, *, ok: bool) -> None:
        """Called after the cell, also when `begin` or the cell has raised (then not `ok`): leave torch as it was."""

    def prepare(self, *objects: Any) -> Any:
        """`jupyter_distrib.prepare`: the objects made ready, in the order given; a single one comes back as itself."""
        raise DistributedError(
            "jupyter_distrib.prepare() needs a strategy to prepare for: add --strategy ddp to the first line of this "
            "cell."
        )

    def total(self, *values: Any) -> tuple[Any, ...]:
        """`jupyter_distrib.total`: the values summed over ranks, if each has evaluated a share only."""
        return values


class Training(Protocol):
    """The converter of one cell's training code."""

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
        assert self.training is not None
        prepared = self.training.prepare(*objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def total(self, *values: Any) -> tuple[Any, ...]:
        assert self.training is not None
        return self.training.total(values)


def load(name: str) -> type[Strategy]:
    """Return the strategy of this name.

    Raises:
        DistributedError: There is none, or its package cannot be imported; says which and why.
    """
    if name in _built_in():
        return _class_of(name)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
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
    """Return the variables that cells of this strategy want; none for one that cannot be loaded, which fails later."""
    try:
        cls = _known(name)
    except DistributedError:
        return {}
    return {**cls.environment(options), **({} if cls.framework in ("", TORCH) else {VARIABLE: cls.framework})}


def load_built_in() -> None:
    """Import every strategy of this package, so that ranks which are forked from here need not."""
    for name in _built_in():
        load(name)


def declared() -> Declared:
    """Return every strategy with its own options, `none` first; one that cannot be loaded has none, and fails later."""
    found = {name: load(name).options for name in _built_in()}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.name not in found:
            try:
                found[point.name] = load(point.name).options
            except DistributedError:
                found[point.name] = ()
    return found


@cache
def _known(name: str) -> type[Strategy]:
    """Load a strategy once, without a look at all packages for each cell."""
    return load(name)


@cache
def _built_in() -> Sequence[str]:
    names = (module.name for module in pkgutil.iter_modules(importlib.import_module(BUILT_IN).__path__))
    return sorted(names, key=lambda name: (name != "none", name))


@cache
def _class_of(built_in: str) -> type[Strategy]:
    module = importlib.import_module(f"{BUILT_IN}.{built_in}")
    here = (value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__)
    return next(value for value in here if issubclass(value, Strategy))


def _checked(found: object) -> type[Strategy]:
    if isinstance(found, type) and issubclass(found, Strategy):
        return found
    raise TypeError(f"{found!r} is not a subclass of {Strategy.__module__}.Strategy")
