"""The interface of pools, which provide ranks. A pool places processes and gives a link to their agent or coordinator;
it has no notion of cells.

A package adds a kind by an entry point of the group `jupyter_distrib.pools`: the kind's name, and a class whose
instances are pools, called with the options that were given (docs/writing-a-pool.md).

`kernel/session/session.py` calls `connect` once per pool and kernel, from the thread that runs the cell, and talks to
the node in the commands and events of `wire/messages/`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.options import (
    Declared,
    DeclaredOnDemand,
    Option,
    count_or_range,
    one_line,
    seconds,
    shown,
    size_bytes,
)
from jupyter_distrib.system import entry_points
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors

Sink: TypeAlias = "Callable[[m.Event, Descriptors], None]"
"""Callback for every event of a node, in order, in the node's own thread; the callback owns the descriptors."""
Lost = Callable[[str], None]
"""Callback called once, with a sentence, when the node is out of reach."""

ENTRY_POINTS = "jupyter_distrib.pools"
DEFAULT_KIND = "local"
LOOK_ROUND_S = 30.0
"""Seconds until a newly installed engine is noticed: the sidebar asks several times a second."""
_PACKAGE = "jupyter_distrib.pools"
_NO_KINDS = frozenset({"base", "discovery", "machines", "server_home", "server_link", "trial"})
"""Modules of `pools/` that are not kinds of pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Properties of a kind of pool that the kernel must know before it uses one."""

    remote: bool = True
    """Whether its ranks may be on other machines, which have their own environment, and whose number may grow."""
    nameable: bool = True
    """Whether settings may define named pools of this kind; if not, there is nothing to configure."""
    unasked: bool = False
    """Whether the settings file of a project may define and choose pools of this kind before the user has trusted that
    file: their ranks are processes of the user on this machine, and cost nothing elsewhere."""
    streams_content: bool = False
    """Whether it starts sending a cell's large values before all of them are complete
    (`shared_memory.Content.early`)."""
    echoes_output: bool = False
    """Whether ranks print directly into the notebook, so that the live view need not show their output."""
    runs_in_send: bool = False
    """Whether `Node.send` of an `Execute` returns when the run has ended, and raises `PoolError` for what it cannot
    do."""
    read_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that locate a pool, by the option that they replace: when one changes in a running
    notebook, the next cell reconnects."""
    ignored_options: Mapping[str, str] = field(default_factory=dict)
    """Options of a cell that have no effect in these pools, by `Option.name`, and why."""


PYTHON = Option(
    flag="--python",
    metavar="PATH",
    meaning="the interpreter of the ranks, with a torch of its own",
    read=one_line,
    default="the kernel's",
    main=True,
)
"""Option that several kinds share."""
_ENVIRONMENTS = ("off", "check", "sync")


def environment(name: str, text: str) -> str:
    """Read the policy for packages that the ranks lack; the reader of the option."""
    if text not in _ENVIRONMENTS:
        raise OptionsError(f"{name} must be one of {', '.join(_ENVIRONMENTS)}; got {shown(text)}")
    return text


ENVIRONMENT = Option(
    flag="--environment",
    metavar="WHAT",
    meaning="packages that the notebook has and the ranks' Python lacks: sync installs them, check refuses the ranks",
    read=environment,
    default="off",
)
ENVIRONMENT_LIMIT = Option(
    flag="--environment-limit",
    metavar="SIZE",
    meaning="the largest size that --environment sync installs",
    read=size_bytes,
    default="5GB",
)
PACKAGES = (ENVIRONMENT, ENVIRONMENT_LIMIT)
"""Options of kinds whose ranks may run under another Python. They are read by the kernel, not by the pool."""


def packages_wanted(options: Mapping[str, str]) -> tuple[str, int]:
    """Return a pool's policy for missing packages, and the maximum number of bytes that may be installed."""
    limit = options.get(ENVIRONMENT_LIMIT.name) or str(ENVIRONMENT_LIMIT.default)
    return options.get(ENVIRONMENT.name, "off"), size_bytes(ENVIRONMENT_LIMIT.name, limit)


NODES = Option(
    flag="--nodes",
    metavar="N",
    meaning="spread the ranks over N nodes, or over 1:4 for as many as there are",
    read=count_or_range,
    default="as few as possible",
)
IDLE = Option(
    flag="--idle",
    metavar="S",
    meaning="release idle ranks without kept values after S seconds",
    read=seconds,
    default="600; 1800 with local, where only ranks with GPUs are released",
)


@runtime_checkable
class Node(Protocol):
    """The agent of one machine, within reach. A subclass needs `send` and `close`."""

    def send(self, command: m.Command, descriptors: Descriptors = NO_DESCRIPTORS) -> None:
        """Deliver a command, from any thread, without blocking on the peer; owns the descriptors.

        With `Capabilities.runs_in_send`, `Execute` blocks instead.
        """

    def close(self) -> None:
        """Give up the link; the agent ends this kernel's worker groups."""

    def give_up(self, ranks: Sequence[int]) -> None:
        """Abandon an agent that does not answer, so that the next cell gets another one. A node of this machine kills
        its ranks, which have these pids; by default, the link is closed."""
        self.close()

    def has_ended(self) -> bool:
        """Return whether the agent has ended, even if the link's reader has not noticed yet; False by default."""
        return False


class Pool(Protocol):
    """A source of ranks."""

    kind: str
    options: ClassVar[tuple[Option, ...]]
    """Options of the kind: flags of cells, keys of settings files. May be missing."""
    capabilities: ClassVar[Capabilities]
    """Capabilities of the kind. May be missing; the default is `Capabilities()`."""

    def connect(self, hello: m.Hello, sink: Sink, lost: Lost) -> Node:
        """Reach the pool's agent, starting it if need be. Raises `PoolError`."""

    # `try_out(self) -> str` may be missing: it reaches the parts of the pool, without starting ranks, and returns a
    # sentence on its findings, or raises `PoolError`. It is called in a process of its own (`trial.py`). So may
    # `check_complete(self) -> None`, which raises `PoolError` for options that do not make a pool together.


def kinds() -> Declared:
    """Return the options of every kind of pool, by the kind's name: the default kind first, then the other built-in
    ones. The module of a built-in kind is imported when its options are asked for."""
    return DeclaredOnDemand((*_built_in(), *_brought()), lambda kind: _options(_class_of(kind)))


def capabilities_of(kind: str) -> Capabilities:
    """Return what a kind of pool can do; the default if there is no such kind."""
    known = kind in _built_in() or kind in _brought()
    return getattr(_class_of(kind), "capabilities", Capabilities()) if known else Capabilities()


def usable_kinds() -> Collection[str]:
    """Return the kinds of pools that work without options: a kind whose engine is not installed, or that must be given
    hosts, does not. A function `usable` of a built-in kind's folder answers, so that its module is not imported."""
    return _usable_kinds(int(time.monotonic() / LOOK_ROUND_S))


@lru_cache(maxsize=1)
def _usable_kinds(when: int) -> frozenset[str]:
    """Return the same; `when` only makes the cached result expire."""
    folders = {kind: importlib.import_module(f"{_PACKAGE}.{kind}") for kind in _built_in()}
    usable = [kind for kind, folder in folders.items() if getattr(folder, "usable", lambda options: True)({})]
    return frozenset([*usable, *_brought()])


def summary_of(kind: str) -> str:
    """Return a sentence on a kind of pool."""
    return (inspect.getdoc(_class_of(kind)) or "").partition("\n")[0]


def needed_by(kind: str) -> Mapping[str, str]:
    """Return examples of the options that pools of a kind must be given, by `Option.name`."""
    return dict(getattr(_class_of(kind), "needed", {}))


def check_complete(kind: str, options: Mapping[str, str]) -> None:
    """Raise `PoolError` if these options do not make a pool of this kind together. Connects to nothing."""
    if check := getattr(open_pool(kind, options), "check_complete", None):
        check()


def built_in_folders() -> Sequence[str]:
    """Return the folders of the built-in kinds that have one, as names of packages."""
    return [module.removesuffix(".pool") for module in _built_in().values() if module.endswith(".pool")]


def open_pool(kind: str, options: Mapping[str, str]) -> Pool:
    """Create a pool of this kind without connecting it.

    Args:
        kind: The kind's name.
        options: The given options among those of the kind, by `Option.name`.
    """
    if kind not in _built_in() and kind not in _brought():
        raise PoolError(f"there is no pool of the kind {kind!r}.")
    read_here = {option.name for option in PACKAGES}
    pool: Pool = _class_of(kind)(**{name: text for name, text in options.items() if name not in read_here})
    return pool


@cache
def _built_in() -> Mapping[str, str]:
    """Return the modules of the kinds in this package, by name: a kind is a module, or `pool` in a folder."""
    found = {
        module.name: f"{_PACKAGE}.{module.name}" + (".pool" if module.ispkg else "")
        for module in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__)
        if module.name not in _NO_KINDS
    }
    return dict(sorted(found.items(), key=lambda item: (item[0] != DEFAULT_KIND, item[0])))


def _class_of(kind: str) -> Any:
    return _built_in_class(kind) if kind in _built_in() else _brought()[kind]


@cache
def _built_in_class(kind: str) -> Any:
    module = importlib.import_module(_built_in()[kind])
    return next(value for value in vars(module).values() if getattr(value, "kind", None) == kind)


def _options(cls: Any) -> tuple[Option, ...]:
    return tuple(getattr(cls, "options", ()))


@cache
def _brought() -> dict[str, Any]:
    """Return the classes that installed packages provide, by entry point name; built-in kinds take precedence."""
    found = {}
    for entry in entry_points.of_group(ENTRY_POINTS):
        try:
            found[entry.name] = entry.load()
        except Exception as error:  # noqa: BLE001 - foreign code; the other pools must stay usable
            warnings.warn(f"the pool kind {entry.name} ({entry.value}) cannot be loaded: {error}", stacklevel=2)
    return {name: cls for name, cls in found.items() if name not in _built_in()}
